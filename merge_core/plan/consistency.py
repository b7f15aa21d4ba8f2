"""Consistency: every tensor of every model is used, and configs agree with their tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from merge_core.architecture import is_head, is_optional, layer_count, layer_place, stacks, vocabulary_size
from merge_core.checkpoint import Checkpoint
from merge_core.errors import Finding
from merge_core.plan.jobs import MergePlan

# What GPTQ and AWQ, bitsandbytes, and compressed-tensors call what they pack weights into.
_PACKED = re.compile(r"\.(qweight|qzeros|g_idx|absmax|quant_map|SCB|weight_packed|weight_scale)$|\.quant_state\.")


def self_consistency(name: str, checkpoint: Checkpoint) -> Iterator[Finding]:
    """What a checkpoint's config says that its tensors do not."""
    config = checkpoint.config
    yield from _quantised(name, checkpoint)
    named, depths = layer_count(config), stacks(checkpoint.tensors)
    if named is not None and depths and named not in depths.values():
        yield Finding(
            "block",
            f"{name}: config.json: num_hidden_layers",
            found=f"{named}",
            expected=f"the number of layers in the weights: {', '.join(map(str, depths.values()))}",
            remedy="repair the config, or download the checkpoint again",
        )
    size = vocabulary_size(config)
    for tensor in checkpoint.tensors.values():
        if is_head(tensor.name) and size is not None and tensor.shape and tensor.shape[0] != size:
            yield Finding(
                "block",
                f"{name}: {tensor.name}",
                found=f"{tensor.shape[0]} rows",
                expected=f"vocab_size {size} of config.json",
                remedy="repair the config, or download the checkpoint again",
            )


def _quantised(name: str, checkpoint: Checkpoint) -> Iterator[Finding]:
    """A model whose weights are packed, as its config says, or as the names of its tensors do."""
    where, found = "", ""
    for key, part in (("", checkpoint.config), ("text_config.", checkpoint.config.get("text_config"))):
        said = part.get("quantization_config") if isinstance(part, Mapping) else None
        if said:
            method = said.get("quant_method", "unknown") if isinstance(said, Mapping) else "unknown"
            where, found = f"config.json: {key}quantization_config", f"a quantised model ({method})"
    packed = next((tensor for tensor in checkpoint.tensors if _PACKED.search(tensor)), None)
    if packed and not where:
        where, found = packed, "a tensor of a quantised model"
    if where:
        yield Finding(
            "block",
            f"{name}: {where}",
            found=found,
            expected="unquantised weights",
            remedy="merge the unquantised models, then quantise the result",
        )


def unused_tensors(plan: MergePlan, checkpoints: Mapping[str, Checkpoint], known: set[str]) -> Iterator[Finding]:
    """Tensors of the inputs that the result of ``plan`` has no place for.

    Args:
        plan: What is merged.
        checkpoints: Its inputs by reference.
        known: Places of findings that have been made; models named there are left out.
    """
    if plan.recipe.mixture is not None:
        return  # Each model gives a part of itself, see plan_mixture.
    used: dict[str, set[str]] = {}
    for job in plan.jobs:
        for item in job.inputs:
            used.setdefault(item.model, set()).add(item.tensor.name)
    cut = any(source.layers for module in plan.recipe.modules for part in module.slices for source in part.sources)
    produced = {job.output.name for job in plan.jobs}
    for model, names in used.items():
        if any(finding.startswith(f"{model}: ") for finding in known):
            continue  # What is wrong with this model has been said.
        left = [name for name in checkpoints[model].tensors if name not in names]
        if cut:
            left = [name for name in left if layer_place(name) is None and name not in produced]
        for name in left[:5]:
            optional = is_optional(name)
            yield Finding(
                "info" if optional else "block",
                f"{model}: {name}",
                found="the result has no such tensor" + (f" ({len(left)} in all)" if len(left) > 5 else ""),
                expected="every tensor of every model is merged",
                remedy=(
                    "nothing to do: it is tied to the embeddings or computed by the library"
                    if optional
                    else "merge models of one architecture, or make this one the base_model"
                ),
            )
