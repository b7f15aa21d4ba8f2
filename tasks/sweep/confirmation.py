"""Confirm the winner of a search with one test on documents that no trial has seen.

The best of sixty candidates looks better than it is on the documents that selected it. If all candidates are equal, the
winner still "beats" the reference there in every second sweep. The winner is therefore compared once more, paired, with
the best hand-written recipe, on a separate set of documents. The reference is selected before that, on the documents of
the search::

    gain = sum over tasks of w_t * mean over documents of (winner - reference)        confirmed if its lower bound > 0

The bound combines the bounds of the tasks (Zou & Donner 2008, Stat. Med. 27:1693). The gate uses the same ones:

* Bonett & Price and Tango for right-or-wrong answers.
* A bound that holds for any distribution for numbers in a known range (probabilities, clipped log-likelihoods).
* Student's interval for all other numbers.
* A bound over clusters for documents that belong together.

The p-value is the smallest error at which the bound is still above zero. If the test does not confirm the winner, no
candidate is confirmed. All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.gate import (
    Difference,
    binary_difference,
    check_clusters,
    clustered_difference,
    graded_difference,
    student_quantile,
)
from mergegate.tasks.stage import Section, Verdict
from mergegate.tasks.sweep.objective import Objective, Term
from mergegate.tasks.sweep.study import Study
from mergegate.tasks.sweep.trials import MetricKey, Sheet

LEAST_P = 1e-6  # smallest p-value that is reported; no bound is known to hold farther out in the tail
_NAME = "sweep"
_TITLE = "Confirmation"


class ConfirmedTerm(BaseModel):
    """Result of the confirmation for one task, in the unit of the scores (shares or nats per token)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    measure: str
    weight: float
    documents: int
    clusters: int | None
    winner: float
    reference: float
    gain: float
    low: float
    high: float


class Confirmation(BaseModel):
    """Test of the winner against the best hand-written recipe, on documents that no trial saw."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    winner: int  # number of the trial
    reference: int
    reference_label: str
    terms: tuple[ConfirmedTerm, ...]
    gain: float  # weighted mean paired difference
    low: float  # interval, one-sided each way
    high: float
    p_value: float  # one-sided; LEAST_P means that value or less
    confidence: float
    confirmed: bool
    held_out: float  # the winner's weighted mean on the confirmation documents
    held_out_reference: float
    searched: float  # the winner's weighted mean on the documents of the search
    searched_reference: float

    @property
    def optimism(self) -> float:
        """How much better the winner scored on the documents that selected it."""
        return self.searched - self.held_out

    @property
    def searched_gain(self) -> float:
        """Gain over the reference on the documents of the search."""
        return self.searched - self.searched_reference

    @property
    def documents(self) -> int:
        """Number of confirmation documents of all tasks together."""
        return sum({term.task: term.documents for term in self.terms}.values())

    def sentence(self) -> str:
        """Return ``trial 41: 0.0120 above ties on 1,200 held-out documents [0.0050, 0.0190], p = 0.002``."""
        side = "above" if self.gain > 0 else "below"
        low, high = (self.low, self.high) if self.gain > 0 else (-self.high, -self.low)
        p = f"p < {LEAST_P:g}" if self.p_value <= LEAST_P else f"p = {self.p_value:.2g}"
        return (
            f"trial {self.winner}: {abs(self.gain):.4f} {side} {self.reference_label or 'the hand-written recipe'} on "
            f"{self.documents:,} held-out documents [{low:.4f}, {high:.4f}], {p}"
        )

    def as_verdict(self) -> Verdict:
        """Return the confirmation as a verdict."""
        summary = self.sentence()
        reason = f"no candidate confirmed: {summary}, where {1 - self.confidence:.2g} was asked for"
        return Verdict(
            name=_NAME,
            outcome="pass" if self.confirmed else "fail",
            publishable=self.confirmed,
            reasons=() if self.confirmed else (reason,),
            evidence=self,
            section=Section(
                title=_TITLE,
                sentences=(
                    summary,
                    f"The search has shown a gain of {self.searched_gain:.4f}: the winner looked "
                    f"{self.optimism:.4f} better on the documents that chose it than on these.",
                ),
                columns=("task", "measure", "documents", "winner", "reference", "gain", "interval"),
                rows=tuple(
                    (
                        term.task or "held-out text",
                        term.measure,
                        f"{term.documents:,}",
                        f"{term.winner:.4f}",
                        f"{term.reference:.4f}",
                        f"{term.gain:+.4f}",
                        f"[{term.low:.4f}, {term.high:.4f}]",
                    )
                    for term in self.terms
                ),
            ),
        )


class NothingToConfirm(BaseModel):
    """Outcome of a search without a confirmation, because no candidate won even on the documents of the search."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    why: str

    @property
    def confirmed(self) -> Literal[False]:
        return False

    def sentence(self) -> str:
        return f"no candidate confirmed: {self.why}"

    def as_verdict(self) -> Verdict:
        """Return the outcome as a failed verdict."""
        reason = self.sentence()
        section = Section(title=_TITLE, sentences=(reason,))
        return Verdict(name=_NAME, outcome="fail", publishable=False, reasons=(reason,), evidence=self, section=section)


class _Part(NamedTuple):
    """One term of the objective, ready to be tested at any confidence level."""

    task: str
    weight: float
    mean: float
    interval: Callable[[float], Difference]


def reason_not_to_confirm(study: Study) -> NothingToConfirm | None:
    """Return why no test is needed, or None if a candidate looks better than the reference."""
    best, reference = study.best, study.reference
    if best is None:
        return NothingToConfirm(why=f"none of {len(study.trials) - len(study.hand_written)} candidates has a score")
    if best.violation > reference.violation:
        return NothingToConfirm(
            why=f"none keeps the constraints as well as {reference.label or 'the hand-written recipe'}"
        )
    total = study.objective.total
    if best.violation == reference.violation and total(best.scores) <= total(reference.scores):
        return NothingToConfirm(
            why=f"none scored above {reference.label or 'the hand-written recipe'} on the documents of the search"
        )
    return None


def confirm(
    study: Study,
    winner: Sheet,
    reference: Sheet,
    clusters: Mapping[MetricKey, Sequence[str]] | None = None,
) -> Confirmation:
    """Test the winner of a search against its reference on the confirmation documents.

    Args:
        study: Finished search with a best candidate.
        winner: Scores of the winner on the confirmation documents.
        reference: Scores of ``study.reference`` on the same documents.
        clusters: Cluster of each document, for every term with ``cluster_by``.

    Raises:
        InvalidInput: Documents of a clustered term have no known cluster or too few clusters, or scores are missing.
    """
    if study.best is None:
        raise ValueError("a study without a candidate has nothing to confirm")
    objective, confidence = study.objective, study.settings.confidence
    by_key = {term.asked: _part(term, winner, reference, (clusters or {}).get(term.asked)) for term in objective.terms}
    parts = list(by_key.values())
    gain, low, high = together(parts, confidence)
    search_sheets = study.sheets[study.best.number], study.sheets[study.reference.number]
    return Confirmation(
        winner=study.best.number,
        reference=study.reference.number,
        reference_label=study.reference.label,
        terms=tuple(
            _term(term, by_key[term.asked].interval(confidence), winner, reference, (clusters or {}).get(term.asked))
            for term in objective.terms
        ),
        gain=gain,
        low=low,
        high=high,
        p_value=least_error(parts),
        confidence=confidence,
        confirmed=low > 0,
        held_out=weighted_mean(objective, winner),
        held_out_reference=weighted_mean(objective, reference),
        searched=weighted_mean(objective, search_sheets[0]),
        searched_reference=weighted_mean(objective, search_sheets[1]),
    )


def weighted_mean(objective: Objective, sheet: Sheet) -> float:
    """Return the weighted mean over the documents, without the penalty for the size of the change."""
    return sum(term.weight * float(term.numbers(sheet).mean()) for term in objective.terms)


def together(parts: Sequence[_Part], confidence: float) -> tuple[float, float, float]:
    """Return the weighted sum of the parts with its confidence interval, as ``(gain, low, high)``.

    Tasks have different documents, so their distances from estimate to bound add in quadrature. Several measures of one
    task share documents, so their distances add linearly.
    """
    gain, below, above = 0.0, dict[str, float](), dict[str, float]()
    for part in parts:
        difference = part.interval(confidence)
        gain += part.weight * part.mean
        below[part.task] = below.get(part.task, 0.0) + part.weight * (part.mean - difference.low)
        above[part.task] = above.get(part.task, 0.0) + part.weight * (difference.high - part.mean)
    return gain, gain - math.hypot(*below.values()), gain + math.hypot(*above.values())


def least_error(parts: Sequence[_Part]) -> float:
    """Return the p-value: the smallest error at which the lower bound is above zero.

    The result is accurate to 3 % and lies between ``LEAST_P`` and 1.
    """
    if together(parts, 0.5)[0] <= 0:
        return 1.0
    least, most = math.log(LEAST_P), 0.0  # an error of 1 always suffices
    if together(parts, 1 - LEAST_P)[1] > 0:
        return LEAST_P
    while most - least > 0.03:
        middle = (least + most) / 2
        error = math.exp(middle)
        if error >= 0.5 or together(parts, 1 - error)[1] > 0:
            most = middle
        else:
            least = middle
    return math.exp(most)


def _part(term: Term, winner: Sheet, reference: Sheet, clusters: Sequence[str] | None) -> _Part:
    ours, theirs = term.numbers(winner), term.numbers(reference)
    if len(ours) != len(theirs) or len(ours) < 2 or not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        raise InvalidInput(
            f"sweep: confirmation of {term.asked.task or 'the held-out text'}",
            found=f"{int(np.isfinite(ours).sum())} and {int(np.isfinite(theirs).sum())} documents with a number",
            expected=f"the same {max(len(ours), len(theirs), 2)} documents of both",
        )
    differences = ours - theirs
    in_range, scale = _range(term, ours, theirs)
    binary = bool(np.isin(ours, (0.0, 1.0)).all() and np.isin(theirs, (0.0, 1.0)).all())
    if term.cluster_by is not None:
        check_clusters(clusters or (), term.cluster_by, term.asked.task)

    def interval(confidence: float) -> Difference:
        # The gate tests for losses. This test looks for gains, so the differences have the opposite sign.
        if binary:
            difference = binary_difference(
                int((differences > 0).sum()), int((differences < 0).sum()), len(differences), confidence
            )
        elif in_range:
            difference = graded_difference(np.clip(differences / scale, -1.0, 1.0), confidence)
        else:
            difference = student_difference(differences / scale, confidence)
        if term.cluster_by is not None and clusters is not None:
            difference = clustered_difference((differences / scale).tolist(), clusters, difference, confidence)
        mean, low, high = (scale * value for value in difference[:3])
        return Difference(mean, low, high, scale**2 * difference.variance)

    return _Part(term.asked.task, term.weight, float(differences.mean()), interval)


def _range(term: Term, ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> tuple[bool, float]:
    """Return whether the scores have a range known in advance, and the scale that maps differences to [-1, 1]."""
    if term.asked.measure in ("exact", "probability"):
        return True, 1.0
    if term.clip is not None and max(ours.max(), theirs.max()) <= 0:
        return True, term.clip
    if term.asked.measure == "metric" and min(ours.min(), theirs.min()) >= 0 and max(ours.max(), theirs.max()) <= 1:
        return True, 1.0
    return False, max(1e-300, float(np.abs(ours - theirs).max()))


def student_difference(differences: NDArray[np.float64], confidence: float) -> Difference:
    """Return the mean of paired differences with Student's interval, for scores without a known range.

    Heavy tails can break the coverage of this interval, which is why log-likelihoods have a ``clip``.
    """
    n, mean = len(differences), float(differences.mean())
    variance = float(differences.var(ddof=1))
    half = student_quantile(confidence, n - 1) * math.sqrt(variance / n)
    return Difference(mean, mean - half, mean + half, variance)


def _term(
    term: Term, difference: Difference, winner: Sheet, reference: Sheet, clusters: Sequence[str] | None
) -> ConfirmedTerm:
    return ConfirmedTerm(
        task=term.asked.task,
        measure=term.asked.metric or term.asked.measure,
        weight=term.weight,
        documents=len(winner[term.asked]),
        clusters=len(set(clusters)) if clusters is not None and term.cluster_by is not None else None,
        winner=float(term.numbers(winner).mean()),
        reference=float(term.numbers(reference).mean()),
        gain=float((term.numbers(winner) - term.numbers(reference)).mean()),
        low=difference.low,
        high=difference.high,
    )
