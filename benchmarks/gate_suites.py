"""Simulate how often suites, attempts and scheduled runs release a merge.

The tables are in ``docs/benchmarks/suite-and-anchor-error-rates.md``. Run it with
``benchmarks/operating_characteristics.py suites`` (or ``attempts``, ``scheduled``). The gate's own functions decide, on
arrays of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergegate.tasks.gate.alpha_spending import anchor_confidence
from mergegate.tasks.gate.power import DrawnDrops, draw, passing_merges
from mergegate.tasks.gate.settings import GateRule, Guard

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


def _both(found: Shares, decimals: int) -> str:
    return f"{100 * found.each:.{decimals}f} / {100 * found.suite:.{decimals}f}"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


TABLES = {"suites": suite_table, "attempts": attempts_table, "scheduled": scheduled_table}
