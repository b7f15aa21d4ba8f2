"""Take the step of a server after the clients: the combined change itself, with momentum, or by Adam.

Each step consists of plain documents after the one of the round, ``w + D``. ``D`` includes the ``lambda``.

Momentum needs no state except the releases. With ``v' = momentum v + D`` and ``w' = w + rate v'`` (Hsu et al. 2019,
https://arxiv.org/abs/1909.06335; the rate is the method's ``lambda``), the last step is ``w - w_before = rate v``.
Therefore ``w' = w + rate D + momentum (w - w_before)``: task arithmetic of the round and the release before the last.

Adam (Reddi et al. 2020, https://arxiv.org/abs/2003.00295) needs the running means of the changes of all rounds and of
their squares, which a release does not contain. Each mean is a document of its own, computed from the round and the
stored mean of the last round. The results are stored next to the release (:mod:`tasks.merge.optimizer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.methods import TASK_ARITHMETIC

ROUND, MEAN, SQUARES = "round", "mean", "squares"  # names of the documents before the last
# Keys that apply to the final step and not to the documents before it.
_OF_THE_RESULT = frozenset(("dtype", "out_dtype", "tokenizer_source", "tokenizer", "chat_template"))

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Adam:
    """Settings of FedAdam with the names of the paper. ``rate`` is its eta."""

    rate: float
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3


def parse_adam(settings: object, location: str) -> Adam | None:
    """Parse ``{rate: 0.01}`` and the optional keys. None if there are no settings.

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


def with_momentum(round_document: Document, before: str, momentum: float) -> tuple[Document, ...]:
    """Return the round and a momentum step that repeats the last round's update, from ``before`` to its base."""
    models = [
        {"model": ROUND, "parameters": {"weight": 1.0}},
        {"model": before, "parameters": {"weight": -momentum}},
    ]
    return _round(round_document), _step(round_document, TASK_ARITHMETIC.name, models)


def with_adam(round_document: Document, states: Mapping[str, str], adam: Adam) -> tuple[Document, ...]:
    """Return the round, both running means updated with it, and the step that follows from them.

    ``states`` holds the means of the earlier rounds by name. If it is empty, the means start over.
    """

    def mean(name: str, method: str, keep: float) -> Document:
        models = [{"model": ROUND}, *([{"model": states[name]}] if name in states else [])]
        document = {"name": name, "merge_method": method, "base_model": round_document["base_model"], "models": models}
        return {**document, "parameters": {"keep": keep}, "dtype": "float32"}

    step = _step(round_document, "adam", [{"model": MEAN}, {"model": SQUARES}])
    return (
        _round(round_document),
        mean(MEAN, "moving_mean", adam.beta1),
        mean(SQUARES, "moving_squares", adam.beta2),
        {**step, "parameters": {"rate": adam.rate, "tau": adam.tau}},
    )


def _round(round_document: Document) -> Document:
    """Return the combined change of the clients in float32."""
    return {
        **{key: value for key, value in round_document.items() if key not in _OF_THE_RESULT},
        "name": ROUND,
        "dtype": "float32",
    }


def _step(round_document: Document, method: str, models: list[dict[str, Any]]) -> Document:
    """Return the document whose result is released."""
    result_keys = {key: value for key, value in round_document.items() if key in _OF_THE_RESULT}
    return {"merge_method": method, "base_model": round_document["base_model"], "models": models, **result_keys}
