"""A verdict: one judgement about a merge, in one shape whoever made it (gate, judge, serve, or a stage of yours).

An attempt has a tuple of them, ``combined`` says what they come to together, and the report shows whatever verdicts
there are: those whose evidence it can draw in its own way, all others by their ``section``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, SerializeAsAny

Outcome = Literal["pass", "fail", "inconclusive"]
_SEVERITY: tuple[Outcome, ...] = ("pass", "inconclusive", "fail")


class Section(BaseModel):
    """What a person is shown of a verdict: sentences, then a table. Plain text; whoever shows it escapes it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    sentences: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()  # as many cells each as there are columns


class Verdict(BaseModel):
    """One judgement about a merge."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # of the stage that judged: 'gate'
    outcome: Outcome
    publishable: bool  # what the outcome comes to, where a profile lets some of it through
    reasons: tuple[str, ...]  # a sentence each, why it did not pass, worst first; empty when it passed
    evidence: SerializeAsAny[BaseModel]  # all that led to it
    section: Section


class JointVerdict(NamedTuple):
    """What several verdicts come to."""

    outcome: Outcome
    publishable: bool
    reasons: tuple[str, ...]


def worst_verdict(outcomes: Iterable[Outcome]) -> Outcome:
    """The worst of them; ``pass`` where there is none."""
    return max(outcomes, key=severity, default="pass")


def severity(outcome: Outcome) -> int:
    """0 for ``pass``, then ``inconclusive``, then ``fail``."""
    return _SEVERITY.index(outcome)


def verdict_word(outcome: Outcome, *, shown_worse: bool) -> str:
    """What was shown, in one of four words.

    Args:
        shown_worse: The whole interval lies on the worse side: the loss may be small, but it is one.
    """
    if outcome == "pass":
        return "a little worse" if shown_worse else "no worse"
    return {"fail": "worse", "inconclusive": "undecided"}[outcome]


def combine_verdicts(verdicts: Sequence[Verdict]) -> JointVerdict:
    """The worst outcome of all, and every reason, those of the worst verdict first. One no is enough."""
    ordered = sorted(verdicts, key=lambda verdict: -severity(verdict.outcome))  # stable: as they were asked
    return JointVerdict(
        outcome=worst_verdict(verdict.outcome for verdict in verdicts),
        publishable=all(verdict.publishable for verdict in verdicts),
        reasons=tuple(reason for verdict in ordered for reason in verdict.reasons),
    )
