"""Choose checkpoints of one training run and their weights, for the keys ``run``, ``window``, ``every``, ``schedule``.

A recipe of a training run looks like this::

    run: runs/pretrain          # directory of checkpoints, pattern, or org/name@step-* on the Hub
    window: 8                   # checkpoints; or {steps: 4000}, {tokens: 50B}, or all. Default: 8
    every: {steps: 500}         # optional: only steps that are multiples of 500; or 2: every second checkpoint
    schedule: minus_sqrt        # weights that imitate a learning-rate decay. Default: mean

Training with a constant learning rate and merging the last checkpoints with suitable weights has the same effect as
decaying the learning rate. If the updates between the checkpoints ``j - 1`` and ``j`` are to be weighted by ``w_j``,
with ``1 = w_0 >= w_1 >= ... >= w_k >= 0``, then checkpoint ``j`` gets the weight ``c_j = w_j - w_{j+1}``, where
``w_{k+1} = 0`` (WSM, https://arxiv.org/abs/2507.17634). ``w_j`` is the decay curve at the position of the
checkpoint in the window. This module only decides; it reads no file.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.methods import LINEAR, find_method
from mergegate.merge_core.recipe.keys import Keys, is_number, is_text, refuse
from mergegate.merge_core.recipe.reference import parse_reference

_DEFAULT_WINDOW = 8
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_STEP_IN_NAME = re.compile(
    r"(?:^|[^a-z])(?:step|checkpoint|ckpt|iter|iteration|update|batch|ba)s?[-_=]?(\d+)(?:([KM])(?![a-z0-9]))?",
    re.IGNORECASE,
)
_TOKENS_IN_NAME = re.compile(r"tokens?[-_=]?(\d+(?:\.\d+)?)([KMBT]?)(?![a-z0-9])", re.IGNORECASE)
_AMOUNT = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([KMBT]?)", re.IGNORECASE)
_EPOCH_IN_NAME = re.compile(r"(?:^|[^a-z])(?:epoch|ep)s?[-_=]?(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![\d.])\d+(?![\d.])")


@dataclass(frozen=True)
class RunCheckpoint:
    """One checkpoint of a training run.

    Args:
        model: Reference, as a recipe writes it: text, or a mapping for a path with ``@`` or ``+``.
        step: Training step, counted from 0.
        tokens: Number of tokens that the run had read. None if unknown.
        part: Whole numbers in the name before the step, such as the stage or the epoch. Empty if the step is not from
            the name.
    """

    model: str | Mapping[str, Any]
    step: int
    tokens: int | None = None
    part: tuple[int, ...] = ()


@dataclass(frozen=True)
class RunWindow:
    """Checkpoints of one training run that are merged.

    Args:
        checkpoints: References of the checkpoints in a recipe, or their names in a report, ordered by step.
        first_step: Training step of the first checkpoint.
        last_step: Training step of the last checkpoint.
        schedule: Name of the schedule that weights them.
    """

    checkpoints: tuple[str, ...]
    first_step: int
    last_step: int
    schedule: str

    @property
    def steps(self) -> str:
        """The range of steps: ``steps 225 to 400``."""
        if self.first_step == self.last_step:
            return f"step {self.last_step}"
        return f"steps {self.first_step} to {self.last_step}"


@dataclass(frozen=True)
class Schedule:
    """Weights of the checkpoints in a window.

    Args:
        name: One of the names in :data:`SCHEDULES`.
        value: For ``exponential``, the value of the decay curve at the end of the window, above 0 and below 1. For
            ``ema``, the share of the previous average that each checkpoint keeps, from 0 to below 1. Otherwise unused.
    """

    name: str
    value: float = 0.0


# Decay curves over a window, from 1 at its start (position 0). Those that end at 0 do so at position 1. Functions name
# them, because no name of a merge method, such as linear, may be a text in this package.
def _linear(position: float, value: float) -> float:
    return 1 - position


def _cosine(position: float, value: float) -> float:
    return (1 + math.cos(math.pi * position)) / 2


def _minus_sqrt(position: float, value: float) -> float:
    return 1 - math.sqrt(position)


def _exponential(position: float, value: float) -> float:
    return float(value**position)


_CURVES: Mapping[str, Callable[[float, float], float]] = {
    curve.__name__.removeprefix("_"): curve for curve in (_linear, _cosine, _minus_sqrt, _exponential)
}
# Schedules with equal weights. LAWA (latest weight averaging, https://arxiv.org/abs/2209.14981) is a mean.
_EQUAL = ("mean", "lawa")
_DEFAULT_VALUES = {"exponential": 0.1, "ema": 0.9}
SCHEDULES = (*_EQUAL, *_CURVES, "ema")
# Keys of a training run. A recipe with these keys is expanded into a plain recipe before it is parsed.
RUN_KEYS: Keys = {
    "run": {
        "type": ["string", "array"],
        "items": {"type": "string"},
        "description": "Training run whose checkpoints are merged: a directory, a pattern, or org/name@step-* on the "
        "Hub. Replaces 'models'.",
    },
    "steps": {
        "type": "string",
        "description": "File with the step of each checkpoint of the run. Default: from trainer_state.json or names.",
    },
    "window": {
        "type": ["integer", "string", "object"],
        "description": "Size of the window: a number of checkpoints, {steps: N}, {tokens: 50B}, or all. Default: 8.",
    },
    "every": {
        "type": ["integer", "object"],
        "description": "Use every Nth checkpoint, counted from the newest, or {steps: N}: only multiples of N.",
    },
    "schedule": {
        "anyOf": [
            {"enum": list(SCHEDULES)},
            {
                "type": "object",
                "additionalProperties": False,
                "maxProperties": 1,
                "properties": {
                    "exponential": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                    "ema": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
                },
            },
        ],
        "description": "Weights of the checkpoints: equal, or those that imitate a decay of the learning rate. "
        "Default: mean.",
    },
}


@dataclass(frozen=True)
class RunSettings:
    """Settings of a training run in a recipe.

    Args:
        patterns: Directories, patterns of directories, or Hub references with a pattern as the revision.
        steps_file: File with the step of each checkpoint by name. None to read the steps from the checkpoints.
        window: Unit (``checkpoints``, ``steps`` or ``tokens``) and size of the window. None for all checkpoints.
        every: Unit (``checkpoints`` or ``steps``) and distance of the checkpoints that can be in the window.
        schedule: Weights of the checkpoints.
    """

    patterns: tuple[str, ...]
    steps_file: str | None = None
    window: tuple[str, int] | None = ("checkpoints", _DEFAULT_WINDOW)
    every: tuple[str, int] = ("checkpoints", 1)
    schedule: Schedule = Schedule("mean")


def parse_run(document: Mapping[str, Any], location: str) -> RunSettings:
    """Read the keys of a training run in a recipe."""
    run = document.get("run")
    patterns = [run] if isinstance(run, str) else run
    if not isinstance(patterns, list) or not patterns or not all(map(is_text, patterns)):
        raise refuse(run, f"{location}: run", "the directory of a training run, a pattern, or org/name@step-*")
    if other := next((key for key in ("models", "slices", "modules", "experts", "clients") if key in document), None):
        raise InvalidInput(
            f"{location}: {other}",
            found="it cannot be combined with run",
            expected="only one of them, because the checkpoints of the run are the models",
            remedy=f"remove {other!r} or 'run'",
        )
    steps_file = document.get("steps")
    if steps_file is not None and not is_text(steps_file):
        expected = "a file (YAML or JSON) with the step of each checkpoint, such as {epoch-1: 500, epoch-2: 1000}"
        raise refuse(steps_file, f"{location}: steps", expected)
    window, every = RunSettings.window, RunSettings.every
    if (written := document.get("window")) == "all":
        window = None
    elif written is not None:
        window = _amount(written, ("checkpoints", "steps", "tokens"), f"{location}: window", "a number, or 'all'")
    if (written := document.get("every")) is not None:
        every = _amount(written, ("checkpoints", "steps"), f"{location}: every", "a number")
    schedule = _parse_schedule(document.get("schedule", "mean"), f"{location}: schedule")
    return RunSettings(tuple(patterns), steps_file, window, every, schedule)


def parse_amount(value: object) -> int | None:
    """Return a whole number above 0 that may be written with a unit, such as ``50B``, or None if it is not one."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and (match := _AMOUNT.fullmatch(value.strip())):
        value = Fraction(match[1]) * _UNITS[match[2].upper()]
    if not isinstance(value, (int, float, Fraction)) or not 0 < value < 2**63 or int(value) != value:
        return None
    return int(value)


def step_in_name(name: str) -> int | None:
    """Return the training step in a name such as ``checkpoint-1000``, ``step1000-tokens4B`` or ``0001000``, or None."""
    if matches := _STEP_IN_NAME.findall(name):
        number, unit = matches[-1]
        return int(number) * _UNITS[unit.upper()]
    return int(name) if re.fullmatch(r"\d{1,18}", name) else None


def steps_in_names(names: Sequence[str]) -> dict[str, int]:
    """Return the training step of each name that has one.

    If no name has an explicit step, the epoch counts, or else the only number of names that differ in nothing else.
    """
    steps = {name: step for name in names if (step := step_in_name(name)) is not None}
    if not steps:
        steps = {name: int(matches[-1]) for name in names if (matches := _EPOCH_IN_NAME.findall(name))}
    if steps:
        return steps
    templates = {name: _NUMBER.sub("#", name) for name in names if len(_NUMBER.findall(name)) == 1}
    shared = [template for template, count in Counter(templates.values()).most_common(1) if count > 1]
    return {name: int(_NUMBER.findall(name)[0]) for name, template in templates.items() if template in shared}


def part_in_name(name: str) -> tuple[int, ...]:
    """Return the whole numbers before the step in a name: ``(2, 1)`` for ``stage2-ingredient1-step1000``."""
    starts = [match.start() for match in _STEP_IN_NAME.finditer(name)]
    return tuple(map(int, _NUMBER.findall(name[: starts[-1]]))) if starts else ()


def tokens_in_name(name: str) -> int | None:
    """Return the number of tokens in a name such as ``step1000-tokens4B``, or None."""
    match = _TOKENS_IN_NAME.search(name)
    return int(Fraction(match[1]) * _UNITS[match[2].upper()]) if match else None


def select_window(
    checkpoints: Sequence[RunCheckpoint], settings: RunSettings, location: str
) -> tuple[RunCheckpoint, ...]:
    """Return the checkpoints of the window, ordered by step.

    ``every`` applies first: a number counts backward from the newest checkpoint, and ``{steps: 500}`` selects the steps
    that are multiples of 500. A window in steps or tokens of size ``n`` contains the checkpoints that are less than
    ``n`` older than the newest of them.

    Raises:
        InvalidInput: There is no checkpoint, two have the same step, a higher step belongs to an earlier part of the
            run, or a needed number of tokens is unknown.
    """
    ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
    for earlier, later in pairwise(ordered):
        if earlier.step == later.step:
            raise InvalidInput(
                f"{location}: run",
                found=f"{earlier.model} and {later.model}, both of step {later.step}",
                expected="one checkpoint per step",
                remedy="narrow the pattern, or list the step of each checkpoint in a file ('steps: FILE')",
            )
        if len(earlier.part) == len(later.part) and later.part < earlier.part:
            raise InvalidInput(
                f"{location}: run",
                found=f"{earlier.model}, which has a lower step than {later.model}",
                expected="steps that continue from one stage or epoch to the next",
                remedy="narrow the pattern to one stage, or list the step of each checkpoint in a file ('steps: FILE')",
            )
    unit, distance = settings.every
    if unit == "steps":
        chosen = [checkpoint for checkpoint in ordered if checkpoint.step % distance == 0]
    else:
        chosen = ordered[::-1][::distance][::-1]
    if not chosen:
        patterns = ", ".join(settings.patterns)
        every = f", but no step is a multiple of {distance}" if ordered else ""
        raise InvalidInput(
            f"{location}: run",
            found=f"{len(ordered)} complete checkpoints{every}" if ordered else f"no checkpoint in {patterns}",
            expected="at least one checkpoint",
            remedy="wait for the first checkpoint, or correct 'every'" if ordered else "check the path or the pattern",
        )
    if settings.window is None:
        return tuple(chosen)
    unit, size = settings.window
    if unit == "checkpoints":
        return tuple(chosen[-size:])
    if unit == "steps":
        return tuple(checkpoint for checkpoint in chosen if checkpoint.step > chosen[-1].step - size)
    if unknown := next((checkpoint for checkpoint in chosen if checkpoint.tokens is None), None):
        raise InvalidInput(
            f"{location}: window",
            found=f"a window in tokens, but the number of tokens of {unknown.model} is unknown",
            expected="tokens in the name (step1000-tokens4B), in trainer_state.json, or in the file of 'steps'",
            remedy="write the window in steps or checkpoints",
        )
    newest = chosen[-1].tokens or 0
    return tuple(checkpoint for checkpoint in chosen if (checkpoint.tokens or 0) > newest - size)


def is_window_full(checkpoints: Sequence[RunCheckpoint], settings: RunSettings, location: str) -> bool:
    """Return whether checkpoints that are older than all of ``checkpoints`` cannot be in the window."""
    if settings.window is None or not checkpoints:
        return False
    unit, size = settings.window
    eligible = select_window(checkpoints, replace(settings, window=None), location)
    window = select_window(checkpoints, settings, location)
    return len(window) == size if unit == "checkpoints" else len(window) < len(eligible)


def schedule_weights(steps: Sequence[int], schedule: Schedule) -> tuple[float, ...]:
    """Return the weight of each checkpoint of a window. The weights add up to 1.

    Args:
        steps: Training steps of the checkpoints, increasing.
        schedule: ``mean`` and ``lawa`` weight all checkpoints equally. ``linear``, ``cosine``, ``minus_sqrt`` and
            ``exponential`` imitate a decay of the learning rate from the first checkpoint (``1 - t``,
            ``(1 + cos(pi t)) / 2``, ``1 - sqrt(t)``, ``value ** t``, where ``t`` is the position in the window by
            steps, and the window ends one mean distance after its last checkpoint). ``ema`` is an exponential moving
            average over the checkpoints, which starts with the first one.
    """
    count = len(steps)
    if count == 1 or schedule.name in _EQUAL:
        return (1.0 / count,) * count
    if schedule.name == "ema":
        keep = schedule.value
        return (keep ** (count - 1), *((1 - keep) * keep ** (count - 1 - index) for index in range(1, count)))
    span = (steps[-1] - steps[0]) * count / (count - 1)
    curve = _CURVES[schedule.name]
    shares = [*(curve((step - steps[0]) / span, schedule.value) for step in steps), 0.0]
    return tuple(share - following for share, following in pairwise(shares))


def run_recipe(
    document: Mapping[str, Any], window: Sequence[RunCheckpoint], schedule: Schedule, location: str
) -> dict[str, Any]:
    """Return the plain recipe that merges a window. All keys of ``document`` that do not belong to the run stay."""
    plain = {key: value for key, value in document.items() if key not in RUN_KEYS}
    method = find_method(plain.setdefault("merge_method", LINEAR.name), f"{location}: merge_method")
    equal = schedule.name in _EQUAL
    weighted = method.parameter("weight") is not None
    if not weighted and not equal:
        raise InvalidInput(
            f"{location}: schedule",
            found=f"{schedule.name} with {method.name}, which weights all models equally",
            expected="a method with weights, such as linear",
            remedy="remove 'merge_method', or write 'schedule: mean'",
        )
    if method.base == "ordinary" and plain.get("base_model") is not None:
        if not all(parse_reference(checkpoint.model, location).adapter for checkpoint in window):
            raise InvalidInput(
                f"{location}: base_model",
                found=f"set, but {method.name} merges only the checkpoints",
                remedy="remove 'base_model', or choose a method with a base, such as task_arithmetic",
            )
        del plain["base_model"]  # It is part of each adapter's reference.
    weights = schedule_weights([checkpoint.step for checkpoint in window], schedule)
    models = [
        {"model": checkpoint.model} | ({"parameters": {"weight": 1.0 if equal else weight}} if weighted else {})
        for checkpoint, weight in zip(window, weights, strict=True)
    ]
    return {**plain, "models": models}


def _amount(value: object, units: tuple[str, ...], location: str, expected: str) -> tuple[str, int]:
    unit, written = units[0], value
    if isinstance(value, Mapping) and len(value) == 1:
        unit, written = next(iter(value.items()))
    amount = parse_amount(written)
    if unit not in units or amount is None:
        forms = " or ".join(f"{{{name}: N}}" for name in units[1:])
        raise refuse(value, location, f"{expected} of {units[0]}, or {forms}")
    return unit, amount


def _parse_schedule(value: object, location: str) -> Schedule:
    name, number = value, None
    if isinstance(value, Mapping) and len(value) == 1:
        name, number = next(iter(value.items()))
    if not isinstance(name, str) or name not in SCHEDULES:
        raise refuse(value, location, f"one of {', '.join(SCHEDULES)}", suggest(str(name), SCHEDULES))
    if number is None:
        return Schedule(name, _DEFAULT_VALUES.get(name, 0.0))
    if name not in _DEFAULT_VALUES:
        raise refuse(value, location, f"{name} without a value")
    if not is_number(number, 0, 1) or number == 1 or (number == 0 and name != "ema"):
        expected = "a number from 0 to below 1" if name == "ema" else "a number above 0 and below 1"
        raise refuse(number, f"{location}.{name}", expected)
    return Schedule(name, float(number))
