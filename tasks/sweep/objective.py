"""What a candidate is worth: from the numbers of its documents to what the search is told. Pure functions.

::

    score      = sum over terms of weight * mean over documents / sum of weights - change_penalty * change
    violation  = sum over constraints of max(0, mean of the reference - mean of the candidate - max_drop)

Every number is more is better. A log-likelihood is cut at ``-clip`` first: a single document of -20 nats would decide a
mean of hundreds. Feasible candidates rank before infeasible ones, those by how little they miss (Deb 2000, Comput.
Methods Appl. Mech. Eng. 186:311), and without a score comes last.

With several objectives the terms stay apart and the result is a front. One rule says which of a front is confirmed: the
one with the best weighted sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.sweep.settings import Constraint, ObjectiveTerm, SweepSettings
from mergegate.tasks.sweep.trials import TEXT, MetricKey, Sheet, Trial

HAND_WRITTEN = ""  # among references: the hand-written recipe


@dataclass(frozen=True)
class Term:
    """One share of the score.

    Args:
        weight: Of all terms together 1.
        clip: Nothing below minus this counts; None: everything does.
        cluster_by: Field of the documents that belong together; None: each stands for itself.
    """

    asked: MetricKey
    weight: float
    clip: float | None = None
    cluster_by: str | None = None

    def numbers(self, sheet: Sheet) -> NDArray[np.float64]:
        """What each document contributes, ``[documents]``."""
        found = sheet[self.asked]
        return found if self.clip is None else np.maximum(found, -self.clip)


@dataclass(frozen=True)
class Limit:
    """A task on which a candidate must not fall.

    Args:
        reference: Name of a parent, or ``HAND_WRITTEN``.
        max_drop: In the unit of the numbers, not in points.
    """

    asked: MetricKey
    reference: str
    max_drop: float


@dataclass(frozen=True)
class Objective:
    """What is searched for. Made by :func:`objective_of`."""

    terms: tuple[Term, ...]
    limits: tuple[Limit, ...] = ()
    several: bool = False
    change_penalty: float = 0.0

    @property
    def asked(self) -> tuple[MetricKey, ...]:
        """Every number that is needed of a document, once."""
        return tuple(dict.fromkeys([term.asked for term in self.terms] + [limit.asked for limit in self.limits]))

    @property
    def weights(self) -> dict[MetricKey, float]:
        """Of each (task, measure) in the score; together 1."""
        return {term.asked: term.weight for term in self.terms}

    @property
    def clips(self) -> dict[MetricKey, float]:
        """Where log-likelihoods are cut, of those that are."""
        return {term.asked: term.clip for term in self.terms if term.clip is not None}

    @property
    def guards(self) -> tuple[str, ...]:
        """Parents that constraints compare with, by name."""
        return tuple(dict.fromkeys(limit.reference for limit in self.limits if limit.reference != HAND_WRITTEN))

    def scores(self, sheet: Sheet, change: float = math.nan) -> tuple[float, ...]:
        """One number an objective; NaN where a document has none.

        Args:
            sheet: With all that is ``asked``.
            change: Relative size of the change; needed where it is penalised.
        """
        penalty = self.change_penalty * change if self.change_penalty else 0.0
        means = [float(np.mean(term.numbers(sheet))) if len(sheet[term.asked]) else math.nan for term in self.terms]
        if self.several:
            return tuple(mean - penalty for mean in means)
        return (sum(term.weight * mean for term, mean in zip(self.terms, means, strict=True)) - penalty,)

    def total(self, scores: Sequence[float]) -> float:
        """The weighted sum of several objectives; of one it is that."""
        if not self.several:
            return scores[0]
        return sum(term.weight * score for term, score in zip(self.terms, scores, strict=True))

    def violation(self, sheet: Sheet, references: Mapping[str, Sheet]) -> float:
        """By how much limits are missed together; 0: they are kept.

        Args:
            sheet: Of all documents or of the first of them; they are compared with the same ones of the reference.
            references: Sheets of whole sets, by name.
        """
        missed = 0.0
        for limit in self.limits:
            own = sheet[limit.asked]
            theirs = references[limit.reference][limit.asked][: len(own)]
            if len(own):
                missed += max(0.0, float(theirs.mean() - own.mean()) - limit.max_drop)
        return missed


def objective_of(settings: SweepSettings, names: Mapping[str, str]) -> Objective:
    """Read what is searched for.

    Args:
        names: What lm-eval calls a task, by what the profile says.

    Raises:
        InvalidInput: The same number twice, a clip of what is no log-likelihood, a metric where none is asked or the
            reverse, several objectives where there is one.
    """
    terms = [_term(term, names, f"sweep.objective[{index}]") for index, term in enumerate(settings.objective)]
    asked = [term.asked for term in terms]
    for index, one in enumerate(asked):
        if one in asked[:index]:
            raise InvalidInput(
                f"sweep.objective[{index}]",
                found=f"{one.measure} of {one.task or 'the held-out text'} again",
                expected="each number once",
                remedy="one term with the sum of their weights",
            )
    if settings.several and len(terms) < 2:
        raise InvalidInput("sweep.several", found="one objective", expected="two or more terms under 'objective'")
    total = sum(term.weight for term in terms)
    return Objective(
        terms=tuple(Term(term.asked, term.weight / total, term.clip, term.cluster_by) for term in terms),
        limits=tuple(_limit(one, names, f"sweep.constraints[{i}]") for i, one in enumerate(settings.constraints)),
        several=settings.several,
        change_penalty=settings.change_penalty,
    )


def rank(scores: Sequence[Sequence[float]], violations: Sequence[float], objective: Objective) -> list[int]:
    """Place of each candidate by Deb's rule, from 0 for the best; equals share a place, and NaN comes last."""
    keys = [_key(one, violation, objective) for one, violation in zip(scores, violations, strict=True)]
    places = {key: place for place, key in enumerate(sorted(set(keys)))}
    return [places[key] for key in keys]


def best_of(trials: Sequence[Trial], objective: Objective) -> Trial | None:
    """The best by Deb's rule of those that were asked everything, the first of equals; None where none has a score."""
    whole = [trial for trial in trials if not trial.dropped and not trial.problem and not _is_nan(trial.scores)]
    return min(whole, key=lambda trial: (_key(trial.scores, trial.violation, objective), trial.number), default=None)


def front(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Those feasible ones that no other is at least as good as in everything and better in something, by number."""
    whole = [one for one in trials if not one.dropped and not one.problem and not _is_nan(one.scores)]
    feasible = [one for one in whole if one.violation == 0]

    def is_dominated(one: Trial) -> bool:
        return any(
            all(a >= b for a, b in zip(other.scores, one.scores, strict=True))
            and any(a > b for a, b in zip(other.scores, one.scores, strict=True))
            for other in feasible
        )

    return tuple(sorted((one for one in feasible if not is_dominated(one)), key=lambda one: one.number))


def _key(scores: Sequence[float], violation: float, objective: Objective) -> tuple[int, float]:
    total = objective.total(scores) if scores else math.nan
    if math.isnan(total) or math.isnan(violation):
        return (2, 0.0)
    return (1, violation) if violation > 0 else (0, -total)


def _is_nan(scores: Sequence[float]) -> bool:
    return not scores or any(math.isnan(score) for score in scores)


def _term(term: ObjectiveTerm, names: Mapping[str, str], where: str) -> Term:
    if term.clip is not None and term.measure != "log_likelihood":
        raise InvalidInput(f"{where}.clip", found=f"a clip of {term.measure}", expected="one of log_likelihood")
    if term.task is None and term.measure != "log_likelihood":
        raise InvalidInput(
            f"{where}.measure", found=f"{term.measure} of the held-out text", expected="log_likelihood, or a task"
        )
    return Term(_asked(term, term.task, names, where), term.weight, term.clip, term.cluster_by)


def _limit(constraint: Constraint, names: Mapping[str, str], where: str) -> Limit:
    asked = _asked(constraint, constraint.task, names, where)
    return Limit(asked, constraint.guarded_by or HAND_WRITTEN, constraint.max_drop / 100)


def _asked(said: ObjectiveTerm | Constraint, task: str | None, names: Mapping[str, str], where: str) -> MetricKey:
    if (said.measure == "metric") != (said.metric is not None):
        found = "no metric" if said.metric is None else f"metric with measure: {said.measure}"
        raise InvalidInput(
            f"{where}.metric", found=found, expected="the name of one with measure: metric, and only there"
        )
    return MetricKey(TEXT if task is None else names[task], said.measure, said.metric or "")
