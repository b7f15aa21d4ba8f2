"""A task's digest covers everything that determines its prompts, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from scoring_runs import write_task
from tiny_models import write_choices, write_jsonl

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.quality.evaluation.definitions import tree
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask, pin_task
from mergegate.tasks.quality.evaluation.definitions.tree import task_tree
from mergegate.tasks.quality.gate.references import pin_tasks
from mergegate.tasks.quality.gate.settings import Guard


def pin(root: Path, task: str = "letters.yaml") -> EvalTask:
    return pin_task(task, root, HashMemo(root / "hashes.db"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Write a task in two files, with a Python function."""
    root = tmp_path / "tasks"
    write_choices(root, extra="process_docs: !function cleaning.clean\n")
    (root / "letters.yaml").rename(root / "base.yaml")
    (root / "letters.yaml").write_text("include: base.yaml\ntask: letters\n")
    (root / "cleaning.py").write_text("def clean(docs):\n    return docs\n")
    return root


@pytest.mark.parametrize("part", ["letters.yaml", "base.yaml", "cleaning.py", "data/letters.jsonl"])
def test_all_files_of_a_task_are_in_its_digest(root: Path, part: str) -> None:
    before = pin(root)
    (root / part).write_text((root / part).read_text() + "\n")
    after = pin(root)
    assert (after.name, after.definition) == (before.name, before.definition)
    assert after.digest != before.digest


def test_a_moved_task_or_an_unrelated_file_in_the_directory_does_not_change_the_digest(
    root: Path, tmp_path: Path
) -> None:
    before = pin(root)
    (root / "data" / "other.jsonl").write_text("{}\n")
    (root / "README.md").write_text("notes")
    assert pin(root) == before
    shutil.move(root, tmp_path / "elsewhere")
    assert pin(tmp_path / "elsewhere").digest == before.digest


def test_the_version_of_lm_eval_is_in_every_digest(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [pin(root, name).digest for name in ("letters.yaml", "gsm8k")]
    monkeypatch.setattr(tree, "version", lambda name: "9.9")
    assert not {pin(root, name).digest for name in ("letters.yaml", "gsm8k")} & set(before)


def test_data_paths_are_relative_to_the_file_that_names_them(root: Path, tmp_path: Path) -> None:
    (leaf,) = task_tree(write_task(tmp_path / "other", "mine", include=str(root / "base.yaml"))).leaves
    assert leaf.data_files == {"test": str(root / "data" / "letters.jsonl")}
    assert leaf.is_local


def test_patterns_and_lists_of_data_files_are_all_hashed(tmp_path: Path) -> None:
    names = [write_jsonl(tmp_path / f"{name}.jsonl", [{"text": name}]).name for name in ("a1", "a2", "b")]
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": ["a*.jsonl", "b.jsonl"]}}}
    assert [file.name for file in task_tree(write_task(tmp_path, "t", **data)).files] == ["t.yaml", *names]


def test_a_local_directory_of_data_is_hashed_whole(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "mmlu" / "law" / "test.jsonl", [{"text": "one"}])
    path = write_task(tmp_path, "t", dataset_path="mmlu", dataset_name="law")
    before = pin(tmp_path, "t.yaml")
    write_jsonl(data, [{"text": "two"}])
    assert pin(tmp_path, "t.yaml").digest != before.digest
    assert task_tree(path).leaves[0].dataset_path == str(tmp_path / "mmlu")


@pytest.mark.parametrize("name", ["gsm8k", "mmlu", "arc_easy", "hellaswag", "ai2_arc"])
def test_tasks_groups_and_tags_that_lm_eval_ships_are_known_by_name(tmp_path: Path, name: str) -> None:
    task = pin(tmp_path, name)
    assert (task.name, task.definition) == (name, None)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("task: t\ndataset_kwargs: {data_files: gone.jsonl}\n", "no file .*gone.jsonl"),
        ("task: t\ndataset_kwargs: {data_files: 'gone*.jsonl'}\n", "no file .*gone"),
        ("include: gone.yaml\ntask: t\n", "No such file"),
        ("include: t.yaml\ntask: t\n", "includes itself"),
        ("group: g\ntask: [a, b]\n", "'a', which no YAML file in its directory defines"),
        ("group: g\ntask: []\n", "no task"),
        ("group: g\ntask: [17]\n", "17"),
        ("group: g\ntask: [g]\n", "a group that contains itself"),
        ("dataset_path: json\n", "no name under 'task'"),
        ("task: [\n", "not YAML"),
        ("task: t\nmetric_list:\n  - {metric: acc, metric: acc_norm}\n", "line 3.*\n*.*the key 'metric' appears twice"),
        ("task: t\n---\ntask: u\n", "2 documents"),
        ("just words\n", "str"),
    ],
)
def test_a_definition_that_cannot_work_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(InvalidInput, match=complaint) as caught:
        pin(tmp_path, "t.yaml")
    assert str(tmp_path) in caught.value.where


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("helaswag", "did you mean 'hellaswag'"),
        ("zzzzqqqqxxxx", "zzzzqqqqxxxx"),  # without a list of thousands
        ("gone.yaml", "No such file"),
    ],
)
def test_an_unknown_name_is_refused_in_few_words(tmp_path: Path, name: str, complaint: str) -> None:
    with pytest.raises(InvalidInput, match=complaint) as caught:
        pin(tmp_path, name)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_a_task_with_two_guards_is_pinned_once(root: Path) -> None:
    written = (Guard(task="letters.yaml", guarded_by="a"), Guard(task="letters.yaml", guarded_by="b", max_drop=3))
    guards, tasks = pin_tasks(written, root, HashMemo(root / "h.db"))
    assert [(guard.task, guard.guarded_by) for guard in guards] == [("letters", "a"), ("letters", "b")]
    assert [task.name for task in tasks] == ["letters"]
    write_task(root, "same", include="base.yaml", task="letters", num_fewshot=2)
    guards = tuple(Guard(task=task, guarded_by="a") for task in ("letters.yaml", "same.yaml"))
    with pytest.raises(InvalidInput, match="the name 'letters'"):
        pin_tasks(guards, root, HashMemo(root / "h.db"))
