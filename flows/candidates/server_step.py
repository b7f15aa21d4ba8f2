"""Append the server's step to a round: the combined change of the clients, with momentum, or by Adam.

A step consists of plain documents after the one of the round, which computes ``w + D``. ``D`` is the combined change,
already multiplied by ``lambda``.

Momentum needs no state except the releases. With ``v' = momentum v + D`` and ``w' = w + rate v'`` (Hsu et al. 2019,
https://arxiv.org/abs/1909.06335; the rate is the method's ``lambda``), the last step is ``w - w_before = rate v``.
Therefore ``w' = w + rate D + momentum (w - w_before)``: task arithmetic of the round and the release before the last.

Adam (Reddi et al. 2020, https://arxiv.org/abs/2003.00295) needs the running means of the changes of all rounds and of
their squares, which a release does not contain. Each mean is a document, computed from the round and the stored mean of
the last round. mergegate stores the results next to the release (:mod:`tasks.merge.optimizer`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mergegate.flows.candidates.last_round import last_recipe, read_predicate, used_digests
from mergegate.merge_core.errors import InvalidInput, MergegateError, suggest
from mergegate.merge_core.methods import TASK_ARITHMETIC

ROUND, MEAN, SQUARES = "round", "mean", "squares"  # names of the documents before the last
# Keys that apply to the final step and not to the documents before it.
_OF_THE_RESULT = frozenset(("dtype", "out_dtype", "tokenizer_source", "tokenizer", "chat_template"))

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Adam:
    """Settings of FedAdam, named as in the paper. ``rate`` is the paper's eta."""

    rate: float
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3


def parse_adam(settings: object, location: str) -> Adam | None:
    """Parse ``{rate: 0.01}`` and the optional keys. Return None if ``settings`` is None.

    Raises:
        InvalidInput: The value is not a mapping with ``rate``, has an unknown key, or a number is out of range.
    """
    if settings is None:
        return None
    names = [field.name for field in fields(Adam)]
    if not isinstance(settings, Mapping) or "rate" not in settings:
        raise InvalidInput(
            location,
            found=f"{settings!r:.60}",
            expected=f"{{rate: ...}} (the approximate change of a weight per round), optionally {', '.join(names[1:])}",
        )
    if unknown := next((key for key in settings if key not in names), None):
        raise InvalidInput(
            f"{location}.{unknown}", found="unknown key", expected=", ".join(names), remedy=suggest(str(unknown), names)
        )
    for key, value in settings.items():
        mean = key.startswith("beta")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (number and (0 <= value < 1 if mean else 0 < value < float("inf"))):
            expected = "a number from 0 to below 1" if mean else "a number above 0"
            raise InvalidInput(f"{location}.{key}", found=f"{value!r:.60}", expected=expected)
    return Adam(**{str(key): float(value) for key, value in settings.items()})


def take_step(
    recipe: Document,
    step: Adam | float,
    last_release: Path | None,
    directory: Path,
    digest_of: Callable[[Path], str],
    find_state: Callable[[str], Path | None],
) -> tuple[tuple[Document, ...], tuple[str, ...]]:
    """Return the documents of a round followed by the server's step, and remarks about the step.

    ``recipe`` combines the clients. ``step`` contains the settings of Adam, or is the momentum. Momentum adds no step
    if it is 0, or in the first round, which has no ``last_release``. Paths in recipes are relative to ``directory``.
    ``digest_of`` returns the digest of a directory. ``find_state`` maps the location of optimizer state in a provenance
    to its path, or to None.
    """
    base, result_keys = recipe["base_model"], {key: value for key, value in recipe.items() if key in _OF_THE_RESULT}
    # The combined change of the clients in float32.
    change = {key: value for key, value in recipe.items() if key not in _OF_THE_RESULT}
    change |= {"name": ROUND, "dtype": "float32"}

    if isinstance(step, Adam):
        # Running means of the last release. Use them only if every file in its provenance still exists unchanged.
        states: dict[str, str] = {}
        with suppress(MergegateError, OSError, ValueError, KeyError, TypeError, AttributeError):
            for product in read_predicate(last_release)["runDetails"]["byproducts"] if last_release else ():
                path = find_state(str(product["annotations"]["stored"]))
                if path is None or digest_of(path) != product["digest"]["sha256"]:
                    states = {}
                    break
                states[str(product["name"])] = os.path.relpath(path, directory)

        def mean(name: str, method: str, keep: float) -> Document:
            models = [{"model": ROUND}, *([{"model": states[name]}] if name in states else [])]
            document = {"name": name, "merge_method": method, "base_model": base, "models": models}
            return {**document, "parameters": {"keep": keep}, "dtype": "float32"}

        means = mean(MEAN, "moving_mean", step.beta1), mean(SQUARES, "moving_squares", step.beta2)
        result = {"merge_method": "adam", "base_model": base, "models": [{"model": MEAN}, {"model": SQUARES}]}
        result |= {**result_keys, "parameters": {"rate": step.rate, "tau": step.tau}}
        remark = "Adam starts again, because the state of the last round does not exist"
        if states:
            remark = "Adam continues with the state of the last round"
        return (change, *means, result), (remark,) if last_release else ()

    if not step or last_release is None:
        return (recipe,), ()
    with suppress(MergegateError, OSError, ValueError):
        *_, last = last_recipe(last_release)
        before = last.get("base_model")
        # The last step, from `before` to the base, continues if that model still exists unchanged.
        if (
            isinstance(before, str)
            and (directory / before).is_dir()
            and digest_of(directory / before) in used_digests(last_release)
        ):
            models = [
                {"model": ROUND, "parameters": {"weight": 1.0}},
                {"model": before, "parameters": {"weight": -step}},
            ]
            result = {"merge_method": TASK_ARITHMETIC.name, "base_model": base, "models": models, **result_keys}
            return (change, result), (f"{step:g} times the last step, from {Path(before).name}, is repeated",)
    return (recipe,), ("without momentum, because the base of the last round no longer exists",)
