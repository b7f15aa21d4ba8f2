"""Hub datasets of tasks are fetched once, at a revision that is recorded, and ``check`` finds them afterward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hub_look_alike import Fault, LookAlike
from rich.console import Console

from mergegate.flows.cli.evaluate import fetch_profile_data
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.quality.evaluation import TaskDataset, fetch_datasets, pin_task, task_tree
from mergegate.tasks.quality.evaluation.scoring.loading import inspect_data

PROFILE = """\
name: nightly
recipe: {merge_method: linear, models: [{model: a}, {model: b}], dtype: float32}
evaluate: {tasks: [{task: piqa, guarded_by: a}], data: eval-data}
"""


LETTERS = """\
task: letters
dataset_path: acme/letters
test_split: test
output_type: loglikelihood
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
SWEEP = """\
sweep:
  parameters: {x: {low: 0, high: 1, start: 0.5}}
  objective: [{task: letters.yaml}]
  constraints: [{task: digits.yaml}]
"""


def add_dataset(server: LookAlike, place: Path, name: str, row: dict[str, object], *splits: str) -> str:
    for split in splits:
        (place / "data").mkdir(parents=True, exist_ok=True)
        (place / "data" / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    (place / "README.md").write_text("---\nlicense: mit\n---\n")
    (place / "setup.py").write_text("raise SystemExit\n")
    return server.add_model(name, place).id


def add_letters(server: LookAlike, place: Path, name: str) -> str:
    return add_dataset(server, place, f"acme/{name}", {"prompt": name, "answer": "x"}, "test", "train")


def add_piqa(server: LookAlike, place: Path, goal: str) -> str:
    row = {"goal": goal, "sol1": "this", "sol2": "that", "label": 0}
    return add_dataset(server, place, "baber/piqa", row, "train", "validation")


@pytest.mark.story
def test_a_task_finds_its_fetched_data(online: LookAlike, tmp_path: Path) -> None:
    commit = add_piqa(online, tmp_path / "piqa", "first")
    (tmp_path / "p.yaml").write_text(PROFILE)
    _, (found,) = fetch_profile_data(tmp_path / "p.yaml", Console(quiet=True))
    data = tmp_path / "eval-data"
    assert found.revision == commit
    assert not list(data.rglob("setup.py"))  # No file that could be executed.
    before = pin_task("piqa", tmp_path, HashMemo(tmp_path / "h.db"), data)
    # After a new commit on the Hub, the pinned revision is still fetched.
    add_piqa(online, tmp_path / "piqa", "second")
    _, (again,) = fetch_profile_data(tmp_path / "p.yaml", Console(quiet=True))
    assert again.revision == commit
    assert pin_task("piqa", tmp_path, HashMemo(tmp_path / "i.db"), data) == before


@pytest.mark.story
def test_a_dataset_that_the_hub_does_not_have_is_named(online: LookAlike, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="dataset baber/piqa"):
        fetch_datasets(task_tree("piqa").datasets, tmp_path / "data", lambda one: None)


def test_datasets_of_yaml_files_and_of_a_sweep_are_fetched_too(online: LookAlike, tmp_path: Path) -> None:
    commits = {f"acme/{name}": add_letters(online, tmp_path / name, name) for name in ("letters", "digits")}
    (tmp_path / "p.yaml").write_text(PROFILE.replace("piqa", "letters.yaml") + SWEEP)
    (tmp_path / "letters.yaml").write_text(LETTERS)
    # One file of a dataset, by its address.
    address = "dataset_kwargs: {data_files: {test: 'hf://datasets/acme/digits/data/test.jsonl'}}"
    digits = LETTERS.replace("task: letters", "task: digits").replace("acme/letters", f"json\n{address}")
    (tmp_path / "digits.yaml").write_text(digits)
    _, fetched = fetch_profile_data(tmp_path / "p.yaml", Console(quiet=True))
    assert {one.name: one.revision for one in fetched} == commits
    for name in ("letters", "digits"):
        task = pin_task(f"{name}.yaml", tmp_path, HashMemo(tmp_path / "h.db"), tmp_path / "eval-data")
        assert inspect_data(task).documents == 1


def test_a_partial_download_is_not_visible_and_resumes(
    online: LookAlike, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_letters(online, tmp_path / "letters", "letters")
    (tmp_path / "letters.yaml").write_text(LETTERS)
    asked, data = task_tree("letters.yaml", tmp_path).datasets, tmp_path / "data"
    online.set_faults([Fault("drop", times=100, path=r"/train\.jsonl")])
    with pytest.raises(InvalidInput, match="dataset acme/letters"):
        fetch_datasets(asked, data, lambda one: None)
    with pytest.raises(InvalidInput, match="no data for acme/letters"):
        pin_task("letters.yaml", tmp_path, HashMemo(tmp_path / "h.db"), data)
    online.set_faults([])
    fetch_datasets(asked, data, lambda one: None)
    assert pin_task("letters.yaml", tmp_path, HashMemo(tmp_path / "h.db"), data).mirror == data
    assert not list((data / ".arriving").iterdir())


def test_two_revisions_of_one_dataset_are_refused(tmp_path: Path) -> None:
    asked = [TaskDataset(name, "acme/x", None, "test", None, revision=name) for name in ("v1", "v2")]
    with pytest.raises(InvalidInput, match="v1 for task v1 and v2 for task v2"):
        fetch_datasets(asked, tmp_path, lambda one: None)


def test_data_at_a_url_are_requested_by_task_name(tmp_path: Path) -> None:
    asked = TaskDataset("prices", "", None, "test", None, reader="csv")
    with pytest.raises(InvalidInput) as refused:
        fetch_datasets([asked], tmp_path, lambda one: None)
    assert "prices_test.jsonl" in refused.value.expected
    (tmp_path / "prices_test.jsonl").write_text("{}\n")
    fetch_datasets([asked], tmp_path, lambda one: None)
