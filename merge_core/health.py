"""Judging the output while it is written: numbers that no healthy network has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from merge_core.findings import Finding


@dataclass(frozen=True)
class TensorHealth:
    """What was seen of one output tensor.

    Args:
        name: Tensor name.
        broken: Number of NaN and infinite elements.
        zero: Whether every element is zero.
    """

    name: str
    broken: int
    zero: bool


def judge(tensors: Sequence[TensorHealth]) -> tuple[Finding, ...]:
    """Findings about the tensors of a finished merge; NaN and Inf block."""
    findings = [
        Finding(
            "block",
            tensor.name,
            found=f"{tensor.broken} elements are NaN or infinite",
            expected="finite numbers",
            remedy="check the parents for NaN, and the range of the output dtype",
        )
        for tensor in tensors
        if tensor.broken
    ]
    findings += [
        Finding(
            "warn", tensor.name, found="every element is zero", expected="weights", remedy="compare with the parents"
        )
        for tensor in tensors
        if tensor.zero
    ]
    return tuple(findings)
