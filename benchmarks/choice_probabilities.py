"""What the probability of the right answer is worth: as a score of its own, and as a control variate of accuracy.

::

    .venv/bin/python benchmarks/choice_probabilities.py simulated            # half a minute
    .venv/bin/python benchmarks/choice_probabilities.py measured --work WORK # after benchmarks/siblings.py

``simulated``: merges are drawn and decided by the functions of the gate. A document has, for each model, a lead of the
right answer over the others (normal; the merge's is the reference's plus noise less what it lost); accuracy is whether
it is above zero, the probability its logistic. ``measured``: real models, document by document, from the scores that
``benchmarks/siblings.py`` left.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergegate.tasks.evaluation.document_scores import read_document_scores
from mergegate.tasks.gate.graded_scores import graded_documents_needed, refuted
from mergegate.tasks.gate.statistics import binary_bounds, documents_needed, normal_quantile

CONFIDENCE = 0.95
MARGIN = 0.03
SPREAD, STEEPNESS = 1.0, 1.5  # of the reference's leads; of the logistic
DOCUMENTS = 2000  # of the task, all of which the reference has answered
AT_ONCE = 2_000_000  # numbers

Array = NDArray[np.float64]


class Drawn(NamedTuple):
    """Many merges against a reference; ``[runs, documents]``."""

    right: Array  # of the reference: 1 or 0
    sure: Array  # of the reference: probability of the right answer
    differences: Array  # of accuracy, reference less merge
    graded: Array  # of the probability


def draw_leads(runs: int, n: int, noise: float, loss: float, rng: np.random.Generator) -> Drawn:
    """Leads of the reference and of merges that change them.

    Args:
        noise: Standard deviation of what the merge changes in a lead.
        loss: What it takes from each lead.
    """
    lead = rng.normal(0.3, SPREAD, (runs, n))
    merged = lead + rng.normal(0, noise, (runs, n)) - loss
    right, kept = (lead > 0).astype(np.float64), (merged > 0).astype(np.float64)
    sure, less_sure = (1 / (1 + np.exp(-STEEPNESS * one)) for one in (lead, merged))
    return Drawn(right, sure, right - kept, sure - less_sure)


def truth(noise: float, loss: float) -> tuple[float, float, float]:
    """True drop of accuracy and of the probability, and the discordance, by a million documents."""
    drawn = draw_leads(1, 1_000_000, noise, loss, np.random.default_rng(7))
    return float(drawn.differences.mean()), float(drawn.graded.mean()), float(np.abs(drawn.differences).mean())


def loss_for(noise: float, drop: float, *, graded: bool) -> float:
    """The loss at which accuracy, or the probability, truly falls by ``drop``; by bisection over the same documents."""
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
    """Merges that are published, of 1, by each way of judging them."""

    accuracy: float  # the gate's interval
    probability: float  # the gate's bound of graded scores, with the same margin
    as_far: float  # that bound, with the margin that accuracy's comes to in points of probability
    controlled: float  # accuracy less what the probability's drop explains, as if that had no drop of its own
    stratified: float  # accuracy, weighed by how the reference answers all documents


def published(noise: float, loss: float, n: int, runs: int, rng: np.random.Generator, as_far: float) -> Shares:
    """Share of merges whose upper bound is within the margin; ``as_far`` is another one for the probability."""
    margin, counts = MARGIN, np.zeros(5)
    for done in range(0, runs, max(1, AT_ONCE // DOCUMENTS)):
        some = min(max(1, AT_ONCE // DOCUMENTS), runs - done)
        drawn = draw_leads(some, DOCUMENTS, noise, loss, rng)
        d, p = drawn.differences[:, :n], drawn.graded[:, :n]
        high = binary_bounds((d > 0).sum(axis=1) * 1.0, (d < 0).sum(axis=1) * 1.0, n, CONFIDENCE)[1]
        sure, as_sure = (refuted(p, limit - 1e-9, CONFIDENCE, (n,)) for limit in (margin, as_far))
        shares = [high <= margin, sure, as_sure, _controlled(d, p) <= margin, _stratified(drawn, n) <= margin]
        counts += [float(share.sum()) for share in shares]
    return Shares(*(float(count) / runs for count in counts))


def _controlled(d: Array, p: Array) -> Array:
    """Upper bound of the mean of ``d - slope * p``, with the slope of the sample: right if ``p`` had a mean of zero."""
    slope = _covariance(d, p) / _covariance(p, p)
    rest = d - slope[:, None] * p
    return rest.mean(axis=1) + normal_quantile(CONFIDENCE) * rest.std(axis=1, ddof=1) / math.sqrt(d.shape[1])


def _stratified(drawn: Drawn, n: int) -> Array:
    """Upper bound from strata of the reference's answers, whose shares are known of all documents: right or wrong, by
    quarters of its probability."""
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
    """A model's marks and probabilities on one task, by document."""

    marks: dict[tuple[str, int], float]
    sure: dict[tuple[str, int], float]


def scores_in(home: Path) -> dict[tuple[str, str], Scored]:
    """By model and task, all that the store of ``home`` holds."""
    found: dict[tuple[str, str], Scored] = {}
    for value in sorted(home.glob("store/evaluate/*/value.json")):
        said = json.loads(value.read_text())
        one = found.setdefault((said["model"], said["tasks"][0]["task"]), Scored({}, {}))
        for row in read_document_scores(value.parent / "outcomes.parquet"):
            (one.marks if row.metric == "acc,none" else one.sure)[row.task, row.doc_id] = row.outcome
    return found


def print_measured(home: Path, reference: str) -> None:
    """Real models: what a document tells by either score, and how many documents an equal merge takes."""
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
    """Documents of a real comparison drawn anew, weighed so that a score truly falls by the margin or not at all."""
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
                shares.append(float(refuted(sure, MARGIN - 1e-9, CONFIDENCE, (n,)).mean()))
            print(f"| {merge} | {task} | {n:,} | " + " | ".join(f"{100 * share:.1f}" for share in shares) + " |")


def _tilted(values: Array, mean: float) -> Array:
    """Weights, summing to 1, that give ``values`` another mean and change them least (exponential tilting)."""
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
    """Share of the variance of ``d`` that lies between the strata of the reference's answers."""
    quarters = np.minimum(3, (sure * 4).astype(np.int64)) + 4 * right.astype(np.int64)
    between = sum(float((quarters == one).mean() * d[quarters == one].mean() ** 2) for one in np.unique(quarters))
    return (between - float(d.mean()) ** 2) / float(d.var()) if d.any() else 0.0


def print_simulated(runs: int) -> None:
    """Merges that are equal, and merges at the margin, by each way of judging them."""
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
