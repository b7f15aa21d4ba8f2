"""Define verdicts, the common form in which the gate, the judge, serve or your own stage judges a merge.

``combine_verdicts`` decides the joint outcome of the verdicts of an attempt. The report shows each verdict with a chart
if it knows the kind of evidence, otherwise with the verdict's ``section``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, SerializeAsAny

Outcome = Literal["pass", "fail", "inconclusive"]
_SEVERITY: tuple[Outcome, ...] = ("pass", "inconclusive", "fail")


class Section(BaseModel):
    """Sentences and a table that show a verdict in a report, as plain text that the report escapes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    sentences: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()  # Each row has one cell for each column.


class Verdict(BaseModel):
    """Judgment of one stage about a merge."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # Name of the stage that decided the verdict, such as 'gate'.
    outcome: Outcome
    publishable: bool  # Whether the profile allows publication with this outcome.
    reasons: tuple[str, ...]  # Why the merge did not pass, one sentence each, most severe first. Empty for a pass.
    evidence: SerializeAsAny[BaseModel]  # Everything that determined the outcome.
    section: Section


class JointVerdict(NamedTuple):
    """Joint outcome of several verdicts."""

    outcome: Outcome
    publishable: bool
    reasons: tuple[str, ...]


def worst_verdict(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the most severe outcome, or ``pass`` if there are no outcomes."""
    return max(outcomes, key=severity, default="pass")


def severity(outcome: Outcome) -> int:
    """Return the severity of an outcome: 0 for ``pass``, 1 for ``inconclusive``, 2 for ``fail``."""
    return _SEVERITY.index(outcome)


def combine_verdicts(verdicts: Sequence[Verdict]) -> JointVerdict:
    """Return the most severe outcome and all reasons, with those of the most severe verdict first.

    The merge is publishable only if every verdict allows it.
    """
    ordered = sorted(verdicts, key=lambda verdict: -severity(verdict.outcome))  # Stable: ties keep their order.
    return JointVerdict(
        outcome=worst_verdict(verdict.outcome for verdict in verdicts),
        publishable=all(verdict.publishable for verdict in verdicts),
        reasons=tuple(reason for verdict in ordered for reason in verdict.reasons),
    )
