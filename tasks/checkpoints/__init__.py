"""From the names in a recipe to bytes that cannot change under the run, and to models in memory.

Directories and Hub repositories are resolved, looked into by headers, fetched, pinned by digest, and loaded: here, or
in the process that holds models.
"""

from mergegate.tasks.checkpoints.adapter import PinnedAdapter, ResolvedAdapter
from mergegate.tasks.checkpoints.applied import loadable, loadable_alone, loadable_before
from mergegate.tasks.checkpoints.card import (
    CARD_FILE,
    NO_CARD,
    NO_FRONT_MATTER,
    ModelCard,
    card_path,
    parse_card,
    read_card,
)
from mergegate.tasks.checkpoints.fetch import fetch_weights
from mergegate.tasks.checkpoints.files import deciding_files, identify_files, require_same_files
from mergegate.tasks.checkpoints.lean_imports import import_lean
from mergegate.tasks.checkpoints.memory import gpu_memory
from mergegate.tasks.checkpoints.model import Model, files_state
from mergegate.tasks.checkpoints.model_cache import (
    LoadedModel,
    ShortOfMemory,
    also_unload,
    asked_with,
    load_apart,
    load_model,
    tokenizer_digest,
    unload,
)
from mergegate.tasks.checkpoints.model_process import TellProgress, ask_child, end_child
from mergegate.tasks.checkpoints.pin import (
    PinnedCheckpoint,
    PinnedRecipe,
    ResolvedCheckpoint,
    adapted_digest,
    adapter_digest,
    adapter_files_digest,
    adapter_remarks,
    checkpoint_digest,
    files_digest,
    find_checkpoint,
    identify_parents,
    open_parent,
    pin_checkpoints,
    pinned_before,
    require_combinable,
    resolve_all_parents,
    resolve_parents,
    search_parents,
    size_of_adapter,
)

__all__ = [
    "CARD_FILE",
    "NO_CARD",
    "NO_FRONT_MATTER",
    "LoadedModel",
    "Model",
    "ModelCard",
    "PinnedAdapter",
    "PinnedCheckpoint",
    "PinnedRecipe",
    "ResolvedAdapter",
    "ResolvedCheckpoint",
    "ShortOfMemory",
    "TellProgress",
    "adapted_digest",
    "adapter_digest",
    "adapter_files_digest",
    "adapter_remarks",
    "also_unload",
    "ask_child",
    "asked_with",
    "card_path",
    "checkpoint_digest",
    "deciding_files",
    "end_child",
    "fetch_weights",
    "files_digest",
    "files_state",
    "find_checkpoint",
    "gpu_memory",
    "identify_files",
    "identify_parents",
    "import_lean",
    "load_apart",
    "load_model",
    "loadable",
    "loadable_alone",
    "loadable_before",
    "open_parent",
    "parse_card",
    "pin_checkpoints",
    "pinned_before",
    "read_card",
    "require_combinable",
    "require_same_files",
    "resolve_all_parents",
    "resolve_parents",
    "search_parents",
    "size_of_adapter",
    "tokenizer_digest",
    "unload",
]
