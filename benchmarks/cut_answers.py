"""Simulate how often the gate publishes a merge if a token budget cuts off some answers of either model.

The tables are in ``dev/measurements/cut-off-answers.md``::

    .venv/bin/python benchmarks/cut_answers.py              # about two minutes on one core

Merges are drawn, not run. Complete answers of both models are right or wrong with a given discordance and drop. Some
need two, four or eight times the budget. A cut-off answer is wrong with probability .9. The gate's own functions decide
(``gate.power``, ``gate.cut_answers``). ``tests/gate/test_cut_answers.py`` verifies that they decide as
``judge_guards`` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergegate.tasks.quality.gate.cut_answers import length_ratio
from mergegate.tasks.quality.gate.power import DrawnDrops, passing_merges
from mergegate.tasks.quality.gate.settings import GateRule, Guard
from mergegate.tasks.quality.gate.statistics import binary_bounds

RULE, GUARD = GateRule(), Guard(task="any", guarded_by="base")  # the defaults: max_drop 2, margin 3
CUT_SHARES = ((0.0, 0.0), (0.1, 0.0), (0.3, 0.0), (0.0, 0.1), (0.0, 0.3), (0.1, 0.1), (0.3, 0.3))  # reference, merge
SUITES = ((1, 1319), (6, 1000))  # number of tasks, documents of each
DISCORDANCE = 0.10
FACTORS = (1, 2, 4, 8)  # budgets, in multiples of the task's own
NEEDED = (0.7, 0.2, 0.1)  # shares of the cut-off answers that need 2, 4 and 8 times the budget
LUCKY = 0.1  # share of the cut-off answers that are right nevertheless
Bools = NDArray[np.bool_]


class Answers(NamedTuple):
    """Answers of one model to many documents, ``[runs, documents]``."""

    right: Bools  # with a budget that suffices
    lucky: Bools  # while cut off
    needed: NDArray[np.int64]  # factor of the budget that suffices

    def scores(self, factor: int, cut_is_right: bool | None) -> Bools:
        """Return the scores at a budget. With ``cut_is_right=None``, cut-off answers count as measured."""
        cut = self.lucky if cut_is_right is None else np.full(self.right.shape, cut_is_right)
        return np.where(self.needed > factor, cut, self.right)


class Published(NamedTuple):
    """Shares of simulated merges that are published."""

    measured: float  # by the scores at the first budget, however answers ended
    once: float  # if both ways to count cut-off answers pass, without generating any again
    again: float  # in the same way, with cut-off answers generated again up to 8 times the budget
    complete: float  # by complete answers of all documents
    undecided: float  # whose first budget did not decide


def draw_answers(right: Bools, cut: float, rng: np.random.Generator) -> Answers:
    """Draw how many tokens the answers need."""
    longer = rng.choice(FACTORS[1:], right.shape, p=NEEDED)
    needed = np.where(rng.random(right.shape) < cut, longer, 1)
    return Answers(right, rng.random(right.shape) < LUCKY, needed)


def passing(models: Sequence[Sequence[Answers]], factor: int, for_merge: bool | None) -> Bools:
    """Return which merges pass if cut-off answers count for or against them, or as measured (None).

    ``models`` holds the answers of reference and merge for each task.
    """
    samples = []
    for number, (reference, merge) in enumerate(models):
        left = reference.scores(factor, None if for_merge is None else not for_merge)
        right = merge.scores(factor, for_merge)
        lost, won = (left & ~right).sum(1).astype(np.float64), (~left & right).sum(1).astype(np.float64)
        guard = GUARD.model_copy(update={"task": f"task {number}"})
        samples.append(DrawnDrops(guard, lost, won, left.shape[1]))
    return passing_merges(samples, RULE.confidence, as_suite=len(samples) > 1)


def simulate(
    tasks: int, n: int, drop: float, cut: tuple[float, float], runs: int, rng: np.random.Generator
) -> Published:
    """Judge merges that truly lose ``drop`` (of 1) on each task. ``cut`` holds the shares of cut-off answers."""
    models = []
    for _ in range(tasks):
        kind = rng.choice(4, (runs, n), p=_shares(drop))
        models.append([draw_answers(kind % 2 == 0, cut[0], rng), draw_answers(kind < 2, cut[1], rng)])

    again = np.zeros(runs, dtype=np.bool_)
    once = measured = undecided = again
    for factor in FACTORS:
        cases = [passing(models, factor, for_merge) for for_merge in (None, True, False)]
        if factor == 1:
            measured, once = cases[0], np.logical_and.reduce(cases)
            undecided = np.logical_or.reduce(cases) & ~once
        again = again | np.logical_and.reduce(cases)
    complete = passing(models, FACTORS[-1], None)
    return Published(*(float(each.mean()) for each in (measured, once, again, complete, undecided)))


def _shares(drop: float) -> list[float]:
    """Return the shares of documents that both get right, the merge alone, the reference alone, and none."""
    lost, won = (DISCORDANCE + drop) / 2, (DISCORDANCE - drop) / 2
    return [0.7 * (1 - DISCORDANCE), won, lost, 0.3 * (1 - DISCORDANCE)]


def cut_table(runs: int, rng: np.random.Generator) -> list[str]:
    """Return a row per suite and share of cut-off answers."""
    head = ("tasks", "cut off: reference / merge", "wrong: as measured", "wrong: once", "wrong: again")
    head = (*head, "equal: as measured", "equal: once", "equal: again", "equal: complete", "equal: undecided at first")
    rows = [_row(*head), "|" + " --: |" * len(head)]
    for tasks, n in SUITES:
        for cut in CUT_SHARES:
            worse = simulate(tasks, n, GUARD.upper_limit / 100, cut, runs, rng)
            equal = simulate(tasks, n, 0.0, cut, runs, rng)
            values = (*worse[:3], *equal)
            cells = [f"{tasks} of {n:,}", f"{100 * cut[0]:.0f} / {100 * cut[1]:.0f}"]
            rows.append(_row(*cells, *(f"{100 * value:.1f}" for value in values)))
    return rows


def length_table(runs: int, rng: np.random.Generator) -> list[str]:
    """Return a row per spread of lengths: how often the length of answers fails or leaves a merge inconclusive."""
    head = ("documents", "spread", "ratio 1: fail", "ratio 1: inconclusive", "ratio 1.5: fail", "ratio 2: fail")
    head = (*head, "ratio 2.5: fail", "ratio 3: fail")
    rows = [_row(*head), "|" + " --: |" * len(head)]
    for n in (100, 500, 1319):
        for spread in (0.5, 1.0, 1.5):
            cells = []
            for ratio in (1.0, 1.5, 2.0, 2.5, 3.0):
                common, *own = rng.normal(0, spread * 0.5**0.5, (3, runs, n))
                reference, merge = np.exp(common + own[0]), ratio * np.exp(common + own[1])
                found, low = length_ratio(100 * reference, 100 * merge, RULE.confidence)
                cells.append(f"{100 * (low > RULE.max_length_ratio).mean():.1f}")
                if ratio == 1:
                    unclear = (found > RULE.max_length_ratio) & (low <= RULE.max_length_ratio)
                    cells.append(f"{100 * unclear.mean():.1f}")
            rows.append(_row(f"{n:,}", f"{spread:g}", *cells))
    return rows


def endless_table(runs: int, rng: np.random.Generator) -> list[str]:
    """Return a row per share of endless answers of the reference: how often more of them fail the merge."""
    excess = (0.0, 0.01, 0.02, 0.05, 0.10)
    rows = [_row("documents", "reference", *(f"{100 * more:+.0f} points" for more in excess)), "|" + " --: |" * 7]
    for n in (500, 1319):
        for share in (0.0, 0.02, 0.10):
            cells = []
            for more in excess:
                reference, merge = rng.random((runs, n)) < share, rng.random((runs, n)) < share + more
                counts = (merge & ~reference).sum(1).astype(np.float64), (reference & ~merge).sum(1).astype(np.float64)
                low, _ = binary_bounds(*counts, n, RULE.confidence)
                cells.append(f"{100 * (100 * low > GUARD.max_drop).mean():.1f}")
            rows.append(_row(f"{n:,}", f"{100 * share:.0f}", *cells))
    return rows


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=4000, help="merges a cell")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for table in (cut_table, length_table, endless_table):
        print("\n".join(table(options.runs, np.random.default_rng(options.seed))) + "\n")


if __name__ == "__main__":
    main()
