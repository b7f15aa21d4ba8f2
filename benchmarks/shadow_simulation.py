"""Simulate the shadow rule's error rate when it is checked after every pair, and the number of pairs it needs.

::

    .venv/bin/python benchmarks/shadow_simulation.py             # both tables as Markdown, a minute or two on one core
    .venv/bin/python benchmarks/shadow_simulation.py --runs 500  # a glance
    .venv/bin/python benchmarks/shadow_simulation.py --switch    # how often the kill switch ends an equal candidate

The results are the tables of ``dev/measurements/shadow-simulation.md``. Pairs are drawn, not judged. Each is a tie with
a fixed probability, and else a win or a loss, such that the win rate is even minus the shortfall. The evidence comes
from the product (``tasks.shadow``). Only the checks are vectorized over thousands of runs. No check is missed: the next
one is at the earliest pair at which the evidence could have reached the threshold if the candidate had won every pair
until then.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergegate.tasks.shadow import ArmRow, ShadowRule, SwitchRule, kill_reason
from mergegate.tasks.shadow.verdict import EVEN, log_evidence

RUNS, MOST_PAIRS, SEED = 10_000, 20_000, 19
TIES = (0.3, 0.6, 0.8)
SHORTFALLS = (0.0, 0.015, 0.03, -0.02)
_SIDE_BY_SIDE = 1_000  # runs drawn in one step
NEVER = np.iinfo(np.int64).max
_ONE_SIDED_Z = 1.6449  # quantile of a test at 95 % with a single look
_NAIVE_EVERY, _NAIVE_MOST = 100, 5_000  # pairs

Counts = NDArray[np.uint16]


class Runs(NamedTuple):
    """For each simulated run, the pair at which either rule alone would promote or roll back, or ``NEVER``.

    ``naive``: whether a one-sided z-test that is checked every 100 of 5,000 pairs ever reports "above the bound".
    """

    promoted_at: NDArray[np.int64]
    rolled_back_at: NDArray[np.int64]
    naive: NDArray[np.bool_]

    @property
    def promoted(self) -> NDArray[np.bool_]:
        """Whether the rule as a whole promotes; the earlier event ends the run."""
        return self.promoted_at < self.rolled_back_at

    @property
    def rolled_back(self) -> NDArray[np.bool_]:
        return (self.rolled_back_at <= self.promoted_at) & (self.rolled_back_at < NEVER)

    @property
    def decided_at(self) -> NDArray[np.int64]:
        return np.minimum(self.promoted_at, self.rolled_back_at)


def simulate(ties: float, shortfall: float, rule: ShadowRule, runs: int, pairs: int, seed: int = SEED) -> Runs:
    """Simulate ``runs`` candidates, each watched for ``pairs`` pairs and checked after each of them."""
    rng = np.random.default_rng(seed)
    parts = [_watched(wins, losses, rule) for wins, losses in _drawn(rng, ties, shortfall, runs, pairs)]
    return Runs(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def first_look(wins: Counts, losses: Counts, bound: float, rule: ShadowRule, start: int) -> NDArray[np.int64]:
    """Return the first number of pairs, at least ``start``, at which the evidence reaches the threshold, or ``NEVER``.

    The evidence is that the win rate is above ``bound``.

    ``wins`` and ``losses`` are counts after each pair: ``[runs, pairs]``.
    """
    # Won pairs raise the evidence most, and the boldest bet alone gives the largest possible increase.
    most = float(log_evidence(1e6, 0, 0, bound)) / 1e6 + 1e-4
    found = np.full(len(wins), NEVER)
    active, at = np.arange(len(wins)), np.full(len(wins), start, dtype=np.int64)
    while len(active := active[at[active] <= wins.shape[1]]):
        n = at[active]
        won, lost = wins[active, n - 1].astype(np.int64), losses[active, n - 1].astype(np.int64)
        short = rule.log_threshold - log_evidence(won, n - won - lost, lost, bound)
        found[active[short <= 0]] = n[short <= 0]
        at[active] = n + np.maximum(1, np.ceil(short / most).astype(np.int64))
        active = active[short > 0]
    return found


def _drawn(
    rng: np.random.Generator, ties: float, shortfall: float, runs: int, pairs: int
) -> Iterator[tuple[Counts, Counts]]:
    won = EVEN - shortfall - ties / 2
    for begin in range(0, runs, _SIDE_BY_SIDE):
        u = rng.random((min(_SIDE_BY_SIDE, runs - begin), pairs), dtype=np.float32)
        yield np.cumsum(u < won, axis=1, dtype=np.uint16), np.cumsum(u >= won + ties, axis=1, dtype=np.uint16)


def _watched(wins: Counts, losses: Counts, rule: ShadowRule) -> Runs:
    return Runs(
        first_look(wins, losses, rule.bound, rule, rule.minimum_pairs),
        first_look(losses, wins, EVEN, rule, 1),
        _naive(wins, losses, rule),
    )


def _naive(wins: Counts, losses: Counts, rule: ShadowRule) -> NDArray[np.bool_]:
    n = np.arange(_NAIVE_EVERY, min(_NAIVE_MOST, wins.shape[1]) + 1, _NAIVE_EVERY)
    won, lost = wins[:, n - 1] / n, losses[:, n - 1] / n
    above = EVEN + (won - lost) / 2 - rule.bound
    variance = (won + lost - (won - lost) ** 2) / 4
    return np.asarray((above >= _ONE_SIDED_Z * np.sqrt(variance / n)).any(axis=1))


def _pairs(values: NDArray[np.int64], share: float, most: int) -> str:
    number = np.quantile(values, share, method="inverted_cdf")
    return f"{int(number):,}" if number <= most else f"over {most:,}"


def _tables(runs: int, pairs: int) -> Iterator[str]:
    rule = ShadowRule()
    done = {(t, s): simulate(t, s, rule, runs, pairs) for t in TIES for s in SHORTFALLS}
    yield f"{runs:,} runs per row, checked after every pair of up to {pairs:,} pairs, margin {rule.margin:g} points:\n"
    yield "| ties | promoted at the margin | a z-test, every 100 of 5,000 pairs | equal, and rolled back |"
    yield "| --: | --: | --: | --: |"
    for t in TIES:
        margin, equal = done[t, rule.margin / 100], done[t, 0.0]
        promoted, back = (margin.promoted_at < NEVER).mean(), (equal.rolled_back_at < NEVER).mean()
        yield f"| {t:.0%} | {promoted:.1%} | {margin.naive.mean():.1%} | {back:.1%} |"
    yield "\n| ties | true shortfall | promoted | rolled back | pairs: median | 90 % within |"
    yield "| --: | --: | --: | --: | --: | --: |"
    for (t, s), one in done.items():
        at = one.decided_at
        yield (
            f"| {t:.0%} | {100 * s:g} points | {one.promoted.mean():.1%} | {one.rolled_back.mean():.1%} "
            f"| {_pairs(at, 0.5, pairs)} | {_pairs(at, 0.9, pairs)} |"
        )


def killed_by_luck(spread: float, rule: SwitchRule, runs: int, requests: int, every: int = 20) -> float:
    """Return the share of candidates that are as fast as their parent but are ended for their first bytes.

    ``spread`` is the standard deviation of the logarithm of the seconds to the first byte, and ``every`` is the number
    of requests between two checks.
    """
    rng, ended = np.random.default_rng(SEED), 0
    for _ in range(runs):
        arms = [
            [ArmRow(0, "parent", "answer", 200, "", False, first, first) for first in np.exp(times).tolist()]
            for times in rng.normal(0, spread, (2, requests))
        ]
        looks = (tuple(arm[n - rule.window : n] for arm in arms) for n in range(rule.window, requests + 1, every))
        ended += any(kill_reason(*look, rule) for look in looks)
    return ended / runs


def _switch_table(runs: int, requests: int) -> Iterator[str]:
    yield f"{runs:,} runs per row, {requests:,} requests to each model, checked every 20 requests:\n"
    yield "| median : 95th percentile | window 50 | window 100 | window 200 |"
    yield "| --: | --: | --: | --: |"
    for spread in (0.4, 0.6, 0.8, 1.0):
        shares = [killed_by_luck(spread, SwitchRule(window=window), runs, requests) for window in (50, 100, 200)]
        yield f"| 1 : {np.exp(_ONE_SIDED_Z * spread):.1f} | " + " | ".join(f"{share:.0%}" for share in shares) + " |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--pairs", type=int, default=MOST_PAIRS)
    parser.add_argument("--switch", action="store_true")
    asked = parser.parse_args()
    for line in _switch_table(min(asked.runs, 100), 10_000) if asked.switch else _tables(asked.runs, asked.pairs):
        print(re.sub(r"(?<=\d)%", " %", line), flush=True)
