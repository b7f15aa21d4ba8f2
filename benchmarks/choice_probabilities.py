"""Measure the value of the right answer's probability, both as a score and as a control variate of accuracy.

::

    .venv/bin/python benchmarks/choice_probabilities.py simulated            # half a minute
    .venv/bin/python benchmarks/choice_probabilities.py measured --work WORK # after benchmarks/siblings.py

``simulated`` draws merges and decides them with the functions of the gate. For each model, the right answer of a
document leads the other answers by a normal amount. The merge's lead is the reference's lead plus noise, minus a loss.
An answer is correct if its lead is above zero, and its probability is the logistic function of the lead. ``measured``
compares real models document by document, based on the scores that ``benchmarks/siblings.py`` left.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergegate.tasks.quality.evaluation.scoring.document_scores import read_document_scores
from mergegate.tasks.quality.gate.graded_scores import graded_documents_needed, refutes
from mergegate.tasks.quality.gate.statistics import binary_bounds, documents_needed, normal_quantile

CONFIDENCE = 0.95
MARGIN = 0.03
SPREAD, STEEPNESS = 1.0, 1.5  # spread of the reference's leads, steepness of the logistic function
DOCUMENTS = 2000  # documents of the task; the reference has answered all of them
AT_ONCE = 2_000_000  # numbers drawn in one step

Array = NDArray[np.float64]


class Drawn(NamedTuple):
    """Many simulated merges and their reference; arrays have the shape ``[runs, documents]``."""

    right: Array  # reference: 1 if right, else 0
    sure: Array  # reference: probability of the right answer
    differences: Array  # accuracy of the reference minus that of the merge
    graded: Array  # probability of the reference minus that of the merge


def draw_leads(runs: int, n: int, noise: float, loss: float, rng: np.random.Generator) -> Drawn:
    """Draw leads of the reference and of merges that change them.

    ``noise`` is the standard deviation of the merge's change of a lead, and ``loss`` is subtracted from each lead.
    """
    lead = rng.normal(0.3, SPREAD, (runs, n))
    merged = lead + rng.normal(0, noise, (runs, n)) - loss
    right, kept = (lead > 0).astype(np.float64), (merged > 0).astype(np.float64)
    sure, less_sure = (1 / (1 + np.exp(-STEEPNESS * one)) for one in (lead, merged))
    return Drawn(right, sure, right - kept, sure - less_sure)


def truth(noise: float, loss: float) -> tuple[float, float, float]:
    """Estimate the true drops of accuracy and of probability, and the discordance, from a million documents."""
    drawn = draw_leads(1, 1_000_000, noise, loss, np.random.default_rng(7))
    return float(drawn.differences.mean()), float(drawn.graded.mean()), float(np.abs(drawn.differences).mean())


def loss_for(noise: float, drop: float, *, graded: bool) -> float:
    """Find the loss at which accuracy, or the probability, truly falls by ``drop``, by bisection."""
    low, high = -1.0, 2.0
    rng = np.random.default_rng(7)
    lead, change = rng.normal(0.3, SPREAD, 1_000_000), rng.normal(0, noise, 1_000_000)
    for _ in range(40):
        loss = (low + high) / 2
        merged = lead + change - loss
        if graded:
            fallen = float((1 / (1 + np.exp(-STEEPNESS * lead)) - 1 / (1 + np.exp(-STEEPNESS * merged))).mean())
        else:
            fallen = float((lead > 0).mean() - (merged > 0).mean())
        low, high = (loss, high) if fallen < drop else (low, loss)
    return (low + high) / 2


class Shares(NamedTuple):
    """Share (0 to 1) of merges that each way of judging publishes."""

    accuracy: float  # the gate's interval
    probability: float  # the gate's bound for graded scores, with the same margin
    as_far: float  # the same bound, with accuracy's margin converted to points of probability
    controlled: float  # accuracy minus what the drop of probability explains, as if its true drop were zero
    stratified: float  # accuracy, weighted by the reference's answers to all documents


def published(noise: float, loss: float, n: int, runs: int, rng: np.random.Generator, as_far: float) -> Shares:
    """Return the share of merges whose upper bound is within the margin; ``as_far`` is a margin for probability."""
    margin, counts = MARGIN, np.zeros(5)
    for done in range(0, runs, max(1, AT_ONCE // DOCUMENTS)):
        some = min(max(1, AT_ONCE // DOCUMENTS), runs - done)
        drawn = draw_leads(some, DOCUMENTS, noise, loss, rng)
        d, p = drawn.differences[:, :n], drawn.graded[:, :n]
        high = binary_bounds((d > 0).sum(axis=1) * 1.0, (d < 0).sum(axis=1) * 1.0, n, CONFIDENCE)[1]
        sure, as_sure = (refutes(p, limit - 1e-9, CONFIDENCE, (n,)) for limit in (margin, as_far))
        shares = [high <= margin, sure, as_sure, _controlled(d, p) <= margin, _stratified(drawn, n) <= margin]
        counts += [float(share.sum()) for share in shares]
    return Shares(*(float(count) / runs for count in counts))


def _controlled(d: Array, p: Array) -> Array:
    """Bound the mean of ``d - slope * p`` from above, with the sample's slope; valid if ``p`` has a mean of zero."""
    slope = _covariance(d, p) / _covariance(p, p)
    rest = d - slope[:, None] * p
    return rest.mean(axis=1) + normal_quantile(CONFIDENCE) * rest.std(axis=1, ddof=1) / math.sqrt(d.shape[1])


def _stratified(drawn: Drawn, n: int) -> Array:
    """Return the upper bound from strata of the reference's answers, whose shares are known for all documents.

    The strata are right or wrong answers, divided by quarters of the reference's probability.
    """
    quarters = np.minimum(3, (drawn.sure * 4).astype(np.int64)) + 4 * drawn.right.astype(np.int64)
    total = drawn.sure.shape[1]
    mean = np.zeros(len(quarters))
    within = np.zeros(len(quarters))
    between = np.zeros(len(quarters))
    for stratum in range(8):
        everywhere, here = quarters == stratum, quarters[:, :n] == stratum
        share, count = everywhere.mean(axis=1), here.sum(axis=1)
        known = np.maximum(count, 1)
        middle = (drawn.differences[:, :n] * here).sum(axis=1) / known
        squares = (drawn.differences[:, :n] ** 2 * here).sum(axis=1) / known - middle**2
        mean += share * middle
        within += share**2 * squares / known
        between += share * middle**2
    error = np.sqrt(within + np.maximum(0, between - mean**2) / total)
    return mean + normal_quantile(CONFIDENCE) * error


def _covariance(a: Array, b: Array) -> Array:
    return ((a - a.mean(axis=1)[:, None]) * (b - b.mean(axis=1)[:, None])).mean(axis=1)


class Scored(NamedTuple):
    """A model's scores and probabilities on one task, by document."""

    marks: dict[tuple[str, int], float]
    sure: dict[tuple[str, int], float]


def scores_in(home: Path) -> dict[tuple[str, str], Scored]:
    """Return all scores in the store of ``home``, by model and task."""
    found: dict[tuple[str, str], Scored] = {}
    for value in sorted(home.glob("store/evaluate/*/value.json")):
        said = json.loads(value.read_text())
        one = found.setdefault((said["model"], said["tasks"][0]["task"]), Scored({}, {}))
        for row in read_document_scores(value.parent / "outcomes.parquet"):
            (one.marks if row.metric == "acc,none" else one.sure)[row.task, row.doc_id] = row.outcome
    return found


def print_measured(home: Path, reference: str) -> None:
    """Print the information per document in real models' scores, and how many documents an equal merge needs."""
    known = scores_in(home)
    print(
        "| merge | task | documents | differ, % | drop acc | drop prob | spread acc | spread prob | correlation ",
        end="",
    )
    print("| explained, % | needed by acc | by prob | by prob, half the margin |")
    print("| --- | --- " + "| --: " * 11 + "|")
    for merge, task in sorted(one for one in known if one[0] != reference):
        theirs, ours = known[reference, task], known[merge, task]
        both = [document for document in ours.sure if document in theirs.sure]
        right, kept = (np.array([side.marks[one] for one in both]) for side in (theirs, ours))
        sure, less_sure = (np.array([side.sure[one] for one in both]) for side in (theirs, ours))
        d, p = right - kept, sure - less_sure
        spent = float(d.var(ddof=1)), float(p.var(ddof=1))
        needed = (
            documents_needed(spent[0], MARGIN, CONFIDENCE) if spent[0] else 0,
            graded_documents_needed(spent[1], MARGIN, CONFIDENCE),
            graded_documents_needed(spent[1], MARGIN / 2, CONFIDENCE),
        )
        alike = np.corrcoef(d, p)[0, 1] if spent[0] else math.nan
        print(
            f"| {merge} | {task} | {len(both):,} | {100 * np.abs(d).mean():.1f} | {100 * d.mean():.1f} "
            f"| {100 * p.mean():.2f} | {spent[0] ** 0.5:.3f} | {spent[1] ** 0.5:.3f} | {alike:.2f} "
            f"| {100 * _explained(right, sure, d):.0f} | {needed[0]:,} | {needed[1]:,} | {needed[2]:,} |"
        )


def print_resampled(home: Path, reference: str, runs: int) -> None:
    """Resample documents of a real comparison, weighted so that a score truly falls by the margin or not at all."""
    known, rng = scores_in(home), np.random.default_rng(0)
    print("| merge | task | documents | equal, by acc | by prob | at the margin, by acc | by prob |")
    print("| --- | --- " + "| --: " * 5 + "|")
    for merge, task in sorted(one for one in known if one[0] != reference):
        theirs, ours = known[reference, task], known[merge, task]
        both = sorted(theirs.sure.keys() & ours.sure.keys())
        d = np.array([theirs.marks[one] - ours.marks[one] for one in both])
        p = np.array([theirs.sure[one] - ours.sure[one] for one in both])
        if not p.min() < 0 < MARGIN < p.max() or not d.min() < 0 < d.max():
            continue
        for n in (120, 250, 500, 1000):
            shares = []
            for drop in (0.0, MARGIN):
                marks = rng.choice(d, (runs, n), p=_tilted(d, drop))
                lost, won = (marks > 0).sum(axis=1) * 1.0, (marks < 0).sum(axis=1) * 1.0
                shares.append(float((binary_bounds(lost, won, n, CONFIDENCE)[1] <= MARGIN).mean()))
                sure = rng.choice(p, (runs, n), p=_tilted(p, drop))
                shares.append(float(refutes(sure, MARGIN - 1e-9, CONFIDENCE, (n,)).mean()))
            print(f"| {merge} | {task} | {n:,} | " + " | ".join(f"{100 * share:.1f}" for share in shares) + " |")


def _tilted(values: Array, mean: float) -> Array:
    """Return weights, summing to 1, that give ``values`` another mean with the least change (exponential tilting)."""
    low, high = -500.0, 500.0
    weights: Array = np.full(len(values), 1 / len(values))
    for _ in range(80):
        middle = (low + high) / 2
        powers = middle * values
        weights = np.exp(powers - powers.max())
        weights /= weights.sum()
        low, high = (middle, high) if float(weights @ values) < mean else (low, middle)
    return weights


def _explained(right: Array, sure: Array, d: Array) -> float:
    """Return the share of the variance of ``d`` that is between the strata of the reference's answers."""
    quarters = np.minimum(3, (sure * 4).astype(np.int64)) + 4 * right.astype(np.int64)
    between = sum(float((quarters == one).mean() * d[quarters == one].mean() ** 2) for one in np.unique(quarters))
    return (between - float(d.mean()) ** 2) / float(d.var()) if d.any() else 0.0


def print_simulated(runs: int) -> None:
    """Print how each way of judging decides equal merges and merges at the margin."""
    print(
        "| documents | discordance | true drop | prob's | by acc | by prob | as far | controlled | by the reference |"
    )
    print("| " + "--: | " * 9)
    rng = np.random.default_rng(0)
    for noise in (0.15, 0.35):
        cases = {"equal": loss_for(noise, 0.0, graded=False), "acc": loss_for(noise, MARGIN, graded=False)}
        cases["prob"] = loss_for(noise, MARGIN, graded=True)
        as_far = truth(noise, cases["acc"])[1]
        for n in (250, 500, 1000):
            for loss in cases.values():
                drop, sure, discordance = truth(noise, loss)
                shares = published(noise, loss, n, runs, rng, as_far)
                print(
                    f"| {n:,} | {discordance:.2f} | {100 * drop:.1f} | {100 * sure:.1f} | "
                    + " | ".join(f"{100 * share:.1f}" for share in shares)
                    + " |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=("simulated", "measured"))
    parser.add_argument("--runs", type=int, default=3000, help="merges of a cell")
    parser.add_argument("--work", type=Path, help="that of benchmarks/siblings.py")
    given = parser.parse_args()
    if given.what == "simulated":
        print_simulated(given.runs)
    else:
        print_measured(given.work / "home-all", "science")
        print()
        print_resampled(given.work / "home-all", "science", given.runs)


if __name__ == "__main__":
    main()
