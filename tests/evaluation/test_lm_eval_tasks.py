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

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.checkpoints.model_cache import unload_models
from mergegate.tasks.evaluation.lm_eval_index import shipped_leaves, shipped_names
from mergegate.tasks.evaluation.mirror import find_dataset
from mergegate.tasks.evaluation.support import (
    UnsupportedReason,
    refusal_of,
    refusal_of_leaf,
    require_examples,
    require_supported,
)
from mergegate.tasks.evaluation.task_datasets import TaskDataset
from mergegate.tasks.evaluation.task_definition import EvalTask, pin_task, read_definition
from mergegate.tasks.evaluation.task_requirements import Requirements

PROJECT = Path(__file__).resolve().parents[2]
MEAN = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
CHOICE = {"output_type": "multiple_choice", "test_split": "test", "metric_list": MEAN}


# Reads files of tasks and groups without importing lm-eval's tasks or datasets, and then compares with lm-eval.
READ = """
import sys
from mergegate.tasks.evaluation.lm_eval_index import read_shipped, shipped_names
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


def write(path: Path, *rows: dict[str, object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({}, None),
        ({"metric_list": None}, None),  # lm-eval's default for choices
        ({"output_type": "loglikelihood_rolling"}, UnsupportedReason.PERPLEXITY),
        ({"unsafe_code": True}, UnsupportedReason.CODE),
        ({"doc_to_audio": ["sound"]}, UnsupportedReason.SOUND),
        ({"class": "/x/task.Squad"}, UnsupportedReason.PYTHON_CLASS),
        ({"recipe": "card=cards.x"}, UnsupportedReason.OTHER_LIBRARY),
        ({"custom_dataset": "/x/utils.make"}, UnsupportedReason.GENERATED_DATA),
        ({"test_split": None}, UnsupportedReason.NO_DOCUMENTS),
        ({"test_split": None, "validation_split": "validation"}, None),
        ({"metric_list": [{"metric": "mcc"}]}, UnsupportedReason.NO_MEAN),
        ({"metric_list": [{"metric": "f1", "aggregation": "f1", "higher_is_better": True}]}, UnsupportedReason.NO_MEAN),
        # The F1 score of a single document is undefined, and lm-eval fails when it averages pairs.
        (
            {"metric_list": [{"metric": "f1", "aggregation": "mean", "higher_is_better": True}]},
            UnsupportedReason.NO_MEAN,
        ),
        (
            {
                "metric_list": [{"metric": "f1", "aggregation": "mean", "higher_is_better": True}],
                "process_results": "/x/utils.process_results",
            },
            None,
        ),
        ({"metric_list": [{"metric": "own", "aggregation": "mean"}]}, UnsupportedReason.NO_MEAN),  # in which direction?
        ({"metric_list": [{"metric": "mcc"}, *MEAN]}, None),
        # Fails in lm-eval even with a suitable metric next to it:
        (
            {"metric_list": [*MEAN, {"metric": "f1", "aggregation": "mean", "higher_is_better": True}]},
            UnsupportedReason.NO_MEAN,
        ),
        ({"metric_list": [*MEAN, {"metric": "likelihood"}]}, UnsupportedReason.NO_MEAN),
        ({"output_type": "generate_until"}, UnsupportedReason.NO_MEAN),  # accuracy of a free-form answer
        ({"output_type": "generate_until", "metric_list": [{**MEAN[0], "metric": "f1", "hf_evaluate": True}]}, None),
        ({"metric_list": [{**MEAN[0], "metric": "bleu"}]}, UnsupportedReason.NO_MEAN),  # choices have none
        ({"metric_list": "acc"}, UnsupportedReason.UNREADABLE),
        ({"metric_list": ["acc"]}, UnsupportedReason.UNREADABLE),
    ],
)
def test_a_task_is_supported_or_refused_by_its_configuration(
    said: dict[str, object], reason: UnsupportedReason | None
) -> None:
    refusal = refusal_of({**CHOICE, **said})
    assert (refusal.reason if refusal else None) == reason


def test_a_function_that_needs_a_package_is_refused_with_its_name() -> None:
    refusal = refusal_of(CHOICE, missing=Requirements(("langdetect",)))
    assert refusal
    assert "langdetect" in refusal.found


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


def task_with_function(directory: Path, module: str) -> Path:
    write(directory / "d.jsonl", {"q": "?", "a": "!"})
    (directory / "helper.py").write_text("import absent_in_helper\n")
    (directory / "f.py").write_text(f"{module}\ndef text(doc):\n    return doc['q']\n")
    path = directory / "t.yaml"
    path.write_text(
        "task: t\ndataset_path: json\ndataset_kwargs: {data_files: {test: d.jsonl}}\ntest_split: test\n"
        "output_type: generate_until\ndoc_to_text: !function f.text\ndoc_to_target: '{{a}}'\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    return path


@pytest.mark.parametrize("name", FUNCTIONS)
def test_missing_packages_of_a_function_are_found(tmp_path: Path, name: str) -> None:
    module, missing = FUNCTIONS[name]
    task_with_function(tmp_path, module)
    if not missing:
        return require_supported("t.yaml", tmp_path)
    with pytest.raises(InvalidInput, match=f"import {missing[0]}, which is not installed") as refused:
        require_supported("t.yaml", tmp_path)
    assert f"pip install {missing[0]}" in refused.value.remedy
    return None


@pytest.mark.parametrize(
    ("packages", "command"),
    [
        (("immutabledict", "langdetect"), "pip install 'mergegate[ifeval]'"),
        (("math_verify",), "pip install 'mergegate[math]'"),
        (("antlr4", "math_verify", "sympy"), "pip install 'mergegate[math]'"),
        (("jieba", "fuzzywuzzy"), "pip install 'lm_eval[longbench]'"),
        (("langdetect", "something_else"), "pip install langdetect something_else"),
    ],
)
def test_the_extra_that_has_all_missing_packages_is_named(packages: tuple[str, ...], command: str) -> None:
    refusal = refusal_of(CHOICE, missing=Requirements(packages))
    assert refusal
    assert refusal.remedy.startswith(command)


def test_mergegate_has_its_own_extras_under_the_names_of_lm_eval() -> None:
    from mergegate.tasks.evaluation.task_requirements import OWN_EXTRAS

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
        require_supported("t.yaml", tmp_path)
    assert f"{sys.executable} -m nltk.downloader small_tab`" in refused.value.remedy
    (tmp_path / "nltk_data" / "tokenizers" / "small_tab").mkdir(parents=True)
    require_supported("t.yaml", tmp_path)


def test_groups_and_tags_stand_for_their_tasks() -> None:
    assert len(shipped_leaves("mmlu")) == 57
    assert [leaf.name for leaf in shipped_leaves("ai2_arc")] == ["arc_challenge", "arc_easy"]  # a tag
    assert {"mmlu", "bbh", "leaderboard", "openllm", "gsm8k"} <= set(shipped_names())
    assert {leaf.name for leaf in shipped_leaves("openllm")} >= {"arc_challenge", "gsm8k", "mmlu_virology"}


def test_settings_of_a_group_override_its_tasks() -> None:
    (leaf,) = shipped_leaves("darija_summarization")
    assert "metric_list" in leaf.overrides
    assert [leaf.name for leaf in shipped_leaves("scrolls_qasper")] == ["scrolls_qasper"]  # its file also names a group


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
        ours = {leaf.name: {**leaf.config, "task": leaf.name} for leaf in shipped_leaves(name)}
        if {task: _as_text(config) for task, config in ours.items()} != {
            task: _as_text(config) for task, config in theirs.items()
        }:
            different.append(name)
    assert set(different) == COLLAPSED
    assert len(unbuilt) < 5  # lm-eval cannot build these


@pytest.mark.parametrize("task", ["mmlu", "bbh", "gsm8k", "arc_easy", "hellaswag", "openllm"])
def test_common_tasks_are_supported(task: str) -> None:
    assert not [refusal for leaf in shipped_leaves(task) if (refusal := refusal_of_leaf(leaf))]


@pytest.mark.parametrize(("task", "why"), [("humaneval", "code"), ("wikitext", "perplexity"), ("cola", "mcc")])
def test_a_refusal_has_a_reason(task: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=task) as refused:
        require_supported(task)
    assert why in refused.value.found


@pytest.mark.parametrize(
    "place", ["cais/mmlu/law/test.jsonl", "cais--mmlu/law/test.jsonl", "mmlu/law/test.jsonl", "mmlu_hub/law/test.jsonl"]
)
def test_a_snapshot_is_found_under_any_of_its_names(place: str, tmp_path: Path) -> None:
    file = write(tmp_path / place, {"question": "?"})
    found = find_dataset(tmp_path, TaskDataset("mmlu_law", "cais/mmlu", "law", "test", "dev"))
    assert found.files == (file,)


@pytest.mark.parametrize("name", ["arc_easy_test.jsonl", "ARC-Easy-test.jsonl", "arc_easy.jsonl", "arc_easy.parquet"])
def test_a_file_is_found_by_task_or_configuration(name: str, tmp_path: Path) -> None:
    write(tmp_path / "arc_challenge_test.jsonl", {})
    file = write(tmp_path / name, {})
    found = find_dataset(tmp_path, TaskDataset("arc_easy", "allenai/ai2_arc", "ARC-Easy", "test", "train"))
    assert found.by_split == {"test": file}


def test_a_single_file_is_the_split_that_the_task_evaluates(tmp_path: Path) -> None:
    file = write(tmp_path / "piqa_test.jsonl", {})
    found = find_dataset(tmp_path, TaskDataset("piqa", "baber/piqa", None, "validation", "train"))
    assert found.by_split == {"validation": file}


def test_a_missing_dataset_is_refused_with_the_expected_paths(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as refused:
        pinned("hellaswag", tmp_path)
    assert "hellaswag_validation.jsonl" in refused.value.expected
    assert "fetch-data" in refused.value.remedy


def test_missing_examples_are_found_in_advance(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write(data / "gsm8k_test.jsonl", {"question": "1 + 1?", "answer": "#### 2"})
    task = pinned("gsm8k", data)
    require_examples(task, 0)
    with pytest.raises(InvalidInput, match="5 few-shot examples"):
        require_examples(task, None)


def test_other_data_are_another_task(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write(data / "gsm8k_test.jsonl", {"question": "1 + 1?", "answer": "#### 2"})
    before = pinned("gsm8k", data)
    assert before.is_local
    write(data / "gsm8k_test.jsonl", {"question": "1 + 2?", "answer": "#### 3"})
    assert pinned("gsm8k", data).digest != before.digest


def test_task_files_in_the_documentation_are_valid(tmp_path: Path) -> None:
    page = (PROJECT / "docs" / "how-to" / "gate-on-your-own-task.md").read_text()
    blocks = re.findall(r"```(?:yaml|python)\n(.*?)```", page, re.DOTALL)
    capitals, named = (block for block in blocks if re.search(r"^task: ", block, re.MULTILINE))
    (several,) = (block for block in blocks if "task_list:" in block)
    (scoring,) = (block for block in blocks if "def overlap" in block)
    for name in ("capitals", "old"):
        write(tmp_path / f"{name}.jsonl", {"country": "France", "capital": "Paris"})
    (tmp_path / "scoring.py").write_text(scoring)
    for name, block in {"capitals": capitals, "named": named}.items():
        (tmp_path / f"{name}.yaml").write_text(block)
        assert pin_task(f"{name}.yaml", tmp_path, HashMemo(tmp_path / "h.db")).name == name
        require_supported(f"{name}.yaml", tmp_path)
    score = runpy.run_path(str(tmp_path / "scoring.py"))["overlap"]
    assert score({"capital": "New Delhi"}, ["Delhi"]) == {"overlap": 0.5}
    (tmp_path / "several.yaml").write_text(several)
    require_supported("several.yaml", tmp_path)
    assert [leaf.name for leaf in read_definition(tmp_path / "several.yaml").leaves] == [
        "capitals_old",
        "capitals_asked",
    ]


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
