"""Define small search spaces that several tests share."""

from __future__ import annotations

from typing import Any

from mergegate.tasks.sweep.settings import SweepSettings
from mergegate.tasks.sweep.space import Space, make_space

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


def settings_of(parameters: dict[str, Any], **more: Any) -> SweepSettings:
    return SweepSettings.model_validate(
        {"objective": [{"task": "rev", "measure": "exact"}], "parameters": parameters, **more}
    )


def space_of(recipe: dict[str, Any], parameters: dict[str, Any], layers: int | None = 4, **more: Any) -> Space:
    return make_space(recipe, settings_of(parameters, **more), layers, "r.yaml")


def ties_space() -> Space:
    return space_of(TIES, TIES_PARAMETERS)
