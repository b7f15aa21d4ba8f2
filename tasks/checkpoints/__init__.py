"""From the names in a recipe to bytes that cannot change under the run, and to models in memory.

Directories and Hub repositories are resolved, looked into by headers, fetched, pinned by digest, and loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tasks.checkpoints.model import Model
from tasks.checkpoints.model_cache import SMALLER, LoadedModel, also_unload, load_model, tokenizer_digest, unload
from tasks.checkpoints.pin import (
    PinnedCheckpoint,
    PinnedRecipe,
    ResolvedCheckpoint,
    checkpoint_digest,
    deciding_files,
    find_checkpoint,
    open_parent,
    pin_checkpoints,
    resolve_all_parents,
    resolve_parents,
    search_parents,
)

if TYPE_CHECKING:
    from tasks.checkpoints.fetch import fetch_weights


def __getattr__(name: str) -> Any:
    """``fetch_weights`` when it is asked for: it is a step of Prefect, whose import a process that only loads models
    need not pay."""
    if name != "fetch_weights":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tasks.checkpoints.fetch import fetch_weights

    return fetch_weights


__all__ = [
    "SMALLER",
    "LoadedModel",
    "Model",
    "PinnedCheckpoint",
    "PinnedRecipe",
    "ResolvedCheckpoint",
    "also_unload",
    "checkpoint_digest",
    "deciding_files",
    "fetch_weights",
    "find_checkpoint",
    "load_model",
    "open_parent",
    "pin_checkpoints",
    "resolve_all_parents",
    "resolve_parents",
    "search_parents",
    "tokenizer_digest",
    "unload",
]
