"""Simulate how often a greedy soup contains a model that does not help, with the product's own functions.

::

    .venv/bin/python benchmarks/soup_simulation.py --soups 1000     # eight minutes of CPU

The results are the table of ``dev/measurements/soups.md``. Only the models are drawn. Search, confirmation and their
bounds are those of the product, and the true score of every soup is known.

A soup ``S`` of models with the qualities ``a_i`` has the quality ``mean(a_i) + boost * (1 - 1 / |S|)``: the average of
several models can be better than each of them. The score of a document depends on the quality, on the document, which
is the same for all soups, and on the average of the noise of the models. Soups that share models have similar scores.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from mergegate.merge_core.files import RecordJournal
from mergegate.tasks.sweep import (
    Confirmation,
    HandWritten,
    Ledger,
    MetricKey,
    SearchProblem,
    Study,
    SweepSettings,
    Trial,
    TrialRequest,
    TrialScores,
    confirm_soup,
    make_objective,
    make_space,
    read_soup_recipe,
    search,
)

Array = NDArray[np.float64]
_SHARED = 0.6  # part of the variance of a document's score that all soups share
_CLIP = 0.1  # nats per token
_CLUSTER_SHARED = 0.5  # part of the variance that the documents of a cluster share
# Points of a standard normal variable with equal weights, to compute true means.
_GRID = ndtri((np.arange(4096) + 0.5) / 4096)


class Scenario(NamedTuple):
    """One row of the table.

    Args:
        qualities: Quality of each model in points of accuracy at 80 %, in random order for each soup.
        boost: Quality that an average of many models gains over a single one, in points.
        documents: Number of documents of the search and of the confirmation.
        measure: ``exact``, or ``log_likelihood`` with a clip.
        margin: See ``sweep.margin``.
        cluster: Number of documents per cluster. Default: documents are independent.
    """

    qualities: tuple[float, ...]
    boost: float = 0.0
    documents: tuple[int, int] = (200, 400)
    measure: str = "exact"
    margin: float = 0.0
    cluster: int = 1


USELESS, HARMFUL = (0.0,) * 8, (0.0, *(-1.0,) * 7)
MIXED = (0.0, 0.0, -1.0, -3.0, -6.0, -10.0, -20.0, -30.0)
SCENARIOS = {
    "useless, exact match": Scenario(USELESS),
    "useless, log-likelihood": Scenario(USELESS, measure="log_likelihood"),
    "useless, 32 models": Scenario((0.0,) * 32),
    "useless, 50 and 50 documents": Scenario(USELESS, documents=(50, 50)),
    "useless, clusters of 4": Scenario(USELESS, documents=(200, 400), cluster=4),
    "slightly harmful": Scenario(HARMFUL),
    "useless, margin 1": Scenario((0.0, *(-2.0,) * 7), margin=1.0),
    "mixed": Scenario(MIXED, boost=8.0),
    "mixed, log-likelihood": Scenario(MIXED, boost=8.0, measure="log_likelihood"),
    "mixed, 1,600 documents": Scenario(MIXED, boost=8.0, documents=(400, 1600)),
    "useful": Scenario(USELESS, boost=8.0),
    "useful, log-likelihood": Scenario(USELESS, boost=8.0, measure="log_likelihood"),
    "useful, margin 1": Scenario(USELESS, boost=8.0, margin=1.0),
}


@dataclass
class DrawnModels:
    """A scorer of soups of drawn models, with known true scores."""

    scenario: Scenario
    seed: int

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.qualities = rng.permutation(np.asarray(self.scenario.qualities)) / 100
        self._shared, self._own = {}, {}
        for name, count in zip(("search", "confirmation"), self.scenario.documents, strict=True):
            size, models = self.scenario.cluster, len(self.qualities)

            def draw(rows: int, count: int = count, size: int = size) -> Array:
                """Return standard normal variates, which the documents of a cluster partly share."""
                alone = rng.standard_normal((rows, count))
                if size == 1:
                    return alone
                together = np.repeat(rng.standard_normal((rows, -(-count // size))), size, axis=1)[:, :count]
                return np.asarray(math.sqrt(_CLUSTER_SHARED) * together + math.sqrt(1 - _CLUSTER_SHARED) * alone)

            self._shared[name], self._own[name] = draw(1)[0], draw(models)

    def chosen(self, recipe: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(int(entry["model"]) for entry in recipe["models"])

    def quality(self, chosen: Collection[int]) -> float:
        mean = float(np.mean([self.qualities[index] for index in chosen]))
        return mean + self.scenario.boost / 100 * (1 - 1 / len(chosen))

    def values(self, chosen: Collection[int], latent: Array) -> Array:
        """Return the score of each document, given its standard normal variate."""
        accuracy = min(max(0.8 + self.quality(chosen), 0.01), 0.99)
        if self.scenario.measure == "exact":
            return np.asarray(latent < ndtri(accuracy), dtype=np.float64)
        return np.asarray(-0.02 * (1 - accuracy) / 0.2 * np.exp(1.5 * latent))

    def true_score(self, chosen: Collection[int]) -> float:
        if self.scenario.measure == "exact":
            return float(ndtr(ndtri(min(max(0.8 + self.quality(chosen), 0.01), 0.99))))
        return float(np.maximum(self.values(chosen, _GRID), -_CLIP).mean())

    def numbers(self, recipe: Mapping[str, Any], document_set: str) -> Array:
        chosen = list(self.chosen(recipe))
        own = self._own[document_set][chosen].sum(axis=0) / math.sqrt(len(chosen))
        return self.values(chosen, math.sqrt(_SHARED) * self._shared[document_set] + math.sqrt(1 - _SHARED) * own)

    @property
    def key(self) -> MetricKey:
        return MetricKey("task", "exact" if self.scenario.measure == "exact" else "log_likelihood")

    def __call__(self, requests: Sequence[TrialRequest]) -> Iterator[tuple[int, TrialScores | Exception]]:
        for number, request in enumerate(requests):
            yield number, TrialScores({self.key: self.numbers(request.recipe, request.document_set)})

    def clusters(self) -> dict[MetricKey, list[str]] | None:
        size = self.scenario.cluster
        return {self.key: [str(i // size) for i in range(self.scenario.documents[1])]} if size > 1 else None


class Outcome(NamedTuple):
    """One simulated soup.

    Args:
        size: Number of models in the confirmed soup, 1 if only the best model is left.
        false: Number of ingredients whose true contribution is at most minus the margin.
        greedy_size: Size of the soup of the greedy search.
        greedy_false: Number of its ingredients whose true contribution was not above minus the margin when they joined.
        lead: True score of the soup minus that of the best model on the search documents.
        greedy_lead: The same for the soup of the greedy search.
        is_confirmed: Whether the lead of the soup was confirmed.
        is_wrong: Whether it was confirmed, but the best ingredient or the average of all models is at least as good.
    """

    size: int
    false: int
    greedy_size: int
    greedy_false: int
    lead: float
    greedy_lead: float
    is_confirmed: bool
    is_wrong: bool


def simulate(scenario: Scenario, seed: int, confidence: float = 0.975) -> Outcome:
    """Search one soup and confirm it, and compare the result with the truth."""
    models = DrawnModels(scenario, seed)
    count = len(models.qualities)
    recipe = {
        "merge_method": "linear",
        "models": [{"model": str(index), "parameters": {"weight": 1.0}} for index in range(count)],
    }
    term: dict[str, Any] = {"task": "task", "measure": scenario.measure}
    term |= {"clip": _CLIP} if scenario.measure == "log_likelihood" else {}
    term |= {"cluster_by": "page"} if scenario.cluster > 1 else {}
    settings = SweepSettings.model_validate(
        {"soup": "greedy", "objective": [term], "margin": scenario.margin, "confidence": confidence}
    )
    soup = read_soup_recipe(recipe, "drawn.yaml")
    problem = SearchProblem(
        make_space(recipe, settings, None, "drawn.yaml"),
        settings,
        make_objective(settings, {"task": "task"}),
        (HandWritten("uniform soup", soup.soup_of(range(count))),),
        soup=soup,
    )
    study = search(problem, models, Ledger(RecordJournal(None), ""))

    def score(trial: Trial) -> dict[MetricKey, Array]:
        return {models.key: models.numbers(study.recipes[trial.number], "confirmation")}

    return _compare(study, confirm_soup(study, score, models.clusters()), models)


def _compare(study: Study, confirmed: Any, models: DrawnModels) -> Outcome:
    assert study.soup is not None
    label_index = [int(item.ingredient) for item in study.soup.ingredients]
    threshold = -models.scenario.margin / 100 + 1e-12

    def false_count(order: Sequence[int]) -> int:
        """Return how many models of an order did not contribute more than minus the margin when they joined."""
        scores = [models.true_score(order[: size + 1]) for size in range(len(order))]
        return sum(after - before <= threshold for before, after in pairwise(scores))

    outcomes = [result.outcome for result in confirmed.soup.ingredients]
    kept = [index for index, outcome in zip(label_index, outcomes, strict=True) if outcome in ("first", "kept")]
    greedy = [label_index[position] for position in study.soup.positions]
    first = models.true_score(kept[:1])
    is_confirmed = isinstance(confirmed, Confirmation) and confirmed.confirmed
    truth = models.true_score(kept)
    everything = range(len(label_index))
    rival = max(first, models.true_score(everything) if len(kept) < len(label_index) else -math.inf)
    return Outcome(
        size=len(kept),
        false=false_count(kept),
        greedy_size=len(greedy),
        greedy_false=false_count(greedy),
        lead=truth - first,
        greedy_lead=models.true_score(greedy) - first,
        is_confirmed=is_confirmed,
        is_wrong=is_confirmed and truth <= rival + 1e-12,
    )


def run(scenario: Scenario, soups: int, first_seed: int = 0, confidence: float = 0.975) -> list[Outcome]:
    return [simulate(scenario, seed, confidence) for seed in range(first_seed, first_seed + soups)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--soups", type=int, default=1000)
    parser.add_argument("--only", choices=SCENARIOS, help="run one scenario")
    arguments = parser.parse_args()
    began = time.process_time()
    columns = (
        "models",
        "false inclusion",
        "false inclusion, greedy only",
        "false confirmation",
        "confirmed",
        "size",
        "size, greedy only",
        "lead",
        "lead, greedy only",
    )
    print(f"| {' | '.join(columns)} |\n| --- | {' | '.join(['--:'] * (len(columns) - 1))} |")
    for name, scenario in SCENARIOS.items():
        if arguments.only not in (None, name):
            continue
        found = run(scenario, arguments.soups)

        def share(has: Callable[[Outcome], object], found: list[Outcome] = found) -> str:
            return f"{100 * sum(bool(has(one)) for one in found) / len(found):.1f} %"

        def mean(of: Callable[[Outcome], float], found: list[Outcome] = found) -> float:
            return float(np.mean([of(one) for one in found]))

        factor = 100 if scenario.measure == "exact" else 1000  # points, or thousandths of a nat
        cells = (
            name,
            share(lambda one: one.false),
            share(lambda one: one.greedy_false),
            share(lambda one: one.is_wrong),
            share(lambda one: one.is_confirmed),
            f"{mean(lambda one: one.size):.1f}",
            f"{mean(lambda one: one.greedy_size):.1f}",
            f"{factor * mean(lambda one: one.lead):+.2f}",
            f"{factor * mean(lambda one: one.greedy_lead):+.2f}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\n{time.process_time() - began:.0f} s of CPU time")


if __name__ == "__main__":
    main()
