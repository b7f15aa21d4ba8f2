"""Each page of the docs is short, is listed on the home page, and has links that lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
HOME = DOCS / "index.md"
KINDS = ("tutorials", "how-to", "reference", "explanation", "benchmarks")
PAGES = [page for kind in KINDS for page in sorted((DOCS / kind).glob("*.md"))]
NOTEBOOKS = [page for kind in KINDS for page in sorted((DOCS / kind).glob("*.ipynb"))]
GENERATED = {DOCS / "reference" / name for name in ("profile.md", "cli.md", "python-api.md")}
MAX_WORDS = 2000


def links(page: Path) -> list[str]:
    """Return the targets of all relative links outside code, without their anchors."""
    text = re.sub(r"^ *```.*?^ *```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    targets = (target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text))
    return [target for target in targets if target and not re.match(r"[a-z]+:", target)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_is_short_and_has_one_title(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert page in GENERATED or len(text.split()) <= MAX_WORDS
    without_code = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"^# ", without_code, re.MULTILINE)) == 1


def test_the_home_page_lists_every_page() -> None:
    listed = {(DOCS / target).resolve() for target in links(HOME)}
    assert [str(page.relative_to(DOCS)) for page in [*PAGES, *NOTEBOOKS] if page not in listed] == []


@pytest.mark.parametrize("page", [HOME, *PAGES], ids=lambda page: str(page.relative_to(DOCS)))
def test_relative_links_lead_to_a_file(page: Path) -> None:
    assert [target for target in links(page) if not (page.parent / target).exists()] == []
