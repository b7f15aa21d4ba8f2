"""From the names in a recipe to bytes that cannot change under the run, and to models in memory.

Directories and Hub repositories are resolved, looked into by headers, fetched, pinned by digest, and loaded.
"""

from tasks.checkpoints.fetch import fetch_weights
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
