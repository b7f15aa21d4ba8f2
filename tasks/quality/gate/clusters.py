"""Compute the interval of a drop if documents are not independent: they form clusters, or repeat one another.

Clusters are subjects or passages. A verdict on a group of tasks can cover *new questions* on the same subjects.
Subjects are then strata with fixed weights, and the interval over documents is valid (it counts the differences between
subjects as noise, which is conservative). A verdict can also cover *new subjects*. The loss on one subject is then a
single observation, however many questions the subject has. ``clustered_difference`` computes the second kind of
interval. All functions are pure.

The drop is the mean over documents, so a cluster's weight is its share of the documents: ``w_g = n_g / n``. ``S_g`` is
the sum of a cluster's deviations from the mean. The squared error is CR2 by Bell & McCaffrey (2002, Surv. Methodol.
28:169), which is unbiased if clusters do not differ::

    se^2 = sum_g S_g^2 / (1 - w_g) / n^2

The ratio of the actual error to this estimate does not follow Student's t. The estimate is too small if clusters of
unequal size differ, or if the sample misses rare bad clusters. Satterthwaite's degrees of freedom correct the first
problem in part and the second not at all. The quantile is therefore simulated for the given weights and several kinds
of clusters, and the largest one is used: clusters with normal effects; with exponential (skewed) effects; without
effects, so that only documents vary; and a share (a fifth or more) of falling clusters while the others do not change.
With fewer than 14 clusters, more than 5 % of samples contain none of the falling clusters, and no analysis of such a
sample can detect them.

Documents that repeat a prompt are one *unit* (``interval_over_units``). Clusters model the same dependence, but their
simulated quantile covers few, large and different clusters. For thousands of small units it is wider than necessary and
takes minutes to simulate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.quality.evaluation import DocumentScore
from mergegate.tasks.quality.gate.graded_scores import graded_difference
from mergegate.tasks.quality.gate.statistics import Difference, binary_difference

FALLING = (0.2, 0.25, 0.3, 0.4)  # Simulated shares of clusters that fall.
MIN_CLUSTERS = 14.0  # With this many equal clusters, 95 % of samples contain a falling one.

_NUMBERS = 4_000_000  # Target number of draws for each kind of clusters.
_SAMPLES = (20_000, 100_000)  # Fewest and most samples.
_AT_ONCE = 1_000_000  # Numbers per batch, 8 MB.


def effective_clusters(sizes: Sequence[int]) -> float:
    """Return the number of equal clusters with as much information as clusters of these sizes: ``1 / sum(w_g^2)``.

    It never exceeds the number of clusters. See Carter, Schnepel & Steigerwald (2017, Rev. Econ. Stat. 99:698), here
    with equal variances and fully correlated documents.
    """
    total = sum(sizes)
    return 1.0 / sum((size / total) ** 2 for size in sizes)


def check_clusters(clusters: Sequence[str], by: str, task: str) -> None:
    """Check that there are enough clusters to draw conclusions about other clusters.

    Args:
        clusters: Name of each document's cluster, or an empty string if it is unknown.
        by: ``task``, or the document field that contains the cluster.
        task: Name of the guard's task, for messages.
    """
    location = f"evaluate.tasks: {task}: cluster_by"
    if not clusters or "" in clusters:
        raise InvalidInput(
            location,
            found=f"{by!r}, which some documents lack",
            expected="'task', or a field that every document of the task has",
        )
    sizes = Counter(clusters)
    remedy = "use population: new questions without cluster_by, if the verdict need not cover other clusters"
    if len(sizes) < 2:
        description = f"all documents in one cluster ({clusters[0]})"
        raise InvalidInput(
            location, found=description, expected=f"{MIN_CLUSTERS:g} or more, preferably dozens", remedy=remedy
        )
    effective = effective_clusters(list(sizes.values()))
    if effective < MIN_CLUSTERS - 1e-9:
        name, most = sizes.most_common(1)[0]
        raise InvalidInput(
            location,
            found=f"{len(sizes)} clusters that count as {effective:.1f} of equal size "
            f"({name} has {100 * most / len(clusters):.0f} % of the documents)",
            expected=f"{MIN_CLUSTERS:g} or more, because a smaller sample easily misses the clusters that drop",
            remedy=remedy,
        )


def clustered_difference(
    differences: Sequence[float], clusters: Sequence[str], plain: Difference, confidence: float
) -> Difference:
    """Return the interval of the mean difference if clusters, not documents, are the independent units.

    It is never narrower than ``plain``, because an error estimated from few clusters can be small by chance.

    Args:
        differences: Reference minus merge for each document, in [-1, 1].
        clusters: Cluster of each document, with at least 2 different values.
        plain: Interval without clusters, on the same documents at the same confidence.
        confidence: One-sided confidence of each bound at this look.
    """
    values = np.asarray(differences, dtype=np.float64)
    n, mean = len(values), float(values.mean())
    # Number the clusters in order of occurrence, so that the last digits do not depend on their names.
    numbers = {name: number for number, name in enumerate(dict.fromkeys(clusters))}
    members = np.asarray([numbers[name] for name in clusters])
    sizes = np.bincount(members)
    sums = np.bincount(members, weights=values - mean)
    error = float(cluster_errors(sums / sizes, sizes))
    # If all clusters have the same mean, the error is zero and the interval over documents is the wider one.
    half = min(2.0, critical_value(tuple(sorted(sizes.tolist())), confidence) * error) if error > 0 else 0.0
    low, high = max(-1.0, mean - half), min(1.0, mean + half)
    return Difference(mean, min(plain.low, low), max(plain.high, high), max(plain.variance, n * error**2))


def cluster_errors(deviations: NDArray[np.float64], sizes: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the CR2 standard error of the weighted mean for each of many samples.

    ``deviations`` (``[..., clusters]``) are the deviations of the clusters' means from the weighted mean, and ``sizes``
    are the clusters' numbers of documents.
    """
    weights = np.asarray(sizes, dtype=np.float64) / np.sum(sizes)
    errors: NDArray[np.float64] = np.sqrt((deviations**2) @ (weights**2 / (1 - weights)))
    return errors


@lru_cache(maxsize=1024)
def critical_value(sizes: tuple[int, ...], confidence: float) -> float:
    """Return how many standard errors the sample mean may be from the true mean at a one-sided ``confidence``.

    The value is a quantile of the simulated ratios, on the safe side by two standard deviations of the count of ratios
    beyond it. It is (practically) infinite if ``confidence`` is too high for the simulation or for so few clusters. No
    look can decide at such a confidence.

    ``sizes`` holds the number of documents of each cluster, in ascending order so that results are cached.
    """
    largest = 0.0
    for ratios in _ratios(sizes):
        beyond = (1 - confidence) * len(ratios)
        rank = math.floor(beyond - 2 * math.sqrt(beyond))
        if rank < 1:
            return math.inf
        largest = max(largest, -float(ratios[rank - 1]), float(ratios[-rank]))
    return largest


@lru_cache(maxsize=64)
def _ratios(sizes: tuple[int, ...]) -> tuple[NDArray[np.float64], ...]:
    """Simulate samples of each kind of clusters, and return the sorted ratios of actual error to CR2 estimate."""
    rng = np.random.default_rng(0)
    clusters = len(sizes)
    samples = int(np.clip(_NUMBERS // clusters, *_SAMPLES))
    batch = max(1, _AT_ONCE // clusters)
    spread = 1 / np.sqrt(np.asarray(sizes, dtype=np.float64))
    weights = np.asarray(sizes, dtype=np.float64) / sum(sizes)
    ratios_by_kind = []
    kinds: list[Callable[[tuple[int, int]], NDArray[np.float64]]] = [
        lambda shape: rng.standard_normal(shape),
        lambda shape: rng.standard_normal(shape) * spread,
        lambda shape: rng.standard_exponential(shape) - 1,
        *(lambda shape, share=share: (rng.random(shape) < share) - share for share in FALLING),
    ]
    for kind in kinds:
        ratios = []
        for first in range(0, samples, batch):
            effects = kind((min(batch, samples - first), clusters))
            means = effects @ weights
            errors = cluster_errors(effects - means[:, None], sizes)
            # If all effects agree to the last digit, the estimated error is zero and carries no information.
            ratios.append(means / np.where(errors > 1e-9, errors, 1e-300))
        ratios_by_kind.append(np.sort(np.concatenate(ratios)))
    return tuple(ratios_by_kind)


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

    A model answers equal prompts equally, so a question that occurs eleven times is one observation, not eleven. An
    interval over documents is then too narrow. The drop stays the mean over documents, and a unit has the weight
    ``w_g = n_g / n``, its share of the documents. The intervals of ``statistics`` and ``graded_scores`` are computed
    with an *effective* number of independent documents, the smaller of two::

        1 / sum_g w_g^2             Kish's effective sample size, if all units vary alike (Kish 1965, Survey Sampling)
        s^2 / se^2 + 1              from the CR2 error of the sample, if heavy units vary more than others

    If all units have the same size, this is exactly the interval over the units. Units of unequal size have another
    risk: a sample without a lost heavy unit shows neither the loss nor its variance. Each bound is therefore at least
    ``w_max * ln(1 / alpha)`` from the drop. If every unit with this weight is lost with a probability that costs more
    than that, the chance that the sample contains none of the losses is below ``alpha`` (the *rule of three*).

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
