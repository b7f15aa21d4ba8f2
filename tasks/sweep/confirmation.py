"""Confirm the winner of a search with one test on documents that no trial has seen.

The best of sixty candidates looks better than it is on the documents that selected it. Even if all candidates are
equal, the winner "beats" the reference there in every second sweep. The winner is therefore compared with the reference
on other documents. The reference is the hand-written recipe with the best score on the documents of the search::

    gain = sum over tasks of w_t * mean over documents of (winner - reference)        confirmed if its lower bound > 0

The bound is combined from bounds of the tasks (Zou & Donner 2008, Stat. Med. 27:1693), which depend on the scores:

* Right or wrong answers: bounds of Bonett & Price and Tango, as in the gate.
* Numbers in a known range, such as probabilities and clipped log-likelihoods: the gate's bound for graded scores.
* All other numbers: Student's interval.
* Documents in clusters: the gate's bound over clusters, if it is wider.

The p-value is the smallest error at which the bound is above zero. All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

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
from mergegate.tasks.sweep.objective import MetricKey, Objective, ScoresByMetric, Term
from mergegate.tasks.sweep.settings import SoupRule
from mergegate.tasks.sweep.study import Study, Trial

MIN_P_VALUE = 1e-6  # smallest reported p-value, because bounds are not reliable farther out in the tail
_NAME = "sweep"
_TITLE = "Confirmation"


class ConfirmedTerm(BaseModel):
    """Result for one term of the objective, in the unit of its scores (shares or nats per token)."""

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


class IngredientResult(BaseModel):
    """Result for one ingredient of a soup, in the unit of the scores.

    ``first`` is the best model, with which the soup begins. ``kept`` and ``removed`` ingredients were tested on the
    confirmation documents. Ingredients after the first removed one are ``not tested``, and do not belong to the soup.
    ``not added`` ingredients lowered the score on the search documents.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ingredient: str
    outcome: Literal["first", "kept", "removed", "not tested", "not added", "no score"]
    alone: float | None = None  # score of the ingredient alone on the search documents
    searched: float | None = None  # change of the score on the search documents when it joined the soup
    contribution: float | None = None  # change of the score on the confirmation documents
    low: float | None = None  # one-sided lower bound of the contribution
    problem: str = ""  # reason for a missing score


class SoupResult(BaseModel):
    """Result for the ingredients of a soup, best first. The unit is that of the scores."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rule: SoupRule
    margin: float  # the contribution of each ingredient must be above minus this
    confidence: float  # one-sided, that every ingredient of the soup contributes more than minus the margin
    ingredients: tuple[IngredientResult, ...]


class Confirmation(BaseModel):
    """Result of the test of the winner against the best hand-written recipe, on documents that no trial used."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    winner: int  # number of the trial
    reference: int
    reference_label: str
    terms: tuple[ConfirmedTerm, ...]
    gain: float  # weighted mean of winner minus reference
    low: float  # one-sided bounds of the gain
    high: float
    p_value: float  # one-sided; MIN_P_VALUE means that value or less
    confidence: float
    confirmed: bool
    held_out: float  # the winner's weighted mean on the confirmation documents
    held_out_reference: float
    searched: float  # the winner's weighted mean on the documents of the search
    searched_reference: float
    soup: SoupResult | None = Field(default=None, exclude_if=lambda soup: soup is None)

    @property
    def optimism(self) -> float:
        """Difference between the winner's scores on the documents of the search and on those of the confirmation."""
        return self.searched - self.held_out

    @property
    def documents(self) -> int:
        """Number of confirmation documents of all tasks together."""
        return sum({term.task: term.documents for term in self.terms}.values())

    def sentence(self) -> str:
        """Return ``trial 41: 0.0120 above ties on 1,200 held-out documents [0.0050, 0.0190], p = 0.002``."""
        side = "above" if self.gain > 0 else "below"
        low, high = (self.low, self.high) if self.gain > 0 else (-self.high, -self.low)
        p = f"p < {MIN_P_VALUE:g}" if self.p_value <= MIN_P_VALUE else f"p = {self.p_value:.2g}"
        return (
            f"trial {self.winner}: {abs(self.gain):.4f} {side} {self.reference_label or 'the hand-written recipe'} on "
            f"{self.documents:,} held-out documents [{low:.4f}, {high:.4f}], {p}"
        )

    def as_verdict(self) -> Verdict:
        """Return the result as a verdict."""
        summary = self.sentence()
        reason = f"no candidate confirmed: {summary}, but at most {1 - self.confidence:.2g} is allowed"
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
                    f"On the search documents, the gain was {self.searched - self.searched_reference:.4f}. The winner "
                    f"scored {self.optimism:.4f} better on the documents that selected it than on these.",
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
    """Result of a search whose candidates did not beat the reference even on the documents of the search."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    why: str
    soup: SoupResult | None = Field(default=None, exclude_if=lambda soup: soup is None)

    @property
    def confirmed(self) -> Literal[False]:
        return False

    def sentence(self) -> str:
        return f"no candidate confirmed: {self.why}"

    def as_verdict(self) -> Verdict:
        """Return the result as a failed verdict."""
        reason = self.sentence()
        section = Section(title=_TITLE, sentences=(reason,))
        return Verdict(name=_NAME, outcome="fail", publishable=False, reasons=(reason,), evidence=self, section=section)


class _Part(NamedTuple):
    """One term of the objective, with a function that returns its interval at any confidence."""

    task: str
    weight: float
    mean: float
    interval: Callable[[float], Difference]


def reason_not_to_confirm(study: Study) -> NothingToConfirm | None:
    """Return a result without a test if no candidate scored above the reference, else None."""
    best, reference = study.best, study.reference
    if best is None:
        return NothingToConfirm(why=f"none of {len(study.trials) - len(study.hand_written)} candidates has a score")
    if best.violation > reference.violation:
        return NothingToConfirm(
            why=f"every candidate violates the constraints more than {reference.label or 'the hand-written recipe'}"
        )
    total = study.objective.total
    if best.violation == reference.violation and total(best.scores) <= total(reference.scores):
        return NothingToConfirm(
            why=f"no candidate scored above {reference.label or 'the hand-written recipe'} on the search documents"
        )
    return None


def confirm(
    study: Study,
    winner: ScoresByMetric,
    reference: ScoresByMetric,
    clusters: Mapping[MetricKey, Sequence[str]] | None = None,
    *,
    against: Trial | None = None,
) -> Confirmation:
    """Test the winner of a search against its reference on the confirmation documents.

    Args:
        study: Search that has ended, with a best candidate.
        winner: Scores of ``study.best`` on the confirmation documents.
        reference: Scores of the reference on the same documents.
        clusters: Cluster of each of these documents, for every term with ``cluster_by``. Default: none.
        against: Trial of the reference. Default: ``study.reference``.

    Raises:
        InvalidInput: Documents of a clustered term have no known cluster or too few clusters, or scores are missing.
    """
    if study.best is None:
        raise ValueError("the study has no candidate to confirm")
    objective, confidence = study.objective, study.settings.confidence
    against = against or study.reference
    parts, terms = make_parts(objective, winner, reference, clusters), []
    for term, part in zip(objective.terms, parts, strict=True):
        labels = (clusters or {}).get(term.key) if term.cluster_by is not None else None
        interval = part.interval(confidence)
        terms.append(
            ConfirmedTerm(
                task=term.key.task,
                measure=term.key.metric or term.key.measure,
                weight=term.weight,
                documents=len(winner[term.key]),
                clusters=None if labels is None else len(set(labels)),
                winner=float(term.numbers(winner).mean()),
                reference=float(term.numbers(reference).mean()),
                gain=part.mean,
                low=interval.low,
                high=interval.high,
            )
        )
    gain, low, high = combine_parts(parts, confidence)
    search_tables = study.tables[study.best.number], study.tables[against.number]
    return Confirmation(
        winner=study.best.number,
        reference=against.number,
        reference_label=against.label,
        terms=tuple(terms),
        gain=gain,
        low=low,
        high=high,
        p_value=p_value(parts),
        confidence=confidence,
        confirmed=low > 0,
        held_out=weighted_mean(objective, winner),
        held_out_reference=weighted_mean(objective, reference),
        searched=weighted_mean(objective, search_tables[0]),
        searched_reference=weighted_mean(objective, search_tables[1]),
    )


def make_parts(
    objective: Objective,
    winner: ScoresByMetric,
    reference: ScoresByMetric,
    clusters: Mapping[MetricKey, Sequence[str]] | None,
) -> list[_Part]:
    """Return the terms of ``winner`` minus ``reference``, for :func:`combine_parts`. See :func:`confirm`."""
    return [
        _make_part(term, winner, reference, (clusters or {}).get(term.key) if term.cluster_by is not None else None)
        for term in objective.terms
    ]


def weighted_mean(objective: Objective, table: ScoresByMetric) -> float:
    """Return the weighted mean of the scores in ``table``, without the change penalty."""
    return sum(term.weight * float(term.numbers(table).mean()) for term in objective.terms)


def combine_parts(parts: Sequence[_Part], confidence: float) -> tuple[float, float, float]:
    """Return the weighted sum of the parts with its one-sided bounds, as ``(gain, low, high)``.

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


def p_value(parts: Sequence[_Part]) -> float:
    """Return the smallest error at which the lower bound is above zero, from ``MIN_P_VALUE`` to 1, accurate to 3 %."""
    if combine_parts(parts, 0.5)[0] <= 0:
        return 1.0
    least, most = math.log(MIN_P_VALUE), 0.0  # an error of 1 always suffices
    if combine_parts(parts, 1 - MIN_P_VALUE)[1] > 0:
        return MIN_P_VALUE
    while most - least > 0.03:
        middle = (least + most) / 2
        error = math.exp(middle)
        if error >= 0.5 or combine_parts(parts, 1 - error)[1] > 0:
            most = middle
        else:
            least = middle
    return math.exp(most)


def _make_part(term: Term, winner: ScoresByMetric, reference: ScoresByMetric, clusters: Sequence[str] | None) -> _Part:
    ours, theirs = term.numbers(winner), term.numbers(reference)
    if len(ours) != len(theirs) or len(ours) < 2 or not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        raise InvalidInput(
            f"sweep: confirmation of {term.key.task or 'the held-out text'}",
            found=f"{int(np.isfinite(ours).sum())} and {int(np.isfinite(theirs).sum())} documents with a number",
            expected=f"numbers for the same {max(len(ours), len(theirs), 2)} documents from both recipes",
        )
    differences = ours - theirs
    # If the range of the scores is known in advance, ``scale`` maps their differences to [-1, 1].
    lowest, highest = min(ours.min(), theirs.min()), max(ours.max(), theirs.max())
    if term.key.measure in ("exact", "probability"):
        has_range, scale = True, 1.0
    elif term.clip is not None and highest <= 0:
        has_range, scale = True, term.clip
    elif term.key.measure == "metric" and lowest >= 0 and highest <= 1:
        has_range, scale = True, 1.0
    else:
        has_range, scale = False, max(1e-300, float(np.abs(differences).max()))
    is_binary = bool(np.isin(ours, (0.0, 1.0)).all() and np.isin(theirs, (0.0, 1.0)).all())
    if term.cluster_by is not None:
        check_clusters(clusters or (), term.cluster_by, term.key.task)

    def interval(confidence: float) -> Difference:
        # The functions of the gate test for losses. Here a gain is positive, so wins take the place of losses.
        if is_binary:
            difference = binary_difference(
                int((differences > 0).sum()), int((differences < 0).sum()), len(differences), confidence
            )
        elif has_range:
            difference = graded_difference(np.clip(differences / scale, -1.0, 1.0), confidence)
        else:
            # Student's interval. Heavy tails can break its coverage, which is why log-likelihoods have a ``clip``.
            scaled, n = differences / scale, len(differences)
            mean, variance = float(scaled.mean()), float(scaled.var(ddof=1))
            half = student_quantile(confidence, n - 1) * math.sqrt(variance / n)
            difference = Difference(mean, mean - half, mean + half, variance)
        if clusters is not None:
            difference = clustered_difference((differences / scale).tolist(), clusters, difference, confidence)
        mean, low, high = (scale * value for value in difference[:3])
        return Difference(mean, low, high, scale**2 * difference.variance)

    return _Part(term.key.task, term.weight, float(differences.mean()), interval)
