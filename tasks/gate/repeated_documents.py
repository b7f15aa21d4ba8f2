"""Count documents that repeat a prompt as one independent unit. Pure functions.

A model answers equal prompts equally, so a question that occurs eleven times is one observation, not eleven. An
interval over documents is then too narrow. The drop stays the mean over documents, and a unit has the weight
``w_g = n_g / n``, its share of the documents. ``interval_over_units`` uses the intervals of ``statistics`` and
``graded_scores`` with an *effective* number of independent documents, the smaller of two::

    1 / sum_g w_g^2                 Kish's effective sample size, if all units vary alike (Kish 1965, Survey Sampling)
    s^2 / se^2 + 1                  from the CR2 error of the sample, if heavy units vary more than others

If all units have the same size, this is exactly the interval over the units. Units of unequal size have another risk:
a sample without a lost heavy unit shows neither the loss nor its variance. Each bound is therefore at least
``w_max * ln(1 / alpha)`` from the drop. If every unit with this weight is lost with a probability that costs more than
that, the chance that the sample contains none of the losses is below ``alpha`` (the *rule of three*).

Clusters (``tasks.gate.clusters``) model the same dependence, but their simulated quantile covers few, large and
different clusters. For thousands of small units it is wider than necessary and takes minutes to simulate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from mergegate.tasks.evaluation import DocumentScore
from mergegate.tasks.gate.clusters import cluster_errors
from mergegate.tasks.gate.graded_scores import graded_difference
from mergegate.tasks.gate.statistics import Difference, binary_difference


def find_units(rows: Sequence[DocumentScore]) -> tuple[int, ...] | None:
    """Return the independent unit of each document, numbered by first occurrence, or None if all are independent.

    Documents with the same prompt are one unit, and so are equal documents of one task, whose prompts can differ by
    random few-shot examples. If all documents of a task have the same prompt (as in BLiMP, where only the choices
    differ), the prompt does not identify a document and is ignored.
    """
    prompts: dict[str, set[str]] = {}
    contents: dict[str, set[str]] = {}
    for row in rows:
        prompts.setdefault(row.task, set()).add(row.prompt_hash)
        contents.setdefault(row.task, set()).add(row.doc_hash)
    keys = []
    for row in rows:
        is_shared_by_all = len(prompts[row.task]) == 1 < len(contents[row.task])
        prompt = () if is_shared_by_all or not row.prompt_hash else (("prompt", row.prompt_hash),)
        document = (("document", row.task, row.doc_hash),) if row.doc_hash else ()
        keys.append((*prompt, *document))
    units = connect(keys)
    return units if len(set(units)) < len(units) else None


def connect(keys: Sequence[Iterable[object]]) -> tuple[int, ...]:
    """Return the group of each item, numbered by first occurrence. Items that share a key are in the same group."""
    parents = list(range(len(keys)))

    def root(item: int) -> int:
        while parents[item] != item:
            parents[item] = parents[parents[item]]
            item = parents[item]
        return item

    first: dict[object, int] = {}
    for item, own in enumerate(keys):
        for key in own:
            one, other = root(first.setdefault(key, item)), root(item)
            parents[max(one, other)] = min(one, other)
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(root(item), len(numbers)) for item in range(len(keys)))


def join_clusters(clusters: Sequence[str], units: Sequence[int]) -> tuple[str, ...]:
    """Return the cluster of each document, where clusters that share a unit are joined under the name of the first."""
    groups = connect([(("cluster", name), ("unit", unit)) for name, unit in zip(clusters, units, strict=True)])
    names: dict[int, str] = {}
    return tuple(names.setdefault(group, name) for group, name in zip(groups, clusters, strict=True))


def interval_over_units(
    differences: Sequence[float] | NDArray[np.float64],
    units: Sequence[int] | NDArray[np.int64],
    schedule: Sequence[int],
    confidence: float,
    level: float | None,
) -> Difference:
    """Return the mean difference over documents, with bounds for units as the independent observations.

    Args:
        differences: Reference minus merge for each document, in [-1, 1], in scoring order.
        units: Unit of each document (see ``find_units``).
        schedule: Number of documents after each planned look.
        confidence: One-sided confidence of each bound over all looks together.
        level: Confidence of this look for scores of 0 or 1, or None for graded scores.
    """
    values = np.asarray(differences, dtype=np.float64)
    n, mean = len(values), float(values.mean())
    members = np.asarray(units)
    sizes = np.bincount(members)
    unit_means = np.bincount(members, weights=values) / sizes
    count, weights = len(sizes), sizes / n
    error = float(cluster_errors(unit_means - mean, sizes)) if count > 1 else 1.0
    by_size = 1 / float(weights @ weights)
    if level is not None:
        effective = min(by_size, float(values.var()) / error**2 + 1 if error > 0 else math.inf)
        share = effective / n
        plain = binary_difference(
            float((values > 0).sum()) * share, float((values < 0).sum()) * share, effective, level
        )
        below, above, variance = mean - plain.low, plain.high - mean, plain.variance / share
    else:
        # The number of units at another look is unknown. It affects the bets, but not the validity of a bound.
        ends = sorted({max(1, round(end * count / n)) for end in schedule} | {count})
        plain = graded_difference(unit_means, confidence, ends)
        stretch = max(1.0, count / by_size, error**2 * count / plain.variance if plain.variance > 0 else 1.0)
        below, above = (math.sqrt(stretch) * side for side in (plain.mean - plain.low, plain.high - plain.mean))
        variance = stretch * plain.variance * n / count
    if sizes.min() < sizes.max():
        least = float(weights.max()) * -math.log(1 - (confidence if level is None else level))
        below, above = max(below, least), max(above, least)
    return Difference(mean, max(-1.0, mean - below), min(1.0, mean + above), variance)
