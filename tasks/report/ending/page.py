"""Render the page of a run without a verdict from ``ending.html``, in the design of a release's report."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mergegate.merge_core.wording import format_duration
from mergegate.tasks.report import wording
from mergegate.tasks.report.ending.content import EndedRun
from mergegate.tasks.report.history import outcome_of_status
from mergegate.tasks.report.page import page_environment
from mergegate.tasks.stage import Outcome, StageStatus

if TYPE_CHECKING:
    from jinja2 import Template

HERE = Path(__file__).parent

_OUTCOMES: dict[StageStatus, Outcome] = {
    "made": "pass",
    "cached": "pass",
    "rebuilt": "pass",
    "refused": "fail",
    "failed": "fail",
}
_CONSEQUENCES = {
    "refused": "Nothing was merged or published by this run.",
    "invalid": "Nothing was merged or published: the input has no meaning as it is.",
    "interrupted": "Somebody stopped it. What was finished is kept: the next run goes on from there.",
    "failed": "This is an error of the program or of its surroundings, and says nothing about the merge. "
    "What was finished is kept: the next run goes on from there.",
}
_REFUSED_LATE = "Nothing was published by this run. What was finished is kept: the next run goes on from there."


def render_ending(content: EndedRun) -> str:
    """Return the page as text, without scripts or external resources.

    Equal content gives equal text.
    """
    from markupsafe import Markup

    styles = (HERE.parent / "style.css", HERE / "ending.css")
    first, _, rest = content.message.partition("\n")
    merged = any(stage.name == "merge" and stage.status in ("made", "cached", "rebuilt") for stage in content.stages)
    return _template().render(
        content=content,
        first=first,
        rest=rest,
        outcome=outcome_of_status(content.status),
        outcomes=_OUTCOMES,
        glyphs=wording.GLYPHS,
        consequence=_REFUSED_LATE if merged and content.status == "refused" else _CONSEQUENCES.get(content.status, ""),
        duration=format_duration,
        style=Markup("\n".join(file.read_text(encoding="utf-8") for file in styles)),
    )


@cache
def _template() -> Template:
    return page_environment(HERE).get_template("ending.html")
