"""Consistency: every tensor of every model is used, and configs agree with their tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from mergegate.merge_core.architecture import (
    class_difference,
    is_embedding,
    is_head,
    is_of_head,
    is_optional,
    layer_count,
    main_depth,
    parse_layer_place,
    prediction_tensors,
    rename_to_layout,
    stacks,
    ties_embeddings,
    vocabulary_size,
)
from mergegate.merge_core.architecture.experts import disk_name
from mergegate.merge_core.checkpoint import TEXT_PARTS, AnyTensor, Checkpoint
from mergegate.merge_core.errors import Finding
from mergegate.merge_core.plan.finding_groups import different_head, different_size
from mergegate.merge_core.plan.jobs import MergePlan

# What GPTQ and AWQ, bitsandbytes, HQQ, compressed-tensors, MXFP4 and block-scaled FP8 call what they pack weights into.
_PACKED = re.compile(
    r"^(?:qweight|qzeros|g_idx|absmax|nested_absmax|quant_map|nested_quant_map|SCB|weight_packed|weight_shape"
    r"|weight_scale|weight_scale_inv|weight_scale_2|weight_global_scale|weight_zero_point|weight_format|input_scale"
    r"|W_q)$|_proj(?:_weight)?_(?:blocks|scales|scale_inv)$"
)
_DEQUANTIZE = "dequantise it, or merge the unquantised models; then quantise the result"
# Ends of class names of models that cannot compute without an output head.
_WITH_HEAD = ("ForCausalLM", "LMHeadModel")
# Bytes are never weights: whole numbers of a network (positions, counters) are of 64 bits, or of one dimension.
_BYTES = ("U8", "I8")


def self_consistency(name: str, checkpoint: Checkpoint) -> Iterator[Finding]:
    """What a checkpoint's config says that its tensors do not."""
    config = checkpoint.config
    yield from _quantised(name, checkpoint)
    yield from (replace(finding, where=f"{name}: {finding.where}") for finding in checkpoint.findings)
    named, depths = layer_count(config), stacks(checkpoint.tensors)
    main = {main_depth(checkpoint, stack) for stack in depths}
    if named is not None and depths and named not in main:
        yield Finding(
            "block",
            f"{name}: config.json: num_hidden_layers",
            found=f"{named}",
            expected=f"the number of layers in the weights: {', '.join(map(str, depths.values()))}",
            remedy="repair the config, or download the checkpoint again",
        )
    yield from _missing_head(name, checkpoint)
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


def _missing_head(name: str, checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a finding for a causal language model that is flagged as untied and stores no head.

    A head under a name that is not known here has one row per token, as the embedding has; such a model passes.
    """
    if ties_embeddings(checkpoint.config) is not False or not checkpoint.architecture.endswith(_WITH_HEAD):
        return
    tables = [tensor for tensor in checkpoint.tensors.values() if is_embedding(tensor.name)]
    if len(tables) != 1 or any(
        is_head(tensor.name) or (tensor.shape[:1] == tables[0].shape[:1] and parse_layer_place(tensor.name) is None)
        for tensor in checkpoint.tensors.values()
        if tensor is not tables[0]
    ):
        return
    yield Finding(
        "block",
        f"{name}: config.json: tie_word_embeddings",
        found="false, but no output head is stored: transformers would fill it with random numbers",
        expected="a stored head such as lm_head.weight, or true if the embedding is the head",
        remedy="set tie_word_embeddings to true in config.json if the head was tied, or save the model with its head",
    )


def _quantised(name: str, checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a finding for a model whose weights are packed, or that is loaded as if they were.

    A ``quantization_config`` over full weights is left over from an earlier load. It is refused too, because every
    loader obeys it: the parent that is evaluated would not be the one that is merged.
    """
    packed = next(
        (disk_name(one) for one in checkpoint.tensors.values() if _is_packed(one.name) or _is_bytes(one)), None
    )
    parts = {"": checkpoint.config, **{f"{key}.": checkpoint.config.get(key) or {} for key in TEXT_PARTS}}
    for key, part in parts.items():
        settings = part.get("quantization_config")
        if not settings:
            continue
        method = settings.get("quant_method", "unknown")
        # The layers of BitNet quantize full weights while they compute: there the key belongs to the model.
        plain = packed is None and all(one.dtype.kind != "packed" for one in checkpoint.tensors.values())
        is_leftover = plain and method != "bitnet"
        path = checkpoint.directory / "config.json"
        yield Finding(
            "block",
            f"{name}: config.json: {key}quantization_config",
            found=f"a quantization ({method}), but no stored tensor is quantized"
            if is_leftover
            else f"a quantised model ({method})",
            expected="no quantization_config next to full weights: loaders quantize them, or fail"
            if is_leftover
            else "unquantised weights",
            remedy=f"delete the key {key}quantization_config from {path}; a model on the Hub must be downloaded first"
            if is_leftover
            else _DEQUANTIZE,
        )
        return
    if packed:
        yield Finding(
            "block",
            f"{name}: {packed}",
            found="a tensor of a quantised model",
            expected="unquantised weights",
            remedy=_DEQUANTIZE,
        )


def _is_packed(name: str) -> bool:
    return _is_packed_word(name.rpartition(".")[2]) or ".quant_state." in name


# A handful of last words in a table of 50,000 names.
@lru_cache(maxsize=1024)
def _is_packed_word(word: str) -> bool:
    return bool(_PACKED.search(word))


def _is_bytes(tensor: AnyTensor) -> bool:
    return tensor.dtype.code in _BYTES and len(tensor.shape) > 1


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
    said = {where.partition(": ")[2] for where in known}  # of another model: it lacks the tensor
    cut = any(source.layers for module in plan.recipe.modules for part in module.slices for source in part.sources)
    produced = {job.output.name for job in plan.jobs}
    for model, names in used.items():
        if any(finding.startswith(f"{model}: ") for finding in known):
            continue  # What is wrong with this model has been said.
        view = rename_to_layout(plan.donor, checkpoints[model])
        left = [name for name, tensor in view.tensors.items() if tensor.name not in names and name not in said]
        if cut:
            # Said of the plan: a warning of its own.
            predictions = prediction_tensors(view)
            left = [name for name in left if name not in predictions]
            left = [name for name in left if parse_layer_place(name) is None and name not in produced]
        other_head = class_difference(plan.donor, view) == "head"
        for name in left:
            if other_head and is_of_head(name) and (is_head(name) or not is_optional(name)):
                yield Finding(
                    "warn",
                    f"{model}: {name}",
                    found=f"left out: the result is of the class of {plan.recipe.donor}, which has no such tensor",
                    expected="one class for all models",
                    remedy=f"nothing to do, or make {model} the base_model to get a result with its head",
                    cause=different_head(model),
                )
                continue
            optional = is_optional(name)
            yield Finding(
                "info" if optional else "block",
                f"{model}: {name}",
                found="the result has no such tensor",
                expected="every tensor of every model is merged",
                remedy=(
                    "nothing to do: it is tied to the embeddings or computed by the library"
                    if optional
                    else "merge models of one architecture, or make this one the base_model"
                ),
                cause="" if optional else different_size(model),
            )
