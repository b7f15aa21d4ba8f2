"""The README works as written: its commands run in order in a fresh clone and print what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from walkthrough import PROJECT, blocks_of, fresh_clone, reader

README = PROJECT / "README.md"
# Commands that this test cannot run as written, with their replacements.
REPLACED = {
    "uv tool install .": "true",  # tests/flows/test_wheel.py installs the wheel with uv, pipx and pip
    "make test ": "make -n test ",  # this test is part of it
    "init BASE MODEL...": "init profiles/demo/models/base profiles/demo/models/shifter --name new --out new --yes",
    "check support.yaml": "check profiles/demo.yaml",  # only the README's reader has the models of support.yaml
    "run support.yaml": "run profiles/demo.yaml",
}


@pytest.mark.slow
def test_the_readme_works_as_written(tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8")
    assert [written for written in REPLACED if written not in text] == []
    user = reader(fresh_clone(tmp_path), REPLACED)
    user.follow(blocks_of(README), "README.md")
    assert (tmp_path / "mergegate-demo/releases/demo/latest").is_dir()
    assert (tmp_path / "new/new.yaml").is_file()
