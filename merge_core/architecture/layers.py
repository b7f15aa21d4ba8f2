"""Locate a tensor in the network by its name: the stack of layers, the layer and the part of the layer.

Names contain this in every Hugging Face layout (``model.layers.3.mlp.up_proj.weight``, ``transformer.h.3.…``), so no
table of architectures is needed. Only the first numbered container counts. Experts inside a layer are parts of the
layer.
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
    """Location of a tensor: ``stack`` (``model.layers``), ``index`` (3) and ``part`` (``mlp.up_proj.weight``)."""

    stack: str
    index: int
    part: str


# A plan calls this many times. A mixture with 384 experts in 61 layers has 70,000 names.
@lru_cache(maxsize=1 << 17)
def parse_layer_place(name: str) -> LayerPlace | None:
    """Return the location of a tensor in a stack of layers, or None for embeddings, the final norm and heads."""
    match = _NUMBERED.match(name)
    # All layers use the same few strings, so store each only once.
    return LayerPlace(sys.intern(match[1]), int(match[2]), sys.intern(match[3])) if match else None


def stacks(names: Iterable[str]) -> dict[str, int]:
    """Return the number of layers of each stack in ``names``."""
    counts: dict[str, int] = {}
    for name in names:
        place = parse_layer_place(name)
        if place is not None and place.index >= counts.get(place.stack, 0):
            counts[place.stack] = place.index + 1
    return counts


def is_before_layers(name: str) -> bool:
    """Return whether the tensor is before the layers (embeddings) and not in or after them (layers, norm, head)."""
    return parse_layer_place(name) is None and bool(_FIRST.search(name))
