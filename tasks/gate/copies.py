"""Find repeated documents of a guard, and parents that the merge copies. All functions are pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from mergegate.tasks.evaluation import DocumentScore
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


MIN_DOCUMENTS = 100  # Smallest number of equal answers that make a merge a copy.


def find_copies(
    same_weights: str,
    answers: Mapping[str, Sequence[tuple[DocumentScore, DocumentScore]]],
    accepted_parents: Collection[str],
) -> Iterator[GateFinding]:
    """Yield a finding for each parent that the merge copies: the weights are equal, or all answers are.

    Answers to 100 documents or more are compared. Of equal merges that change 5 % of the answers, 0.6 % have no
    different answer on 100 documents, and none on 500.

    Args:
        same_weights: Name of a parent with the same weights, or an empty string.
        answers: Scores of the parent and the merge for every document of all tasks, by parent.
        accepted_parents: Names of the parents that the merge may copy. They are only noted.
    """
    facts = {}
    for name, rows in answers.items():
        are_known = any(row.answer for _, row in rows)
        are_equal = all((row.outcome, row.answer) == (other.outcome, other.answer) for row, other in rows)
        if len(rows) >= MIN_DOCUMENTS and are_known and are_equal:
            facts[name] = f"the merge behaves like a copy of {name}: all {len(rows):,} answers are equal"
    if same_weights:
        facts[same_weights] = f"the merge is a copy of {same_weights}: all weights are equal"
    for name, fact in facts.items():
        advice = f"publish {name} itself, or set checks.copies.accepted: [{name}]"
        remedy = f". Raise weight or density in the recipe if its changes cancel out, {advice}"
        is_accepted = name in accepted_parents
        yield GateFinding(
            kind="copy", outcome="pass" if is_accepted else "fail", reason=fact + ("" if is_accepted else remedy)
        )
