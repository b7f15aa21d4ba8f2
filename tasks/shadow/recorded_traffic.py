"""Define recorded requests, answers and pairs as plain values, independent of the database.

An :class:`ArmRow` is the outcome of one request at one arm, without its content. A :class:`ShadowRecord` adds the
content, and a :class:`RecordedPair` joins the answers of both arms to one request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

# Request timeout and too many requests: the server is at fault, not the request.
_FAULTS_BELOW = frozenset({408, 429})


class ArmRow(NamedTuple):
    """Outcome of one request at one arm.

    Attributes:
        at: Start of the request, as Unix time.
        arm: Server that received the request.
        role: ``answer`` if the user received the response, ``copy`` if it was only recorded.
        status: HTTP status, or 0 if the server sent none.
        error: Failure of the server or of the connection to it. Empty if there was none, or if the user disconnected.
        fallback: Whether the candidate failed and the parent answered instead.
        first_byte: Seconds until the first byte of the body, or None if no body arrived.
        seconds: Seconds until the last byte, or until the request was abandoned.
    """

    at: float
    arm: Literal["parent", "candidate"]
    role: Literal["answer", "copy"]
    status: int
    error: str
    fallback: bool
    first_byte: float | None
    seconds: float


class ShadowRecord(NamedTuple):
    """A request at one arm, with its answer. Headers are never recorded, and the stored bodies are redacted."""

    exchange: str  # shared by an answer and its copy
    candidate: str
    role: Literal["answer", "copy"]
    arm: Literal["parent", "candidate"]
    request_id: str  # sent by the client, or else generated
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
        return ArmRow(*(getattr(self, name) for name in ArmRow._fields))


class RecordedAnswer(NamedTuple):
    """Answer from one arm."""

    status: int
    body: bytes
    first_byte: float | None
    seconds: float
    error: str


class RecordedPair(NamedTuple):
    """A request with the answers of both arms. The user received the parent's."""

    request_id: str  # ID of the exchange, which is unique
    session: str
    at: float
    path: str
    request: bytes
    parent: RecordedAnswer
    candidate: RecordedAnswer


def is_fault(row: ArmRow) -> bool:
    """Return whether the server failed.

    A fallback counts as a fault of the candidate, even if the parent then answered well.
    """
    is_fallback = row.fallback and row.arm == "candidate"
    return is_fallback or bool(row.error) or row.status >= 500 or row.status < 100 or row.status in _FAULTS_BELOW


def is_refusal(row: ArmRow) -> bool:
    """Return whether the server refused the request (4xx).

    The request itself is often the cause, so refusals count against the candidate only if it refuses more requests than
    the parent does.
    """
    return not is_fault(row) and row.status >= 400


def own_rows(rows: Iterable[ArmRow]) -> tuple[ArmRow, ...]:
    """Return ``rows`` without the parent's fallback answers.

    With the requests that failed at the candidate, the parent's traffic would not be a fair sample.
    """
    return tuple(row for row in rows if not (row.fallback and row.arm == "parent"))
