"""Confirm the winner of a search with one test on documents that no trial has seen, and forecast its power.

The best of sixty candidates looks better than it is on the documents that selected it. Even if all candidates are
equal, the winner "beats" the reference there in every second sweep. The winner is therefore compared with the reference
on other documents. The reference is the hand-written recipe with the best score on the documents of the search::

    gain = sum over tasks of w_t * mean over documents of (winner - reference)        confirmed if its lower bound > 0

The bound is combined from bounds of the tasks (Zou & Donner 2008, Stat. Med. 27:1693), which depend on the scores:

* Right or wrong answers: bounds of Bonett & Price and Tango, as in the gate.
* Numbers in a known range, such as probabilities and clipped log-likelihoods: the gate's bound for graded scores.
* All other numbers: Student's interval.
* Documents in clusters: the gate's bound over clusters, if it is wider.

The p-value is the smallest error at which the bound is above zero.

The *contribution* of an ingredient of a soup is the change of the true score when it joins the soup. The contributions
of all ingredients add up to the lead of the soup over its first ingredient. They are tested in the order of the search,
each at the full confidence, until one is not shown to be above minus the margin. The soup ends before that ingredient::

    S_1 = {best model},  S_j = S_{j-1} + ingredient j        kept while  lower bound of score(S_j) - score(S_{j-1}) > -m

Tests in a fixed order that end with the first failure need no correction (Maurer, Hothorn & Lehmacher 1995; Westfall &
Krishen 2001, J. Stat. Plan. Inference 99:25). A soup with an ingredient whose true contribution is at most ``-m``
requires that the first such test in the order is passed by chance, so its probability is at most ``1 - confidence``,
for any number of ingredients and in any order.

The confirmed soup must then beat the best model and the best other hand-written recipe. The confirmation documents
chose it among ``k - 1`` soups, so this test has the error ``(1 - confidence) / (k - 1)``.

The forecast before the search says which gains the test can detect, and with what chance. It uses the number of
confirmation documents, and the variance of the hand-written recipes' scores. It assumes a correlation between the
scores of winner and reference, and states it. For right or wrong answers this is the tetrachoric correlation (Pearson
1900), that of the latent variables behind the answers. All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.base.stage import Section, Verdict
from mergegate.tasks.quality.gate import (
    POWER,
    Difference,
    binary_difference,
    check_clusters,
    clustered_difference,
    graded_difference,
    normal_quantile,
    student_quantile,
)
from mergegate.tasks.sweep.objective import MetricKey, Objective, ScoresByMetric, Term
from mergegate.tasks.sweep.space import recipe_key
from mergegate.tasks.sweep.study import SOUP, SoupResult, Study, Trial, best_of

MIN_P_VALUE = 1e-6  # smallest reported p-value, because bounds are not reliable farther out in the tail
_NAME = "sweep"
_TITLE = "Confirmation"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ConfirmedTerm(_Record):
    """Result for one term of the objective, in the unit of its scores (shares or nats per token)."""

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


class Confirmation(_Record):
    """Result of the test of the winner against the best hand-written recipe, on documents that no trial used."""

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


class NothingToConfirm(_Record):
    """Result of a search whose candidates did not beat the reference even on the documents of the search."""

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
    """One term of the objective: the scores of both recipes, and a function from a confidence to their interval."""

    term: Term
    winner: NDArray[np.float64]
    reference: NDArray[np.float64]
    clusters: Sequence[str] | None
    interval: Callable[[float], Difference]

    @property
    def mean(self) -> float:
        return float((self.winner - self.reference).mean())


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
    parts = _make_parts(objective, winner, reference, clusters)
    gain, low, high = _combine(parts, confidence)
    search_tables = study.tables[study.best.number], study.tables[against.number]
    return Confirmation(
        winner=study.best.number,
        reference=against.number,
        reference_label=against.label,
        terms=tuple(_confirmed_term(part, confidence) for part in parts),
        gain=gain,
        low=low,
        high=high,
        p_value=_p_value(parts),
        confidence=confidence,
        confirmed=low > 0,
        held_out=_weighted_mean(objective, winner),
        held_out_reference=_weighted_mean(objective, reference),
        searched=_weighted_mean(objective, search_tables[0]),
        searched_reference=_weighted_mean(objective, search_tables[1]),
    )


def confirm_soup(
    study: Study,
    score: Callable[[Trial], ScoresByMetric],
    clusters: Mapping[MetricKey, Sequence[str]] | None = None,
) -> Confirmation | NothingToConfirm:
    """Test the contribution of each chosen ingredient in order, then test the lead of the soup.

    ``score`` returns the scores of a trial on the confirmation documents. It is called only for soups that are tested,
    and at most once for each trial. ``clusters`` are those of :func:`confirm`.
    """
    if (soup := study.soup) is None:
        raise ValueError("the study is not a search of a soup")
    tables: dict[int, ScoresByMetric] = {}

    def table_of(number: int) -> ScoresByMetric:
        if number not in tables:
            tables[number] = score(study.trials[number])
        return tables[number]

    margin, confidence = soup.margin, soup.confidence
    results, chain = list(soup.ingredients), study.soup_chain
    # The rule ``uniform`` chooses all models, so only the lead of the soup is tested.
    is_greedy = soup.rule == "greedy"
    winner = chain[0] if is_greedy else chain[-1]
    for position, number in zip(soup.positions[1:], chain[1:], strict=True) if is_greedy else ():
        parts = _make_parts(study.objective, table_of(number), table_of(winner), clusters)
        gain, low, _ = _combine(parts, confidence)
        is_kept = low > -margin
        change = {"outcome": "kept" if is_kept else "removed", "contribution": gain, "low": low}
        results[position] = results[position].model_copy(update=change)
        if not is_kept:
            break
        winner = number
    result = soup.model_copy(update={"ingredients": tuple(results)})
    best_model = results[0].ingredient
    if study.best is None:
        why = f"no other model improves {best_model} on the search documents"
        if problem := next((trial.problem for trial in study.trials if trial.origin == SOUP and trial.problem), ""):
            why = f"a soup has no score: {problem}"
        return NothingToConfirm(why=why, soup=result)
    if winner == chain[0]:
        why = f"no other model is shown to improve {best_model} on the held-out documents"
        return NothingToConfirm(why=why, soup=result)
    # The soup must also beat the best hand-written recipe. It can be that recipe itself.
    own_recipe = recipe_key(study.recipes[winner])
    others = [trial for trial in study.hand_written if recipe_key(study.recipes[trial.number]) != own_recipe]
    best_other = best_of(others, study.objective)
    rivals = [study.trials[chain[0]], *([best_other] if best_other else [])]
    settings = study.settings.model_copy(update={"confidence": 1 - (1 - confidence) / (len(chain) - 1)})
    tested = replace(study, best=study.trials[winner], settings=settings)
    comparisons = [
        confirm(tested, table_of(winner), table_of(rival.number), clusters, against=rival) for rival in rivals
    ]
    return min(comparisons, key=lambda comparison: comparison.low).model_copy(update={"soup": result})


def _confirmed_term(part: _Part, confidence: float) -> ConfirmedTerm:
    interval, key = part.interval(confidence), part.term.key
    return ConfirmedTerm(
        task=key.task,
        measure=key.metric or key.measure,
        weight=part.term.weight,
        documents=len(part.winner),
        clusters=None if part.clusters is None else len(set(part.clusters)),
        winner=float(part.winner.mean()),
        reference=float(part.reference.mean()),
        gain=part.mean,
        low=interval.low,
        high=interval.high,
    )


def _make_parts(
    objective: Objective,
    winner: ScoresByMetric,
    reference: ScoresByMetric,
    clusters: Mapping[MetricKey, Sequence[str]] | None,
) -> list[_Part]:
    return [
        _make_part(term, winner, reference, (clusters or {}).get(term.key) if term.cluster_by is not None else None)
        for term in objective.terms
    ]


def _weighted_mean(objective: Objective, table: ScoresByMetric) -> float:
    """Return the weighted mean of the scores in ``table``, without the change penalty."""
    return sum(term.weight * float(term.numbers(table).mean()) for term in objective.terms)


def _combine(parts: Sequence[_Part], confidence: float) -> tuple[float, float, float]:
    """Return the weighted sum of the parts with its one-sided bounds, as ``(gain, low, high)``.

    Tasks have different documents, so their distances from estimate to bound add in quadrature. Several measures of one
    task share documents, so their distances add linearly.
    """
    gain, below, above = 0.0, dict[str, float](), dict[str, float]()
    for part in parts:
        difference = part.interval(confidence)
        mean, task, weight = part.mean, part.term.key.task, part.term.weight
        gain += weight * mean
        below[task] = below.get(task, 0.0) + weight * (mean - difference.low)
        above[task] = above.get(task, 0.0) + weight * (difference.high - mean)
    return gain, gain - math.hypot(*below.values()), gain + math.hypot(*above.values())


def _p_value(parts: Sequence[_Part]) -> float:
    """Return the smallest error at which the lower bound is above zero, from ``MIN_P_VALUE`` to 1, accurate to 3 %."""
    if _combine(parts, 0.5)[0] <= 0:
        return 1.0
    least, most = math.log(MIN_P_VALUE), 0.0  # an error of 1 always suffices
    if _combine(parts, 1 - MIN_P_VALUE)[1] > 0:
        return MIN_P_VALUE
    while most - least > 0.03:
        middle = (least + most) / 2
        error = math.exp(middle)
        if error >= 0.5 or _combine(parts, 1 - error)[1] > 0:
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

    return _Part(term, ours, theirs, clusters, interval)


CORRELATION = 0.6  # assumed between the scores of two recipes on the same documents
_SHARE_GAINS = (0.01, 0.02, 0.03, 0.05, 0.1)  # gains in the forecast if scores are shares
_GAIN_MULTIPLES = (0.25, 0.5, 1.0, 2.0)  # for other scores, as multiples of ``detectable``


class GainChance(_Record):
    """True gain, in the unit of the scores, and the chance that the test confirms it."""

    gain: float
    chance: float


class ConfirmationPower(_Record):
    """Forecast of the gains that the confirmation can detect."""

    documents: int  # of all tasks together
    detectable: float  # smallest true gain that is confirmed with 80 % probability
    chances: tuple[GainChance, ...]
    confidence: float
    correlation: float
    in_points: bool  # whether gains are shares

    def brief(self) -> str:
        """Return ``1,200 held-out documents confirm a true lead of 2.1 points 80 % of the time``."""
        lead = self._format(self.detectable)
        return f"{self.documents:,} held-out documents confirm a true lead of {lead} {100 * POWER:g} % of the time"

    def sentence(self) -> str:
        """Return :meth:`brief` with the chances of other gains and the assumed correlation.

        Example: ``1,200 held-out documents confirm a true lead of 2.1 points 80 % of the time (1.0 points: 31 %)``.
        """
        chances = ", ".join(f"{self._format(item.gain)}: {100 * item.chance:.0f} %" for item in self.chances)
        assumption = f"the scores of winner and hand-written recipe have a correlation of {self.correlation:g}"
        return f"{self.brief()} ({chances}), if {assumption}"

    def _format(self, gain: float) -> str:
        return f"{100 * gain:.1f} points" if self.in_points else f"{gain:.2g}"


def confirmation_power(
    objective: Objective,
    tables: Sequence[ScoresByMetric],
    documents: Mapping[MetricKey, int],
    confidence: float,
    correlation: float = CORRELATION,
) -> ConfirmationPower:
    """Return the forecast for a confirmation with the given number of documents by metric.

    ``tables`` are the scores of the hand-written recipes on the documents of the search. ``confidence`` is one-sided.
    ``correlation``, in [0, 1), is that between the scores of winner and reference.
    """
    squared = 0.0
    for term in objective.terms:
        # For each hand-written recipe, the variance of a document's difference between two recipes that are as good.
        variances = []
        for numbers in (term.numbers(table) for table in tables):
            if np.isin(numbers, (0.0, 1.0)).all():
                # Keep the rate away from 0 and 1, because the next answer could differ even if all answers agree.
                least = 1 / (len(numbers) + 2)
                right = min(max(float(numbers.mean()), least), 1 - least)
                variances.append(2 * (right - both_right(right, correlation)))
            else:
                variances.append(2 * (1 - correlation) * float(numbers.var()))
        squared += term.weight**2 * sum(variances) / len(variances) / documents[term.key]
    error, normal_bound = max(math.sqrt(squared), 1e-12), normal_quantile(confidence)
    detectable = (normal_bound + normal_quantile(POWER)) * error
    in_points = all(term.key.measure in ("exact", "probability") for term in objective.terms)
    gains = _SHARE_GAINS if in_points else tuple(multiple * detectable for multiple in _GAIN_MULTIPLES)
    return ConfirmationPower(
        documents=sum({key.task: documents[key] for key in objective.weights}.values()),
        detectable=detectable,
        chances=tuple(GainChance(gain=gain, chance=NormalDist().cdf(gain / error - normal_bound)) for gain in gains),
        confidence=confidence,
        correlation=correlation,
        in_points=in_points,
    )


def both_right(right: float, correlation: float) -> float:
    """Return the chance that two recipes are both right about a document if each is with probability ``right``.

    It is ``P(X < h, Y < h)`` for correlated standard normal variables with ``P(X < h) = right``.
    """
    h = NormalDist().inv_cdf(right)
    x = np.linspace(-9.0, h, 401)
    conditional = [NormalDist().cdf(bound) for bound in (h - correlation * x) / math.sqrt(1 - correlation**2)]
    return float(np.trapezoid(np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi) * conditional, x))
