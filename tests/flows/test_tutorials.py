"""Each tutorial works as written: its commands run in order in a fresh directory and print what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from samples import sampled
from served_site import free_port
from walkthrough import PROJECT, blocks_of, reader

TUTORIALS = {page.stem: page for page in sorted((PROJECT / "docs" / "tutorials").glob("*.md"))}
ELSEWHERE = ("release-quantized-variants",)  # tests/variants/test_tutorial.py follows it in other environments
SHORT = ("first-release",)  # the slow suite follows this one, and the long suite all
MAX_WORDS = 1200


@pytest.mark.story
@pytest.mark.parametrize(
    "name", sampled([name for name in TUTORIALS if name not in ELSEWHERE], SHORT, pytest.mark.proof)
)
def test_a_tutorial_works_as_written(name: str, tmp_path: Path) -> None:
    port = str(free_port())  # of the page that starts a server
    user = reader(tmp_path, {"mergegate server": f"mergegate server --port {port}"})
    user.follow(blocks_of(TUTORIALS[name]), f"{name}.md")


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_is_short_and_ends_with_the_next_pages(name: str) -> None:
    text = TUTORIALS[name].read_text(encoding="utf-8")
    assert len(text.split()) <= MAX_WORDS
    assert "minutes" in text.partition("\n## ")[0]  # it says how long it takes
    assert text.rpartition("\n## ")[2].startswith("Next\n")
