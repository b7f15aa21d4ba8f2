"""Run a search whose candidates are scored by a formula of the recipe and a seed."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergegate.tasks.sweep import HandWritten, Ledger, Study, TrialRequest, TrialScores, open_ledger, study_key
from mergegate.tasks.sweep.objective import MetricKey, Objective, ScoresByMetric, make_objective
from mergegate.tasks.sweep.search import SearchProblem, search
from mergegate.tasks.sweep.settings import SweepSettings
from mergegate.tasks.sweep.space import Space, make_space, recipe_key
from mergegate.tasks.sweep.study import request_key

TIES = {
    "merge_method": "ties",
    "base_model": "base",
    "dtype": "bfloat16",
    "parameters": {"lambda": 1.0},
    "models": [
        {"model": "math", "parameters": {"weight": "$math", "density": "$density"}},
        {"model": "code", "parameters": {"weight": "$code", "density": "$density"}},
    ],
}
WEIGHT = {"low": 0.2, "high": 1.8, "start": 1.0}
TIES_PARAMETERS: dict[str, Any] = {"math": WEIGHT, "code": WEIGHT, "density": {"low": 0.05, "high": 1.0, "start": 0.5}}
REV, COPY = MetricKey("rev", "exact"), MetricKey("copy", "exact")
Quality = Callable[[dict[str, Any]], float]


def by_weights(recipe: dict[str, Any]) -> float:
    """Return the probability of a correct answer, which is highest at weights 0.6 and 1.4."""
    first, second = (model["parameters"]["weight"] for model in recipe["models"])
    return 0.9 - 0.4 * ((first - 0.6) ** 2 + (second - 1.4) ** 2)


class ToyModels:
    """Models that score recipes in a shuffled order and count how often each recipe was scored.

    Args:
        documents: Number of documents per set and task.
        shared: Fraction of the variance of a document's outcome that all recipes share.
    """

    def __init__(self, quality: Quality = by_weights, documents: int = 200, shared: float = 0.6, seed: int = 0) -> None:
        self._quality, self._documents, self._shared, self._seed = quality, documents, shared, seed
        self.scored: Counter[str] = Counter()
        self.documents_scored = 0

    def score_table(self, request: TrialRequest) -> ScoresByMetric:
        return {key: self._numbers(request, key) for key in (REV, COPY)}

    def score(self, request: TrialRequest) -> TrialScores:
        self.scored[request_key(request)] += 1
        table = self.score_table(request)
        for look, share in enumerate(request.race.looks if request.race else (1.0,)):
            part = {key: numbers[: int(np.ceil(share * len(numbers)))] for key, numbers in table.items()}
            if request.race and request.race.should_drop(part, look):
                self.documents_scored += sum(map(len, part.values()))
                return TrialScores(part, dropped=True, seconds={"merge": 0.5, "score": share})
        self.documents_scored += sum(map(len, table.values()))
        return TrialScores(table, change=0.25, seconds={"merge": 0.5, "score": 1.0})

    def __call__(self, requests: Sequence[TrialRequest]) -> Iterator[tuple[int, TrialScores | Exception]]:
        order = np.random.default_rng(len(self.scored)).permutation(len(requests))
        for number in map(int, order):
            yield number, self.score(requests[number])

    def _numbers(self, request: TrialRequest, key: MetricKey) -> NDArray[np.float64]:
        """Return 1 for each document whose normal variate is below the quantile of the recipe's quality, else 0.

        All recipes share a part of each document's variate.
        """
        from scipy.special import ndtri

        def draw(part: str) -> NDArray[np.float64]:
            seed = int(hashlib.sha256(f"{part} {request.document_set} {key.task}".encode()).hexdigest()[:12], 16)
            return np.random.default_rng([seed, self._seed]).standard_normal(self._documents)

        shared, alone = draw("all"), draw(recipe_key(request.recipe))
        latent = np.sqrt(self._shared) * shared + np.sqrt(1 - self._shared) * alone
        return (latent < ndtri(np.clip(self._quality(dict(request.recipe)), 0.01, 0.99))) * 1.0


def toy_settings(**more: Any) -> SweepSettings:
    objective = [{"task": "rev", "measure": "exact", "weight": 2}, {"task": "copy", "measure": "exact"}]
    settings = {"parameters": TIES_PARAMETERS, "objective": objective, "budget": {"trials": 40}, **more}
    return settings_of(settings.pop("parameters"), **settings)


def toy_space(settings: SweepSettings) -> Space:
    return make_space(TIES, settings, 4, "r.yaml")


def toy_objective(settings: SweepSettings) -> Objective:
    return make_objective(settings, {"rev": "rev", "copy": "copy"})


def run_toy(models: Any, directory: Path, settings: SweepSettings | None = None, **more: Any) -> Study:
    """Run one search with a ledger in ``directory``."""
    settings = settings or toy_settings()
    space = toy_space(settings)
    with open_ledger("0" * 64, study_key(space, settings), root=directory) as ledger:
        return search_toy(models, ledger, settings, **more)


def search_toy(models: Any, ledger: Ledger, settings: SweepSettings, **more: Any) -> Study:
    space, objective = toy_space(settings), toy_objective(settings)
    by_hand, references = more.pop("hand_written", (hand_written_ties(space),)), more.pop("references", {})
    return search(SearchProblem(space, settings, objective, by_hand, references), models, ledger, **more)


def hand_written_ties(space: Space) -> HandWritten:
    """Return the searched recipe with its start values."""
    return HandWritten("ties", space.fill_recipe(space.start))


def settings_of(parameters: dict[str, Any], **more: Any) -> SweepSettings:
    return SweepSettings.model_validate(
        {"objective": [{"task": "rev", "measure": "exact"}], "parameters": parameters, **more}
    )


def space_of(recipe: dict[str, Any], parameters: dict[str, Any], layers: int | None = 4, **more: Any) -> Space:
    return make_space(recipe, settings_of(parameters, **more), layers, "r.yaml")


def ties_space() -> Space:
    return space_of(TIES, TIES_PARAMETERS)
