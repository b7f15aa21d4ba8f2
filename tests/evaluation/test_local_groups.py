"""Groups, tags and lists in local YAML files: their tasks, their declared means, and which of them can guard."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from scoring_runs import mean_of, pin, score, write_task
from tiny_models import make_model, write_choices

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.models.checkpoints.model_cache import unload_models
from mergegate.tasks.quality.evaluation.definitions.support import require_declared_mean, require_supported
from mergegate.tasks.quality.evaluation.definitions.tree import task_tree
from mergegate.tasks.quality.evaluation.scoring.lm_eval_tasks import quiet
from mergegate.tasks.quality.evaluation.scoring.loading import load_task


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Write ``base.yaml`` with the task ``letters``, and ``several.yaml``, a list of three tasks derived from it."""
    write_choices(tmp_path, 5, name="other")
    write_choices(tmp_path, 7).rename(tmp_path / "base.yaml")
    (tmp_path / "own.py").write_text("def shout(doc):\n    return doc['word'].upper()\n")
    (tmp_path / "several.yaml").write_text(
        """include: base.yaml
task_list:
  - {task: short, dataset_kwargs: {data_files: {test: data/other.jsonl}}}
  - {task: shouted, doc_to_text: !function own.shout, tag: loud}
  - plain
tag: pair
"""
    )
    return tmp_path


def asked(path: Path) -> dict[str, list[str]]:
    """Return the prompts of each task in a file, as loaded by lm-eval."""
    with quiet():
        leaves = load_task(pin(path)).leaves
        return {name: [leaf.doc_to_text(document) for document in leaf.eval_docs] for name, leaf in leaves.items()}


def test_a_task_list_equals_one_file_per_task(root: Path) -> None:
    found = asked(root / "several.yaml")
    alone: dict[str, dict[str, Any]] = {
        "short": {"dataset_kwargs": {"data_files": {"test": "data/other.jsonl"}}},
        "shouted": {"doc_to_text": "!function own.shout"},
        "plain": {},
    }
    for name, config in alone.items():
        assert found[name] == asked(write_task(root, name, include="base.yaml", **config))[name]
    assert list(found) == list(alone)
    assert [len(found[name]) for name in alone] == [5, 7, 7]
    assert found["shouted"] == [text.upper() for text in found["plain"]]
    assert task_tree(root / "several.yaml").name == "several"


@pytest.mark.parametrize(
    ("tasks", "names"),
    [
        ("[pair]", ["short", "shouted", "plain"]),  # the tag in the file
        ("[loud, letters]", ["shouted", "letters"]),  # the tag of a task in it
        ("[shouted, pair]", ["shouted", "short", "plain"]),  # each task once
        ("short", ["short"]),
    ],
)
def test_a_group_includes_tasks_of_a_list_by_name_and_tag_and_overrides_their_settings(
    root: Path, tasks: str, names: list[str]
) -> None:
    path = root / "g.yaml"
    path.write_text(f'group: g\ntask: {tasks}\ndoc_to_text: "{{{{word}}}}?"\n')
    found = asked(path)
    assert [leaf.name for leaf in task_tree(path).leaves] == list(found) == names
    assert all(text.endswith("?") and text.islower() for texts in found.values() for text in texts)
    assert {name: len(texts) for name, texts in found.items()} == {name: 5 if name == "short" else 7 for name in names}


@pytest.mark.parametrize("file", ["several.yaml", "g.yaml"])
@pytest.mark.parametrize("part", ["several.yaml", "base.yaml", "own.py", "data/other.jsonl", "data/letters.jsonl"])
def test_all_files_of_a_task_list_or_a_group_are_pinned(root: Path, file: str, part: str) -> None:
    (root / "g.yaml").write_text("group: g\ntask: [pair]\n")
    before = pin(root / file).digest
    (root / "unrelated.yaml").write_text("task: unrelated\n")
    assert pin(root / file).digest == before
    (root / part).write_text((root / part).read_text() + "\n")
    assert pin(root / file).digest != before


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("group: g\ntask_list: [a]\n", "a group with a task_list"),
        ("task_list: []\n", "no task"),
        ("task_list: [{num_fewshot: 1}]\n", "num_fewshot"),
        ("task_list: [a, {task: a, num_fewshot: 1}]\n", "'a' twice, with different settings"),
        ("group: g\ntask: [letters, {task: letters, num_fewshot: 1}]\n", "'letters' twice, with different settings"),
        ("group: [g]\ntask: letters\n", "g"),
    ],
)
def test_an_invalid_group_is_refused(root: Path, text: str, complaint: str) -> None:
    (root / "g.yaml").write_text(text)
    with pytest.raises(InvalidInput, match=complaint) as refused:
        task_tree(root / "g.yaml")
    assert str(root / "g.yaml") in refused.value.where


@pytest.mark.parametrize(
    ("entries", "mean_over", "complaint"),
    [
        (None, None, None),
        ([{"metric": "acc"}], None, None),
        ({"metric": "acc", "weight_by_size": True, "aggregation": "mean"}, None, None),
        ([{"metric": "acc"}, {"metric": "acc_norm", "weight_by_size": False}], None, "weights tasks equally"),
        ([{"metric": "acc", "weight_by_size": False}], "documents", None),
        ([{"metric": "acc", "weight_by_size": "no"}], None, "weight_by_size: no"),
        ([{"metric": "acc", "aggregation": "median"}], None, "aggregation: median"),
        (["acc"], None, "acc"),
    ],
)
def test_a_guard_tests_the_declared_mean_of_its_group_or_requests_another(
    root: Path, entries: object, mean_over: Any, complaint: str | None
) -> None:
    group = {"group": "g", "task": ["pair"], "aggregate_metric_list": entries}
    (root / "g.yaml").write_text(yaml.safe_dump(group))
    with pytest.raises(InvalidInput, match=complaint) if complaint else nullcontext():
        require_declared_mean("g.yaml", mean_over, root)


def test_the_declared_mean_of_a_shipped_group_is_known(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="weights tasks equally"):
        require_declared_mean("blimp", None, tmp_path)
    for name in ("mmlu", "bbh", "arc_easy", "ai2_arc"):
        require_declared_mean(name, None, tmp_path)


@pytest.mark.parametrize(
    ("says", "found"),
    [
        ({"output_type": "loglikelihood_rolling"}, "a perplexity task"),
        ({"unsafe_code": True}, "runs code"),
        ({"metric_list": [{"metric": "f1"}]}, "only f1"),
        ({"metric_list": [mean_of("f1")]}, "a mean of f1"),
        ({"metric_list": 5}, "a metric_list that is not a list"),
    ],
)
def test_a_local_task_is_decided_as_one_that_lm_eval_ships(root: Path, says: dict[str, Any], found: str) -> None:
    require_supported("several.yaml", root)
    write_task(root, "bad", include="base.yaml", **says)
    (root / "g.yaml").write_text("group: g\ntask: [plain, bad]\n")
    for file, where in (("bad.yaml", "evaluate.tasks: bad.yaml"), ("g.yaml", "evaluate.tasks: g.yaml: bad")):
        with pytest.raises(InvalidInput, match=found) as refused:
            require_supported(file, root)
        assert refused.value.where == where


def test_a_function_beside_a_task_that_needs_a_package_is_refused_with_its_name(root: Path) -> None:
    (root / "own.py").write_text("import nowhere_to_be_found\n\ndef shout(doc):\n    return ''\n")
    with pytest.raises(InvalidInput, match="nowhere_to_be_found"):
        require_supported("several.yaml", root)


def test_metrics_of_own_functions_are_supported(root: Path) -> None:
    write_task(root, "w", [{"word": "a"}], output_type="generate_until", metric_list=[mean_of("!function own.overlap")])
    require_supported("w.yaml", root)


@pytest.mark.story
@pytest.mark.parametrize("kind", ["multiple_choice", "loglikelihood", "generate_until"])
def test_a_metric_is_supported_where_lm_eval_has_a_number_of_each_document(tmp_path: Path, kind: str) -> None:
    """For every lm-eval metric taken as a mean, the check of the configuration agrees with an actual evaluation."""
    import lm_eval.api.metrics  # noqa: F401  # fills the registry
    from lm_eval.api.registry import METRIC_REGISTRY

    model = make_model(tmp_path / "model")
    write_choices(tmp_path, 2).rename(tmp_path / "base.yaml")
    config: dict[str, Any] = {"include": "base.yaml", "output_type": kind}
    config |= {"doc_to_choice": None, "doc_to_target": "{{choices[0]}}"} if kind != "multiple_choice" else {}
    config |= {"generation_kwargs": {"until": ["."], "max_gen_toks": 2}} if kind == "generate_until" else {}
    found = {}
    for metric in METRIC_REGISTRY:
        path = write_task(tmp_path, "t", **config, metric_list=[mean_of(metric)])
        beforehand, asked = True, True
        try:
            require_supported("t.yaml", tmp_path)
        except InvalidInput:
            beforehand = False
        try:
            asked = any(row.metric.partition(",")[0] == metric for row in score(model, pin(path), (0, 2)))
        except InvalidInput:
            asked = False
        found[metric] = (beforehand, asked)
    unload_models()
    found.pop("perplexity")  # known per document, but lm-eval's perplexity is not their mean
    assert {metric for metric, (beforehand, asked) in found.items() if beforehand != asked} == set()
    assert any(beforehand for beforehand, _ in found.values())


@pytest.mark.parametrize("group", ["[words]", "words", "[words, more]", "5"])
def test_a_group_key_in_a_task_file_is_refused_in_favor_of_a_tag(root: Path, group: str) -> None:
    (root / "labeled.yaml").write_text(f"include: base.yaml\ntask: labeled\ngroup: {group}\n")
    with pytest.raises(InvalidInput, match=r"labeled.yaml: group(.*\n)*.*rename 'group' to 'tag'"):
        task_tree(root / "labeled.yaml")
    (root / "labeled.yaml").write_text(f"include: base.yaml\ntask: labeled\ntag: {group}\n")
    assert task_tree(root / "labeled.yaml").name == "labeled"


def test_a_group_may_name_one_task_and_override_its_settings(root: Path) -> None:
    (root / "group.yaml").write_text("group: all\ntask: letters\ndoc_to_text: '{{word}}!'\n")
    assert [leaf.name for leaf in task_tree(root / "group.yaml").leaves] == ["letters"]
