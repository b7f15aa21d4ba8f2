"""Simulate how often the gate passes, fails or cannot decide, by a merge's true drop.

The tables are in ``dev/measurements/gate-error-rates.md``, and those of the other commands in the pages that
``error_rates``, ``gate_suites`` and ``gate_alarms`` name::

    .venv/bin/python benchmarks/operating_characteristics.py               # the tables, a minute or so on one core
    .venv/bin/python benchmarks/operating_characteristics.py --markdown    # the same, for the docs
    .venv/bin/python benchmarks/operating_characteristics.py graded        # or clusters, perplexity: see error_rates.py

Merges are drawn, not run. On each document, the merge loses a right answer of the reference with probability
``(discordance + drop) / 2``, corrects a wrong one with ``(discordance - drop) / 2``, and agrees in all other cases. The
script implements the rule a second time, as hypothesis tests on arrays instead of intervals of one sample.
``tests/gate/test_gate_operating_characteristics.py`` verifies that both decide the same way.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergegate.tasks.quality.evaluation.document_order import interim_looks
from mergegate.tasks.quality.gate.sequential import plan_looks
from mergegate.tasks.quality.gate.statistics import normal_quantile, score_statistic

ERROR_TABLES = ("graded", "clusters", "duplicates", "perplexity")
SUITE_TABLES = ("suites", "attempts", "scheduled", "wear")
CONFIDENCE = 0.95
MAX_DROP, MARGIN = 0.02, 0.03  # the defaults: 2 points, and one more to pass
FIRST_LOOK = 500
DOCUMENTS = (500, 1319, 14042)  # a subset, GSM8K, MMLU
DISCORDANCES = (0.05, 0.10, 0.15, 0.20)
DROPS = (0.0, 0.01, 0.02, 0.03, 0.04)


class Decided(NamedTuple):
    """Shares of the simulated merges by outcome, and the number of documents used."""

    passed: float
    undecided: float
    failed: float
    documents: float  # mean


def decide(
    lost: NDArray[np.float64], won: NDArray[np.float64], n: int, confidence: float, last: bool
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return whether each sample passes, and whether it fails, at one look, which may be the last."""
    quantile, drop = normal_quantile(confidence), (lost - won) / n
    p_lost, p_won = (lost + 1) / (n + 2), (won + 1) / (n + 2)
    centre = p_lost - p_won
    half = quantile * np.sqrt((p_lost + p_won - centre**2) / (n + 2))
    small = (centre + half <= MARGIN) & (score_statistic(lost, won, n, MARGIN) <= -quantile)
    present = (centre - half > 0) & (lost - won > quantile * np.sqrt(lost + won))
    return (drop <= MAX_DROP) & small, (drop > (MAX_DROP if last else MARGIN)) & present


def simulate(drop: float, discordance: float, schedule: Sequence[int], runs: int, rng: np.random.Generator) -> Decided:
    """Judge ``runs`` merges that are truly ``drop`` worse, with interim looks until one decides.

    ``drop`` is the true difference of the shares of right answers, at most ``discordance``, which is the share of
    documents on which reference and merge disagree. ``schedule`` is the number of documents after each look.
    """
    shares = [(discordance + drop) / 2, (discordance - drop) / 2, 1 - discordance]
    lost, won = np.zeros(runs), np.zeros(runs)
    going = np.ones(runs, dtype=bool)
    passed = failed = used = 0
    before = 0
    for look in plan_looks(schedule, CONFIDENCE):
        fresh = rng.multinomial(look.documents - before, shares, size=runs)
        lost, won, before = lost + fresh[:, 0], won + fresh[:, 1], look.documents
        last = look.number == look.of
        passes, fails = decide(lost, won, look.documents, look.confidence, last)
        stops = going if last else going & (passes | fails)
        passed, failed = passed + int((going & passes).sum()), failed + int((going & fails).sum())
        used += int(stops.sum()) * look.documents
        going &= ~stops
    return Decided(passed / runs, (runs - passed - failed) / runs, failed / runs, used / runs)


def characteristics(runs: int, rng: np.random.Generator) -> list[str]:
    """Return one row per task and discordance: pass / inconclusive / fail at each true drop."""
    rows = [_row("documents", "discordance", *(f"{100 * drop:g} points" for drop in DROPS)), _rule(2 + len(DROPS))]
    for n in DOCUMENTS:
        for schedule in dict.fromkeys((interim_looks(n, None), interim_looks(n, FIRST_LOOK))):
            for discordance in DISCORDANCES:
                cells = []
                for drop in DROPS:
                    if drop > discordance:
                        cells.append("")
                        continue
                    found = simulate(drop, discordance, schedule, runs, rng)
                    cell = " / ".join(f"{100 * share:.0f}" for share in found[:3])
                    cells.append(f"{cell} · {found.documents:,.0f}" if len(schedule) > 1 else cell)
                name = f"{n:,}" if len(schedule) == 1 else f"{n:,} in {len(schedule)} looks"
                rows.append(_row(name, f"{discordance:.2f}", *cells))
    return rows


def errors(runs: int, rng: np.random.Generator) -> list[str]:
    """Return one row per task: passes at a true drop of the margin, failures at none."""
    heads = (f"{what} {discordance:.2f}" for what in ("pass", "fail") for discordance in DISCORDANCES)
    rows = [_row("documents", *heads), _rule(1 + 2 * len(DISCORDANCES))]
    for n in DOCUMENTS:
        for schedule in dict.fromkeys((interim_looks(n, None), interim_looks(n, FIRST_LOOK))):
            published = [simulate(MARGIN, d, schedule, runs, rng).passed for d in DISCORDANCES]
            alarmed = [simulate(0.0, d, schedule, runs, rng).failed for d in DISCORDANCES]
            name = f"{n:,}" if len(schedule) == 1 else f"{n:,} in {len(schedule)} looks"
            rows.append(_row(name, *(f"{100 * share:.2f}" for share in (*published, *alarmed))))
    return rows


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _rule(columns: int) -> str:
    return "|" + " --: |" * columns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "table", nargs="?", default="guards", choices=["guards", "sensitivity", "alarms", *ERROR_TABLES, *SUITE_TABLES]
    )
    parser.add_argument("--markdown", action="store_true", help="print the introduction of each table, too")
    parser.add_argument("--runs", type=int, default=20_000, help="merges a cell; ten times as many for errors")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.table in SUITE_TABLES:
        from gate_suites import TABLES  # in this directory

        print("\n".join(TABLES[arguments.table](arguments.runs, np.random.default_rng(arguments.seed))))
        return
    if arguments.table == "sensitivity":
        from gate_sensitivity import sensitivity_table  # in this directory

        print("\n".join(sensitivity_table(arguments.runs, np.random.default_rng(arguments.seed))))
        return
    if arguments.table == "alarms":
        from gate_alarms import alarm_tables  # in this directory

        print("\n".join(alarm_tables(arguments.runs, np.random.default_rng(arguments.seed))))
        return
    if arguments.table != "guards":
        from error_rates import print_table  # in this directory

        print_table(arguments.table, arguments.runs, arguments.seed, arguments.markdown)
        return
    rng, runs = np.random.default_rng(arguments.seed), arguments.runs
    if arguments.markdown:
        error = 100 * 0.5 / math.sqrt(runs)
        print(
            f"Pass / inconclusive / fail in percent of {runs:,} simulated merges, by true drop (Monte Carlo standard "
            f"error at most {error:.2f}). With several looks, the mean number of documents follows after the dot.\n"
        )
    print("\n".join(characteristics(runs, rng)))
    print()
    if arguments.markdown:
        error = 100 * math.sqrt(0.05 * 0.95 / (10 * runs))
        print(
            f"Wrong verdicts in percent of {10 * runs:,} simulated merges, by discordance (Monte Carlo standard error "
            f"{error:.2f}): pass although the true drop equals the margin of 3 points, and fail although it is zero.\n"
        )
    print("\n".join(errors(10 * runs, rng)))


if __name__ == "__main__":
    main()
