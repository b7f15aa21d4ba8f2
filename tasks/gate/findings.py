"""Check what the interval of a drop does not show: whether the evidence of a guard can carry its verdict.

Each check is a function ``(evidence, verdict) -> findings`` in a module of its own. ``verdict`` is the guard's verdict
by its interval alone, with the confidences that hold for it. The most severe of the interval's outcome and the findings
is the guard's outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mergegate.tasks.gate.alarms import find_alarms
from mergegate.tasks.gate.copies import note_repeated_documents
from mergegate.tasks.gate.cut_answers import check_cut_answers, check_lengths
from mergegate.tasks.gate.evidence import GateFinding, GuardEvidence, GuardVerdict
from mergegate.tasks.gate.sensitivity import check_prompts, check_reference, note_detectable_drop

GuardCheck = Callable[[GuardEvidence, GuardVerdict], Iterable[GateFinding]]

_CHECKS: tuple[GuardCheck, ...] = (
    find_alarms,
    check_prompts,  # before the reference, because it explains a score at chance
    check_reference,
    note_detectable_drop,
    check_cut_answers,
    check_lengths,
    note_repeated_documents,
)


def find_guard_problems(evidence: GuardEvidence, verdict: GuardVerdict) -> tuple[GateFinding, ...]:
    """Return the findings of all checks on one guard, in the order of the checks."""
    return tuple(finding for check in _CHECKS for finding in check(evidence, verdict))
