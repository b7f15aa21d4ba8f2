"""Derive the location of a tensor in the network, and its role, from its name.

The location is the stack of layers, the layer and the part of the layer. Every Hugging Face layout writes it into the
name (``model.layers.3.mlp.up_proj.weight``, ``transformer.h.3.…``), so no table of architectures is needed. Only the
first number in a name is a layer number, so the experts of a layer are parts of the layer.

The role, or *kind*, is query, up projection, norm, embedding and so on. The few names that Hugging Face layouts use
have the same meaning in all of them. A fused projection, such as one matrix for query, key and value, is a kind of its
own. A bias has the kind of its weight.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from mergegate.merge_core.checkpoint import is_head

TensorKind = Literal["q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down", "norm", "embedding", "head", "other"]

# Ordered by the flow of data through a layer, with the kinds outside the layers last.
KINDS: tuple[TensorKind, ...] = (
    "q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down", "norm", "other", "embedding", "head",
)  # fmt: skip

_NUMBERED = re.compile(r"^((?:[^.]+\.)*?(?:layers|layer|h|blocks|block))\.([0-9]{1,6})\.(.+)$")
_FIRST = re.compile(r"embed|wte|wpe|patch|tok_emb", re.IGNORECASE)

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


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Location of a tensor, such as stack ``model.layers``, index 3 and part ``mlp.up_proj.weight``."""

    stack: str
    index: int
    part: str


# A plan calls this many times. A mixture with 384 experts in 61 layers has 70,000 names.
@lru_cache(maxsize=1 << 17)
def parse_layer_place(name: str) -> LayerPlace | None:
    """Return the location of the tensor called ``name``, or None if it is in no layer, like embeddings and heads."""
    match = _NUMBERED.match(name)
    # All layers use the same few strings, so store each only once.
    return LayerPlace(sys.intern(match[1]), int(match[2]), sys.intern(match[3])) if match else None


def stacks(names: Iterable[str]) -> dict[str, int]:
    """Return the number of layers of each stack of layers in the tensor names ``names``, by the name of the stack."""
    counts: dict[str, int] = {}
    for name in names:
        position = parse_layer_place(name)
        if position is not None and position.index >= counts.get(position.stack, 0):
            counts[position.stack] = position.index + 1
    return counts


def is_before_layers(name: str) -> bool:
    """Return whether the tensor called ``name`` comes before the layers of the network, like an embedding."""
    return parse_layer_place(name) is None and bool(_FIRST.search(name))


def tensor_kind(name: str) -> TensorKind:
    """Return the kind of the tensor called ``name``. Routers, for example, are of the kind ``other``."""
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
    """Return whether the tensor called ``name`` belongs to experts that a router selects, not to a shared expert."""
    return ".experts." in name


def is_projection(name: str) -> bool:
    """Return whether the tensor called ``name`` belongs to a linear layer of attention or of a feed-forward network."""
    return tensor_kind(name) in _PROJECTIONS and parse_layer_place(name) is not None


def is_inputs_first(name: str) -> bool:
    """Return whether the projection called ``name`` has the shape ``[in, out]`` instead of ``[out, in]``.

    Only experts of families that store all experts of a layer in one tensor of this form have it (Llama 4, GPT-OSS).
    """
    return is_routed_expert(name) and not name.endswith((".weight", ".bias")) and is_projection(name)


def input_width(name: str, shape: tuple[int, ...]) -> int:
    """Return the number of inputs of the projection called ``name``, whose weight has the shape ``shape``."""
    return shape[0] if is_inputs_first(name) else shape[-1]
