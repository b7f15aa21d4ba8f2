"""The gate: from paired evidence to a verdict. Pure decisions; the stage around them only stores the answer."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from tasks.stage import StageValue

Outcome = Literal["pass", "fail", "inconclusive"]


class GuardVerdict(BaseModel):
    """One regression guard: the merge against its reference on one task. Differences are in points (0–100),
    positive when the merge is worse."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    metric: str
    reference: str  # name of the model it is held against
    reference_score: float  # in [0, 1]
    merge_score: float
    n: int  # paired documents
    lost: int  # documents the reference gets right and the merge wrong (binary scores)
    won: int  # the reverse
    drop: float  # points
    low: float  # interval of the drop at ``confidence``, one-sided each way, points
    high: float
    confidence: float  # 0.95
    max_drop: float  # points
    margin: float  # points: the upper bound must stay within it to pass
    outcome: Outcome
    reason: str  # a sentence: task, drop, interval, threshold


class DriftVerdict(BaseModel):
    """Perplexity of the merge over the better parent's on the same documents."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reference: str  # the better parent
    documents: int
    unit: Literal["token", "byte"]  # bytes when tokenizers differ
    ratio: float | None  # None when the merge's likelihood is not finite
    low: float | None
    high: float | None
    max_ratio: float  # 1.05
    warn_ratio: float  # 1.02
    outcome: Outcome
    broken: bool  # not finite, or worse than twice: the costly tasks are not worth running
    warning: bool
    reason: str


class Verdict(StageValue):
    """The decision about one merge, with all that led to it."""

    outcome: Outcome  # worst of all
    publishable: bool  # what the outcome and ``on_inconclusive`` make of it
    guards: tuple[GuardVerdict, ...]
    drift: DriftVerdict | None
    overall_drop: float | None  # mean over tasks, points
    overall_low: float | None
    overall_high: float | None
    on_inconclusive: Literal["block", "warn", "pass"]
    reasons: tuple[str, ...]  # why not, worst first; empty when it passes

    def summary(self) -> str:
        if self.publishable:
            return f"{len(self.guards)} guards passed" + ("" if self.outcome == "pass" else f" ({self.outcome})")
        return self.reasons[0]
