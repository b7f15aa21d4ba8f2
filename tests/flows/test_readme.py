"""The README and each tutorial work as written: their commands run in order and print what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from served_site import free_port
from walkthrough import PROJECT, blocks_of, fresh_clone, reader

README = PROJECT / "README.md"
# Commands that these tests cannot run as written, with their replacements.
REPLACED = {
    "uv tool install .": "true",  # benchmarks/bare_wheel.py --real installs the wheel with uv, pipx and pip
    "make test ": "make -n test ",  # these tests are part of it
    "init BASE MODEL...": "init profiles/demo/models/base profiles/demo/models/shifter --name new -o new --yes",
    "check support.yaml": "check profiles/demo.yaml",  # only the README's reader has the models of support.yaml
    "run support.yaml": "run profiles/demo.yaml",
}
TRIED = ("Install", "Write a profile")
SHOWN = ("Example output",)
TUTORIALS = {page.stem: page for page in sorted((PROJECT / "docs" / "tutorials").glob("*.md"))}
EXAMPLES = ("merge-a-training-run", "merge-client-rounds")  # how-tos with a section "Try it"


@pytest.mark.proof
def test_its_commands_work_and_its_example_shows_what_the_demo_prints(tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8")
    assert [written for written in REPLACED if written not in text] == []
    clone = fresh_clone(tmp_path / "clone")
    # The example first, because it shows a first run. The run of the own profile then finds nothing new.
    for headings, user in ((SHOWN, reader(clone)), (TRIED, reader(clone, REPLACED))):
        for heading in headings:
            user.follow(blocks_of(README, heading), f"README.md, {heading}")
    assert (clone / "mergegate-demo/releases/demo/latest").is_dir()
    assert (clone / "new/new.yaml").is_file()


def test_no_block_of_it_is_left_out() -> None:
    tried = [block for heading in (*TRIED, *SHOWN) for block in blocks_of(README, heading)]
    assert tried == blocks_of(README)


@pytest.mark.parametrize("name", [*TUTORIALS, *EXAMPLES])
@pytest.mark.proof  # every documented command is parsed by test_documented_commands.py, and the README is followed
def test_a_tutorial_works_as_written(name: str, tmp_path: Path) -> None:
    port = str(free_port())  # of the page that starts a server
    user = reader(tmp_path, {"mergegate server": f"mergegate server --port {port}"})
    how_to = PROJECT / "docs" / "how-to" / f"{name}.md"
    user.follow(blocks_of(how_to, "Try it") if name in EXAMPLES else blocks_of(TUTORIALS[name]), f"{name}.md")


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_is_short_and_ends_with_the_next_pages(name: str) -> None:
    text = TUTORIALS[name].read_text(encoding="utf-8")
    assert len(text.split()) <= 1200
    assert "minutes" in text.partition("\n## ")[0]  # it says how long it takes
    assert text.rpartition("\n## ")[2].startswith("Next\n")
