"""The shadow report page is well-formed, loads nothing, escapes users' text, and leaves it out of stored content."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import pytest
import shadow_pages

sys.path.append(str(Path(__file__).resolve().parents[1] / "report"))

from pages import Page  # Shared with the report tests.

from mergegate.tasks.release.report import ShadowContent, render_shadow, shadow_rows
from mergegate.tasks.release.report.shadow import e_value


@cache
def content(name: str) -> ShadowContent:
    return shadow_pages.EVERY[name]()


@cache
def page(name: str) -> str:
    return render_shadow(content(name))


@pytest.mark.parametrize("name", shadow_pages.EVERY)
def test_the_shadow_page_is_well_formed_and_self_contained(name: str) -> None:
    read = Page(page(name))
    ids = read.attributes("id")
    assert len(ids) == len(set(ids))
    assert {href.removeprefix("#") for href in read.attributes("href")} <= set(ids)
    assert {tag for tag, _ in read.elements}.isdisjoint({"script", "link", "img", "iframe", "object", "image"})
    assert re.search(r"https?://|@import|url\((?!#)", page(name)) is None
    assert re.search(r"#[0-9a-f]{6}", "".join(read.attributes("style") + read.attributes("fill"))) is None
    assert all(value in " ".join(read.text.split()) for _, value in shadow_rows(content(name)))


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("watched", "No action is needed: each interim look"),
        ("promoted", "use the rollback command"),
        ("rolled back", "read the lost answers below"),
        ("killed", "log of the candidate's server"),
    ],
)
def test_the_lead_says_what_to_do_next(name: str, step: str) -> None:
    text = " ".join(Page(page(name)).text.split())
    assert step in text.partition("Quality of the answers")[0]


def test_user_text_is_escaped_and_not_archived() -> None:
    wrote = [text for one in shadow_pages.LOST for text in (one.question, one.parent, one.candidate, one.reasoning)]
    shown = " ".join(Page(page("watched")).text.split())
    assert all(" ".join(text.split()) in shown for text in wrote)
    kept = " ".join(Page(render_shadow(content("watched").model_copy(update={"examples": ()}))).text.split())
    assert not any(text and " ".join(text.split()) in kept for text in wrote)


def test_evidence_of_any_size_is_readable() -> None:
    shown = [e_value(log_e) for log_e in (0.0, -3.5, 3.0, 6.0, 60.0, -60.0, 5000.0)]
    assert shown == ["1", "0.03", "20", "403", "10²⁶", "10⁻²⁶", "10²¹⁷¹"]
