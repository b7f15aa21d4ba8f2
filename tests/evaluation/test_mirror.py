"""``evaluate.data`` replaces every dataset that is not next to its task, for tasks from any source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scoring_runs import mean_of, write_task
from tiny_models import write_jsonl

from mergegate.flows.preflight import pin_profile_sweep
from mergegate.flows.profile import load_profile
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.preflight import Evidence
from mergegate.tasks.quality.evaluation.definitions.datasets import declared_dataset
from mergegate.tasks.quality.evaluation.definitions.support import pin_sound_tasks, require_examples
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask, pin_task
from mergegate.tasks.quality.evaluation.scoring.lm_eval_tasks import quiet
from mergegate.tasks.quality.evaluation.scoring.loading import inspect_data, load_task

LETTERS: dict[str, Any] = {"dataset_path": "acme/letters", "test_split": "test", "output_type": "loglikelihood"}
LETTERS |= {"doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}", "metric_list": [mean_of("acc")]}
PAGES, TRAIN = "https://huggingface.co/datasets", (("train", "t.jsonl"),)
PROFILE = """\
name: nightly
recipe: {merge_method: linear, models: [{model: a}, {model: b}], dtype: float32}
evaluate: {tasks: [{task: letters.yaml, guarded_by: a}], data: mirror, num_fewshot: 0}
sweep:
  parameters: {x: {low: 0, high: 1, start: 0.5}}
  objective: [{task: letters.yaml}, {task: more.yaml}]
  constraints: [{task: arc_easy}]
"""


def rows(path: Path, *prompts: str) -> Path:
    return write_jsonl(path, ({"prompt": prompt, "answer": "x"} for prompt in prompts))


def written(root: Path, name: str, **said: Any) -> str:
    return write_task(root, name, **LETTERS | said).name


def from_file(address: str) -> dict[str, Any]:
    return {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": address}}}


def pinned(task: str, root: Path, mirror: Path | None) -> EvalTask:
    return pin_task(task, root, HashMemo(root / "hashes.db"), mirror)


@pytest.mark.parametrize(
    ("path", "files", "found"),
    [
        ("acme/x", None, ("acme/x", "", "", ())),
        ("json", {"test": "hf://datasets/acme/x/d/t.jsonl"}, ("acme/x", "json", "", (("test", "d/t.jsonl"),))),
        ("csv", "hf://datasets/acme/x@v1/t.csv", ("acme/x", "csv", "v1", (("train", "t.csv"),))),
        ("json", [f"{PAGES}/acme/x/resolve/main/t.jsonl?download=true"], ("acme/x", "json", "", TRAIN)),
        ("acme/x", {"test": "en/*.parquet"}, ("acme/x", "", "", (("test", "en/*.parquet"),))),
        ("json", {"test": "https://example.org/t.jsonl"}, ("", "json", "", ())),
        ("json", {"test": "/nowhere/t.jsonl"}, ("", "json", "", ())),
        ("json", ["hf://datasets/acme/x/t.jsonl", "hf://datasets/acme/y/t.jsonl"], ("", "json", "", ())),
    ],
)
def test_a_dataset_is_identified_by_name_or_file_address(path: str, files: object, found: tuple[object, ...]) -> None:
    asked = declared_dataset("t", {"dataset_path": path, "dataset_kwargs": {"data_files": files}, "test_split": "test"})
    assert asked
    assert (asked.path, asked.reader, asked.revision, asked.files) == found


@pytest.mark.parametrize(
    ("said", "split"),
    [
        ({"training_split": "train", "validation_split": "validation"}, "train"),
        ({"fewshot_split": "dev", "training_split": "train"}, "dev"),
        ({"fewshot_config": {"split": "dev"}}, "dev"),
        ({"fewshot_config": {"samples": [{"prompt": "?"}]}, "training_split": "train"}, None),
        ({}, None),
    ],
)
def test_examples_are_drawn_from_the_split_that_lm_eval_draws_from(said: dict[str, Any], split: str | None) -> None:
    asked = declared_dataset("t", {**LETTERS, **said})
    assert asked
    assert asked.examples == split


@pytest.mark.parametrize(
    ("said", "place"),
    [
        ({}, "acme/letters/test.jsonl"),
        ({}, "letters_test.jsonl"),
        ({}, "own.jsonl"),
        (from_file("hf://datasets/acme/letters/d/e.jsonl"), "acme/letters/d/e.jsonl"),
        (from_file("https://example.org/e.jsonl"), "own_test.jsonl"),
    ],
)
def test_a_yaml_task_uses_the_mirror_and_changes_with_its_data(
    said: dict[str, Any], place: str, tmp_path: Path
) -> None:
    task = written(tmp_path, "own", **said)
    file = rows(tmp_path / "mirror" / place, "a", "b")
    before = pinned(task, tmp_path, tmp_path / "mirror")
    assert before.is_local  # no network access
    assert inspect_data(before).documents == 2
    rows(file, "a", "b", "c")
    after = pinned(task, tmp_path, tmp_path / "mirror")
    assert after.digest != before.digest
    assert inspect_data(after).documents == 3


def test_two_tasks_of_a_group_have_files_of_their_own_of_one_dataset_and_a_third_its_data_beside_it(
    tmp_path: Path,
) -> None:
    for name in ("first", "second"):
        written(tmp_path, name)
        rows(tmp_path / "mirror" / f"{name}_test.jsonl", name)
    rows(tmp_path / "beside.jsonl", "third")
    third = written(tmp_path, "third", **from_file("beside.jsonl"))
    (tmp_path / "all.yaml").write_text("group: all\ntask: [first, second, third]\n")
    with quiet():
        leaves = load_task(pinned("all.yaml", tmp_path, tmp_path / "mirror")).leaves
        asked = {name: [document["prompt"] for document in leaf.eval_docs] for name, leaf in leaves.items()}
    assert asked == {"first": ["first"], "second": ["second"], "third": ["third"]}
    # A mirror does not change a task with local data.
    assert pinned(third, tmp_path, tmp_path / "nowhere") == pinned(third, tmp_path, None)


def test_missing_examples_of_a_yaml_file_are_found(tmp_path: Path) -> None:
    task = written(tmp_path, "own", fewshot_split="train", num_fewshot=2)
    rows(tmp_path / "mirror" / "own_test.jsonl", "a")
    pinned = pin_sound_tasks([task], tmp_path, HashMemo(tmp_path / "h.db"), Path("mirror"))
    require_examples(pinned[task], 0)
    with pytest.raises(InvalidInput, match="split 'train'") as refused:
        require_examples(pinned[task], None)
    assert "own_train.jsonl" in refused.value.expected


def test_a_sweep_uses_the_mirror_and_leaves_other_documents_for_the_gate(tmp_path: Path) -> None:
    written(tmp_path, "letters")
    written(tmp_path, "more", dataset_path="acme/more")
    (tmp_path / "nightly.yaml").write_text(PROFILE)
    profile = load_profile(tmp_path / "nightly.yaml")
    assert profile.evaluate
    hashes = HashMemo(tmp_path / "h.db")
    mirror = tmp_path / "mirror"
    rows(mirror / "letters_test.jsonl", "a")
    # The error names the missing file: first the one of a YAML task, then the one of a task by name.
    for lacking in ("more_test.jsonl", "arc_easy_test.jsonl"):
        with pytest.raises(InvalidInput, match=r"evaluate\.data") as refused:
            pin_profile_sweep(profile, Evidence(), hashes)
        assert lacking in refused.value.expected
        rows(mirror / lacking, "a")
    swept = pin_profile_sweep(profile, Evidence(), hashes)
    assert {task.name: task.mirror for task in swept.tasks} == dict.fromkeys(("letters", "more", "arc_easy"), mirror)
    guarded = pin_sound_tasks(["letters.yaml"], tmp_path, hashes, profile.evaluate.data)["letters.yaml"]
    assert [task.only for task in swept.gate_tasks([guarded])] != [None]
