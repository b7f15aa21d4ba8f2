"""Derive the role of a tensor in a network from its name: query, up projection, norm, embedding and so on.

Hugging Face layouts use few names for the parts of a layer, and each name has the same meaning in all of them. Fused
projections, such as one matrix for query, key and value, are separate kinds. A bias has the kind of its weight.
"""

from __future__ import annotations

import re
from typing import Literal

from mergegate.merge_core.architecture.layers import is_before_layers, parse_layer_place
from mergegate.merge_core.checkpoint import is_head

TensorKind = Literal["q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down", "norm", "embedding", "head", "other"]

# Ordered by the flow of data through a layer, with the kinds outside the layers last.
KINDS: tuple[TensorKind, ...] = (
    "q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down", "norm", "other", "embedding", "head",
)  # fmt: skip

_ATTENTION = re.compile(r"att|attn", re.IGNORECASE)
_NAMES: dict[str, TensorKind] = {
    **dict.fromkeys(("q_proj", "query", "wq", "q"), "q"),
    **dict.fromkeys(("k_proj", "key", "wk", "k"), "k"),
    **dict.fromkeys(("v_proj", "value", "wv", "v"), "v"),
    **dict.fromkeys(("qkv_proj", "query_key_value", "c_attn", "wqkv", "qkv"), "qkv"),
    **dict.fromkeys(("o_proj", "out_proj", "wo"), "o"),
    **dict.fromkeys(("gate_proj", "w1"), "gate"),
    **dict.fromkeys(("up_proj", "fc1", "c_fc", "dense_h_to_4h", "w3", "fc_in"), "up"),
    "gate_up_proj": "gate_up",
    **dict.fromkeys(("down_proj", "fc2", "dense_4h_to_h", "w2", "fc_out"), "down"),
}
# Output projections of attention or of the feed-forward network, depending on the rest of the name.
_OUTPUTS = frozenset({"c_proj", "dense"})
_NORM = re.compile(r"norm|^ln|_ln$|^ln_", re.IGNORECASE)


def tensor_kind(name: str) -> TensorKind:
    """Return the kind of a tensor, or ``other`` for names that are not in the table, such as routers and adapters."""
    if is_head(name):
        return "head"
    parts = name.split(".")
    words = [word.lower() for word in parts if word not in ("weight", "bias")]
    for word in reversed(words):
        if word in _NAMES:
            return _NAMES[word]
        if word in _OUTPUTS:
            return "o" if _ATTENTION.search(name) else "down"
        # The innermost name decides, so q_norm inside attention is a norm.
        if _NORM.search(word):
            return "norm"
    return "embedding" if parse_layer_place(name) is None and is_before_layers(name) else "other"


# Kinds whose weight is the matrix of a linear layer.
_PROJECTIONS = frozenset({"q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down"})


def is_routed_expert(name: str) -> bool:
    """Return whether the tensor belongs to a routed expert. In memory, one parameter usually holds all experts."""
    return ".experts." in name


def is_projection(name: str) -> bool:
    """Return whether the tensor belongs to a linear projection of attention or of the feed-forward network.

    Routers, norms, embeddings and heads are not projections.
    """
    return tensor_kind(name) in _PROJECTIONS and parse_layer_place(name) is not None


def is_inputs_first(name: str) -> bool:
    """Return whether the projection has the shape ``[in, out]``.

    This is the case for an expert in a tensor that holds all experts in this form (Llama 4, GPT-OSS). All other
    projections have the shape ``[out, in]``.
    """
    return is_routed_expert(name) and not name.endswith((".weight", ".bias")) and is_projection(name)


def input_width(name: str, shape: tuple[int, ...]) -> int:
    """Return the number of inputs of the projection called ``name``."""
    return shape[0] if is_inputs_first(name) else shape[-1]
