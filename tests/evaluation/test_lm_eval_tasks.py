"""Tasks that ship with lm-eval, by name: which ones can guard a release, and their data without network access."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import load_benchmark
from scoring_runs import mean_of, pin, write_task
from tiny_models import write_jsonl

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.models.checkpoints.model_cache import unload_models
from mergegate.tasks.quality.evaluation.definitions import support
from mergegate.tasks.quality.evaluation.definitions.datasets import TaskDataset, find_dataset
from mergegate.tasks.quality.evaluation.definitions.support import Requirements
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask, pin_task
from mergegate.tasks.quality.evaluation.definitions.tree import shipped_names, task_tree

PROJECT = Path(__file__).resolve().parents[2]
CHOICE = {"output_type": "multiple_choice", "test_split": "test", "metric_list": [mean_of("acc")]}


# Reads files of tasks and groups without importing lm-eval's tasks or datasets, and then compares with lm-eval.
READ = """
import sys
from mergegate.tasks.quality.evaluation.definitions.tree import read_shipped, shipped_names
names = shipped_names()
files = [*[*names.tasks.values()][::500], *[*names.groups.values()][::50]]
ours = [read_shipped(file) for file in files]
assert not {"lm_eval.tasks", "datasets", "pandas"} & set(sys.modules)
from lm_eval.tasks._yaml_loader import load_yaml
assert ours == [load_yaml(file, resolve_func=False) for file in files]
assert len(files) > 20
"""


@pytest.mark.story
def test_task_files_are_read_as_lm_eval_does_without_importing_its_tasks() -> None:
    read = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr


def pinned(task: str, data: Path) -> EvalTask:
    return pin_task(task, data, HashMemo(data.parent / "hashes.db"), data)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({}, None),
        ({"metric_list": None}, None),  # lm-eval's default for choices
        ({"output_type": "loglikelihood_rolling"}, support.UnsupportedReason.PERPLEXITY),
        ({"unsafe_code": True}, support.UnsupportedReason.CODE),
        ({"doc_to_audio": ["sound"]}, support.UnsupportedReason.SOUND),
        ({"class": "/x/task.Squad"}, support.UnsupportedReason.PYTHON_CLASS),
        ({"recipe": "card=cards.x"}, support.UnsupportedReason.OTHER_LIBRARY),
        ({"custom_dataset": "/x/utils.make"}, support.UnsupportedReason.GENERATED_DATA),
        ({"test_split": None}, support.UnsupportedReason.NO_DOCUMENTS),
        ({"test_split": None, "validation_split": "validation"}, None),
        ({"metric_list": [{"metric": "mcc"}]}, support.UnsupportedReason.NO_MEAN),
        ({"metric_list": [mean_of("f1", aggregation="f1")]}, support.UnsupportedReason.NO_MEAN),
        # The F1 score of a single document is undefined, and lm-eval fails when it averages pairs.
        ({"metric_list": [mean_of("f1")]}, support.UnsupportedReason.NO_MEAN),
        ({"metric_list": [mean_of("f1")], "process_results": "/x/utils.process_results"}, None),
        (
            {"metric_list": [{"metric": "own", "aggregation": "mean"}]},
            support.UnsupportedReason.NO_MEAN,
        ),  # in which direction?
        ({"metric_list": [{"metric": "mcc"}, mean_of("acc")]}, None),
        # Fails in lm-eval even with a suitable metric next to it:
        ({"metric_list": [mean_of("acc"), mean_of("f1")]}, support.UnsupportedReason.NO_MEAN),
        ({"metric_list": [mean_of("acc"), {"metric": "likelihood"}]}, support.UnsupportedReason.NO_MEAN),
        ({"output_type": "generate_until"}, support.UnsupportedReason.NO_MEAN),  # accuracy of a free-form answer
        ({"output_type": "generate_until", "metric_list": [mean_of("f1", hf_evaluate=True)]}, None),
        ({"metric_list": [mean_of("bleu")]}, support.UnsupportedReason.NO_MEAN),  # choices have none
        ({"metric_list": "acc"}, support.UnsupportedReason.UNREADABLE),
        ({"metric_list": ["acc"]}, support.UnsupportedReason.UNREADABLE),
    ],
)
def test_a_task_is_supported_or_refused_by_its_configuration(
    said: dict[str, object], reason: support.UnsupportedReason | None
) -> None:
    refusal = support.refusal_of({**CHOICE, **said})
    assert (refusal.reason if refusal else None) == reason


FUNCTIONS = {
    "plain": ("import absent_module\n", ("absent_module",)),
    "of a part": ("from absent_module.inner import x\n", ("absent_module",)),
    "in a try that raises again": (
        "try:\n    import absent_module\nexcept ImportError as e:\n    raise ImportError('install it') from e\n",
        ("absent_module",),
    ),
    "in a try that goes on": ("try:\n    import absent_module\nexcept ImportError:\n    absent_module = None\n", ()),
    "in a function": ("def other():\n    import absent_module\n", ()),
    "beside it": ("import helper\n", ("absent_in_helper",)),
    "installed": ("import json, numpy\n", ()),
}


def task_with_function(directory: Path, module: str) -> None:
    (directory / "helper.py").write_text("import absent_in_helper\n")
    (directory / "f.py").write_text(f"{module}\ndef text(doc):\n    return doc['q']\n")
    config = {"output_type": "generate_until", "doc_to_text": "!function f.text", "doc_to_target": "{{a}}"}
    write_task(directory, "t", [{"q": "?", "a": "!"}], **config, metric_list=[mean_of("exact_match")])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_missing_packages_of_a_function_are_found(tmp_path: Path, name: str) -> None:
    module, missing = FUNCTIONS[name]
    task_with_function(tmp_path, module)
    if not missing:
        support.require_supported("t.yaml", tmp_path)
        return
    with pytest.raises(InvalidInput, match=f"import {missing[0]}, which is not installed") as refused:
        support.require_supported("t.yaml", tmp_path)
    assert f"pip install {missing[0]}" in refused.value.remedy


@pytest.mark.parametrize(
    ("packages", "command"),
    [
        (("langdetect",), "pip install 'mergegate[ifeval]'"),
        (("immutabledict", "langdetect"), "pip install 'mergegate[ifeval]'"),
        (("math_verify",), "pip install 'mergegate[math]'"),
        (("antlr4", "math_verify", "sympy"), "pip install 'mergegate[math]'"),
        (("jieba", "fuzzywuzzy"), "pip install 'lm_eval[longbench]'"),
        (("langdetect", "something_else"), "pip install langdetect something_else"),
    ],
)
def test_the_extra_that_has_all_missing_packages_is_named(packages: tuple[str, ...], command: str) -> None:
    refusal = support.refusal_of(CHOICE, missing=Requirements(packages))
    assert refusal
    assert all(package in refusal.found for package in packages)
    assert refusal.remedy.startswith(command)


def test_mergegate_has_its_own_extras_under_the_names_of_lm_eval() -> None:
    from mergegate.tasks.quality.evaluation.definitions.support import OWN_EXTRAS

    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    for name in OWN_EXTRAS:
        assert project["optional-dependencies"][name] == [f"lm_eval[{name}]"]


@pytest.mark.story
@pytest.mark.parametrize(
    "module",
    [
        "def fetch():\n    try:\n        nltk.data.find('tokenizers/small_tab')\n    except LookupError:\n"
        "        nltk.download('small_tab')\nfetch()\n",
        "nltk.download('small_tab')\n",
    ],
    ids=["found or downloaded", "downloaded"],
)
def test_missing_nltk_data_is_reported_with_the_download_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    from nltk import data

    monkeypatch.setattr(data, "path", [str(tmp_path / "nltk_data")])
    task_with_function(tmp_path, f"import nltk\n{module}")
    with pytest.raises(InvalidInput, match=r"not installed: .*small_tab") as refused:
        support.require_supported("t.yaml", tmp_path)
    assert f"{sys.executable} -m nltk.downloader small_tab`" in refused.value.remedy
    (tmp_path / "nltk_data" / "tokenizers" / "small_tab").mkdir(parents=True)
    support.require_supported("t.yaml", tmp_path)


def test_groups_and_tags_stand_for_their_tasks() -> None:
    assert len(task_tree("mmlu").leaves) == 57
    assert [leaf.name for leaf in task_tree("ai2_arc").leaves] == ["arc_challenge", "arc_easy"]  # a tag
    assert {"mmlu", "bbh", "leaderboard", "openllm", "gsm8k"} <= set(shipped_names())
    assert {leaf.name for leaf in task_tree("openllm").leaves} >= {"arc_challenge", "gsm8k", "mmlu_virology"}


def test_settings_of_a_group_override_its_tasks() -> None:
    (leaf,) = task_tree("darija_summarization").leaves
    assert "metric_list" in leaf.overrides
    (leaf,) = task_tree("scrolls_qasper").leaves  # its file also names a group
    assert leaf.name == "scrolls_qasper"


class _Loaded:
    """Fake lm-eval task that records its configuration."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.name = dict(config), str(config["task"])


def _configured(built: Any) -> dict[str, dict[str, Any]]:
    """Return the configuration of each task in an object that lm-eval built."""
    if isinstance(built, _Loaded):
        return {built.name: built.config}
    below = built if isinstance(built, list) else built._children.values()
    return {name: config for each in below for name, config in _configured(each).items()}


def _as_text(config: Mapping[str, Any]) -> str:
    beside = {"tag", "group", "task_list", "metadata"}  # lm-eval removes or adds these
    return json.dumps({key: value for key, value in config.items() if key not in beside}, sort_keys=True, default=str)


# In the groups below these, lm-eval gives all tasks the group's name, or the list of their names, and keeps one.
COLLAPSED = {"openllm", "toksuite_abridged"}


@pytest.mark.proof
def test_every_name_means_what_lm_evals_own_index_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.tasks import TaskManager, _factory

    def build_task(factory: Any, entry: Any, overrides: Any) -> _Loaded:
        config = factory._load_full_config(entry, overrides)
        return _Loaded({key: value for key, value in config.items() if key not in ("tag", "group", "task_list")})

    load_yaml = _factory.load_yaml
    monkeypatch.setattr(_factory, "load_yaml", lambda path, **said: load_yaml(path, **{**said, "resolve_func": False}))
    monkeypatch.setattr(_factory.TaskFactory, "_build_task", build_task)
    monkeypatch.setattr(_factory, "ConfigurableTask", _Loaded)
    manager = TaskManager()
    assert set(shipped_names()) == set(manager.all_tasks)
    different, unbuilt = [], []
    for name in manager.all_tasks:
        try:
            theirs = _configured(manager._load_spec(name))
        except (TypeError, ValueError):
            unbuilt.append(name)
            continue
        ours = {leaf.name: {**leaf.config, "task": leaf.name} for leaf in task_tree(name).leaves}
        texts = [{task: _as_text(config) for task, config in side.items()} for side in (ours, theirs)]
        if texts[0] != texts[1]:
            different.append(name)
    assert set(different) == COLLAPSED
    assert len(unbuilt) < 5  # lm-eval cannot build these


@pytest.mark.parametrize("task", ["mmlu", "bbh", "gsm8k", "arc_easy", "hellaswag", "openllm"])
def test_common_tasks_are_supported(task: str) -> None:
    support.require_supported(task)


@pytest.mark.parametrize(("task", "why"), [("humaneval", "code"), ("wikitext", "perplexity"), ("cola", "mcc")])
def test_a_refusal_has_a_reason(task: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=task) as refused:
        support.require_supported(task)
    assert why in refused.value.found


LAW = TaskDataset("mmlu_law", "cais/mmlu", "law", "test", "dev")
EASY = TaskDataset("arc_easy", "allenai/ai2_arc", "ARC-Easy", "test", "train")


@pytest.mark.parametrize(
    ("dataset", "place", "split"),
    [
        # A snapshot is not read by split.
        (LAW, "cais/mmlu/law/test.jsonl", None),
        (LAW, "cais--mmlu/law/test.jsonl", None),
        (LAW, "mmlu/law/test.jsonl", None),
        (LAW, "mmlu_hub/law/test.jsonl", None),
        (EASY, "arc_easy_test.jsonl", "test"),
        (EASY, "ARC-Easy-test.jsonl", "test"),
        (EASY, "arc_easy.jsonl", "test"),
        (EASY, "arc_easy.parquet", "test"),
        # A single file is the split that the task evaluates.
        (TaskDataset("piqa", "baber/piqa", None, "validation", "train"), "piqa_test.jsonl", "validation"),
    ],
)
def test_a_dataset_is_found_under_any_of_its_names(
    dataset: TaskDataset, place: str, split: str | None, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "arc_challenge_test.jsonl", [{}])
    file = write_jsonl(tmp_path / place, [{"question": "?"}])
    found = find_dataset(tmp_path, dataset)
    assert (found.files, found.by_split) == ((file,), {split: file} if split else {})


def test_a_missing_dataset_is_refused_with_the_expected_paths(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as refused:
        pinned("hellaswag", tmp_path)
    assert "hellaswag_validation.jsonl" in refused.value.expected
    assert "fetch-data" in refused.value.remedy


def test_missing_examples_are_found_in_advance_and_other_data_are_another_task(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "data" / "gsm8k_test.jsonl", [{"question": "1 + 1?", "answer": "#### 2"}])
    task = pinned("gsm8k", file.parent)
    support.require_examples(task, 0)
    with pytest.raises(InvalidInput, match="5 few-shot examples"):
        support.require_examples(task, None)
    assert task.is_local
    write_jsonl(file, [{"question": "1 + 2?", "answer": "#### 3"}])
    assert pinned("gsm8k", file.parent).digest != task.digest


def test_task_files_in_the_documentation_are_valid(tmp_path: Path) -> None:
    page = (PROJECT / "docs" / "how-to" / "gate-on-a-task.md").read_text()
    blocks = re.findall(r"```(?:yaml|python)\n(.*?)```", page, re.DOTALL)
    capitals, named = (block for block in blocks if re.search(r"^task: ", block, re.MULTILINE))
    (several,) = (block for block in blocks if "task_list:" in block)
    (scoring,) = (block for block in blocks if "def overlap" in block)
    for name in ("capitals", "old"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"country": "France", "capital": "Paris"}])
    (tmp_path / "scoring.py").write_text(scoring)
    for name, block in {"capitals": capitals, "named": named}.items():
        (tmp_path / f"{name}.yaml").write_text(block)
        assert pin(tmp_path / f"{name}.yaml").name == name
        support.require_supported(f"{name}.yaml", tmp_path)
    score = runpy.run_path(str(tmp_path / "scoring.py"))["overlap"]
    assert score({"capital": "New Delhi"}, ["Delhi"]) == {"overlap": 0.5}
    (tmp_path / "several.yaml").write_text(several)
    support.require_supported("several.yaml", tmp_path)
    leaves = task_tree(tmp_path / "several.yaml").leaves
    assert [leaf.name for leaf in leaves] == ["capitals_old", "capitals_asked"]


@pytest.mark.story
def test_five_tasks_by_name_score_as_lm_eval_scores_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agreement = load_benchmark("lm_eval_agreement")
    monkeypatch.setattr(agreement, "DOCUMENTS", 3)
    try:
        found = agreement.compare(["sciq", "copa", "arithmetic_2da", "winogrande", "triviaqa"], None, tmp_path)
    finally:
        unload_models()
    assert {each.kind for each in found} == {"multiple_choice", "loglikelihood", "generate_until"}
    assert [(each.documents, each.differing) for each in found] == [(3, 0)] * 5
