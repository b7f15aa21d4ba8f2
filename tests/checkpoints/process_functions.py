"""Functions that tests call in the model process, in addition to those of the product."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from mergegate.tasks.models.checkpoints import model_cache
from mergegate.tasks.models.checkpoints.model import Model

_loads: list[str] = []
_load = model_cache._load


def count_loads(on_progress: object) -> None:
    """Start to count model loads."""

    def counted(model: Model, dtype: str, device: str) -> Any:
        _loads.append(model.name)
        return _load(model, dtype, device)

    model_cache._load = counted
    _loads.clear()


def loads(on_progress: object) -> list[str]:
    """Return the names of the models that were loaded, in order."""
    return _loads


def die(on_progress: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_unless_alone(model: Model, notes: Path, on_progress: object) -> int:
    """Die as if memory held only one model; otherwise return the number of loaded models."""
    with notes.open("a") as file, model_cache.load_model(model, dtype="auto", device="cpu"):
        file.write(f"{model.name} {len(model_cache._loaded)}\n")
        file.flush()
        if len(model_cache._loaded) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return len(model_cache._loaded)


def process_id(on_progress: object) -> int:
    return os.getpid()
