"""The README works as written: its commands run in order in a fresh clone and print what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from walkthrough import PROJECT, blocks_of, fresh_clone, reader

README = PROJECT / "README.md"
# Commands that these tests cannot run as written, with their replacements.
REPLACED = {
    "uv tool install .": "true",  # benchmarks/bare_wheel.py --real installs the wheel with uv, pipx and pip
    "make test ": "make -n test ",  # these tests are part of it
    "init BASE MODEL...": "init profiles/demo/models/base profiles/demo/models/shifter --name new --out new --yes",
    "check support.yaml": "check profiles/demo.yaml",  # only the README's reader has the models of support.yaml
    "run support.yaml": "run profiles/demo.yaml",
}
TRIED = ("Install", "Write a profile")
SHOWN = ("Example output",)

pytestmark = pytest.mark.story


def test_its_commands_work(tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8")
    assert [written for written in REPLACED if written not in text] == []
    user = reader(fresh_clone(tmp_path), REPLACED)
    for heading in TRIED:
        user.follow(blocks_of(README, heading), f"README.md, {heading}")
    assert (tmp_path / "mergegate-demo/releases/demo/latest").is_dir()
    assert (tmp_path / "new/new.yaml").is_file()


def test_its_example_shows_what_the_demo_prints(tmp_path: Path) -> None:
    user = reader(fresh_clone(tmp_path))
    for heading in SHOWN:
        user.follow(blocks_of(README, heading), f"README.md, {heading}")


def test_no_block_of_it_is_left_out() -> None:
    tried = [block for heading in (*TRIED, *SHOWN) for block in blocks_of(README, heading)]
    assert tried == blocks_of(README)
