"""Documents that belong together: an interval for a population of clusters (subjects, passages). Pure functions.

Two questions can be asked of a group of tasks, and they have different answers. *The same subjects, new questions*:
subjects are strata of fixed weights, each document stands for others of its subject, and the interval over documents
holds (it even counts the differences between subjects as noise, which they are not). *New subjects*: what one subject
loses is a single observation, however many questions it has. This file answers the second, and passages alike.

The drop is the mean over documents, so a cluster weighs as many as it has: ``w_g = n_g / n``. With ``S_g`` the sum of a
cluster's deviations from the mean, its squared error is that of Bell & McCaffrey (2002, Surv. Methodol. 28:169), CR2,
which is unbiased where clusters do not differ::

    se^2 = sum_g S_g^2 / (1 - w_g) / n^2

Its ratio to the error that was made is no Student's t: clusters that differ make it too small where they are of unequal
size, and a mean whose rare bad clusters are missing from the sample comes with an error that misses them too. Degrees
of freedom (Satterthwaite's) mend the first in part, the second not at all. So the quantile is simulated, for these very
weights and several kinds of clusters, and the largest is taken: normal effects; exponential ones, which are skewed; no
effects, only the noise of documents; and a share of the clusters that falls while the others hold, a fifth or more. Of
fewer than 14 clusters there may be none that falls in more than 5 % of samples, and no look at them can tell.
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

FALLING = (0.2, 0.25, 0.3, 0.4)  # shares of the clusters that fall
FEWEST_CLUSTERS = 14.0  # of equal size: the fewest of which one among a fifth is nearly always met

_NUMBERS = 4_000_000  # drawn for each kind of clusters, as far as that makes
_SAMPLES = (20_000, 100_000)  # at least, at most
_AT_ONCE = 1_000_000  # numbers, 8 MB


def effective_clusters(sizes: Sequence[int]) -> float:
    """As many clusters of equal size know as much where clusters differ: ``1 / sum(w_g^2)``.

    Never more than there are; Carter, Schnepel & Steigerwald (2017, Rev. Econ. Stat. 99:698) with clusters of one
    variance and documents that go together fully.
    """
    total = sum(sizes)
    return 1.0 / sum((size / total) ** 2 for size in sizes)


def check_clusters(clusters: Sequence[str], by: str, task: str) -> None:
    """See that there are enough clusters to speak for others.

    Args:
        clusters: Of each document; empty texts where it is not known.
        by: 'task', or the field that says it.
        task: What messages call the guard.

    Raises:
        InvalidInput: where one is unknown, there is only one, or a few hold most of the documents.
    """
    where = f"evaluate.tasks: {task}: cluster_by"
    if not clusters or "" in clusters:
        raise InvalidInput(
            where,
            found=f"{by!r}, which is not known of every document",
            expected="'task', or a field that every document of the task has",
        )
    sizes = Counter(clusters)
    remedy = "population: new questions, without cluster_by, where the verdict need not speak for other clusters"
    if len(sizes) < 2:
        found = f"all documents in one cluster ({clusters[0]})"
        raise InvalidInput(where, found=found, expected=f"{FEWEST_CLUSTERS:g} or more, better dozens", remedy=remedy)
    effective = effective_clusters(list(sizes.values()))
    if effective < FEWEST_CLUSTERS - 1e-9:
        name, most = sizes.most_common(1)[0]
        raise InvalidInput(
            where,
            found=f"{len(sizes)} clusters that count as {effective:.1f} of equal size "
            f"({name} has {100 * most / len(clusters):.0f} % of the documents)",
            expected=f"{FEWEST_CLUSTERS:g} or more: among fewer, those that fall are too easily missed",
            remedy=remedy,
        )


def clustered_difference(
    differences: Sequence[float], clusters: Sequence[str], plain: Difference, confidence: float
) -> Difference:
    """The interval where clusters, not documents, are the independent units.

    Never narrower than ``plain``: an error that is estimated from few clusters can come out small by chance.

    Args:
        differences: Reference minus merge for each document, in [-1, 1].
        clusters: The cluster of each document; at least 2 different ones.
        plain: The interval without clusters, on the same documents at the same confidence.
        confidence: One-sided, each way, of this look.
    """
    values = np.asarray(differences, dtype=np.float64)
    n, mean = len(values), float(values.mean())
    _, members = np.unique(np.asarray(clusters), return_inverse=True)
    sizes = np.bincount(members)
    sums = np.bincount(members, weights=values - mean)
    error = float(cluster_errors(sums / sizes, sizes))
    # Clusters that are all alike have an error of nothing; then the interval over documents is the wider one.
    half = min(2.0, critical_value(tuple(sorted(sizes.tolist())), confidence) * error) if error > 0 else 0.0
    low, high = max(-1.0, mean - half), min(1.0, mean + half)
    return Difference(mean, min(plain.low, low), max(plain.high, high), max(plain.variance, n * error**2))


def cluster_errors(deviations: NDArray[np.float64], sizes: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard errors of weighted means by CR2, for many samples at once.

    Args:
        deviations: Of each cluster's mean from the weighted mean; ``[..., clusters]``.
        sizes: Documents of each cluster.
    """
    weights = np.asarray(sizes, dtype=np.float64) / np.sum(sizes)
    errors: NDArray[np.float64] = np.sqrt((deviations**2) @ (weights**2 / (1 - weights)))
    return errors


@lru_cache(maxsize=1024)
def critical_value(sizes: tuple[int, ...], confidence: float) -> float:
    """By how many standard errors the mean may lie below or above the truth; one-sided.

    The order statistic of the simulated ratios that errs to the safe side by two standard deviations of their number.
    Infinite, or as good as, where ``confidence`` is more than can be simulated or than so few clusters allow: an early
    look that must be so sure decides nothing.

    Args:
        sizes: Documents of each cluster, ascending.
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
    """Errors of a weighted mean over what CR2 makes of them, sorted, for each kind of clusters: normal, noise,
    exponential, and shares that fall. Seeded."""
    rng = np.random.default_rng(0)
    clusters = len(sizes)
    samples = int(np.clip(_NUMBERS // clusters, *_SAMPLES))
    each = max(1, _AT_ONCE // clusters)
    spread = 1 / np.sqrt(np.asarray(sizes, dtype=np.float64))
    weights = np.asarray(sizes, dtype=np.float64) / sum(sizes)
    found = []
    kinds: list[Callable[[tuple[int, int]], NDArray[np.float64]]] = [
        lambda shape: rng.standard_normal(shape),
        lambda shape: rng.standard_normal(shape) * spread,
        lambda shape: rng.standard_exponential(shape) - 1,
        *(lambda shape, share=share: (rng.random(shape) < share) - share for share in FALLING),
    ]
    for kind in kinds:
        ratios = []
        for first in range(0, samples, each):
            effects = kind((min(each, samples - first), clusters))
            means = effects @ weights
            errors = cluster_errors(effects - means[:, None], sizes)
            # Where all are alike to the last digit, the error is nothing and says nothing.
            ratios.append(means / np.where(errors > 1e-9, errors, 1e-300))
        found.append(np.sort(np.concatenate(ratios)))
    return tuple(found)
