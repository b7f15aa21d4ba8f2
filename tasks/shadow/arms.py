# stand-in of h-G: a copy of h-E's
"""What is kept of one request that one arm was asked: no content, only how it went."""

from __future__ import annotations

from typing import Literal, NamedTuple

_REFUSED, _FAULT = 400, 500
# They speak of the server, not of the request: it gave up waiting, or has too much to do.
_FAULTS_BELOW = frozenset({408, 429})


class ArmRow(NamedTuple):
    """One request at one arm.

    Attributes:
        at: Unix time.
        role: ``answer`` reached a user; ``copy`` was only recorded.
        status: Of HTTP; 0 where none came.
        error: What went wrong on the way to the server or at it; empty where nothing did, also when a user left.
        fallback: The candidate failed and the parent answered in its place.
        first_byte: Seconds until the first byte of the body; None where none came.
        seconds: Until the last byte, or until it was given up.
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
    """Whether the server did not do its part. A fallback at the candidate's arm is one, whatever the parent said."""
    stood_in = row.fallback and row.arm == "candidate"
    return stood_in or bool(row.error) or row.status >= _FAULT or row.status < 100 or row.status in _FAULTS_BELOW


def is_refusal(row: ArmRow) -> bool:
    """Whether the server declined the request (4xx): often the request's own fault, so only more of them mean much."""
    return not is_fault(row) and row.status >= _REFUSED


def own_rows(rows: tuple[ArmRow, ...]) -> tuple[ArmRow, ...]:
    """Without what the parent answered in the candidate's place: a fallback is a sample of nobody's traffic."""
    return tuple(row for row in rows if not (row.fallback and row.arm == "parent"))
