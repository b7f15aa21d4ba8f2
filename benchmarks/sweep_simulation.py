"""Simulate how often a sweep confirms noise, and what early stopping saves, with the product's own functions.

::

    .venv/bin/python benchmarks/sweep_simulation.py lies     # sweeps of noise: ten minutes of CPU
    .venv/bin/python benchmarks/sweep_simulation.py racing   # documents saved: one minute

The results are the tables of ``dev/measurements/sweep-statistics.md``. Only the models are drawn. The quality of a
recipe, the document (which all recipes share) and chance decide a document's score. Space, sampler, search, racing,
ledger and confirmation are those of the product.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from mergegate.merge_core.files import RecordJournal
from mergegate.tasks.sweep import (
    Confirmation,
    HandWritten,
    Ledger,
    MetricKey,
    SearchProblem,
    Study,
    SweepSettings,
    TrialRequest,
    TrialScores,
    confirm,
    make_objective,
    make_space,
    reason_not_to_confirm,
    recipe_key,
    search,
)

Array = NDArray[np.float64]
CLIP = 0.1  # nats per token
WEIGHTS = (0.6, 1.4)  # position of the best candidates
RECIPE = {
    "merge_method": "ties",
    "base_model": "base",
    "models": [
        {"model": name, "parameters": {"weight": f"${name}", "density": f"$d_{name}"}} for name in ("math", "code")
    ],
}
WEIGHT = {"low": 0.2, "high": 1.8, "start": 1.0}
DENSITY = {"low": 0.05, "high": 1.0, "start": 0.5}


class Kind(NamedTuple):
    """The measure of a document, and the distance between candidates.

    Args:
        measure: ``exact`` or ``log_likelihood``.
        spread: Difference between the best and the hand-written recipe, in the share of right answers or the logarithm
            of nats. 0 means pure noise.
        shared: Part of a document's outcome that all recipes share.
    """

    measure: str
    spread: float
    shared: float
    clip: float | None = None


KINDS = {
    "exact match, wide": Kind("exact", 0.10, 0.6),
    "exact match, narrow": Kind("exact", 0.02, 0.6),
    "log-likelihood, clipped": Kind("log_likelihood", 0.4, 0.9, CLIP),
    "log-likelihood": Kind("log_likelihood", 0.4, 0.9),
}


@dataclass
class DrawnModels:
    """A scorer of recipes that counts the decisions of racing.

    Args:
        documents: Number of documents in each set.
    """

    kind: Kind
    documents: Mapping[str, int]
    seed: int
    asked: int = 0  # documents scored
    raced: int = 0  # candidates compared with an incumbent
    ahead: int = 0  # those of them that are ahead of it on all documents
    ahead_dropped: int = 0

    def quality(self, recipe: Mapping[str, Any]) -> float:
        """Return 0 at best and -1 for the hand-written recipe; densities matter a tenth as much as weights."""
        own = [model["parameters"] for model in recipe["models"]]
        far = sum((one["weight"] - best) ** 2 for one, best in zip(own, WEIGHTS, strict=True)) / 0.32
        return -far - 0.1 * sum((one["density"] - 0.5) ** 2 for one in own)

    def true_score(self, recipe: Mapping[str, Any]) -> float:
        """Return the share of right answers, or minus the nats per token of the median document."""
        if self.kind.measure == "exact":
            return min(max(0.8 + self.kind.spread * self.quality(recipe), 0.01), 0.99)
        return -0.003 * math.exp(-self.kind.spread * self.quality(recipe))

    def numbers(self, request: TrialRequest) -> Array:
        """Return one number per document of the set."""
        n = self.documents[request.document_set]
        own, common = (
            _number(text) for text in (recipe_key(request.recipe) + request.document_set, request.document_set)
        )
        shared, alone = (np.random.default_rng([part, self.seed]).standard_normal(n) for part in (common, own))
        latent = math.sqrt(self.kind.shared) * shared + math.sqrt(1 - self.kind.shared) * alone
        score = self.true_score(request.recipe)
        if self.kind.measure == "exact":
            return np.asarray(latent < ndtri(score), dtype=np.float64)
        # Heavy tails: one document in forty has fifty times the nats of the median document.
        return np.asarray(score * np.exp(2 * latent))

    def __call__(self, requests: Sequence[TrialRequest]) -> Iterator[tuple[int, TrialScores | Exception]]:
        asked = MetricKey("task", "exact" if self.kind.measure == "exact" else "log_likelihood")
        for number, request in enumerate(requests):
            whole, race = self.numbers(request), request.race
            seen, dropped = whole, False
            for look, share in enumerate(race.looks if race else ()):
                seen = whole[: math.ceil(share * len(whole))]
                if race is not None and race.should_drop({asked: seen}, look):
                    dropped = True
                    break
            self.asked += len(seen)
            if race is not None and race.incumbent:
                is_ahead = race.difference({asked: whole}) > 0
                self.raced, self.ahead = self.raced + 1, self.ahead + is_ahead
                self.ahead_dropped += is_ahead and dropped
            yield number, TrialScores({asked: seen}, dropped=dropped)


def _number(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)


def settings_of(kind: Kind, **more: Any) -> SweepSettings:
    term = {"task": "task", "measure": kind.measure, **({"clip": kind.clip} if kind.clip else {})}
    parameters = {"math": WEIGHT, "code": WEIGHT, "d_math": DENSITY, "d_code": DENSITY}
    return SweepSettings.model_validate(
        {"parameters": parameters, "objective": [term], "budget": {"trials": 60}, **more}
    )


def sweep(models: DrawnModels, settings: SweepSettings) -> Study:
    space = make_space(RECIPE, settings, None, "drawn.yaml")
    by_hand = HandWritten("hand-written", space.fill_recipe(space.start))
    problem = SearchProblem(space, settings, make_objective(settings, {"task": "task"}), (by_hand,))
    return search(problem, models, Ledger(RecordJournal(None), ""))


def confirmed(models: DrawnModels, study: Study, on: str = "confirmation") -> Confirmation | None:
    """Return the test of the winner, or None if there was nothing to test."""
    if reason_not_to_confirm(study) or study.best is None:
        return None
    asked = study.objective.metric_keys[0]
    found = [
        {asked: models.numbers(TrialRequest(study.recipes[one.number], on))}  # type: ignore[arg-type]  # a set by name
        for one in (study.best, study.reference)
    ]
    return confirm(study, *found)


class Lies(NamedTuple):
    """Results of sweeps in which no candidate is better than the hand-written recipe."""

    sweeps: int
    confirmed: int
    on_search: int  # confirmed by the same test on the documents of the search
    optimism: float  # mean for the winner


def lies(kind: Kind, sweeps: int, documents: Mapping[str, int], first: int = 0, **more: Any) -> Lies:
    """Run sweeps of pure noise, in which all recipes are equally good."""
    found = naive = 0
    optimism = []
    for seed in range(first, first + sweeps):
        models = DrawnModels(kind._replace(spread=0.0), documents, seed)
        study = sweep(models, settings_of(kind, seed=seed, **more))
        one = confirmed(models, study)
        if one is not None:
            found += one.confirmed
            optimism.append(one.optimism)
            again = confirmed(models, study, "search")
            naive += again is not None and again.confirmed
    return Lies(sweeps, found, naive, float(np.mean(optimism)))


def _lies_table(sweeps: int) -> None:
    documents = {"search": 200, "confirmation": 400}
    columns = (
        "objective",
        "sampler",
        "confidence",
        f"no candidate confirmed, of {sweeps}",
        "false confirmations on search documents, of 100",
        "optimism",
    )
    print(f"| {' | '.join(columns)} |")
    print("| --- | --- | --- | --- | --- | --- |")
    exact, clipped = KINDS["exact match, wide"], KINDS["log-likelihood, clipped"]
    for name, kind, sampler, confidence in (
        ("exact match", exact, "cma", 0.975),
        ("exact match", exact, "random", 0.975),
        ("exact match", exact, "cma", 0.95),
        ("log-likelihood, clipped", clipped, "cma", 0.975),
        ("log-likelihood, not clipped", KINDS["log-likelihood"], "cma", 0.975),
    ):
        one = lies(kind, sweeps, documents, sampler=sampler, confidence=confidence)
        unit = f"{100 * one.optimism:.1f} points" if kind.measure == "exact" else f"{one.optimism:.4f} nats"
        kept, naive = (100 * share / one.sweeps for share in (one.sweeps - one.confirmed, one.on_search))
        print(f"| {name} | `{sampler}` | {confidence} | {kept:.1f} % | {naive:.0f} | {unit} |", flush=True)


def _racing_table(sweeps: int) -> None:
    columns = (
        "objective",
        "rule",
        "documents used",
        "better than the incumbent, but dropped",
        "winner, compared with `none`",
    )
    print(f"| {' | '.join(columns)} |")
    print("| --- | --- | --- | --- | --- |")
    for name, kind in KINDS.items():
        whole: list[float] = []
        for rule in ("none", "paired", "halving"):
            asked = ahead = dropped = 0
            winners = []
            for seed in range(sweeps):
                models = DrawnModels(kind, {"search": 400, "confirmation": 400}, seed)
                study = sweep(models, settings_of(kind, seed=seed, racing={"rule": rule}))
                asked, ahead, dropped = asked + models.asked, ahead + models.ahead, dropped + models.ahead_dropped
                best = study.best if study.best is not None else study.reference
                winners.append(models.true_score(study.recipes[best.number]))
            whole = whole or winners
            loss = float(np.mean(np.array(winners) - np.array(whole)))
            said = (
                f"{100 * loss:+.2f} points" if kind.measure == "exact" else f"{100 * loss / abs(np.mean(whole)):+.1f} %"
            )
            wrong = f"{dropped} of {ahead}" if rule == "paired" else "unknown" if rule == "halving" else "0"
            print(f"| {name} | {rule} | {100 * asked / (sweeps * 60 * 400):.0f} % | {wrong} | {said} |", flush=True)


TABLES: dict[str, tuple[Callable[[int], None], int]] = {"lies": (_lies_table, 500), "racing": (_racing_table, 100)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--sweeps", type=int)
    chosen = parser.parse_args()
    table, usual = TABLES[chosen.table]
    began = time.process_time()
    table(chosen.sweeps or usual)
    print(f"\n{time.process_time() - began:.0f} s of CPU time")


if __name__ == "__main__":
    main()
