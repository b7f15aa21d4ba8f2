"""Datasets of tasks by name are fetched once, in a revision that is kept, and found by ``check`` afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hub_look_alike import LookAlike
from rich.console import Console

from flows.cli.fetch_data import fetch_data
from merge_core.errors import InvalidInput
from merge_core.store.hashing import HashMemo
from tasks.evaluation import fetch_datasets, named_data, pin_task

PROFILE = """\
name: nightly
recipe: {merge_method: linear, models: [{model: a}, {model: b}], dtype: float32}
evaluate: {tasks: [{task: piqa, guarded_by: a}], data: eval-data}
"""


def add_piqa(server: LookAlike, place: Path, goal: str) -> str:
    for split in ("train", "validation"):
        (place / "data").mkdir(parents=True, exist_ok=True)
        row = {"goal": goal, "sol1": "this", "sol2": "that", "label": 0}
        (place / "data" / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    (place / "README.md").write_text("---\nlicense: mit\n---\n")
    (place / "setup.py").write_text("raise SystemExit\n")
    return server.add_model("baber/piqa", place).id


def test_what_is_fetched_is_found_by_its_task(online: LookAlike, tmp_path: Path) -> None:
    commit = add_piqa(online, tmp_path / "piqa", "first")
    (tmp_path / "p.yaml").write_text(PROFILE)
    (found,) = fetch_data(tmp_path / "p.yaml", Console(quiet=True))
    data = tmp_path / "eval-data"
    assert found.revision == commit
    assert not list(data.rglob("setup.py"))  # nothing that could be run
    before = pin_task("piqa", tmp_path, HashMemo(tmp_path / "h.db"), data)
    # The Hub goes on; what was pinned is fetched again all the same.
    add_piqa(online, tmp_path / "piqa", "second")
    (again,) = fetch_data(tmp_path / "p.yaml", Console(quiet=True))
    assert again.revision == commit
    assert pin_task("piqa", tmp_path, HashMemo(tmp_path / "i.db"), data) == before


def test_a_dataset_that_the_hub_does_not_have_is_named(online: LookAlike, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="dataset baber/piqa"):
        fetch_datasets(named_data("piqa", None), tmp_path / "data", lambda one: None)
