"""Check that a merge uses every tensor of every model, and that configs agree with their tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from mergegate.merge_core.architecture import (
    class_difference,
    is_embedding,
    is_head,
    is_of_head,
    is_optional,
    layer_count,
    layer_kinds,
    main_depth,
    main_stack,
    parse_layer_place,
    prediction_tensors,
    rename_to_layout,
    stacks,
    text_part,
    tied_source,
    ties_embeddings,
    unloaded_tensors,
    vocabulary_size,
)
from mergegate.merge_core.architecture.experts import disk_name
from mergegate.merge_core.checkpoint import TEXT_PARTS, Checkpoint
from mergegate.merge_core.errors import Finding, InvalidInput, Severity
from mergegate.merge_core.plan.jobs import MergePlan


def config_value(checkpoint: Checkpoint, key: str) -> Any:
    """Return the value of ``key`` in the checkpoint's config or, if missing, in the config of its language model."""
    value = checkpoint.config.get(key)
    return text_part(checkpoint.config).config.get(key) if value is None else value


# Tensor names of packed weights in GPTQ, AWQ, bitsandbytes, HQQ, compressed-tensors, MXFP4 and block-scaled FP8.
_PACKED = re.compile(
    r"^(?:qweight|qzeros|g_idx|absmax|nested_absmax|quant_map|nested_quant_map|SCB|weight_packed|weight_shape"
    r"|weight_scale|weight_scale_inv|weight_scale_2|weight_global_scale|weight_zero_point|weight_format|input_scale"
    r"|W_q)$|_proj(?:_weight)?_(?:blocks|scales|scale_inv)$"
)
# Cached because a table of 50,000 names has only a handful of suffixes.
_packed_suffix = lru_cache(maxsize=1024)(_PACKED.search)
_DEQUANTIZE = "merge the unquantized models, or dequantize this one; then quantize the result"
# Suffixes of the class names of models that need an output head.
_WITH_HEAD = ("ForCausalLM", "LMHeadModel")
# Byte tensors with several dimensions are packed weights: a network's own integers (positions, counters) have 64 bits
# or one dimension.
_BYTES = ("U8", "I8")


def self_consistency(name: str, checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a finding for each contradiction between a checkpoint's config and its tensors."""
    config = checkpoint.config
    yield from _quantized_findings(name, checkpoint)
    yield from (replace(finding, where=f"{name}: {finding.where}") for finding in checkpoint.findings)
    stated_depth, depths = layer_count(config), stacks(checkpoint.tensors)
    main = {main_depth(checkpoint, stack) for stack in depths}
    if stated_depth is not None and depths and stated_depth not in main:
        yield Finding(
            "block",
            f"{name}: config.json: num_hidden_layers",
            found=f"{stated_depth}",
            expected=f"the number of layers in the weights: {', '.join(map(str, depths.values()))}",
            remedy="correct the config, or download the checkpoint again",
        )
    # A causal language model that declares an untied head must store one. Another tensor outside the layers, with a row
    # for each token, may be a head with an unknown name.
    tables = [tensor for tensor in checkpoint.tensors.values() if is_embedding(tensor.name)]
    if ties_embeddings(config) is False and checkpoint.architecture.endswith(_WITH_HEAD) and len(tables) == 1:
        heads = (
            is_head(other.name) or (other.shape[:1] == tables[0].shape[:1] and parse_layer_place(other.name) is None)
            for other in checkpoint.tensors.values()
            if other is not tables[0]
        )
        if not any(heads):
            yield Finding(
                "block",
                f"{name}: config.json: tie_word_embeddings",
                found="false, but no output head is stored: transformers would fill it with random numbers",
                expected="a stored head such as lm_head.weight, or true if the embedding serves as the head",
                remedy="set tie_word_embeddings to true in config.json if the head was tied, or save the model with "
                "its head",
            )
    size = vocabulary_size(config)
    for tensor in checkpoint.tensors.values():
        if is_head(tensor.name) and size is not None and tensor.shape and tensor.shape[0] != size:
            yield Finding(
                "block",
                f"{name}: {tensor.name}",
                found=f"{tensor.shape[0]} rows",
                expected=f"vocab_size {size} of config.json",
                remedy="correct the config, or download the checkpoint again",
            )


def _quantized_findings(name: str, checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a finding if a model has packed weights, or declares a quantization that its weights do not have.

    A ``quantization_config`` next to full weights is left over from an earlier load. It blocks the merge too, because
    every loader obeys it: evaluation would load a model that differs from the merged parent.
    """
    packed_tensors = (
        disk_name(tensor)
        for tensor in checkpoint.tensors.values()
        if _packed_suffix(tensor.name.rpartition(".")[2])
        or ".quant_state." in tensor.name
        or (tensor.dtype.code in _BYTES and len(tensor.shape) > 1)
    )
    packed = next(packed_tensors, None)
    parts = {"": checkpoint.config, **{f"{key}.": checkpoint.config.get(key) or {} for key in TEXT_PARTS}}
    for key, part in parts.items():
        settings = part.get("quantization_config")
        if not settings:
            continue
        method = settings.get("quant_method", "unknown")
        found, expected, remedy = f"a quantized model ({method})", "unquantized weights", _DEQUANTIZE
        is_plain = packed is None and all(tensor.dtype.kind != "packed" for tensor in checkpoint.tensors.values())
        # BitNet layers quantize full weights during computation, so there the key belongs to the model.
        if is_plain and method != "bitnet":
            found = f"a quantization ({method}), but no stored tensor is quantized"
            expected = "no quantization_config for full weights, because loaders quantize them or fail"
            path = checkpoint.directory / "config.json"
            remedy = f"delete the key {key}quantization_config from {path}; download a model from the Hub first"
        yield Finding("block", f"{name}: config.json: {key}quantization_config", found, expected, remedy)
        return
    if packed:
        yield Finding("block", f"{name}: {packed}", "a tensor of a quantized model", "unquantized weights", _DEQUANTIZE)


def unused_tensors(
    plan: MergePlan, checkpoints: Mapping[str, Checkpoint], finding_locations: set[str]
) -> Iterator[Finding]:
    """Yield a finding for each input tensor that the result of ``plan`` does not use."""
    if plan.recipe.mixture is not None:
        return  # Each model contributes one part; plan_mixture checks it.
    used: dict[str, set[str]] = {}
    replaced = plan.recipe.repaired.tensors.keys() if plan.recipe.repaired else frozenset[str]()
    for job in plan.jobs:
        for item in job.inputs if job.output.name not in replaced else ():
            used.setdefault(item.model, set()).add(item.tensor.name)
    # Tensors that a finding already reports as missing in another model.
    reported_names = replaced | {location.partition(": ")[2] for location in finding_locations}
    is_sliced = any(source.layers for source in plan.recipe.sources)
    produced = {job.output.name for job in plan.jobs}
    for model, names in used.items():
        if any(entry.startswith(f"{model}: ") for entry in finding_locations):
            continue  # A finding already reports this model.
        view = rename_to_layout(plan.donor, checkpoints[model])
        unused = [
            name for name, tensor in view.tensors.items() if tensor.name not in names and name not in reported_names
        ]
        if is_sliced:
            # The plan has a separate warning for prediction layers.
            predictions = prediction_tensors(view)
            unused = [name for name in unused if name not in predictions]
            unused = [name for name in unused if parse_layer_place(name) is None and name not in produced]
        other_head = class_difference(plan.donor, view) == "head"
        unloaded = unloaded_tensors(view) if unused else frozenset[str]()
        for name in unused:
            severity: Severity = "warn"
            if other_head and is_of_head(name) and (is_head(name) or not is_optional(name)):
                found = f"not merged: the class of {plan.recipe.donor}, which the result gets, lacks this tensor"
                expected, cause = "one class for all models", f"{model}: head"
                remedy = f"nothing to do; to get a result with this head, set base_model: {model}"
            elif name in unloaded:
                found = f"not merged: {view.class_name} does not load it, and {plan.recipe.donor} lacks it"
                expected, cause = "a tensor of every model", f"{model}: not loaded"
                remedy = f"nothing to do; to get a result with this tensor, set base_model: {model}"
            else:
                found, expected = "the result does not have this tensor", "every tensor of every model in the result"
                if is_optional(name) or tied_source(view, name) in view.tensors:
                    severity, cause = "info", ""
                    remedy = "nothing to do: the library computes it or ties it to the embeddings"
                else:
                    severity, cause = "block", f"{model}: size"
                    remedy = "merge models of one architecture, or use this model as base_model"
            yield Finding(severity, f"{model}: {name}", found, expected, remedy, cause)


def differing_kinds(donor_name: str, donor: Checkpoint, model: str, parent: Checkpoint) -> Iterator[Finding]:
    """Yield a finding if layers with the same number in two whole models compute different things."""
    donor_part, parent_part = text_part(donor.config), text_part(parent.config)
    if donor_part.family is None or donor_part.family != parent_part.family or donor_part.family.refused is not None:
        return
    try:
        stack = main_stack(donor, donor_name)
        depth = main_depth(donor, stack)
        if main_depth(parent, stack) != depth:
            return
        for index in range(depth):
            donor_kinds = layer_kinds(donor_part, index, depth, f"{donor_name}: config.json")
            for name, value in layer_kinds(parent_part, index, depth, f"{model}: config.json").items():
                if donor_kinds[name] != value:
                    keys = next(kind.keys for kind in donor_part.family.kinds if kind.name == name)
                    yield Finding(
                        "warn",
                        f"{model}: config.json: {', '.join(keys)}",
                        found=f"{name} of layer {index} is {value}",
                        expected=f"{donor_kinds[name]}, as in {donor_name}, whose config the result gets",
                        remedy="make sure that the models compute the same function of their weights",
                    )
                    return
    except InvalidInput as error:
        yield Finding("warn", error.where, error.found, error.expected, error.remedy)
