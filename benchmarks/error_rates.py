"""Simulate how often the gate passes a bad or an equal merge: graded scores, clusters, duplicates and perplexity.

The tables are in ``graded-and-clustered-error-rates.md``, ``graded-and-clustered-power.md``,
``duplicate-documents.md`` and ``perplexity-error-rates.md`` under ``dev/measurements``.

::

    .venv/bin/python benchmarks/operating_characteristics.py graded --markdown      # a quarter of an hour on one core
    .venv/bin/python benchmarks/operating_characteristics.py clusters --markdown    # two minutes
    .venv/bin/python benchmarks/operating_characteristics.py duplicates --runs 4000 --markdown    # two minutes
    .venv/bin/python benchmarks/operating_characteristics.py perplexity --runs 2000 --markdown    # half an hour

Merges are drawn, not run. The gate's functions decide them (``gate.graded_scores``, ``gate.clusters``,
``gate.statistics``), which accept arrays of many samples. A merge that fails at an early interim look
is still judged at the next one, so the published share is overstated. ``gate.drift.judge_drift`` decides about
perplexity, one merge at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from mergegate.tasks.quality.evaluation.document_order import interim_looks
from mergegate.tasks.quality.gate.clusters import (
    MIN_CLUSTERS,
    cluster_errors,
    critical_value,
    effective_clusters,
    interval_over_units,
)
from mergegate.tasks.quality.gate.drift import ModelLikelihoods, judge_drift
from mergegate.tasks.quality.gate.graded_scores import refutes
from mergegate.tasks.quality.gate.regression import decide_guard
from mergegate.tasks.quality.gate.sequential import plan_looks
from mergegate.tasks.quality.gate.statistics import binary_bounds, binary_difference
from mergegate.tasks.quality.perplexity import DocumentLikelihood, DriftLimits
from mergegate.tasks.quality.perplexity.measurement import TextMeasurement
from mergegate.tasks.quality.perplexity.stage import total_likelihood

CONFIDENCE = 0.95
MARGIN = 0.03  # ``max_drop`` is equal to it, the hardest case: only the bound can stop a merge
AT_ONCE = 4_000_000  # numbers drawn in one step, 32 MB

# --- graded scores

DOCUMENTS = (50, 100, 200, 500, 1000, 2000, 5000)

Draw = Callable[[tuple[int, int], float, np.random.Generator], NDArray[np.float64]]


def _ruined(
    equal: NDArray[np.float64], reference: NDArray[np.float64], mean: float, drop: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Make equal merges worse: their answers score zero on enough documents to lose ``drop`` on average.

    ``equal`` holds differences with a mean of zero. ``reference`` holds the reference's scores, drawn independently of
    ``equal``, with the mean ``mean``.
    """
    return np.where(rng.random(equal.shape) < drop / mean, reference, equal)


def f1(shape: tuple[int, int], drop: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw scores that are 30 % zero, 40 % full and 30 % partial; a quarter differ between models."""

    def score() -> NDArray[np.float64]:
        kind = rng.random(shape)
        return np.where(kind < 0.3, 0.0, np.where(kind < 0.7, 1.0, rng.random(shape)))

    equal = np.where(rng.random(shape) < 0.25, score() - score(), 0.0)
    return _ruined(equal, score(), 0.55, drop, rng)


def rouge(shape: tuple[int, int], drop: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw low scores with a long tail, Beta(2, 6); both models share half of each score."""
    equal = (rng.beta(2, 6, shape) - rng.beta(2, 6, shape)) / 2
    return _ruined(equal, rng.beta(2, 6, shape), 0.25, drop, rng)


def marks(shape: tuple[int, int], drop: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw a judge's marks from 1 to 10: mostly 7 to 9, half of them one or two higher or lower."""
    steps = rng.choice([-2, -1, 0, 1, 2], shape, p=[0.1, 0.15, 0.5, 0.15, 0.1]) / 9
    mark = rng.choice([2, 4, 6, 7, 8], shape, p=[0.05, 0.1, 0.3, 0.35, 0.2]) / 9
    return _ruined(steps, mark, (0.1 + 0.4 + 1.8 + 2.45 + 1.6) / 9, drop, rng)


def rare_losses(shape: tuple[int, int], drop: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw merges that lose everything on 1 document in 100 (more with ``drop``) and gain a point on all others."""
    return np.where(rng.random(shape) < (drop + 0.01) / 1.01, 1.0, -0.01)


def ties(shape: tuple[int, int], drop: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw differences that are zero in 19 of 20 cases."""
    equal = np.where(rng.random(shape) < 0.05, rng.uniform(-1, 1, shape), 0.0)
    return _ruined(equal, rng.uniform(0, 1, shape), 0.5, drop, rng)


def continuous(shape: tuple[int, int], drop: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw normal differences with a standard deviation of .15."""
    return drop + np.clip(rng.normal(0, 0.15, shape), -0.6, 0.6)


def all_or_nothing(shape: tuple[int, int], drop: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw merges that equal the reference except on documents where they lose everything; this hides a drop best."""
    return (rng.random(shape) < drop).astype(np.float64)


def subjects(shape: tuple[int, int], drop: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw ten mixed subjects in fixed shares; half of them lose 20 points and half gain as many."""
    samples, n = shape
    shift = np.where(np.arange(n) < n / 2, 0.2, -0.2) + (0.0 if n % 2 == 0 else -0.2 / n)
    shifts = rng.permuted(np.broadcast_to(shift, (samples, n)), axis=1)
    return drop + shifts + np.clip(rng.normal(0, 0.05, shape), -0.2, 0.2)


SHAPES: dict[str, Draw] = {
    "F1, mass at 0 and 1": f1,
    "ROUGE, Beta(2, 6)": rouge,
    "marks 1 to 10": marks,
    "rare great losses": rare_losses,
    "19 of 20 tie": ties,
    "continuous": continuous,
    "all or nothing": all_or_nothing,
    "subjects apart": subjects,
}


class Published(NamedTuple):
    """Shares of simulated merges that are published."""

    ours: float
    students: float


def published(
    draw: Draw, drop: float, schedule: tuple[int, ...], runs: int, rng: np.random.Generator, margin: float = MARGIN
) -> Published:
    """Return how often merges that are truly ``drop`` worse are published, by our bound and by Student's.

    ``schedule`` is the number of documents after each interim look, and ``margin`` is in (0, 1).
    """
    ours = students = 0
    at_once = max(1, AT_ONCE // schedule[-1])
    for first in range(0, runs, at_once):
        samples = min(at_once, runs - first)
        differences = draw((samples, schedule[-1]), drop, rng)
        passed, before = np.zeros(samples, dtype=bool), np.zeros(samples, dtype=bool)
        for look in plan_looks(schedule, CONFIDENCE):
            seen = differences[:, : look.documents]
            passed |= refutes(seen, margin, CONFIDENCE, schedule)
            quantile = stdtrit(look.documents - 1, look.confidence)
            half = quantile * seen.std(axis=1, ddof=1) / math.sqrt(look.documents)
            floor = binary_bounds(np.zeros(1), np.zeros(1), look.documents, look.confidence)[1][0]
            before |= seen.mean(axis=1) + np.maximum(half, floor) <= margin
        ours, students = ours + int(passed.sum()), students + int(before.sum())
    return Published(ours / runs, students / runs)


def graded(runs: int, rng: np.random.Generator) -> list[str]:
    """Return one row per shape and number of looks: published at the margin and when equal, ours and Student's."""
    rows = []
    for what, drop, samples in (("at the margin", MARGIN, runs), ("equal", 0.0, max(1, runs // 10))):
        rows += [_row(what, "looks", *(f"{n:,}" for n in DOCUMENTS)), _rule(2 + len(DOCUMENTS))]
        digits = 1 if drop else 0
        for name, draw in SHAPES.items():
            for parts in (1, 4):
                cells = []
                for n in DOCUMENTS:
                    found = published(draw, drop, interim_looks(n, math.ceil(n / parts)), samples, rng)
                    cells.append(" · ".join(f"{100 * share:.{digits}f}" for share in found))
                rows.append(_row(name, str(len(interim_looks(100, 100 // parts))), *cells))
        rows.append("")
    return rows[:-1]


# --- clusters

# Numbers of questions of the 57 subjects in MMLU's test set.
MMLU = (
    *(1534, 895, 783, 612, 545, 390, 378, 346, 324, 311, 310, 306, 282, 272, 270, 265, 245, 238, 237, 235, 234, 223),
    *(216, 204, 203, 201, 198, 193, 173, 171, 166, 165, 163, 152, 151, 145, 144, 135, 131, 126, 121, 114, 112, 110),
    *(108, 103, 102, *(100,) * 10),
)
SIZES: dict[str, tuple[int, ...]] = {
    "4 equal": (250,) * 4,
    "6 equal": (250,) * 6,
    "6 unequal": (100, 150, 200, 300, 400, 500),
    "10 equal": (250,) * 10,
    "20, one of half": (*(50,) * 19, 950),
    **{f"{count} equal": (250,) * count for count in (14, 20, 30)},
    "30 unequal": tuple(round(20 * 1.1**position) for position in range(30)),
    "57 equal": (250,) * 57,
    "57 of MMLU": MMLU,
}
SPREADS = (0.02, 0.06, 0.10)
NOISE = 0.2  # standard deviation of one document's graded difference
EFFECTS: dict[str, Callable[[tuple[int, int], np.random.Generator], NDArray[np.float64]]] = {
    "normal": lambda shape, rng: rng.standard_normal(shape),
    "skewed": lambda shape, rng: rng.standard_exponential(shape) - 1,
    "a fifth falls": lambda shape, rng: np.where(rng.random(shape) < 0.2, 2.0, -0.5),
}


def clusters_published(
    sizes: Sequence[int], drop: float, spread: float, effects: str, binary: bool, runs: int, rng: np.random.Generator
) -> Published:
    """Return how often merges whose clusters lose ``drop`` on average are published.

    The result compares our interval with the previous one, Student's with ``G - 1`` degrees of freedom.

    ``spread`` is the standard deviation of the clusters' losses, and ``effects`` is one of ``EFFECTS``. With
    ``binary``, answers are right or wrong, with a discordance of .10 or more if the cluster's drop needs it. Without
    it, scores are graded.
    """
    counts = np.asarray(sizes)
    n, groups = int(counts.sum()), len(counts)
    lost_by = np.clip(drop + spread * EFFECTS[effects]((runs, groups), rng), -1, 1)
    if binary:
        discordance = np.maximum(0.10, np.abs(lost_by))
        changed = rng.binomial(counts, discordance)
        lost = rng.binomial(changed, (1 + lost_by / discordance) / 2)
        means = (2 * lost - changed) / counts
        floor = binary_bounds(lost.sum(axis=1).astype(float), (changed - lost).sum(axis=1).astype(float), n, CONFIDENCE)
        high = floor[1]
    else:
        means = lost_by + rng.standard_normal((runs, groups)) * NOISE / np.sqrt(counts)
        high = np.full(runs, -1.0)  # the bound over documents could only add to ours
    mean = means @ counts / n
    deviations = means - mean[:, None]
    ours = mean + critical_value(tuple(sorted(sizes)), CONFIDENCE) * cluster_errors(deviations, counts)
    error = np.sqrt(groups / (groups - 1) * ((deviations * counts) ** 2).sum(axis=1)) / n
    before = mean + stdtrit(groups - 1, CONFIDENCE) * error
    return Published(
        float((np.maximum(ours, high) <= MARGIN).mean()), float((np.maximum(before, high) <= MARGIN).mean())
    )


def clusters(runs: int, rng: np.random.Generator) -> list[str]:
    """Return one row per set of clusters: published at the margin and when equal, our interval and the previous one."""
    rows = []
    for what, drop in (("at the margin", MARGIN), ("equal", 0.0)):
        kinds = [("none", 0.0), *((kind, spread) for kind in EFFECTS for spread in SPREADS)]
        rows.append(_row(what, "count as", "scores", *(f"{k} {s:.2f}" if s else k for k, s in kinds)))
        rows.append(_rule(3 + len(kinds)))
        digits = 1 if drop else 0
        for name, sizes in SIZES.items():
            refused = effective_clusters(sizes) < MIN_CLUSTERS - 1e-9
            for scores in ("binary", "graded"):
                cells = []
                for kind, spread in kinds:
                    effects = kind if spread else "normal"
                    found = clusters_published(sizes, drop, spread, effects, scores == "binary", runs, rng)
                    shares = [f"{100 * share:.{digits}f}" for share in found]
                    cells.append(" · ".join(["refused", shares[1]] if refused else shares))
                rows.append(_row(name, f"{effective_clusters(sizes):.1f}", scores, *cells))
        rows.append("")
    return rows[:-1]


# --- perplexity

TEXTS = (24, 100, 300, 1000)  # numbers of documents
LOSS_LIMIT = math.log(1.05)  # nats per token, the default limit of perplexity
LOSS_NOISE = 0.05  # standard deviation of one document's loss, in nats per token
LENGTHS: dict[str, Callable[[int, np.random.Generator], NDArray[np.float64]]] = {  # tokens
    "equal": lambda n, rng: np.full(n, 300.0),
    "lognormal": lambda n, rng: np.ceil(np.exp(rng.normal(5.0, 1.5, n))) + 15,
    "Pareto": lambda n, rng: np.ceil(np.minimum(2_000_000, 50 * (1 + rng.pareto(1.2, n)))),
}


def even(n: int, mean: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw normal losses around ``mean``."""
    return mean + rng.normal(0, LOSS_NOISE, n)


def few_lose_all(n: int, mean: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw losses of 0.20 nats (0.48 in 100 documents or more), the most that counts, on a few documents only."""
    most = (9.9 if n >= 100 else 4.0) * LOSS_LIMIT  # below 0.5 nats, so that no document counts as broken
    return np.where(rng.random(n) < (mean + 0.005) / (most + 0.005), most, -0.005)


def one_in_a_hundred(n: int, mean: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw losses of 4 nats on 1 % of the documents; the others lose so much that the mean is ``mean``."""
    return np.where(rng.random(n) < 0.01, 4.0, even(n, (mean - 0.04) / 0.99, rng))


def broken_share(n: int, mean: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw equal losses except on broken documents, whose share is the smallest that ``n`` documents can exclude."""
    share = max(0.01, 1 - (1 - CONFIDENCE) ** (1 / n))
    return np.where(rng.random(n) < share, 4.0, even(n, 0.0, rng))


# Merges whose loss is at a limit: lengths of the documents, and losses.
AT_A_LIMIT: dict[str, tuple[str, Callable[[int, float, np.random.Generator], NDArray[np.float64]]]] = {
    "equal lengths": ("equal", even),
    "lognormal lengths": ("lognormal", even),
    "Pareto lengths": ("Pareto", even),
    "few documents lose most": ("lognormal", few_lose_all),
    "broken documents at their limit": ("equal", broken_share),
    "1 % of documents lose 4 nats": ("equal", one_in_a_hundred),
}


def text_published(
    lengths: str,
    losses: Callable[[int, float, np.random.Generator], NDArray[np.float64]],
    mean: float,
    n: int,
    runs: int,
    rng: np.random.Generator,
) -> Published:
    """Return how often merges whose documents lose ``mean`` nats per token are published.

    The result compares the gate with the previous rule: the ratio over all tokens, with a delta-method interval.
    """
    ours = before = 0
    for _ in range(runs):
        tokens, lost = LENGTHS[lengths](n, rng), losses(n, mean, rng)
        sides = [
            [DocumentLikelihood(i, -length * (2.0 + loss), int(length), 4 * int(length)) for i, length, loss in rows]
            for rows in (zip(range(n), tokens, np.zeros(n), strict=True), zip(range(n), tokens, lost, strict=True))
        ]
        reference, merge = (
            ModelLikelihoods(total_likelihood(name, TextMeasurement(rows, "", 2048, 0)), tuple(rows))
            for name, rows in zip(("reference", "merge"), sides, strict=True)
        )
        ours += judge_drift({"reference": reference}, merge, DriftLimits(), CONFIDENCE).outcome == "pass"
        ratio = float((lost * tokens).sum() / tokens.sum())
        error = math.sqrt(n / (n - 1) * float((((lost - ratio) * tokens) ** 2).sum())) / tokens.sum()
        before += ratio + float(stdtrit(n - 1, CONFIDENCE)) * error <= LOSS_LIMIT
    return Published(ours / runs, before / runs)


def perplexity(runs: int, rng: np.random.Generator) -> list[str]:
    """Return one row per kind of text: published at a limit and when equal, by the gate and by the previous rule."""
    rows = []
    for what, mean in (("at a limit", LOSS_LIMIT), ("equal", 0.0)):
        counts = TEXTS[:-1] if mean else TEXTS  # 1,000 documents take a quarter of a second per merge
        rows += [_row(what, *(f"{n:,}" for n in counts)), _rule(1 + len(counts))]
        kinds = AT_A_LIMIT if mean else {f"{lengths} lengths": (lengths, even) for lengths in LENGTHS}
        for name, (lengths, losses) in kinds.items():
            cells = [text_published(lengths, losses, mean, n, runs if mean else max(1, runs // 4), rng) for n in counts]
            rows.append(_row(name, *(" · ".join(f"{100 * share:.1f}" for share in found) for found in cells)))
        rows.append("")
    return rows[:-1]


# --- duplicates

# Number of documents with each prompt, by description.
REPEATS: dict[str, tuple[int, ...]] = {
    "500 twice": (2,) * 500,
    "120 eleven times": (11,) * 120,
    "950 once, 25 twice": (1,) * 950 + (2,) * 25,
    "1,000 once, 50 ten times": (1,) * 1000 + (10,) * 50,
    "one to ten times, 20 each": tuple(range(1, 11)) * 20,
}
DISCORDANCE = 0.10


def duplicates_published(
    sizes: Sequence[int], drop: float, only_repeated: bool, runs: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Return how often a merge that loses ``drop`` is published, with and without the rule for equal prompts.

    Every document with the same prompt has the same outcome. If ``only_repeated``, the merge loses only documents
    whose prompt is one of the most frequent, and wins none. Otherwise, all prompts are lost or won alike.
    """
    counts = np.asarray(sizes)
    n, members = int(counts.sum()), np.repeat(np.arange(len(counts)), counts)
    lost, won = np.full(len(counts), (DISCORDANCE + drop) / 2), np.full(len(counts), (DISCORDANCE - drop) / 2)
    if only_repeated:
        heavy = counts == counts.max()
        lost, won = np.where(heavy, min(1.0, drop * n / counts[heavy].sum()), 0.0), np.zeros(len(counts))
    passed = np.zeros(2)
    for _ in range(runs):
        draws = rng.random(len(counts))
        differences = np.where(draws < lost, 1.0, np.where(draws < lost + won, -1.0, 0.0))[members]
        intervals = (
            interval_over_units(differences, members, (n,), CONFIDENCE, CONFIDENCE),
            binary_difference(int((differences > 0).sum()), int((differences < 0).sum()), n, CONFIDENCE),
        )
        for position, found in enumerate(intervals):
            points = (100 * value for value in found[:3])
            # ``max_drop`` equals the margin, the hardest case: only the bound can stop a merge.
            passed[position] += decide_guard(*points, max_drop=100 * MARGIN, margin=100 * MARGIN) == "pass"
    return float(passed[0] / runs), float(passed[1] / runs)


def duplicates(runs: int, rng: np.random.Generator) -> list[str]:
    """Return one row per pattern of repetition: published with the rule and, after the dot, without it."""
    heads = ("prompts", "documents", "at the margin", "lost among the most repeated", "equal", "equal, prompts once")
    rows = [_row(*heads), _rule(len(heads))]
    for name, sizes in REPEATS.items():
        cells = []
        for drop, only_repeated in ((MARGIN, False), (MARGIN, True), (0.0, False)):
            shares = duplicates_published(sizes, drop, only_repeated, runs, rng)
            cells.append(" · ".join(f"{100 * share:.1f}" for share in shares))
        alone = duplicates_published((1,) * len(sizes), 0.0, False, runs, rng)[1]
        rows.append(_row(name, f"{sum(sizes):,}", *cells, f"{100 * alone:.1f}"))
    return rows


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _rule(columns: int) -> str:
    return "|" + " --: |" * columns


TABLES = {"graded": graded, "clusters": clusters, "duplicates": duplicates, "perplexity": perplexity}


def print_table(name: str, runs: int, seed: int, markdown: bool) -> None:
    """Print one of ``TABLES``, preceded by its introductory sentence if ``markdown``."""
    if markdown:
        error = 100 * math.sqrt(0.05 * 0.95 / runs)
        equal_runs = {"graded": runs // 10, "perplexity": runs // 4}.get(name)
        fewer = f", of {equal_runs:,} where equal" if equal_runs else ""
        others = {
            "perplexity": "the previous rule, which counted tokens",
            "duplicates": "the interval over all documents",
        }
        other = others.get(name, "Student's interval")
        print(
            f"Merges that pass, in percent of {runs:,} simulated merges{fewer} (Monte Carlo standard error {error:.2f} "
            f"at 5 %): by the gate and, after the dot, by {other}.\n"
        )
    print("\n".join(TABLES[name](runs, np.random.default_rng(seed))))
