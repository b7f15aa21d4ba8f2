"""The step that a server takes when it has what the clients changed together: that itself, with momentum, or by Adam.

Each is plain documents after the one of the round, ``w + D``, whose ``lambda`` is in ``D``.

Momentum needs no state beside the releases. With ``v' = momentum v + D`` and ``w' = w + rate v'`` (Hsu et al. 2019,
https://arxiv.org/abs/1909.06335; the rate is the method's ``lambda``) the last step is ``w - w_before = rate v``, so
that ``w' = w + rate D + momentum (w - w_before)``: the round, and task arithmetic of it and of the release before the
last.

Adam (Reddi et al. 2020, https://arxiv.org/abs/2003.00295) needs the mean of the changes of all rounds, and of their
squares, which no release holds. Each is a document of its own, of the round and of what the last round has kept of it;
what it makes is kept beside the release (:mod:`tasks.merge.optimizer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.methods import TASK_ARITHMETIC

ROUND, MEAN, SQUARES = "round", "mean", "squares"  # what the documents before the last are called
# What the step that is taken says, and not the documents before it.
_OF_THE_RESULT = frozenset(("dtype", "out_dtype", "tokenizer_source", "tokenizer", "chat_template"))

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Adam:
    """Settings of FedAdam, called as in the paper; ``rate`` is its eta."""

    rate: float
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3


def parse_adam(said: object, where: str) -> Adam | None:
    """``{rate: 0.01}``, and more; None where nothing is said.

    Raises:
        InvalidInput: Something else, a key that is none, or a number outside of its range.
    """
    if said is None:
        return None
    known = [field.name for field in fields(Adam)]
    if not isinstance(said, Mapping) or "rate" not in said:
        raise InvalidInput(
            where,
            found=f"{said!r:.60}",
            expected=f"{{rate: ...}}: about how far a weight goes in a round; and {', '.join(known[1:])}",
        )
    if unknown := next((key for key in said if key not in known), None):
        raise InvalidInput(
            f"{where}.{unknown}", found="unknown key", expected=", ".join(known), remedy=suggest(str(unknown), known)
        )
    for key, value in said.items():
        mean = key.startswith("beta")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (number and (0 <= value < 1 if mean else 0 < value < float("inf"))):
            expected = "a number from 0, below 1" if mean else "a number above 0"
            raise InvalidInput(f"{where}.{key}", found=f"{value!r:.60}", expected=expected)
    return Adam(**{str(key): float(value) for key, value in said.items()})


def with_momentum(made: Document, before: str, momentum: float) -> tuple[Document, ...]:
    """A round, and the step that is taken when the last one (from ``before`` to its base) goes on."""
    models = [
        {"model": ROUND, "parameters": {"weight": 1.0}},
        {"model": before, "parameters": {"weight": -momentum}},
    ]
    return _round(made), _step(made, TASK_ARITHMETIC.name, models)


def with_adam(made: Document, kept: Mapping[str, str], adam: Adam) -> tuple[Document, ...]:
    """A round, both means with it, and the step that follows from them.

    Args:
        kept: The means of the rounds before, by name; none where it begins anew.
    """

    def mean(name: str, method: str, keep: float) -> Document:
        models = [{"model": ROUND}, *([{"model": kept[name]}] if name in kept else [])]
        said = {"name": name, "merge_method": method, "base_model": made["base_model"], "models": models}
        return {**said, "parameters": {"keep": keep}, "dtype": "float32"}

    step = _step(made, "adam", [{"model": MEAN}, {"model": SQUARES}])
    return (
        _round(made),
        mean(MEAN, "moving_mean", adam.beta1),
        mean(SQUARES, "moving_squares", adam.beta2),
        {**step, "parameters": {"rate": adam.rate, "tau": adam.tau}},
    )


def _round(made: Document) -> Document:
    """What the clients make together, in float32."""
    return {
        **{key: value for key, value in made.items() if key not in _OF_THE_RESULT},
        "name": ROUND,
        "dtype": "float32",
    }


def _step(made: Document, method: str, models: list[dict[str, Any]]) -> Document:
    """The document whose result is released."""
    of_the_result = {key: value for key, value in made.items() if key in _OF_THE_RESULT}
    return {"merge_method": method, "base_model": made["base_model"], "models": models, **of_the_result}
