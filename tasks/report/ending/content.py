"""What is said of a run that has no verdict: how it ended, why, what was found, what to do, which stages were done."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from mergegate.tasks.stage import StageStatus


class EndedStage(BaseModel):
    """A stage that ran before the end."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    subject: str
    status: StageStatus
    seconds: float
    summary: str


class EndedRun(BaseModel):
    """A run without a verdict. All text may be a stranger's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # of the profile
    flow: str  # release, compare, sweep
    status: str  # the word that stands everywhere: refused, invalid, failed, nothing new
    message: str  # what a person reads first
    where: str = ""  # file, field or model
    found: str = ""
    expected: str = ""
    remedy: str = ""
    exception: str = ""  # type and message of one that nobody foresaw
    log: str = ""  # where its traceback stands
    stages: tuple[EndedStage, ...] = ()  # in the order in which they ended
