"""One observation about a merge, before it or after it, in the shape in which a person reads it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from merge_core.errors import InvalidInput

Severity = Literal["block", "warn", "info"]
_ORDER = ("block", "warn", "info")


@dataclass(frozen=True)
class Finding:
    """What was found where, what was expected, and what to do about it.

    Args:
        severity: ``block``: the result would be wrong or impossible; ``warn``: it may not be what was meant; ``info``.
        where: Model, file, field or tensor.
        found: What is there.
        expected: What should be there.
        remedy: What to do.
    """

    severity: Severity
    where: str
    found: str
    expected: str = ""
    remedy: str = ""

    def error(self) -> InvalidInput:
        """The finding as an exception."""
        return InvalidInput(self.where, found=self.found, expected=self.expected, remedy=self.remedy)


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings by severity; those of equal severity stay in their order, repeated ones are dropped."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: _ORDER.index(finding.severity)))
