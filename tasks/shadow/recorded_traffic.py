"""Define recorded requests and recorded pairs as plain values, independent of the database."""

from __future__ import annotations

from typing import Literal, NamedTuple

from mergegate.tasks.shadow.arms import ArmRow


class ShadowRecord(NamedTuple):
    """Recorded request at one arm. Headers are never recorded, and the stored bodies are redacted."""

    exchange: str  # shared by an answer and its copy
    candidate: str
    role: Literal["answer", "copy"]
    arm: Literal["parent", "candidate"]
    request_id: str  # sent by the client, otherwise generated
    session: str  # a hash
    at: float  # Unix time
    path: str  # without its query
    request: bytes  # empty for a copy, whose request is the same as that of the answer
    status: int = 0  # HTTP status, or 0 if there was none
    response: bytes = b""
    error: str = ""
    fallback: bool = False
    first_byte: float | None = None  # seconds
    seconds: float = 0.0

    @property
    def row(self) -> ArmRow:
        """Outcome of the request, without its content."""
        return ArmRow(
            self.at, self.arm, self.role, self.status, self.error, self.fallback, self.first_byte, self.seconds
        )


class RecordedAnswer(NamedTuple):
    """Answer of one arm."""

    status: int
    body: bytes
    first_byte: float | None
    seconds: float
    error: str


class RecordedPair(NamedTuple):
    """One request with the answers of both arms. The user received the parent's."""

    request_id: str  # ID of the exchange, which is unique
    session: str
    at: float
    path: str
    request: bytes
    parent: RecordedAnswer
    candidate: RecordedAnswer
