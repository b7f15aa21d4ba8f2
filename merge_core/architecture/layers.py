"""From a tensor's name to its place in the network: which stack of layers, which layer, which part of it.

Names carry this in every Hugging Face layout (``model.layers.3.mlp.up_proj.weight``, ``transformer.h.3.…``), so no
table of architectures is needed. Only the first numbered container counts: experts inside a layer are parts of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

_NUMBERED = re.compile(r"^((?:[^.]+\.)*?(?:layers|layer|h|blocks|block))\.([0-9]{1,6})\.(.+)$")
_FIRST = re.compile(r"embed|wte|wpe|patch|tok_emb", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """``stack`` (``model.layers``), ``index`` (3) and ``part`` (``mlp.up_proj.weight``)."""

    stack: str
    index: int
    part: str


# A plan asks many times; a mixture of 384 experts in 61 layers has 70,000 names.
@lru_cache(maxsize=1 << 17)
def parse_layer_place(name: str) -> LayerPlace | None:
    """Place of a tensor in a stack of layers; None for embeddings, final norm, heads."""
    match = _NUMBERED.match(name)
    # The same few words for all layers: each is kept once.
    return LayerPlace(sys.intern(match[1]), int(match[2]), sys.intern(match[3])) if match else None


def stacks(names: Iterable[str]) -> dict[str, int]:
    """Number of layers of each stack that occurs in ``names``."""
    counts: dict[str, int] = {}
    for name in names:
        at = parse_layer_place(name)
        if at is not None and at.index >= counts.get(at.stack, 0):
            counts[at.stack] = at.index + 1
    return counts


def is_before_layers(name: str) -> bool:
    """True for what stands before the layers (embeddings), False for what stands after them (norm, head)."""
    return parse_layer_place(name) is None and bool(_FIRST.search(name))
