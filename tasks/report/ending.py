"""Render the page of a run without a verdict: refused by a check, invalid, failed, or without new work.

The page has the design of a release's report. It shows how the run ended and why, the remedy and the completed stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.wording import format_duration
from mergegate.tasks.report import wording
from mergegate.tasks.report.history.overview import outcome_of_status
from mergegate.tasks.report.page import add_contents, page_style, page_template
from mergegate.tasks.stage import Outcome, StageStatus, joint_status

_OUTCOMES: dict[StageStatus, Outcome] = {
    "made": "pass",
    "cached": "pass",
    "rebuilt": "pass",
    "refused": "fail",
    "failed": "fail",
}
_STATUS_WORDS = {"made": "built", "failed": "error"}
_RESUMES = "The results of finished stages are cached, so the next run continues from there."
_CONSEQUENCES = {
    "refused": "This run merged and published nothing.",
    "invalid": "This run merged and published nothing, because its input is invalid.",
    "interrupted": f"A user or the system stopped this run. {_RESUMES}",
    "failed": f"This is an error in mergegate or its environment, not a verdict on the merge. {_RESUMES}",
}
_ENDED_LATE = f"This run published nothing. {_RESUMES}"
_STAGES = "<!--stages--><!--/stages-->"


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
    consequence = _CONSEQUENCES.get(content.status, "")
    merged = any(stage.name == "merge" and stage.status in ("made", "cached", "rebuilt") for stage in content.stages)
    return page_template("ending.html").render(
        content=content,
        status=_STATUS_WORDS.get(content.status, content.status),
        first=first,
        rest=rest,
        outcome=outcome_of_status(content.status),
        consequence=_ENDED_LATE if merged and content.status in ("refused", "invalid") else consequence,
        style=page_style("ending.css"),
        **_stage_variables(content.stages),
    )


def add_stages(page: str, stages: Sequence[EndedStage]) -> str:
    """Return a report page with the stages of this run and their times, which a release must not contain.

    All calls of a stage share a row, because a stage may run once per model and task.
    """
    if not stages or _STAGES not in page:
        return page
    calls_by_stage: dict[str, list[EndedStage]] = {}
    for stage in stages:
        calls_by_stage.setdefault(stage.name, []).append(stage)
    rows = []
    for name, calls in calls_by_stage.items():
        status = joint_status([(call.subject, call.status) for call in calls])
        cached = sum(call.status == "cached" for call in calls)
        summary = calls[0].summary if len(calls) == 1 else f"{len(calls)} calls, {cached} cached"
        seconds = sum(call.seconds for call in calls)
        rows.append(EndedStage(name=name, subject="", status=status, seconds=seconds, summary=summary))
    table = page_template("stages.html").render(**_stage_variables(rows))
    section = f'<section id="stages">\n  <h2>Stages of this run</h2>\n{table}</section>'
    return add_contents(page.replace(_STAGES, section, 1))


def _stage_variables(stages: Sequence[EndedStage]) -> dict[str, Any]:
    return {
        "stages": stages,
        "outcomes": _OUTCOMES,
        "words": _STATUS_WORDS,
        "glyphs": wording.GLYPHS,
        "duration": format_duration,
    }
