"""Causes that many findings have: models of different sizes differ in every tensor, and a person wants to hear it once.

A finding names its cause (``Finding.cause``); ``merge_core.errors.group_findings`` puts together those of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mergegate.merge_core.architecture import class_difference, layer_count, text_part
from mergegate.merge_core.checkpoint import Checkpoint
from mergegate.merge_core.errors import Finding

# Keys of config.json that decide the shapes of tensors, and what they are called; the older names, too.
SIZES: Mapping[str, str] = {
    "hidden_size": "hidden size",
    "n_embd": "hidden size",
    "intermediate_size": "feed-forward size",
    "n_inner": "feed-forward size",
    "num_attention_heads": "heads",
    "n_head": "heads",
    "num_key_value_heads": "key-value heads",
    "head_dim": "head size",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "moe_intermediate_size": "size of an expert",
}
_COUNTED = ("layers", "heads", "key-value heads", "experts")


def different_size(model: str) -> str:
    """The cause of what comes of a model's layers and widths, or of its architecture."""
    return f"{model}: size"


def different_head(model: str) -> str:
    """Return the cause of findings about a model whose class has another head than the result, or none."""
    return f"{model}: head"


def different_vocabulary(model: str) -> str:
    """The cause of what comes of a model's number of tokens."""
    return f"{model}: vocabulary"


def compare_sizes(donor: str, first: Checkpoint, name: str, other: Checkpoint) -> Iterator[Finding]:
    """One finding that says all sizes in which ``other`` differs from ``first``; none where their configurations agree,
    or are of different architectures."""
    if class_difference(first, other) == "network":
        return
    pairs = [("layers", layer_count(other.config), layer_count(first.config))]
    pairs += [(called, stated(other, key), stated(first, key)) for key, called in SIZES.items()]
    differing = [
        f"{theirs} {called} against {mine}" if called in _COUNTED else f"{called} {theirs} against {mine}"
        for called, theirs, mine in pairs
        if theirs != mine and theirs is not None and mine is not None
    ]
    if differing:
        yield Finding(
            "block",
            f"{name}: config.json",
            found=", ".join(differing),
            expected=f"the size of {donor}",
            remedy="merge models of one architecture and size",
            cause=different_size(name),
        )


def stated(checkpoint: Checkpoint, key: str) -> Any:
    """What a configuration, or its text part, says under ``key``."""
    value = checkpoint.config.get(key)
    return text_part(checkpoint.config).config.get(key) if value is None else value
