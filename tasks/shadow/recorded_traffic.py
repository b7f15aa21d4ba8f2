"""What is kept of a request, and of two answers to one: plain values, whatever database they are in."""

from __future__ import annotations

from typing import Literal, NamedTuple

from mergegate.tasks.shadow.arms import ArmRow


class ShadowRecord(NamedTuple):
    """One request at one arm, as it is kept. Bodies have been redacted; headers are never kept."""

    exchange: str  # what joins an answer and its copy
    candidate: str
    role: Literal["answer", "copy"]
    arm: Literal["parent", "candidate"]
    request_id: str  # the client's, or ours
    session: str  # a hash
    at: float  # Unix time
    path: str  # without its query
    request: bytes  # of an answer; of its copy it is the same, and empty here
    status: int = 0  # of HTTP; 0 where none came
    response: bytes = b""
    error: str = ""
    fallback: bool = False
    first_byte: float | None = None  # seconds
    seconds: float = 0.0

    @property
    def row(self) -> ArmRow:
        """How it went, without what was said."""
        return ArmRow(
            self.at, self.arm, self.role, self.status, self.error, self.fallback, self.first_byte, self.seconds
        )


class RecordedAnswer(NamedTuple):
    """What one arm answered."""

    status: int
    body: bytes
    first_byte: float | None
    seconds: float
    error: str


class RecordedPair(NamedTuple):
    """One request with the answers of both arms: the parent's reached the user."""

    request_id: str  # of the exchange: no two are alike
    session: str
    at: float
    path: str
    request: bytes
    parent: RecordedAnswer
    candidate: RecordedAnswer
