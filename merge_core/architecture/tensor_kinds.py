"""What a tensor does in a network, from its name: query, up-projection, norm, embedding, ...

The names of the parts are few, and each means one thing in every Hugging Face layout; fused projections (one matrix for
query, key and value) are kinds of their own. A bias counts with its weight.
"""

from __future__ import annotations

import re
from typing import Literal

from mergegate.merge_core.architecture.layers import is_before_layers, parse_layer_place
from mergegate.merge_core.checkpoint import is_head

TensorKind = Literal["q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down", "norm", "embedding", "head", "other"]

# In the order in which data flows through a layer; those outside the layers last.
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
# These are the output of whichever part they stand in.
_OUTPUTS = frozenset({"c_proj", "dense"})
_NORM = re.compile(r"norm|^ln|_ln$|^ln_", re.IGNORECASE)


def tensor_kind(name: str) -> TensorKind:
    """Kind of the tensor called ``name``; ``other`` for what no layout has taught us (routers, adapters, ...)."""
    if is_head(name):
        return "head"
    parts = name.split(".")
    words = [word.lower() for word in parts if word not in ("weight", "bias")]
    for word in reversed(words):
        if word in _NAMES:
            return _NAMES[word]
        if word in _OUTPUTS:
            return "o" if _ATTENTION.search(name) else "down"
        # From the inside out: q_norm inside attention is a norm.
        if _NORM.search(word):
            return "norm"
    return "embedding" if parse_layer_place(name) is None and is_before_layers(name) else "other"


# Kinds whose weight is the matrix of a linear layer.
_PROJECTIONS = frozenset({"q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down"})


def is_routed_expert(name: str) -> bool:
    """Whether the tensor called ``name`` is one of many experts': in memory all of them are one parameter, mostly."""
    return ".experts." in name


def is_projection(name: str) -> bool:
    """Whether the tensor called ``name`` belongs to a linear layer inside a layer of the network: attention's and the
    feed-forward network's, not a router, a norm, an embedding or the head."""
    return tensor_kind(name) in _PROJECTIONS and parse_layer_place(name) is not None


def is_inputs_first(name: str) -> bool:
    """Whether the projection called ``name`` is ``[in, out]``: one expert of a tensor in which all of them lie so
    (Llama 4, GPT-OSS). Every other is ``[out, in]``."""
    return is_routed_expert(name) and not name.endswith((".weight", ".bias")) and is_projection(name)


def input_width(name: str, shape: tuple[int, ...]) -> int:
    """How many numbers flow into the matrix called ``name``."""
    return shape[0] if is_inputs_first(name) else shape[-1]
