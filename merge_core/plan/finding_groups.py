"""Name the causes that findings share, so that a report can group them.

Models of different sizes differ in every tensor, but a user needs to read that only once. A finding names its cause
(``Finding.cause``), and ``merge_core.errors.group_findings`` groups findings by cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mergegate.merge_core.architecture import class_difference, layer_count, text_part
from mergegate.merge_core.checkpoint import Checkpoint
from mergegate.merge_core.errors import Finding

# Labels of the config.json keys that decide tensor shapes, including older key names.
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
# End of the place of a finding about models with different networks.
CLASSES = ": config.json: architectures"
_COUNTED = ("layers", "heads", "key-value heads", "experts")


def different_size(model: str) -> str:
    """Return the cause of findings about the depth, width or architecture of a model."""
    return f"{model}: size"


def different_head(model: str) -> str:
    """Return the cause of findings about a model whose class has no head or a different head than the result."""
    return f"{model}: head"


def not_loaded(model: str) -> str:
    """Return the cause of findings about tensors that the class of a model does not load and a writer drops."""
    return f"{model}: not loaded"


def different_vocabulary(model: str) -> str:
    """Return the cause of findings about the vocabulary size of a model."""
    return f"{model}: vocabulary"


def compare_sizes(donor_name: str, donor: Checkpoint, name: str, parent: Checkpoint) -> Iterator[Finding]:
    """Yield a finding if the models have different networks, or one that lists all sizes in which they differ."""
    if class_difference(donor, parent) == "network":
        order = ((donor_name, donor, name, parent), (name, parent, donor_name, donor))
        whole = next((models for models in order if _is_text_part(models[1], models[3])), None)
        relation = f"; {whole[2]} is the text model alone of a multimodal model like {whole[0]}" if whole else ""
        yield Finding(
            "block",
            f"{name}{CLASSES}",
            found=(parent.architecture or "no value") + relation,
            expected=f"{donor.architecture or 'no value'}, as in {donor_name}",
            remedy=f"save the text model of {whole[0]} as a model of its own and merge text models; see "
            "docs/how-to/gate-other-kinds.md"
            if whole
            else "merge models of one architecture",
            cause=different_size(name),
        )
        return
    pairs = [("layers", layer_count(parent.config), layer_count(donor.config))]
    pairs += [(label, config_value(parent, key), config_value(donor, key)) for key, label in SIZES.items()]
    differing = [
        f"{parent_value} {label} instead of {donor_value}"
        if label in _COUNTED
        else f"{label} {parent_value} instead of {donor_value}"
        for label, parent_value, donor_value in pairs
        if parent_value != donor_value and parent_value is not None and donor_value is not None
    ]
    if differing:
        yield Finding(
            "block",
            f"{name}: config.json",
            found=", ".join(differing),
            expected=f"the size of {donor_name}",
            remedy="merge models of one architecture and size",
            cause=different_size(name),
        )


def _is_text_part(multimodal: Checkpoint, text: Checkpoint) -> bool:
    """Return whether the language model inside ``multimodal`` is of the family of ``text``."""
    part = text_part(multimodal.config)
    return part.key is not None and part.model_type == text.config.get("model_type")


def config_value(checkpoint: Checkpoint, key: str) -> Any:
    """Return the value of ``key`` in the checkpoint's config or, if missing, in the config of its language model."""
    value = checkpoint.config.get(key)
    return text_part(checkpoint.config).config.get(key) if value is None else value
