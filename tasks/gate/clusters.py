"""Compute intervals for a population of clusters, such as subjects or passages. Pure functions.

Two questions about a group of tasks have different answers. *The same subjects, new questions*: subjects are strata of
fixed weights, each document represents others of its subject, and the interval over documents is valid (it even counts
the differences between subjects as noise, which is conservative). *New subjects*: the loss of one subject is a single
observation, however many questions it has. This module answers the second question, and treats passages the same way.

The drop is the mean over documents, so a cluster has the weight of its documents: ``w_g = n_g / n``. With ``S_g`` the
sum of a cluster's deviations from the mean, the squared error is CR2 by Bell & McCaffrey (2002, Surv. Methodol.
28:169), which is unbiased if clusters do not differ::

    se^2 = sum_g S_g^2 / (1 - w_g) / n^2

The ratio of the actual error to this estimate does not follow Student's t. The estimate is too small if clusters differ
and have unequal sizes, and a sample that misses rare bad clusters also has an error that misses them. Satterthwaite's
degrees of freedom correct the first problem in part and the second not at all. The quantile is therefore simulated for
the given weights and several kinds of clusters, and the largest quantile wins: normal effects; exponential effects,
which are skewed; no effects, only noise of documents; and a share of the clusters (a fifth or more) that falls while
the others do not change. With fewer than 14 clusters, more than 5 % of samples contain no falling cluster, and no
analysis of the sample can detect that.
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

FALLING = (0.2, 0.25, 0.3, 0.4)  # Shares of the clusters that fall.
MIN_CLUSTERS = 14.0  # Fewest clusters of equal size whose samples nearly always contain one of the falling fifth.

_NUMBERS = 4_000_000  # Target number of draws for each kind of clusters.
_SAMPLES = (20_000, 100_000)  # Fewest and most samples.
_AT_ONCE = 1_000_000  # Numbers per batch, 8 MB.


def effective_clusters(sizes: Sequence[int]) -> float:
    """Return the number of equal clusters that carry as much information if clusters differ: ``1 / sum(w_g^2)``.

    It never exceeds the number of clusters. See Carter, Schnepel & Steigerwald (2017, Rev. Econ. Stat. 99:698), with
    clusters of one variance and fully correlated documents.
    """
    total = sum(sizes)
    return 1.0 / sum((size / total) ** 2 for size in sizes)


def check_clusters(clusters: Sequence[str], by: str, task: str) -> None:
    """Check that the clusters suffice to draw conclusions about other clusters.

    Args:
        clusters: Name of the cluster of each document. It is an empty string if the cluster is unknown.
        by: ``task``, or the name of the field that contains the cluster.
        task: Name of the guard, for messages.

    Raises:
        InvalidInput: The cluster of a document is unknown, there is only one cluster, or a few clusters contain most of
            the documents.
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
    """Return the interval if clusters, not documents, are the independent units.

    It is never narrower than ``plain``, because an error estimated from few clusters can be small by chance.

    Args:
        differences: Reference minus merge for each document, in [-1, 1].
        clusters: Cluster of each document, with at least 2 different values.
        plain: Interval without clusters, on the same documents at the same confidence.
        confidence: One-sided confidence in each direction at this look.
    """
    values = np.asarray(differences, dtype=np.float64)
    n, mean = len(values), float(values.mean())
    _, members = np.unique(np.asarray(clusters), return_inverse=True)
    sizes = np.bincount(members)
    sums = np.bincount(members, weights=values - mean)
    error = float(cluster_errors(sums / sizes, sizes))
    # Identical clusters have an error of zero, and then the interval over documents is the wider one.
    half = min(2.0, critical_value(tuple(sorted(sizes.tolist())), confidence) * error) if error > 0 else 0.0
    low, high = max(-1.0, mean - half), min(1.0, mean + half)
    return Difference(mean, min(plain.low, low), max(plain.high, high), max(plain.variance, n * error**2))


def cluster_errors(deviations: NDArray[np.float64], sizes: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
    """Return standard errors of weighted means by CR2, vectorized over samples.

    Args:
        deviations: Deviation of each cluster's mean from the weighted mean; ``[..., clusters]``.
        sizes: Number of documents of each cluster.
    """
    weights = np.asarray(sizes, dtype=np.float64) / np.sum(sizes)
    errors: NDArray[np.float64] = np.sqrt((deviations**2) @ (weights**2 / (1 - weights)))
    return errors


@lru_cache(maxsize=1024)
def critical_value(sizes: tuple[int, ...], confidence: float) -> float:
    """Return how many standard errors the mean may be below or above the truth; one-sided.

    The value is the order statistic of the simulated ratios that errs on the safe side by two standard deviations of
    their count. It is infinite, or practically so, if ``confidence`` is higher than can be simulated or than so few
    clusters allow. An early look that needs such confidence decides nothing.

    Args:
        sizes: Number of documents of each cluster, ascending.
        confidence: One-sided confidence, in (0, 1).
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
    """Return the sorted ratios of the actual error to the CR2 estimate, for each kind of clusters, from a fixed seed.

    The kinds are normal, noise, exponential, and shares that fall.
    """
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
