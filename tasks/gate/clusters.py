"""Compute the interval of a drop whose independent units are clusters of documents, such as subjects or passages.

A verdict on a group of tasks can cover *new questions* on the same subjects. Subjects are then strata with fixed
weights, and the interval over documents is valid (it counts the differences between subjects as noise, which is
conservative). A verdict can also cover *new subjects*. The loss on one subject is then a single observation, however
many questions the subject has. This module computes the second kind of interval. All functions are pure.

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
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.gate.statistics import Difference

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

    Raises:
        InvalidInput: A document's cluster is unknown, or the clusters count as fewer than 14 of equal size.
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
