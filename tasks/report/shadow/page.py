"""Render the page of a watched release from ``shadow.html``, in the design of a release's report."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mergegate.tasks.report import wording
from mergegate.tasks.report.page import page_environment
from mergegate.tasks.report.shadow import wording as words
from mergegate.tasks.report.shadow.content import ShadowContent
from mergegate.tasks.report.shadow.plots import evidence_plot, win_rate_plot

if TYPE_CHECKING:
    from jinja2 import Template

HERE = Path(__file__).parent


def render_shadow(content: ShadowContent) -> str:
    """Return the page as text, without scripts or external resources.

    Equal content gives equal text.
    """
    from markupsafe import Markup

    styles = (HERE.parent / "style.css", HERE / "shadow.css")
    return _template().render(
        content=content,
        wording=wording,
        words=words,
        round=round,
        outcome=words.shadow_outcome(content),
        style=Markup("\n".join(file.read_text(encoding="utf-8") for file in styles)),
        # Matplotlib draws these plots and escapes the text in them.
        win_rate=[Markup(plot) for plot in win_rate_plot(content)],
        evidence=[Markup(plot) for plot in evidence_plot(content)],
        when=lambda at: datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        arms=[("parent", content.parent_arm), ("candidate", content.candidate_arm)],
    )


@cache
def _template() -> Template:
    return page_environment(HERE).get_template("shadow.html")
