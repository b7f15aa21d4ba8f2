"""Simulate how often groups with a collapsed task, and equal merges of groups and suites, are published.

The tables are in ``dev/measurements/alarm-error-rates.md``. Run it with
``benchmarks/operating_characteristics.py alarms --runs 500``. Groups are judged on
arrays, with the gate's own bounds, and ``tests/gate/test_hidden_losses.py`` verifies that ``judge_guards`` decides the
same way. Suites are judged by ``judge_suite`` and ``judge_guards``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc

from mergegate.tasks.quality.evaluation.document_order import interim_looks
from mergegate.tasks.quality.gate.alarms import ALARM_SHARE, CLEAR
from mergegate.tasks.quality.gate.evidence import GuardEvidence, MetricDrop
from mergegate.tasks.quality.gate.regression import judge_guards
from mergegate.tasks.quality.gate.sequential import InterimLook, error_at_look, plan_looks
from mergegate.tasks.quality.gate.settings import Guard
from mergegate.tasks.quality.gate.statistics import binary_bounds
from mergegate.tasks.quality.gate.suite import judge_suite

CONFIDENCE = 0.95
GUARD = Guard(task="group", guarded_by="base")  # the defaults: max_drop 2, margin 3, limit 11, leaf_limit 40
MAX_DROP = GUARD.max_drop / 100
Array = NDArray[np.float64]
# Test questions of the 57 subjects of MMLU (14,042).
MMLU = (100, 135, 152, 100, 265, 144, 100, 100, 100, 173, 102, 100, 235, 114, 145, 378, 126, 100, 310, 203, 100, 165)
MMLU += (198, 193, 390, 270, 238, 151, 545, 216, 204, 237, 223, 131, 121, 108, 163, 112, 103, 234, 100, 783, 346, 895)
MMLU += (306, 311, 324, 282, 1534, 272, 612, 110, 245, 201, 100, 166, 171)
# Documents of the 39 tasks of `leaderboard` (21,606): IFEval first, then BBH, GPQA, MATH, MuSR and MMLU-Pro.
LEADERBOARD = (541, *[250] * 21, 187, 146, 178, 198, 546, 448, 307, 123, 132, 280, 154, 193, 135, 250, 256, 250, 12032)
GROUPS = {"mmlu": (MMLU, (0.5, 0.3)), "leaderboard": (LEADERBOARD, (0.2, 0.4, 0.52))}  # drops of the first task
DISCORDANCES = (0.05, 0.10, 0.20)


class Published(NamedTuple):
    """Share of simulated merges that are published, and the mean number of documents until the decision."""

    share: float
    documents: float


class Counts(NamedTuple):
    """Documents of each task of a group, in arrays ``[merges, tasks]``."""

    documents: NDArray[np.int64]
    lost: Array
    won: Array


class Decided(NamedTuple):
    """Outcome of each merge at one look."""

    passes: NDArray[np.bool_]
    fails: NDArray[np.bool_]


def judge_look(
    counts: Counts, look: InterimLook, schedule: tuple[int, ...], *, as_suite: bool, alarms: bool
) -> Decided:
    """Judge many merges of a group at one look, as ``judge_guards`` does for one merge with the defaults.

    With ``as_suite``, the group is a task of a suite whose mean passes at every look.
    """
    n, is_last = look.documents, look.number == look.of
    low, high = binary_bounds(counts.lost.sum(1), counts.won.sum(1), n, look.confidence)
    drop = (counts.lost - counts.won).sum(1) / n
    if as_suite:
        passes, fails = high <= GUARD.catastrophe / 100, low > MAX_DROP
    else:
        passes = (drop <= MAX_DROP) & (high <= GUARD.upper_limit / 100)
        fails = (drop > (MAX_DROP if is_last else GUARD.upper_limit / 100)) & (low > 0)
    if alarms:
        documents = np.maximum(counts.documents, 1)
        # The first step of Holm's procedure decides whether there is any alarm.
        error = error_at_look(schedule, n, ALARM_SHARE * (1 - CONFIDENCE)) / documents.shape[1]
        changed = np.maximum(counts.lost + counts.won, 1)
        chance = (1 + np.minimum(1, MAX_DROP * documents / changed)) / 2
        is_exact = np.where(counts.lost > 0, bdtrc(counts.lost - 1, changed.astype(int), chance), 1.0) <= error
        is_above = binary_bounds(counts.lost, counts.won, documents, 1 - error)[0] > MAX_DROP  # type: ignore[arg-type]
        fails = fails | (is_exact & is_above & (counts.documents > 0)).any(1)
        if not is_last:
            limit = (GUARD.leaf_limit or 0) * np.sqrt(100 * n / schedule[-1] / documents)
            limit = np.maximum(limit, GUARD.catastrophe) / 100
            upper = binary_bounds(counts.lost, counts.won, documents, CLEAR)[1]  # type: ignore[arg-type]
            passes = passes & ~((upper > limit) & (limit < 1) & (counts.documents > 0)).any(1)
    return Decided(passes & ~fails, fails)


def group_rates(
    sizes: Sequence[int],
    drops: Array,
    discordance: float,
    runs: int,
    rng: np.random.Generator,
    *,
    as_suite: bool,
) -> tuple[Published, Published]:
    """Return how often merges are published, without and with alarms.

    ``drops`` (of 1) are the true drops of the group's tasks.
    """
    total, changed = sum(sizes), np.maximum(discordance, np.abs(drops))
    p_lost, p_won = (changed + drops) / 2, (changed - drops) / 2
    schedule = interim_looks(total, 500)
    shape = runs, len(sizes)
    counts = Counts(np.zeros(shape, dtype=np.int64), np.zeros(shape), np.zeros(shape))
    is_open, published, used = (np.full((2, runs), value) for value in (True, False, 0))
    before = 0
    for look in plan_looks(schedule, CONFIDENCE):
        remaining = np.asarray(sizes) - counts.documents
        new = np.array([rng.multivariate_hypergeometric(left, look.documents - before) for left in remaining])
        lost = rng.binomial(new, p_lost)
        won = rng.binomial(new - lost, np.clip(p_won / (1 - p_lost), 0, 1))
        counts = Counts(counts.documents + new, counts.lost + lost, counts.won + won)
        for kind in (0, 1):
            found = judge_look(counts, look, schedule, as_suite=as_suite, alarms=bool(kind))
            stops = is_open[kind] & (found.passes | found.fails | (look.number == look.of))
            published[kind] |= stops & found.passes
            used[kind][stops] = look.documents
            is_open[kind] &= ~stops
        before = look.documents
    shares, documents = published.mean(1), used.mean(1)
    return Published(shares[0], documents[0]), Published(shares[1], documents[1])


def suite_rates(tasks: int, n: int, discordance: float, runs: int, rng: np.random.Generator) -> tuple[float, float]:
    """Return how often an equal merge of a suite is published, without and with alarms of a second metric.

    On nine of ten documents, the second metric (``acc_norm`` next to ``acc``) changes like the judging one.
    """
    published = np.zeros(2)
    shares = [discordance / 2, 1 - discordance, discordance / 2]
    for _ in range(runs):
        measured = []
        for number in range(tasks):
            judging, own = rng.choice([-1.0, 0.0, 1.0], (2, n), p=shares)
            other = np.where(rng.random(n) < 0.9, judging, own)
            evidence = GuardEvidence(
                guard=Guard(task=f"task {number}", guarded_by="base"),
                metric="acc,none",
                reference="base",
                reference_score=0.6,
                merge_score=0.6 - judging.mean(),
                differences=tuple(judging.tolist()),
                binary=True,
                documents=n,
                schedule=(n,),
                other_metrics=(MetricDrop("acc_norm,none", tuple(other.tolist())),),
            )
            measured.append(evidence)
        mean = judge_suite(measured, CONFIDENCE).outcome
        for kind, some in enumerate(([replace(each, other_metrics=()) for each in measured], measured)):
            outcomes = {verdict.outcome for verdict in judge_guards(some, CONFIDENCE, as_suite=True)}
            published[kind] += {mean, *outcomes} == {"pass"}
    before, after = published / runs
    return float(before), float(after)


def alarm_tables(runs: int, rng: np.random.Generator) -> list[str]:
    """Return the tables of groups and of suites as Markdown."""
    heads = ("group", "judged", "drop of one task", *(f"discordance {each:.2f}" for each in DISCORDANCES))
    lines = ["<!-- alarms of groups -->", _row(heads), _rule(len(heads))]
    for name, (sizes, drops) in GROUPS.items():
        for as_suite in (False, True):
            for drop in (0.0, *drops):
                lost = np.array([drop, *[0.0] * (len(sizes) - 1)])
                cells = [_rates(group_rates(sizes, lost, each, runs, rng, as_suite=as_suite)) for each in DISCORDANCES]
                lines.append(_row((name, "in a suite" if as_suite else "alone", f"{100 * drop:g}", *cells)))
    margin = GUARD.upper_limit / 100
    for name, (sizes, _) in GROUPS.items():
        lost = np.full(len(sizes), margin)
        cells = [_rates(group_rates(sizes, lost, each, 5 * runs, rng, as_suite=False)) for each in DISCORDANCES]
        lines.append(_row((name, "alone", "all by 3", *cells)))
    lines += ["<!-- /alarms of groups -->", "", "<!-- alarms of suites -->"]
    discordances = (*DISCORDANCES, 0.30)
    lines += [_row(("suite", *(f"discordance {each:.2f}" for each in discordances))), _rule(1 + len(discordances))]
    for tasks, n in ((6, 1000), (7, 500)):
        rates = [suite_rates(tasks, n, discordance, runs, rng) for discordance in discordances]
        cells = [f"{100 * before:.1f} → {100 * after:.1f}" for before, after in rates]
        lines.append(_row((f"{tasks} of {n:,}", *cells)))
    return [*lines, "<!-- /alarms of suites -->"]


def _rates(published: tuple[Published, Published]) -> str:
    before, after = published
    shares = f"{100 * before.share:.1f} → {100 * after.share:.1f}"
    return f"{shares} · {before.documents:,.0f} → {after.documents:,.0f}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _rule(columns: int) -> str:
    return "|" + " --: |" * columns
