"""Functions that the process that holds models is asked to call, besides those of the product."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from mergegate.merge_core.system import Capacity
from mergegate.tasks.checkpoints import model_cache
from mergegate.tasks.checkpoints.model import Model

_loads: list[str] = []
_load = model_cache._load


def count_loads(on_progress: object) -> None:
    """From now on."""

    def counted(model: Model, dtype: str, device: str) -> Any:
        _loads.append(model.name)
        return _load(model, dtype, device)

    model_cache._load = counted
    _loads.clear()


def loads(on_progress: object) -> list[str]:
    """Names of the models that were loaded, in order."""
    return _loads


def have_memory(available: int, on_progress: object) -> None:
    """Believe in so many bytes, without what is held."""
    model_cache.system_memory = lambda: Capacity(available, available - _held())


def held(on_progress: object) -> int:
    return len(model_cache._loaded)


def die(on_progress: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_unless_alone(model: Model, notes: Path, on_progress: object) -> int:
    """As where memory is enough for one model and not for two; the number of models held."""
    with notes.open("a") as file, model_cache.load_model(model, dtype="auto", device="cpu"):
        file.write(f"{model.name} {len(model_cache._loaded)}\n")
        file.flush()
        if len(model_cache._loaded) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return len(model_cache._loaded)


def _held() -> int:
    return sum(map(model_cache._bytes_of, model_cache._loaded.values()))
