"""Derive facts about networks from tensor names and configurations: heads, tied embeddings, layer counts."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any, Literal

from mergegate.merge_core.architecture.families import text_part
from mergegate.merge_core.architecture.loading import tied_source
from mergegate.merge_core.checkpoint import (
    AnyTensor,
    Checkpoint,
    DType,
    config_parts,
    is_embedding,
    is_head,
    ties_embeddings,
)

# Further tensors with one row per token: biases of heads, heads of encoders, and T5's embedding. ``is_embedding`` does
# not include T5's, because it cannot replace a missing head: T5 scales the output of a tied head.
_TOKEN_ROWS = re.compile(
    r"^(?:.*\.)?(?:(?:lm_head|embed_out|lm_head\.decoder|predictions|predictions\.decoder)\.bias"
    r"|(?:lm_head|predictions)\.decoder\.weight)$|^shared\.weight$|^generator_lm_head\.bias$"
)
# Buffers that some versions of a library store and others compute.
_BUFFERS = ("rotary_emb.inv_freq", "position_ids", "masked_bias", "attn.bias")

LAYER_COUNT_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def has_vocabulary_rows(name: str) -> bool:
    """Return whether the tensor called ``name`` has one row per token: an embedding, a head or the bias of a head."""
    return is_embedding(name) or is_head(name) or bool(_TOKEN_ROWS.match(name))


def class_difference(first: Checkpoint, second: Checkpoint) -> Literal["none", "head", "network"]:
    """Return how the networks of two checkpoints differ, according to ``model_type`` and ``architectures``.

    Returns:
        ``head`` if one checkpoint is the base network of the other's family (``BertModel``) or if its config contains
        no class, ``network`` for two families or two classes with different heads, and ``none`` for equal classes.
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
    """Return whether the class called ``name`` is the base network of a family, without a head, like ``BertModel``."""
    return name.endswith("Model") and "Head" not in name


def is_optional(name: str) -> bool:
    """Return whether checkpoints may omit the tensor called ``name``, although others of their architecture have it."""
    return name.endswith(_BUFFERS) or is_head(name)


def find_tensor(checkpoint: Checkpoint, name: str) -> AnyTensor | None:
    """Return the tensor called ``name``, or None. For a tied tensor that is not stored, return what it is tied to."""
    tensor = checkpoint.tensors.get(name) or checkpoint.tensors.get(tied_source(checkpoint, name) or "")
    if tensor is not None or not is_head(name) or ties_embeddings(checkpoint.config) is False:
        return tensor
    embeddings = [candidate for candidate in checkpoint.tensors.values() if is_embedding(candidate.name)]
    return embeddings[0] if len(embeddings) == 1 else None


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """Return ``vocab_size`` of a config or of its text part, or None if neither sets it."""
    size: int | None = _first(config, "vocab_size")
    return size


def layer_count(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers according to a config, or None. Layers for multi-token prediction do not count.

    A family with several encoders may have a number for each (``lxmert``). Then no single number is the depth.
    """
    count = _first(config, *LAYER_COUNT_KEYS)
    if isinstance(count, int):
        return count
    text = text_part(config)
    lists = (text.config.get(key) for key in (text.family.depth_of if text.family else ()))
    return next((len(kinds) for kinds in lists if kinds), None)


def _first(config: Mapping[str, Any], *keys: str) -> Any:
    """Return the first value of ``keys`` that a config, or its text part, sets."""
    values = (part.get(key) for part in config_parts(config) for key in keys)
    return next((value for value in values if value is not None), None)


def with_dtype(config: Mapping[str, Any], dtype: DType | None) -> dict[str, Any]:
    """Return a copy of ``config`` with ``dtype`` as the declared format of the weights, or unchanged if it is None."""
    result: dict[str, Any] = copy.deepcopy(dict(config))
    parts: list[Any] = config_parts(result)
    if dtype is not None:
        keys = [(part, key) for part in parts for key in ("dtype", "torch_dtype") if part.get(key) is not None]
        for part, key in keys or [(result, "torch_dtype")]:
            part[key] = dtype.torch_name
    return result


def dtype_in(config: Mapping[str, Any]) -> str:
    """Return the format of the weights that ``config`` declares, such as ``bfloat16``, or an empty string."""
    dtypes = (part.get(key) for part in config_parts(config) for key in ("dtype", "torch_dtype"))
    return next((name.removeprefix("torch.") for name in dtypes if isinstance(name, str)), "")


def with_vocabulary(config: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return a copy of ``config`` in which every ``vocab_size``, also that of the text part, is ``size``."""
    result: dict[str, Any] = copy.deepcopy(dict(config))
    parts: list[Any] = config_parts(result)
    for part in parts:
        if part.get("vocab_size") is not None:
            part["vocab_size"] = size
    return result


def has_own_head(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint stores a head (output projection) that is not tied to the embedding."""
    return any(is_head(name) for name in checkpoint.tensors) and ties_embeddings(checkpoint.config) is not True
