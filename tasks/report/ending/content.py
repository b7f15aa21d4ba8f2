"""Define the content of the page of a run without a verdict.

It holds how the run ended and why, the finding, the remedy and the completed stages.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from mergegate.tasks.stage import StageStatus


class EndedStage(BaseModel):
    """One stage that ran before the run ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    subject: str
    status: StageStatus
    seconds: float
    summary: str


class EndedRun(BaseModel):
    """One run without a verdict.

    All of its text is untrusted.
    """

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
