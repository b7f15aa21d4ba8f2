"""No command deletes or overwrites user files at its output path or next to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo_project import Project, make_project

REVERSER, BASE = "profiles/demo/models/reverser", "profiles/demo/models/base"
COMMANDS = {
    "merge": ["merge", "profiles/demo/recipes/linear.yaml", "o"],
    "merge of adapters": ["merge", "profiles/demo/recipes/adapters.yaml", "o"],
    "merge --share": ["merge", "profiles/demo/recipes/linear.yaml", "o", "--share"],
    "merge of adapters --share": ["merge", "profiles/demo/recipes/adapters.yaml", "o", "--share"],
    "extract-lora": [
        "extract-lora",
        "profiles/demo/models/reverser",
        "profiles/demo/models/base",
        "--rank=1",
        "--out=o",
    ],
    "transplant-tokenizer": ["transplant-tokenizer", REVERSER, BASE, "o"],
    "schema": ["schema", "--write", "o"],
}
SHARED = ["steps.partial/notes", "merge.partial", "config.json", "a.journal.partial", "x.partial.damaged-1"]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path / "project")


def of_the_user(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and ".mergegate" not in path.parts}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *((command, "o.partial/notes.txt") for command in COMMANDS if command != "schema" and "--share" not in command),
        *((command, "o/notes.txt") for command in COMMANDS if command != "schema"),
        *(("merge --share", f"o/{name}") for name in SHARED),
        ("schema", "o/reference/profile.md"),
        ("schema", "o/schema/recipe.json"),
    ],
)
def test_files_of_the_user_stay(project: Project, command: str, name: str) -> None:
    (project.root / name).parent.mkdir(parents=True)
    (project.root / name).write_text("of the user")
    before = of_the_user(project.root)
    result = project.mergegate(*COMMANDS[command])
    assert result.exit_code == 2, result.output
    assert name.split("/")[0] in result.output or "with --share" in result.output
    assert of_the_user(project.root) == before


def test_schemas_are_written_over_older_ones(project: Project) -> None:
    assert project.mergegate("schema", "--write", "o").exit_code == 0
    before = of_the_user(project.root)
    assert project.mergegate("schema", "--write", "o").exit_code == 0
    assert of_the_user(project.root) == before


@pytest.mark.parametrize("command", ["doctor --repair", "store gc --older-than 0 --quota 0B"])
def test_files_of_the_user_in_the_home_stay(project: Project, command: str) -> None:
    names = ["backup.partial", "photo.damaged-1.jpg", "store/notes.txt", "store/merge/big.partial", "store/x/y.doomed"]
    names += ["store/merge/photo.damaged-x", "reports/notes.partial", "12"]
    for name in names:
        (project.home / name).parent.mkdir(parents=True, exist_ok=True)
        (project.home / name).write_text("of the user")
    for _ in range(2):
        project.mergegate(*command.split())
    assert {name: (project.home / name).exists() for name in names} == dict.fromkeys(names, True)
