"""Derive facts about networks from tensor names and configurations: heads, tied embeddings, layer counts."""

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

# Additional tensors with one row per token: biases of heads, heads of encoders, and T5's table. T5's table cannot
# replace a head like other embeddings, because a tied head of T5 is scaled.
_TOKEN_ROWS = re.compile(
    r"^(?:.*\.)?(?:(?:lm_head|embed_out|lm_head\.decoder|predictions|predictions\.decoder)\.bias"
    r"|(?:lm_head|predictions)\.decoder\.weight)$|^shared\.weight$|^generator_lm_head\.bias$"
)
# Buffers that some versions of a library store and others compute.
_BUFFERS = ("rotary_emb.inv_freq", "position_ids", "masked_bias", "attn.bias")

LAYER_COUNT_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def has_vocabulary_rows(name: str) -> bool:
    """Return whether the tensor has one row per token: an embedding, a head or the bias of a head."""
    return is_embedding(name) or is_head(name) or bool(_TOKEN_ROWS.match(name))


def class_difference(first: Checkpoint, second: Checkpoint) -> Literal["none", "head", "network"]:
    """Return how the networks of two checkpoints differ, according to ``model_type`` and ``architectures``.

    Returns:
        ``head`` if one is the base network of the other's family (``BertModel``) or its config names no class,
        ``network`` for two different heads or two families, and ``none`` otherwise.
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
    """Return whether a checkpoint may lack the tensor while another one of the same architecture has it."""
    return name.endswith(_BUFFERS) or is_head(name)


def find_tensor(checkpoint: Checkpoint, name: str) -> AnyTensor | None:
    """Return the tensor called ``name``, or the embedding that it is tied to for a tied head that is not stored."""
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

    Layers for multi-token prediction do not count.
    """
    count: int | None = _first(config, *LAYER_COUNT_KEYS)
    if count is not None:
        return count
    text = text_part(config)
    lists = (text.config.get(key) for key in (text.family.depth_of if text.family else ()))
    return next((len(kinds) for kinds in lists if kinds), None)


def _first(config: Mapping[str, Any], *keys: str) -> Any:
    """Return the first value of ``keys`` that a config, or its text part, sets. Its type was checked on opening."""
    values = (part.get(key) for part in config_parts(config) for key in keys)
    return next((value for value in values if value is not None), None)


def with_dtype(config: Mapping[str, Any], dtype: DType | None) -> dict[str, Any]:
    """Return a copy of ``config`` that states ``dtype`` as the format of most weights. None leaves it unchanged."""
    result: dict[str, Any] = copy.deepcopy(dict(config))
    parts: list[Any] = config_parts(result)
    if dtype is not None:
        keys = [(part, key) for part in parts for key in ("dtype", "torch_dtype") if part.get(key) is not None]
        for part, key in keys or [(result, "torch_dtype")]:
            part[key] = dtype.torch_name
    return result


def dtype_in(config: Mapping[str, Any]) -> str:
    """Return the format of most weights that a configuration states, such as ``bfloat16``, or an empty string."""
    dtypes = (part.get(key) for part in config_parts(config) for key in ("dtype", "torch_dtype"))
    return next((name.removeprefix("torch.") for name in dtypes if isinstance(name, str)), "")


def with_vocabulary(config: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return a copy of ``config`` with ``size`` embedding rows, in every part that states the vocabulary size."""
    result: dict[str, Any] = copy.deepcopy(dict(config))
    parts: list[Any] = config_parts(result)
    for part in parts:
        if part.get("vocab_size") is not None:
            part["vocab_size"] = size
    return result


def has_own_head(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint stores an output projection that is not tied to the embedding."""
    return any(is_head(name) for name in checkpoint.tensors) and ties_embeddings(checkpoint.config) is not True
