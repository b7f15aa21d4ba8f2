"""Raise alarms for losses that the mean drop of a guard hides. Pure functions.

The mean over a group hides the collapse of one of its tasks, the judging metric hides a loss under another one, and a
score near 100 hides that the share of wrong answers has multiplied. Each of these is a test for failure only:

* a task of a group fails if the lower bound of its drop exceeds the guard's ``max_drop``;
* another metric of the task fails if the lower bound of its drop exceeds ``max_drop``;
* near the ceiling, the answers fail if the lower bound of the ratio of error rates exceeds ``max_error_ratio``.

All alarms of a guard together may err a tenth as often as its mean drop (``gate.regression``): with one guard and
a confidence of 95 %, in 0.5 % of runs. They share this error by Holm's procedure, and each look spends a fixed part of
it (``error_at_look``). An equal merge therefore hardly ever raises an alarm, however many tasks the group has.

A task of a group may have few documents, and normal approximations are too bold at the required confidence. For right
and wrong answers, an alarm therefore also needs an exact test: given the documents on which the models disagree, the
number of lost ones is binomial (McNemar 1947, Psychometrika 12:153). For graded scores, the betting test of
``gate.graded_scores`` is exact. If documents form clusters, the means of the clusters must pass the same test.

The first looks see few documents of each task, so a collapse may still be invisible when the mean drop already passes.
A group therefore passes before its last look only if a collapse of each of its tasks is ruled out (see
``leaf_limit``). At the last look the alarms alone decide, so this costs documents, but no publication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergegate.merge_core.wording import format_count
from mergegate.tasks.quality.gate.evidence import GuardEvidence
from mergegate.tasks.quality.gate.graded_scores import graded_difference, refutes
from mergegate.tasks.quality.gate.sequential import error_at_look
from mergegate.tasks.quality.gate.statistics import binary_difference, share_bounds
from mergegate.tasks.quality.gate.verdicts import GateFinding, GuardVerdict

ALARM_SHARE = 0.1  # Error of all alarms of a guard together, as a share of the error allowed for its mean drop.

CLEAR = 0.98  # One-sided confidence at each look with which a collapse is ruled out.
_NAMED = 3  # Number of losses that a sentence describes, worst first.


class Part(NamedTuple):
    """Documents of a guard that are tested on their own: those of a task below a group, or all under another metric."""

    name: str
    differences: NDArray[np.float64]
    units: NDArray[Any] | None = None  # Independent unit of each difference; None: the document itself.

    @property
    def binary(self) -> bool:
        """Whether all differences are those of right and wrong answers."""
        return bool(np.isin(self.differences, (-1.0, 0.0, 1.0)).all())

    @property
    def drop(self) -> float:
        """Mean difference, in [-1, 1]."""
        return float(self.differences.mean())

    def unit_means(self) -> NDArray[np.float64] | None:
        """Return the mean difference of each unit in scoring order, or None if each document is a unit."""
        if self.units is None:
            return None
        _, first, members = np.unique(self.units, return_index=True, return_inverse=True)
        means = np.bincount(members, weights=self.differences) / np.bincount(members)
        return np.asarray(means[np.argsort(first)], dtype=np.float64)

    def exceeds(self, limit: float, error: float) -> bool:
        """Return whether a drop above ``limit`` is shown at one look. It is wrong with at most ``error``."""
        if self.drop <= limit:
            return False
        confidence, n = 1 - error, len(self.differences)
        means = self.unit_means()
        if means is not None and not _is_refuted(-means, -limit, confidence):
            return False
        if not self.binary:
            return _is_refuted(-self.differences, -limit, confidence)
        lost, won = self._counts()
        # Given a drop of ``limit``, a document on which the models disagree is lost with this probability.
        chance = (1 + min(1.0, limit * n / (lost + won))) / 2
        return _binomial_tail(lost, lost + won, chance) <= error and (
            binary_difference(lost, won, n, confidence).low > limit
        )

    def is_below(self, limit: float, error: float) -> bool:
        """Return whether a drop of ``limit`` or more is ruled out at one look. It is wrong with at most ``error``."""
        if self.drop >= limit:
            return False
        if limit >= 1:
            return True
        means = self.unit_means()
        if means is not None and not _is_refuted(means, limit, 1 - error):
            return False
        if not self.binary:
            return _is_refuted(self.differences, limit, 1 - error)
        return binary_difference(*self._counts(), len(self.differences), 1 - error).high <= limit

    def interval(self, error: float) -> tuple[float, float, float]:
        """Return the drop and its bounds in points; each bound errs with at most ``error``."""
        confidence, n = 1 - error, len(self.differences)
        if self.binary:
            bounds = [binary_difference(*self._counts(), n, confidence)]
        else:
            bounds = [graded_difference(self.differences, confidence)]
        if (means := self.unit_means()) is not None:
            bounds.append(graded_difference(means, confidence))
        low, high = min(bound.low for bound in bounds), max(bound.high for bound in bounds)
        return 100 * self.drop, 100 * low, 100 * high

    def _counts(self) -> tuple[int, int]:
        return int((self.differences > 0).sum()), int((self.differences < 0).sum())


def find_alarms(evidence: GuardEvidence, verdict: GuardVerdict) -> Iterator[GateFinding]:
    """Yield a failure for each kind of alarm that the evidence raises, and a note about metrics that cannot raise one.

    ``verdict`` provides the error that the guard may spend on failures.
    """
    guard, limit = evidence.guard, evidence.guard.max_drop / 100
    if evidence.unusable_metrics:
        names = ", ".join(evidence.unusable_metrics)
        reason = f"{guard.task}: {names} not compared, because its scores are not between 0 and 1"
        yield GateFinding(kind="other metrics", outcome="pass", reason=reason)
    # Only complete answers can raise an alarm: cut-off answers count for the merge.
    evidence = evidence.counting_cut_answers(for_merge=True)
    leaves = leaf_parts(evidence)
    metrics = [
        Part(metric.metric, np.asarray(metric.differences), np.asarray(metric.units) if metric.units else None)
        for metric in evidence.other_metrics
    ]
    parts = [*leaves, *metrics]
    tests: list[Callable[[float], bool]] = [partial(part.exceeds, limit) for part in parts]
    if evidence.limits_errors:
        tests.append(
            lambda error: error_ratio_bound(*_count_errors(evidence), error) > (guard.max_error_ratio or math.inf)
        )
    error = ALARM_SHARE * (1 - (verdict.alarm_confidence or verdict.confidence))
    alarms = _holm(tests, error_at_look(evidence.schedule, evidence.documents, error))
    if found := [(part, alarms[i]) for i, part in enumerate(leaves) if i in alarms]:
        reason = _describe(found, evidence, f"{guard.task}: ", "task")
        yield GateFinding(kind="task of the group", outcome="fail", reason=reason)
    else:
        yield from _unseen_collapses(evidence, verdict)
    if verdict.outcome == "fail":
        return  # The other alarms would only repeat this.
    if found := [(part, alarms[i]) for i, part in enumerate(parts) if i >= len(leaves) and i in alarms]:
        reason = _describe(found, evidence, f"{guard.task}, ", "metric")
        yield GateFinding(kind="other metric", outcome="fail", reason=reason)
    if len(parts) in alarms:
        yield GateFinding(kind="error ratio", outcome="fail", reason=_describe_errors(evidence, alarms[len(parts)]))


def _unseen_collapses(evidence: GuardEvidence, verdict: GuardVerdict) -> Iterator[GateFinding]:
    """Yield a finding if tasks of a group may have collapsed, but have too few documents to tell.

    If documents are left, a guard that would pass is inconclusive, and mergegate evaluates up to the next look. For a
    task of 100 documents, a drop of ``leaf_limit`` must be ruled out. The limit shrinks with the root of the task's
    size, as errors do, so that large and small tasks are clear at about the same look. It is at least the ``limit`` of
    the guard. If no documents are left, the finding is a note.
    """
    guard, leaves = evidence.guard, leaf_parts(evidence)
    if not leaves or guard.leaf_limit is None or verdict.outcome != "pass":
        return
    share, is_last = evidence.documents / evidence.schedule[-1], not verdict.documents_left
    is_open = []
    for leaf in leaves:
        size = 100 if is_last else len(leaf.differences) / share
        limit = max(guard.leaf_limit * math.sqrt(100 / size), guard.catastrophe)
        if limit < 100 and not leaf.is_below(limit / 100, 1 - CLEAR):
            is_open.append((leaf.name, limit))
    if not is_open:
        return
    names = [f"{name} ({limit:.0f} points)" for name, limit in is_open[:_NAMED]]
    names += [f"{len(is_open) - _NAMED} more"] if len(is_open) > _NAMED else []
    reason = f"{guard.task}: too few documents so far to rule out a collapse of {_join(names)}"
    if is_last:
        reason = reason.replace(" so far", "")
    yield GateFinding(kind="unseen collapse", outcome="pass" if is_last else "inconclusive", reason=reason)


def leaf_parts(evidence: GuardEvidence) -> list[Part]:
    """Return the documents of each task below the group, by name. Empty if the task is not a group."""
    if not evidence.leaves:
        return []
    differences, leaves = np.asarray(evidence.differences), np.asarray(evidence.leaves)
    # If the tasks themselves are the clusters, the documents of one task still represent its other questions.
    units = evidence.units if evidence.guard.clustered_by == "task" else evidence.clusters or evidence.units
    names = np.asarray(units) if units else None
    return [
        Part(str(leaf), differences[leaves == leaf], names[leaves == leaf] if names is not None else None)
        for leaf in np.unique(leaves)
    ]


def error_ratio_bound(old: int, new: int, error: float) -> float:
    """Return a lower bound of the error rate of the merge divided by that of the reference.

    The share ``q`` of new errors among old and new ones is binomial, and its bound is exact (``share_bounds``). The
    ratio is at least ``q / (1 - q)``, because the merge may also make some of the old errors.

    Args:
        old: Number of documents that the reference gets wrong.
        new: Number of documents that only the merge gets wrong.
        error: Probability that the bound exceeds the true ratio, in (0, 1).
    """
    share, _ = share_bounds(new, old + new, 1 - error)
    return share / (1 - share)


def _count_errors(evidence: GuardEvidence) -> tuple[int, int]:
    """Return the number of the reference's errors, and of the merge's new ones. New ones of one unit count once."""
    score = evidence.reference_score
    old = round(len(evidence.differences) * (1 - score if evidence.higher_is_better else score))
    units = evidence.clusters or evidence.units or range(len(evidence.differences))
    return old, len({unit for unit, difference in zip(units, evidence.differences, strict=True) if difference > 0})


def _holm(tests: Sequence[Callable[[float], bool]], error: float) -> dict[int, float]:
    """Return the index of each test that rejects by Holm's procedure, with the error at which it rejects."""
    rejected: dict[int, float] = {}
    while len(rejected) < len(tests):
        share = error / (len(tests) - len(rejected))
        new = {i: share for i, test in enumerate(tests) if i not in rejected and test(share)}
        if not new:
            break
        rejected |= new
    return rejected


def _is_refuted(differences: NDArray[np.float64], mean: float, confidence: float) -> bool:
    """Return whether the differences of one look refute that their true mean is ``mean`` or more."""
    return bool(refutes(differences, np.array([mean]), confidence, (len(differences),))[0])


def _binomial_tail(successes: int, trials: int, chance: float) -> float:
    """Return the probability of at least ``successes``, which is 1 or more."""
    from scipy.special import bdtrc

    return float(bdtrc(successes - 1, trials, min(chance, 1 - 1e-12)))


def _describe(found: Sequence[tuple[Part, float]], evidence: GuardEvidence, subject: str, noun: str) -> str:
    """Return ``leaderboard: leaderboard_ifeval: drop of 52.0 points against base [47.1, 56.9] exceeds max_drop 2``."""
    worst = sorted(found, key=lambda each: -each[0].drop)
    intervals = [part.interval(error) for part, error in worst[:_NAMED]]
    drop, low, high = intervals[0]
    text = (
        f"{subject}{worst[0][0].name}: drop of {drop:.1f} points against {evidence.reference} [{low:.1f}, {high:.1f}] "
        f"exceeds max_drop {evidence.guard.max_drop:g}"
    )
    further = [
        f"{part.name} ({drop:.1f} points [{low:.1f}, {high:.1f}])"
        for (part, _), (drop, low, high) in zip(worst[1:], intervals[1:], strict=False)
    ]
    further += [format_count(len(worst) - _NAMED, f"other {noun}")] if len(worst) > _NAMED else []
    return f"{text}. The same is shown for {_join(further)}" if further else text


def _join(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def _describe_errors(evidence: GuardEvidence, error: float) -> str:
    n = len(evidence.differences)
    scores = (evidence.reference_score, evidence.merge_score)
    before, after = (round(n * (1 - score if evidence.higher_is_better else score)) for score in scores)
    ratio = f"{after / before:.1f} times as many, " if before else ""
    least = error_ratio_bound(*_count_errors(evidence), error)
    return (
        f"{evidence.guard.task}: wrong answers rose from {before:,} to {after:,} of {n:,} against {evidence.reference} "
        f"({ratio}at least {least:.1f} times), which exceeds max_error_ratio "
        f"{evidence.guard.max_error_ratio:g}"
    )
