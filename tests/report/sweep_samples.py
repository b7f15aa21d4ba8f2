"""Build synthetic sweeps: confirmed, by layer, with a front, unconfirmed, stopped, with failures, with one trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from builders.results import update

from mergegate.tasks.release.report.sweep import ReportedObjective, SweepContent
from mergegate.tasks.sweep import Budget, Confirmation, ConfirmationPower, Coordinate, Racing, Trial
from mergegate.tasks.sweep.confirmation import ConfirmedTerm
from mergegate.tasks.sweep.settings import FreeParameter

TASKS = ("copy", "reverse", "shift")
LIKELIHOOD = ReportedObjective(title="log-likelihood of the answers", terms=TASKS, unit="nats per token")
EXACT = ReportedObjective(title="exact match", terms=("reverse", "shift"), unit="points", factor=100)
METHODS = ("ties", "dare_ties", "della")
SIZES = {name: dict.fromkeys(TASKS, n) for name, n in (("search", 100), ("confirmation", 400), ("gate", 1000))}


def parameter(name: str, low: float = 0.0, high: float = 1.0, start: object = 1.0, **free: object) -> Coordinate:
    return Coordinate(name, FreeParameter.model_validate({"low": low, "high": high, "start": start, **free}))


FIVE = (
    parameter("weight_reverser", 0.2, 1.8),
    parameter("weight_shifter", 0.2, 1.8),
    parameter("density", 0.05, 1.0, 0.5, type="log"),
    parameter("lambda", 0.5, 1.5),
    parameter("method", start="ties", type="category", choices=METHODS),
)
IMPORTANCES = {"weight_reverser": 0.61, "weight_shifter": 0.19, "density": 0.12, "lambda": 0.05, "method": 0.03}
RECIPE = """\
merge_method: ties
base_model: ../models/base
models:
- model: ../models/reverser
  parameters: {weight: 0.8132, density: 0.71}
- model: ../models/shifter
  parameters: {weight: 1.2207, density: 0.71}
parameters: {lambda: 1.04}
dtype: float32
"""
Bowl = Callable[[np.ndarray], tuple[float, ...]]


def point_of(parameters: Sequence[Coordinate], at: np.ndarray) -> dict[str, float | int | str]:
    """Return parameter values from positions within their ranges, each between 0 and 1."""
    found: dict[str, float | int | str] = {}
    for one, share in zip(parameters, at, strict=True):
        if one.free.type == "category":
            found[one.name] = METHODS[min(int(share * len(METHODS)), len(METHODS) - 1)]
        elif one.free.type == "log":
            found[one.name] = float(one.low * (one.high / one.low) ** share)
        else:
            found[one.name] = float(one.low + share * (one.high - one.low))
    return found


def searched(
    parameters: Sequence[Coordinate],
    bowl: Bowl,
    hand_written: dict[str, tuple[float, ...]],
    count: int = 60,
    baseline: int = 15,
    seed: int = 0,
    drops: bool = True,
) -> tuple[Trial, ...]:
    """Return hand-written trials, then generations that converge on the optimum, interleaved with baseline trials."""
    rng = np.random.default_rng(seed)
    dimensions = len(parameters)
    start = {one.name: one.free.start for one in parameters}
    trials = [
        Trial(number, -1, "hand-written", label, start if number == 0 else {}, scores, seconds=0.11)
        for number, (label, scores) in enumerate(hand_written.items())
    ]
    centre = np.full(dimensions, 0.5)
    width, best = 0.24, max(scores[0] for scores in hand_written.values()) if hand_written else -math.inf
    size = 8
    for at in range(count):
        is_baseline = at < 4 * baseline and at % 4 == 3
        share = rng.random(dimensions) if is_baseline else np.clip(centre + width * rng.normal(size=dimensions), 0, 1)
        scores = bowl(share)
        dropped = bool(drops and scores[0] < best - 0.002 and rng.random() < 0.7)
        origin = "baseline" if is_baseline else "sampler"
        point = point_of(parameters, share)
        used = float(rng.choice([0.125, 0.25, 0.5])) if dropped else 1.0
        trials.append(
            Trial(len(trials), at // size, origin, "", point, scores, dropped=dropped, documents=used, seconds=0.11)
        )
        if not is_baseline and scores[0] > best:
            best = scores[0]
            centre = 0.5 * centre + 0.5 * share
        width *= 0.985
    return tuple(trials)


def likelihood(dimensions: int, floor: float = -0.0047, seed: int = 1) -> Bowl:
    """Return a score in nats per token that equals ``floor`` at the optimum and falls off steeply."""
    rng = np.random.default_rng(seed)
    optimum = rng.uniform(0.3, 0.75, dimensions)
    steep = rng.gamma(1.0, 0.03, dimensions) * 5 / dimensions + 0.002

    def bowl(share: np.ndarray) -> tuple[float, ...]:
        away = float((steep * (share - optimum) ** 2).sum())
        return (floor - away - 3 * away**2 - 0.0002 * abs(float(rng.normal())),)

    return bowl


def winner_of(trials: Sequence[Trial], objective: int = 0) -> int:
    able = [
        one
        for one in trials
        if one.origin != "hand-written" and not one.dropped and not one.problem and one.violation == 0
    ]
    return max(able, key=lambda one: one.scores[objective]).number


def held_out(scores: dict[int, float | tuple[float, ...]]) -> dict[int, tuple[float, ...]]:
    """Return the scores on held-out documents by the number of the trial."""
    return {at: one if isinstance(one, tuple) else (one,) for at, one in scores.items()}


def confirmation(gain: float, low: float, high: float, p: float, documents: int) -> Confirmation:
    bounds = {"gain": gain, "low": low, "high": high}
    scores = {"winner": gain, "reference": 0.0, "measure": "exact", "weight": 1.0, "clusters": None}
    return Confirmation(
        confirmed=low > 0, p_value=p, confidence=0.95, winner=1, reference=0, reference_label="ties.yaml",
        terms=(ConfirmedTerm(task="copy", documents=documents, **scores, **bounds),), **bounds,
        held_out=gain, held_out_reference=0.0, searched=gain, searched_reference=0.0,
    )  # fmt: skip


def without_importances(reason: str) -> dict[str, object]:
    """Return the fields of a sweep whose parameters have no importances."""
    return {"importances": {}, "no_importances": reason}


def power(documents: int, detectable: float, *, in_points: bool = False) -> ConfirmationPower:
    known = {"chances": (), "confidence": 0.95, "correlation": 0.6}
    return ConfirmationPower(documents=documents, detectable=detectable, in_points=in_points, **known)


def confirmed() -> SweepContent:
    """Return a confirmed sweep: 60 trials in 5 dimensions, by likelihood, against hand-written TIES and linear."""
    trials = searched(FIVE, likelihood(5), {"ties.yaml": (-0.0072,), "linear.yaml": (-0.0831,)})
    winner = winner_of(trials)
    score = trials[winner].scores[0]
    best_random = max((one for one in trials if one.origin == "baseline" and not one.dropped), key=lambda o: o.scores)
    unseen = {0: -0.0071, 1: -0.0822, winner: score - 0.00021, best_random.number: best_random.scores[0] - 0.0003}
    gain = score - 0.00021 + 0.0071
    return SweepContent(
        name="demo-sweep", method="ties of 2 over base", parameters=FIVE, importances=IMPORTANCES,
        objectives=(LIKELIHOOD,),
        constraints=("Constraint: on copy, the drop from base may be at most 2 points (exact match).",), trials=trials,
        winner=winner, reference=0, held_out=held_out(unseen),
        confirmation=confirmation(gain, gain - 0.0006, gain + 0.0006, 3.2e-8, 1200),
        power=power(1200, 0.0012), sizes=SIZES, racing=Racing(),
        budget=Budget(trials=62, hours=0.5, cost=2.0, cost_per_hour=1.0), spent_hours=0.0028, spent_cost=0.0034,
        recipe=RECIPE, population=8, runner="local, 2 processes", seconds={"merge": 2.9, "load": 0.1, "score": 4.6},
        reproduce=("mergegate sweep profiles/demo-sweep.yaml",), versions=("cmaes 0.13.1", "numpy 2.4.0"),
    )  # fmt: skip


def by_layer() -> SweepContent:
    """Return a sweep in 17 dimensions, which is drawn as lines instead of slices, without importances."""
    names = ["lambda", *(f"{name}.layers_{at}" for name in ("weight_reverser", "weight_shifter") for at in range(8))]
    parameters = tuple(parameter(name, 0.2, 1.8) for name in names)
    trials = searched(parameters, likelihood(17, floor=-0.0035, seed=6), {"ties.yaml": (-0.0092,)}, seed=3)
    winner = winner_of(trials)
    return update(
        confirmed(), name="demo-sweep-layers", parameters=parameters, trials=trials, winner=winner, constraints=(),
        confirmation=confirmation(0.0015, 0.0009, 0.0021, 2.1e-6, 1200),
        held_out=held_out({0: -0.0093, winner: -0.0078}),
        **without_importances("optuna is not installed (pip install 'mergegate[sweep]')"),
    )  # fmt: skip


def several() -> SweepContent:
    """Return a sweep with two conflicting objectives and a Pareto front."""
    parameters = FIVE[:3]
    rng = np.random.default_rng(4)

    def bowl(share: np.ndarray) -> tuple[float, ...]:
        one, other, density = share
        noise = 0.006 * rng.normal(size=2)
        reverse = 0.55 + 0.45 * one ** (0.4 + 0.8 * other) - 0.1 * abs(density - 0.6)
        shift = 0.55 + 0.45 * other ** (0.4 + 0.8 * one) - 0.1 * abs(density - 0.4)
        return (min(1.0, reverse + noise[0]), min(1.0, shift + noise[1]))

    trials = searched(parameters, bowl, {"linear.yaml": (0.771, 0.783)}, drops=False, seed=8)
    front = tuple(
        one.number
        for one in trials
        if not any(
            all(a >= b for a, b in zip(other.scores, one.scores, strict=True)) and other.scores != one.scores
            for other in trials
        )
    )
    winner = max(front, key=lambda number: min(trials[number].scores))
    unseen = tuple(score - 0.011 for score in trials[winner].scores)
    objectives = tuple(update(EXACT, title=f"exact match of {task}", terms=()) for task in ("reverse", "shift"))
    return update(
        confirmed(), name="demo-sweep-front", method="linear of 2", objectives=objectives, constraints=(),
        trials=trials, winner=winner, front=front, held_out=held_out({0: (0.768, 0.79), winner: unseen}),
        parameters=parameters, sampler="nsga2", power=None, racing=None,
        confirmation=confirmation(0.061, 0.038, 0.084, 2.4e-5, 400),
        **without_importances("they are computed of one objective only"),
    )  # fmt: skip


def unconfirmed() -> SweepContent:
    """Return a sweep over pure noise, whose best of 60 trials looks better only on the search set."""
    rng = np.random.default_rng(2)
    trials = searched(
        FIVE[:2], lambda _: (round(float(rng.binomial(200, 0.924)) / 200, 4),), {"ties.yaml": (0.925,)}, drops=False
    )
    winner = winner_of(trials)
    return update(
        confirmed(), name="nightly-sweep", parameters=FIVE[:2], objectives=(EXACT,), constraints=(), trials=trials,
        winner=winner, reference=0, held_out=held_out({0: 0.923, winner: 0.9255}), recipe="",
        power=power(400, 0.041, in_points=True),
        importances={name: IMPORTANCES[name] for name in ("weight_reverser", "weight_shifter")},
        confirmation=confirmation(0.0025, -0.0098, 0.0148, 0.37, 400), sampler="random",
    )  # fmt: skip


def stopped() -> SweepContent:
    """Return a sweep that was stopped after 7 trials."""
    whole = confirmed()
    trials = whole.trials[:7]
    return update(
        whole, finished=False, ending="It was stopped after 7 of 62 trials.", trials=trials, winner=winner_of(trials),
        held_out={}, confirmation=None, recipe="", seconds={},
        **without_importances("with 5 candidates they would say nothing"),
    )  # fmt: skip


def failing() -> SweepContent:
    """Return a sweep with unscored trials, trials that violate a constraint and one far outlier."""
    whole = confirmed()
    trials = list(whole.trials)
    for at in (9, 17, 33):
        trials[at] = replace(trials[at], scores=(math.nan,), problem="the merge has NaN in model.layers.0.mlp")
    trials[21] = replace(trials[21], scores=(math.nan,), problem="density 0 keeps nothing of reverser")
    for at in (12, 13, 40):
        trials[at] = replace(trials[at], violation=1.4, dropped=False)
    trials[25] = replace(trials[25], scores=(-3.2,), dropped=True)
    return update(whole, trials=tuple(trials), winner=winner_of(trials))


def lonely() -> SweepContent:
    """Return a sweep with a single candidate that has no score."""
    whole = confirmed()
    trial = Trial(0, 0, "sampler", "", dict(whole.trials[5].point), (math.nan,), problem="not enough memory")
    return update(
        whole, trials=(trial,), winner=None, reference=None, held_out={}, confirmation=None, ending="It has no score.",
        recipe="", constraints=(), **without_importances("with one candidate they would say nothing"),
    )  # fmt: skip


EVERY = {"confirmed": confirmed, "by layer": by_layer, "front": several, "not confirmed": unconfirmed}
EVERY |= {"stopped": stopped, "failing": failing, "lonely": lonely}
