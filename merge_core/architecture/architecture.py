"""What the engine must know about networks, from names and configs alone: heads, tied embeddings, layer counts."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any, Literal

from mergegate.merge_core.architecture.families import text_part
from mergegate.merge_core.checkpoint import (
    AnyTensor,
    Checkpoint,
    DType,
    config_parts,
    is_embedding,
    is_head,
    ties_embeddings,
)

# Further tensors with a row for each token: biases of heads, heads of encoders, and T5's table, which is no embedding
# that could stand for a head: where T5's head is tied, it is scaled.
_TOKEN_ROWS = re.compile(
    r"^(?:.*\.)?(?:(?:lm_head|embed_out|lm_head\.decoder|predictions|predictions\.decoder)\.bias"
    r"|(?:lm_head|predictions)\.decoder\.weight)$|^shared\.weight$|^generator_lm_head\.bias$"
)
# Buffers that some versions of a library stored and others compute.
_BUFFERS = ("rotary_emb.inv_freq", "position_ids", "masked_bias", "attn.bias")

LAYER_COUNT_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def has_vocabulary_rows(name: str) -> bool:
    """Whether the tensor has one row per token: embeddings, heads and their biases."""
    return is_embedding(name) or is_head(name) or bool(_TOKEN_ROWS.match(name))


def class_difference(first: Checkpoint, second: Checkpoint) -> Literal["none", "head", "network"]:
    """Return in what the networks of two checkpoints differ, from ``model_type`` and ``architectures``.

    ``head``: one is the base network of the other's family (``BertModel``), or its config names no class. Models with
    two different heads, or of two families, differ as networks.
    """
    classes = (first.class_name, second.class_name)
    if classes[0] == classes[1] != "":
        return "none"
    families = (first.config.get("model_type"), second.config.get("model_type"))
    if all(families) and families[0] != families[1]:
        return "network"
    if classes[0] == classes[1]:
        return "none"
    if not all(classes):
        return "head"
    return "head" if all(families) and any(map(is_base_class, classes)) else "network"


def is_base_class(name: str) -> bool:
    """Return whether a class is the base network of a family, without a head: ``BertModel``."""
    return name.endswith("Model") and "Head" not in name


def is_optional(name: str) -> bool:
    """Whether checkpoints of one architecture may differ in having the tensor."""
    return name.endswith(_BUFFERS) or is_head(name)


def find_tensor(checkpoint: Checkpoint, name: str) -> AnyTensor | None:
    """The tensor of that name; for a head that is tied and not stored, the embedding it is tied to."""
    tensor = checkpoint.tensors.get(name)
    if tensor is not None or not is_head(name) or ties_embeddings(checkpoint.config) is False:
        return tensor
    embeddings = [candidate for candidate in checkpoint.tensors.values() if is_embedding(candidate.name)]
    return embeddings[0] if len(embeddings) == 1 else None


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """Return ``vocab_size`` of a config or of its text part, or None if neither states it."""
    size: int | None = _first(config, "vocab_size")
    return size


def layer_count(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers that a config, or its text part, states or lists.

    Layers that predict further tokens do not count.
    """
    count: int | None = _first(config, *LAYER_COUNT_KEYS)
    if count is not None:
        return count
    text = text_part(config)
    listed = (text.config.get(key) for key in (text.family.depth_of if text.family else ()))
    return next((len(kinds) for kinds in listed if kinds), None)


def _first(config: Mapping[str, Any], *keys: str) -> Any:
    """Return the first of ``keys`` that a config, or its text part, sets. Types are checked where it is opened."""
    values = (part.get(key) for part in config_parts(config) for key in keys)
    return next((value for value in values if value is not None), None)


def with_dtype(config: Mapping[str, Any], dtype: DType | None) -> dict[str, Any]:
    """``config`` that names ``dtype`` as the format of most of the weights; None: as it was."""
    changed: dict[str, Any] = copy.deepcopy(dict(config))
    parts: list[Any] = config_parts(changed)
    if dtype is not None:
        keys = [(part, key) for part in parts for key in ("dtype", "torch_dtype") if part.get(key) is not None]
        for part, key in keys or [(changed, "torch_dtype")]:
            part[key] = dtype.torch_name
    return changed


def dtype_in(config: Mapping[str, Any]) -> str:
    """Format of most of the weights (``bfloat16``) as a configuration names it, and a loader takes it; else empty."""
    named = (part.get(key) for part in config_parts(config) for key in ("dtype", "torch_dtype"))
    return next((name.removeprefix("torch.") for name in named if isinstance(name, str)), "")


def with_vocabulary(config: Mapping[str, Any], size: int) -> dict[str, Any]:
    """``config`` for ``size`` embedding rows, in every part that names their number."""
    changed: dict[str, Any] = copy.deepcopy(dict(config))
    parts: list[Any] = config_parts(changed)
    for part in parts:
        if part.get("vocab_size") is not None:
            part["vocab_size"] = size
    return changed


def has_own_head(checkpoint: Checkpoint) -> bool:
    """Whether the output projection is a table of its own: stored, and not said to be the embedding."""
    return any(is_head(name) for name in checkpoint.tensors) and ties_embeddings(checkpoint.config) is not True
