"""``mergegate merge`` run twice: it does not redo the same merge and does not overwrite anything else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from demo_project import Project, expect, make_project
from samples import sampled
from tampering import flip

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


def test_the_same_merge_is_not_made_again_unless_it_was_removed(project: Project) -> None:
    weights = project.root / "merged" / "model.safetensors"
    before = weights.stat()
    again = expect(project.mergegate("merge", RECIPE, "merged", "--json"), 0)
    assert json.loads(again.stdout)["status"] == "nothing new"
    assert weights.stat() == before
    shutil.rmtree(project.root / "merged")
    again = expect(project.mergegate("merge", RECIPE, "merged"), 0)
    assert "nothing new" not in again.output


def write_garbage(root: Path) -> None:
    for file in (root / ".mergegate" / "merges").iterdir():
        file.write_bytes(b"\0garbage")


def write_another_recipe(root: Path) -> None:
    (root / RECIPE).write_text((root / RECIPE).read_text().replace("0.5", "0.4"))


CHANGES: dict[str, Callable[[Path], object]] = {
    "another recipe": write_another_recipe,
    "a touched parent": lambda root: os.utime(next((root / "profiles/demo/models").rglob("*.safetensors")), ns=(1, 1)),
    "other weights": lambda root: flip(root / "merged" / "model.safetensors"),
    "a missing file": lambda root: (root / "merged" / "config.json").unlink(),
    "one more file": lambda root: (root / "merged" / "more.txt").touch(),
    "a damaged record": write_garbage,
}


@pytest.mark.parametrize("change", sampled(CHANGES, ["another recipe", "other weights", "one more file"]))
def test_anything_else_is_not_written_over(project: Project, change: str) -> None:
    CHANGES[change](project.root)
    expect(project.mergegate("merge", RECIPE, "merged"), 2, "it exists")


@pytest.mark.proof
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
