"""Each tutorial works as written: its commands run in order in a fresh directory and print what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from walkthrough import PROJECT, blocks_of, reader

TUTORIALS = PROJECT / "docs" / "tutorials"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("page", ["first-release", "your-own-models"])
def test_a_tutorial_works_as_written(page: str, tmp_path: Path) -> None:
    reader(tmp_path).follow(blocks_of(TUTORIALS / f"{page}.md"), page)
