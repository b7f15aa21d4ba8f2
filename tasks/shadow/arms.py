"""Define how one request went at one arm: status, errors and timing, but no content."""

from __future__ import annotations

from typing import Literal, NamedTuple

_REFUSED, _FAULT = 400, 500
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


def is_fault(row: ArmRow) -> bool:
    """Return whether the server failed.

    A fallback counts as a fault of the candidate, even if the parent then answered well.
    """
    is_fallback = row.fallback and row.arm == "candidate"
    return is_fallback or bool(row.error) or row.status >= _FAULT or row.status < 100 or row.status in _FAULTS_BELOW


def is_refusal(row: ArmRow) -> bool:
    """Return whether the server declined the request (4xx).

    The request itself is often the cause, so refusals count against the candidate only if it has more of them.
    """
    return not is_fault(row) and row.status >= _REFUSED


def own_rows(rows: tuple[ArmRow, ...]) -> tuple[ArmRow, ...]:
    """Return the rows without the parent's fallback answers.

    The parent's traffic is not a fair sample if it includes requests that failed at the candidate.
    """
    return tuple(row for row in rows if not (row.fallback and row.arm == "parent"))
