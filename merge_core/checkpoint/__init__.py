"""Checkpoints on disk as tables of tensors: headers, number formats and chat templates, no weight read.

Everything here treats files as a stranger's: lengths are checked before they are believed, and no pickle is run.
"""

from merge_core.checkpoint.chat_template import FILE, TURN_ENDS, chosen_template
from merge_core.checkpoint.checkpoint import (
    INDEX_NAME,
    PICKLED_INDEX_NAME,
    PICKLED_SINGLE_NAME,
    SINGLE_NAME,
    Checkpoint,
    open_checkpoint,
)
from merge_core.checkpoint.configuration import CONFIG_KEYS, TEXT_PARTS, config_parts, read_config
from merge_core.checkpoint.derived import AnyTensor, DerivedTensor, ReadElements, ReadStored
from merge_core.checkpoint.dtypes import (
    BY_CODE,
    BY_TORCH_NAME,
    EXPONENTS,
    RECIPE_NAMES,
    DType,
    SizedTensor,
    numbers,
    patterns,
    promote,
    recipe_dtype,
)
from merge_core.checkpoint.heads import is_embedding, is_head, ties_embeddings, with_tie
from merge_core.checkpoint.importance import (
    FILES_OF_IMPORTANCE,
    IMPORTANCE,
    ExpectedImportance,
    file_of_importance,
    open_importance,
    write_importance,
)
from merge_core.checkpoint.moments import (
    FILES_OF_MOMENTS,
    INPUTS,
    ExpectedMoments,
    StoredMoments,
    file_of_moments,
    no_moments,
    open_moments,
    packed_moments,
    write_inputs,
)
from merge_core.checkpoint.pickled_file import read_pickled
from merge_core.checkpoint.safetensors_file import StoredTensor, fetch_header, read_header, read_into, render_header

__all__ = [
    "BY_CODE",
    "BY_TORCH_NAME",
    "CONFIG_KEYS",
    "EXPONENTS",
    "FILE",
    "FILES_OF_IMPORTANCE",
    "FILES_OF_MOMENTS",
    "IMPORTANCE",
    "INDEX_NAME",
    "INPUTS",
    "PICKLED_INDEX_NAME",
    "PICKLED_SINGLE_NAME",
    "RECIPE_NAMES",
    "SINGLE_NAME",
    "TEXT_PARTS",
    "TURN_ENDS",
    "AnyTensor",
    "Checkpoint",
    "DType",
    "DerivedTensor",
    "ExpectedImportance",
    "ExpectedMoments",
    "ReadElements",
    "ReadStored",
    "SizedTensor",
    "StoredMoments",
    "StoredTensor",
    "chosen_template",
    "config_parts",
    "fetch_header",
    "file_of_importance",
    "file_of_moments",
    "is_embedding",
    "is_head",
    "no_moments",
    "numbers",
    "open_checkpoint",
    "open_importance",
    "open_moments",
    "packed_moments",
    "patterns",
    "promote",
    "read_config",
    "read_header",
    "read_into",
    "read_pickled",
    "recipe_dtype",
    "render_header",
    "ties_embeddings",
    "with_tie",
    "write_importance",
    "write_inputs",
]
