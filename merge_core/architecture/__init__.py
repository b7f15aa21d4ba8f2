"""What networks do, from names and configurations alone: layers, heads, tied embeddings, kinds of tensors."""

from merge_core.architecture.architecture import (
    find_tensor,
    has_own_head,
    is_embedding,
    is_head,
    is_optional,
    layer_count,
    main_stack,
    output_config,
    ties_embeddings,
    untied,
    vocabulary_size,
    with_vocabulary,
)
from merge_core.architecture.layers import before_layers, layer_place, stacks
from merge_core.architecture.tensor_kinds import KINDS, TensorKind, tensor_kind

__all__ = [
    "KINDS",
    "TensorKind",
    "before_layers",
    "find_tensor",
    "has_own_head",
    "is_embedding",
    "is_head",
    "is_optional",
    "layer_count",
    "layer_place",
    "main_stack",
    "output_config",
    "stacks",
    "tensor_kind",
    "ties_embeddings",
    "untied",
    "vocabulary_size",
    "with_vocabulary",
]
