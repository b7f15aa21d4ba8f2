"""What the page of a watched release says: one frozen value, put together by the flow, read by page and terminal.

Rates are shares in [0, 1], times seconds; evidence is a natural logarithm, because it grows beyond what a float holds.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field

ReportedRouting = Literal["watch", "promoted", "rolled back", "killed"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ShadowPoint(_Part):
    """What was shown after so many pairs."""

    pairs: int = Field(ge=0)
    at: float  # unix: of the newest request among them
    win_rate: float
    low: float  # holds at all looks
    high: float
    log_e_promote: float
    log_e_rollback: float


class ReportedArm(_Part):
    """How one of the two servers did."""

    requests: int = Field(ge=0)
    failed: int = Field(ge=0)
    low: float = 0.0  # of the share that fails, at all looks
    high: float = 1.0
    fallbacks: int = 0  # of the candidate: how often the parent answered in its place
    first_byte: tuple[float, float, float] | None = None  # median, 95 %, 99 %; None where nothing was answered
    seconds: tuple[float, float, float] | None = None

    @property
    def rate(self) -> float:
        """Share of its requests that failed."""
        return self.failed / self.requests if self.requests else 0.0


class LostExample(_Part):
    """A pair that the candidate lost. All of it is a stranger's text."""

    at: float  # unix
    question: str
    parent: str
    candidate: str
    reasoning: str


class ShadowContent(_Part):
    """Everything that stands on the page of a watched release.

    Args:
        name: Of the profile.
        candidate: Its version.
        serving: What becomes of requests now.
        reason: Why, or what is still missing: a sentence.
        hours: For which it was watched.
        share: Of the traffic, that the candidate sees while it is watched.
        points: How the evidence grew; the last is what is shown now.
        waiting: Pairs that the next look will have judged.
        left_out: Recorded pairs that are not judged, by reason.
        not_recorded: What the proxy could not keep, by reason.
        examples: Of pairs that were lost, the newest first; kept no longer than the records.
        keep_days: For which they are.
        alias: What a promoted candidate is called at its target; empty: nothing.
    """

    name: str
    candidate: str
    serving: ReportedRouting
    reason: str
    looked: float  # unix
    hours: float = Field(ge=0)
    mode: Literal["mirror", "split"]
    share: float = Field(ge=0, le=1)
    margin: float  # points of win rate below even
    confidence: float
    minimum_hours: float
    minimum_pairs: int
    judge: str
    wins: int = Field(ge=0)
    ties: int = Field(ge=0)
    losses: int = Field(ge=0)
    identical: int = Field(ge=0)  # of the ties: equal answers
    consistency: float | None = None  # share of the others that the judge judged alike in both orders
    points: tuple[ShadowPoint, ...] = ()
    waiting: int = Field(default=0, ge=0)
    left_out: tuple[tuple[str, int], ...] = ()
    parent_arm: ReportedArm
    candidate_arm: ReportedArm
    errors: str  # how they compare: a sentence
    not_recorded: tuple[tuple[str, int], ...] = ()
    examples: tuple[LostExample, ...] = ()
    keep_days: float = 30.0
    alias: str = ""

    @property
    def pairs(self) -> int:
        """That were judged."""
        return self.wins + self.ties + self.losses

    @property
    def now(self) -> ShadowPoint | None:
        """What is shown now; None before the first pair."""
        return self.points[-1] if self.points else None

    def without_examples(self) -> Self:
        """The same without any user's text."""
        return self.model_copy(update={"examples": ()})
