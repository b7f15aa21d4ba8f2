"""``mergegate merge`` run twice: it does not redo the same merge and does not overwrite anything else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from demo_project import Project, make_project

RECIPE = "profiles/demo/recipes/linear.yaml"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = make_project(tmp_path)
    shared = made.root / "profiles" / "demo"
    family = shared.resolve()
    shared.unlink()
    shutil.copytree(family, shared)  # A copy, because tests change it.
    assert made.mergegate("merge", RECIPE, "merged").exit_code == 0
    return made


def test_the_same_merge_is_not_made_again(project: Project) -> None:
    weights = project.root / "merged" / "model.safetensors"
    before = weights.stat()
    again = project.mergegate("merge", RECIPE, "merged", "--json")
    assert again.exit_code == 0
    assert json.loads(again.stdout)["status"] == "nothing new"
    assert weights.stat() == before


def _recipe_other(root: Path) -> None:
    file = root / RECIPE
    file.write_text(file.read_text().replace("0.5", "0.4"))


def _parent_touched(root: Path) -> None:
    parent = next((root / "profiles/demo/models").rglob("*.safetensors"))
    os.utime(parent, ns=(1, 1))


def _result_written(root: Path) -> None:
    with (root / "merged" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")


def _result_incomplete(root: Path) -> None:
    (root / "merged" / "config.json").unlink()


def _result_with_more(root: Path) -> None:
    (root / "merged" / "more.txt").touch()


def _memory_damaged(root: Path) -> None:
    for file in (root / ".mergegate" / "merges").iterdir():
        file.write_bytes(b"\0garbage")


@pytest.mark.parametrize(
    "change",
    [_recipe_other, _parent_touched, _result_written, _result_incomplete, _result_with_more, _memory_damaged],
)
def test_anything_else_is_not_written_over(project: Project, change: Callable[[Path], None]) -> None:
    change(project.root)
    again = project.mergegate("merge", RECIPE, "merged")
    assert again.exit_code == 2
    assert "it exists" in again.output


def test_what_was_removed_is_made_again(project: Project) -> None:
    shutil.rmtree(project.root / "merged")
    again = project.mergegate("merge", RECIPE, "merged")
    assert again.exit_code == 0
    assert "nothing new" not in again.output


@pytest.mark.story
def test_another_text_is_another_merge(project: Project) -> None:
    """The calibration texts that models read before a merge determine the result as much as their weights do."""
    recipe = "profiles/demo/recipes/regmean.yaml"
    assert project.mergegate("merge", recipe, "read").exit_code == 0
    before = (project.root / "read/model.safetensors").read_bytes()
    assert "nothing new" in project.mergegate("merge", recipe, "read").output
    text = project.root / "profiles/demo/data/texts/shifter.jsonl"
    text.write_text("".join(text.read_text().splitlines(keepends=True)[:20]))
    refused = project.mergegate("merge", recipe, "read")
    assert refused.exit_code != 0
    assert (project.root / "read/model.safetensors").read_bytes() == before
    assert project.mergegate("merge", recipe, "again").exit_code == 0
    assert (project.root / "again/model.safetensors").read_bytes() != before
