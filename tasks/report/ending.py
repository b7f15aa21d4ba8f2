"""Render the page of a run without a verdict: refused by a check, invalid, failed, or without new work.

The page has the design of a release's report. It shows how the run ended and why, the remedy and the completed stages.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.wording import format_duration
from mergegate.tasks.report import wording
from mergegate.tasks.report.history.overview import outcome_of_status
from mergegate.tasks.report.page import page_style, page_template
from mergegate.tasks.stage import Outcome, StageStatus

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


class EndedStage(BaseModel):
    """A stage that ran before the run ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    subject: str
    status: StageStatus
    seconds: float
    summary: str


class EndedRun(BaseModel):
    """A run without a verdict. All of its text is untrusted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # name of the profile
    flow: str  # release, compare, sweep
    status: str  # status as used everywhere: refused, invalid, failed, nothing new
    message: str  # first text on the page
    where: str = ""  # file, field or model
    found: str = ""
    expected: str = ""
    remedy: str = ""
    exception: str = ""  # type and message of an unexpected exception
    log: str = ""  # file with the traceback
    stages: tuple[EndedStage, ...] = ()  # in the order of completion


def render_ending(content: EndedRun) -> str:
    """Return the page about the run as HTML, without scripts or external resources. Equal content gives equal text."""
    first, _, rest = content.message.partition("\n")
    merged = any(stage.name == "merge" and stage.status in ("made", "cached", "rebuilt") for stage in content.stages)
    return page_template("ending.html").render(
        content=content,
        first=first,
        rest=rest,
        outcome=outcome_of_status(content.status),
        outcomes=_OUTCOMES,
        glyphs=wording.GLYPHS,
        consequence=_REFUSED_LATE if merged and content.status == "refused" else _CONSEQUENCES.get(content.status, ""),
        duration=format_duration,
        style=page_style("ending.css"),
    )
