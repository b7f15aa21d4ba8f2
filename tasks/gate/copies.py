"""Find what occurs twice: a document among those of a guard, and a parent in its merge. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from mergegate.tasks.gate.evidence import GateFinding, GuardEvidence, GuardVerdict


def note_repeated_documents(evidence: GuardEvidence, verdict: GuardVerdict) -> Iterator[GateFinding]:
    """Yield a note with the number of independent documents of a guard, if some documents repeat others."""
    if evidence.units is not None:
        n, distinct = len(evidence.units), len(set(evidence.units))
        yield GateFinding(
            kind="duplicates",
            outcome="pass",
            reason=f"{verdict.task}: {n - distinct:,} of {n:,} documents repeat the prompt of another document, so the "
            f"interval counts {distinct:,} independent documents",
        )
