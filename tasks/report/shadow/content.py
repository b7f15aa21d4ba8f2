"""Define the content of the page of a watched release as one frozen value, for the page and the terminal.

Rates are shares in [0, 1], and times are in seconds. Evidence is a natural logarithm, because it exceeds the range of a
float.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

ReportedRouting = Literal["watch", "promoted", "rolled back", "killed"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ShadowPoint(_Part):
    """Evidence after a number of judged pairs."""

    pairs: int = Field(ge=0)
    at: float  # Unix time of the newest request among the pairs
    win_rate: float
    low: float  # lower end of the interval, which is valid at all interim looks
    high: float
    log_e_promote: float
    log_e_rollback: float


class ReportedArm(_Part):
    """Requests to one of the two servers: failures and latency."""

    requests: int = Field(ge=0)
    failed: int = Field(ge=0)
    low: float = 0.0  # lower end of the interval of the failure rate, valid at all interim looks
    high: float = 1.0
    fallbacks: int = 0  # for the candidate: number of requests that the parent answered instead
    first_byte: tuple[float, float, float] | None = None  # median, 95 %, 99 %; None without responses
    seconds: tuple[float, float, float] | None = None

    @property
    def rate(self) -> float:
        """Share of requests that failed."""
        return self.failed / self.requests if self.requests else 0.0


class LostExample(_Part):
    """A pair that the candidate lost. All of its text is untrusted."""

    at: float  # Unix time
    question: str
    parent: str
    candidate: str
    reasoning: str


class ShadowContent(_Part):
    """All content of the page of a watched release.

    Args:
        name: Name of the profile.
        candidate: Version of the candidate.
        serving: Current routing of requests.
        reason: Reason for the routing, or the evidence that is still missing, as a sentence.
        hours: Duration of the watch, in hours.
        share: Share of the traffic that the candidate receives during the watch.
        points: Evidence over time. The last point is the current state.
        waiting: Number of pairs that the next interim look will judge.
        left_out: Number of recorded pairs that are not judged, by reason.
        not_recorded: Number of requests that the proxy could not record, by reason.
        examples: Lost pairs, newest first. They are stored no longer than the records.
        retention_days: Number of days for which the records are stored.
        alias: Name of a promoted candidate at its target. Empty without a name.
    """

    name: str
    candidate: str
    serving: ReportedRouting
    reason: str
    looked: float  # Unix time of the last look
    hours: float = Field(ge=0)
    mode: Literal["mirror", "split"]
    share: float = Field(ge=0, le=1)
    margin: float  # largest distance of the win rate below 50 %, in points
    confidence: float
    minimum_hours: float
    minimum_pairs: int
    judge: str
    wins: int = Field(ge=0)
    ties: int = Field(ge=0)
    losses: int = Field(ge=0)
    identical: int = Field(ge=0)  # ties with equal answers
    consistency: float | None = None  # share of all other pairs with the same judgment in both orders
    controls: tuple[int, int] = (0, 0)  # control pairs that the judge found, of all
    length_ratio: float | None = None  # length of the candidate's answers relative to the parent's
    cut_off: tuple[float, float] = (0.0, 0.0)  # answers cut off by the token limit in percent: parent, candidate
    points: tuple[ShadowPoint, ...] = ()
    waiting: int = Field(default=0, ge=0)
    left_out: tuple[tuple[str, int], ...] = ()
    parent_arm: ReportedArm
    candidate_arm: ReportedArm
    errors: str  # comparison of the two servers' errors, as a sentence
    not_recorded: tuple[tuple[str, int], ...] = ()
    examples: tuple[LostExample, ...] = ()
    retention_days: float = 30.0
    alias: str = ""

    @property
    def pairs(self) -> int:
        """Number of judged pairs."""
        return self.wins + self.ties + self.losses

    @property
    def now(self) -> ShadowPoint | None:
        """Current evidence, or None before the first pair."""
        return self.points[-1] if self.points else None
