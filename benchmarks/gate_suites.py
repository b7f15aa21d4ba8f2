"""Simulate how often suites, attempts and scheduled runs release a merge.

The tables are in ``dev/measurements/suite-and-anchor-error-rates.md``, and that of ``wear`` in
``dev/measurements/test-set-wear.md``. Run it with ``benchmarks/operating_characteristics.py suites`` (or ``attempts``,
``scheduled``, ``wear``). The gate's own functions decide, on arrays of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergegate.tasks.quality.evaluation.document_order import SampleUse, interim_looks
from mergegate.tasks.quality.gate.earlier_runs import anchor_confidence
from mergegate.tasks.quality.gate.power import DrawnDrops, draw, passing_merges
from mergegate.tasks.quality.gate.regression import decide_guard
from mergegate.tasks.quality.gate.sequential import plan_looks
from mergegate.tasks.quality.gate.settings import GateRule, Guard

RULE, GUARD = GateRule(), Guard(task="any", guarded_by="base")  # the defaults: max_drop 2, margin 3, limit 11
SUITES = ((1, 1319), (1, 164), (6, 1000), (7, 500))  # number of tasks, documents of each: GSM8K, HumanEval, two suites
DISCORDANCES = (0.05, 0.10, 0.20, 0.30)
Array = NDArray[np.float64]


class Shares(NamedTuple):
    """Shares of simulated merges."""

    each: float  # published if each task is judged on its own
    suite: float  # published if the suite is judged as a whole
    possible: float  # stopped by one test of the fallen task alone at the same error, as if that task were known


def suites(drops: Sequence[float], discordance: float, n: int, runs: int, rng: np.random.Generator) -> Shares:
    """Simulate merges with these true drops, one per task."""
    samples = [
        draw(guard, drop, discordance, n, runs, rng) for guard, drop in zip(_guards(len(drops)), drops, strict=True)
    ]
    fallen = samples[0].at(RULE.confidence)
    return Shares(
        each=float(passing_merges(samples, RULE.confidence, as_suite=False).mean()),
        suite=float(passing_merges(samples, RULE.confidence, as_suite=True).mean()),
        possible=float(((fallen.drop > 0) & (fallen.low > 0)).mean()),
    )


def attempts(count: int, shared: float, runs: int, rng: np.random.Generator) -> tuple[float, float]:
    """Return how often a run of ``count`` attempts at the margin publishes one: at 95 % each, and as the gate does.

    ``shared`` is the part of the discordance that all attempts have in common, that is, how similar they are.
    """
    tasks, n, discordance, drop = 7, 500, 0.20, GUARD.upper_limit / 100
    naive = spent = np.zeros(runs, dtype=np.bool_)
    guards = _guards(tasks)
    common = [draw(guard, shared * drop, shared * discordance, n, runs, rng) for guard in guards]
    for number in range(1, count + 1):
        own = [draw(guard, (1 - shared) * drop, (1 - shared) * discordance, n, runs, rng) for guard in guards]
        samples = [DrawnDrops(a.guard, a.lost + b.lost, a.won + b.won, n) for a, b in zip(common, own, strict=True)]
        naive = naive | passing_merges(samples, RULE.confidence, as_suite=True)
        spent = spent | passing_merges(samples, RULE.for_attempt(number, count).confidence, as_suite=True)
    return float(naive.mean()), float(spent.mean())


class Series(NamedTuple):
    """Result of many series of scheduled runs: points that are truly lost compared with the first release."""

    released: float  # mean number of runs that release
    lost: float  # mean
    quantile: float  # 95 % quantile of the loss
    beyond: float  # share of series that end beyond the margin


def scheduled(
    step: float, discordance: float, tasks: int, n: int, runs: int, rng: np.random.Generator, *, anchored: bool
) -> Series:
    """Simulate a hundred scheduled runs on the same documents, each with a merge that loses a little more.

    Each merge is truly ``step`` (of 1) worse than the latest release.
    """
    champion = anchor = rng.random((runs, tasks, n)) < 0.7
    published, refusals = np.zeros(runs), np.zeros(runs, dtype=np.int64)
    for _ in range(100):
        chance, right = rng.random(champion.shape, dtype=np.float32), champion.mean()
        loses, wins = (discordance + step) / 2 / right, (discordance - step) / 2 / (1 - right)
        merge = np.where(champion, chance >= loses, chance < wins)
        passes = _judged(champion, merge, np.full(runs, RULE.confidence))
        if anchored:
            levels = np.array([anchor_confidence(RULE.confidence, int(count)) for count in refusals])
            allowed = _judged(anchor, merge, levels)
            refusals += passes & ~allowed
            passes &= allowed
        champion = np.where(passes[:, None, None], merge, champion)
        published += passes
    lost = 100 * step * published
    beyond = float((lost > GUARD.upper_limit + 1e-9).mean())
    return Series(float(published.mean()), float(lost.mean()), float(np.quantile(lost, 0.95)), beyond)


class TestSet(NamedTuple):
    """Documents of the tasks that judge a series of merges."""

    tasks: int
    total: int  # documents of each task
    looks: tuple[int, ...]  # documents of each task after each look
    discordance: float  # share of documents on which two merges disagree


class Wear(NamedTuple):
    """Effect of a hundred scheduled runs of merges that are all equally good, by run."""

    published: Array  # share of the series whose merge is published
    documents: Array  # mean number of documents of a task that judge the merge
    selected: Array  # mean points by which the champion scores above the truth on the documents that selected it
    following: Array  # the same on the documents with which it judges the next merge


def wear(test_set: TestSet, runs: int, rng: np.random.Generator, *, resample: bool, length: int = 100) -> Wear:
    """Simulate ``runs`` series of ``length`` scheduled runs that compare a new merge with the latest release.

    All merges are equal in truth. Each answers a part of the documents by chance, independently of other merges, so the
    release is one that was lucky on the documents that selected it. With ``resample``, the sample of each run starts
    where that of the last one ended.
    """
    tasks, total, looks, discordance = test_set
    luck = rng.random((runs, tasks, total), dtype=np.float32) < 2 * discordance  # documents answered by chance
    positions = np.arange(looks[-1])

    def merge_answers() -> NDArray[np.bool_]:
        return luck & (rng.integers(0, 2, luck.shape, dtype=np.uint8) == 1)

    def luck_in(answers: NDArray[np.bool_], starts: NDArray[np.int64], documents: NDArray[np.int64]) -> Array:
        """Return the points above the expected score on each series' sample."""
        window = (starts[:, None] + positions) % total
        counted = positions < documents[:, None]
        excess = np.take_along_axis(answers - 0.5 * luck, window[:, None, :], axis=2)
        return 100 * (excess * counted[:, None, :]).sum((1, 2)) / (tasks * documents)

    champion = merge_answers()
    starts = np.zeros(runs, dtype=np.int64)
    published, counts, selected, following = (np.zeros(length) for _ in range(4))
    for run in range(length):
        merge = merge_answers()
        window = ((starts[:, None] + positions) % total)[:, None, :]
        old, new = (np.take_along_axis(answers, window, axis=2) for answers in (champion, merge))
        passes, documents = _sequential(old, new, looks)
        luck_of_release = luck_in(np.where(passes[:, None, None], merge, champion), starts, documents)
        published[run], counts[run] = passes.mean(), documents.mean()
        selected[run] = luck_of_release[passes].mean() if passes.any() else np.nan
        champion = np.where(passes[:, None, None], merge, champion)
        if resample:
            samples = zip(starts.tolist(), documents.tolist(), strict=True)
            uses = (SampleUse(start=start, documents=count) for start, count in samples)
            starts = np.array([use.next_start(total, looks[0]) for use in uses])
        following[run] = luck_in(champion, starts, np.full(runs, looks[0])).mean()
    return Wear(published, counts, selected, following)


def _sequential(
    old: NDArray[np.bool_], new: NDArray[np.bool_], looks: Sequence[int]
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which merges pass, and the number of documents that decided. A single task may have several looks."""
    passes, documents = np.zeros(len(old), dtype=np.bool_), np.full(len(old), looks[-1])
    if old.shape[1] > 1:
        return _judged(old, new, np.full(len(old), RULE.confidence)), documents
    going = np.ones(len(old), dtype=np.bool_)
    for look in plan_looks(looks, RULE.confidence):
        seen, shown = old[:, 0, : look.documents], new[:, 0, : look.documents]
        lost, won = ((one & ~other).sum(1).astype(np.float64) for one, other in ((seen, shown), (shown, seen)))
        drops = DrawnDrops(GUARD, lost, won, look.documents).at(look.confidence)
        last = look.number == look.of
        outcomes = np.array(
            [
                decide_guard(*bounds, GUARD.max_drop, GUARD.upper_limit, last_look=last)
                for bounds in zip(drops.drop, drops.low, drops.high, strict=True)
            ]
        )
        passes |= going & (outcomes == "pass")
        ends = going & ((outcomes != "inconclusive") | last)
        documents[ends] = look.documents
        going &= ~ends
    return passes, documents


def _guards(tasks: int) -> list[Guard]:
    return [GUARD.model_copy(update={"task": f"task {number}"}) for number in range(tasks)]


def _judged(reference: NDArray[np.bool_], merge: NDArray[np.bool_], levels: Array) -> NDArray[np.bool_]:
    """Return whether each run's merge passes against its reference, each at its own confidence."""
    lost, won = (reference & ~merge).sum(2).astype(np.float64), (~reference & merge).sum(2).astype(np.float64)
    passes = np.zeros(len(levels), dtype=np.bool_)
    for level in np.unique(levels):
        at = levels == level
        samples = [
            DrawnDrops(guard, lost[at, task], won[at, task], merge.shape[2])
            for task, guard in enumerate(_guards(merge.shape[1]))
        ]
        passes[at] = passing_merges(samples, float(level), as_suite=True)
    return passes


def suite_table(runs: int, rng: np.random.Generator) -> list[str]:
    """Return a row per suite and discordance: percentage published, judged per task / as a suite."""
    head = ("tasks", "discordance", "equal: each / suite", "at the margin: each / suite", "one drop of 5")
    head = (*head, "stopped / detectable", "one drop of 10", "stopped / detectable")
    rows = [_row(*head), "|" + " --: |" * len(head)]
    for tasks, n in SUITES:
        for discordance in DISCORDANCES:
            margin = GUARD.upper_limit / 100
            equal = suites([0.0] * tasks, discordance, n, runs, rng)
            bad = suites([margin] * tasks, discordance, n, 10 * runs, rng)
            cells = [f"{tasks} of {n:,}", f"{discordance:.2f}", _both(equal, 1), _both(bad, 2)]
            for fallen in (0.05, 0.10):
                if tasks == 1 or fallen > discordance:
                    cells += ["", ""]
                    continue
                found = suites([fallen] + [0.0] * (tasks - 1), discordance, n, runs, rng)
                cells += [_both(found, 1), f"{100 * (1 - found.suite):.0f} / {100 * found.possible:.0f}"]
            rows.append(_row(*cells))
    return rows


def attempts_table(runs: int, rng: np.random.Generator) -> list[str]:
    """Return a row per number of attempts: percentage of merges at the margin that are published."""
    kinds = ("unrelated: 95 % each", "unrelated: shared", "half shared: 95 % each", "half shared: shared")
    head = ("attempts", *kinds)
    rows = [_row(*head), "|" + " --: |" * len(head)]
    for count in range(1, 7):
        found = [share for shared in (0.0, 0.5) for share in attempts(count, shared, runs, rng)]
        rows.append(_row(str(count), *(f"{100 * share:.2f}" for share in found)))
    return rows


def scheduled_table(runs: int, rng: np.random.Generator) -> list[str]:
    """Return a row per suite and drop per run, with and without an anchor."""
    head = (
        "tasks",
        "discordance",
        "drop per run",
        "anchor",
        "released",
        "total drop",
        "95 % quantile",
        "above 3, %",
    )
    rows = [_row(*head), "|" + " --: |" * len(head)]
    for tasks, n, discordance in ((6, 1000, 0.05), (6, 1000, 0.10), (7, 500, 0.10)):
        for step in (0.0, 0.005, 0.01):
            for anchored in (False, True):
                found = scheduled(step, discordance, tasks, n, runs, rng, anchored=anchored)
                cells = (
                    f"{found.released:.1f}",
                    f"{found.lost:.1f}",
                    f"{found.quantile:.1f}",
                    f"{100 * found.beyond:.1f}",
                )
                name = "first" if anchored else "none"
                rows.append(_row(f"{tasks} of {n:,}", f"{discordance:.2f}", f"{100 * step:g}", name, *cells))
    return rows


def wear_table(runs: int, rng: np.random.Generator) -> list[str]:
    """Return a row per test set and discordance: merges published by run, and the inflation of scores."""
    head = ("documents", "discordance", "sample", "run 1", "run 10", "run 100", "documents a run")
    head = (*head, "score above truth", "on the next sample")
    rows = [_row(*head), "|" + " --: |" * len(head)]
    shapes = [
        ("500 of 500", 1, 500, (500,), DISCORDANCES),
        ("500 of 1,319", 1, 1319, (500,), DISCORDANCES),
        ("500 to 1,319", 1, 1319, interim_looks(1319, 500), DISCORDANCES),
        ("500 to 14,042", 1, 14042, interim_looks(14042, 500), DISCORDANCES),
        ("1,319 of 1,319", 1, 1319, (1319,), (0.21,)),
        ("7 tasks, 500 of 500", 7, 500, (500,), DISCORDANCES),
        ("500 of 14,042", 1, 14042, (500,), DISCORDANCES),
    ]
    own_generator = np.random.default_rng(0)  # of the last shape
    for name, tasks, total, looks, discordances in shapes:
        for discordance in discordances:
            for resample in (False, True) if looks[0] < total else (False,):
                series = runs if tasks * total < 5000 else max(1, runs // (2 if len(looks) == 1 else 5))
                generator = own_generator if name == shapes[-1][0] else rng
                test_set = TestSet(tasks, total, looks, discordance)
                found = wear(test_set, series, generator, resample=resample)
                # Means over ten runs, as the shares change slowly.
                shares = (
                    f"{100 * found.published[part].mean():.0f}" for part in (slice(1), slice(5, 15), slice(90, 100))
                )
                means = (f"{np.nanmean(values[50:]):+.1f}" for values in (found.selected, found.following))
                count = f"{found.documents[50:].mean():,.0f}"
                sample = "changes" if resample else "stays the same"
                rows.append(_row(name, f"{discordance:.2f}", sample, *shares, count, *means))
    return rows


def _both(found: Shares, decimals: int) -> str:
    return f"{100 * found.each:.{decimals}f} / {100 * found.suite:.{decimals}f}"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


TABLES = {"suites": suite_table, "attempts": attempts_table, "scheduled": scheduled_table, "wear": wear_table}
