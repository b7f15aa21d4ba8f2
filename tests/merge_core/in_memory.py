"""The oracle for merges of structure: rearranges the layers of transformers models in memory.

A layer keeps its module, and the lists of the configuration are rebuilt from the parents' entries.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

# Modules after the layers in the module that contains them, and heads at the top level.
_AFTER = ("norm", "ln_f", "norm_f", "final_layernorm", "final_layer_norm", "embedding_norm")
_HEADS = ("lm_head", "embed_out", "cls", "classifier", "generator_predictions", "generator_lm_head")
_LISTS = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers")
_LISTS += ("layers_num_experts", "per_layer_config")


def layers_of(model: nn.Module, depth: int) -> tuple[nn.Module, str]:
    """Return the module that contains the text layers, and the name of its attribute for them."""
    for path, module in model.named_modules():
        if any(sense in path for sense in ("vision", "visual", "audio", "mtp")):
            continue
        for name, child in module.named_children():
            is_stack = name in ("layers", "layer", "h", "block", "blocks") and isinstance(child, nn.ModuleList)
            if is_stack and len(child) == depth:
                return module, name
    raise AssertionError("no stack of layers")


def average(models: Sequence[nn.Module], weights: Sequence[float]) -> nn.Module:
    """Return a copy of the first model with the weighted sum of all parameters and buffers, in float32."""
    result = copy.deepcopy(models[0])
    states = [model.state_dict() for model in models]
    with torch.no_grad():
        for name, tensor in result.state_dict().items():
            if tensor.is_floating_point():
                total = sum(weight * state[name] for weight, state in zip(weights, states, strict=True))
                tensor.copy_(total)
    return result


def stack(picks: Sequence[tuple[nn.Module, int]], depth: int) -> Any:
    """Return a model with the layers ``picks``, the first model's embeddings, and the last one's norm and heads."""
    first, last = picks[0][0], picks[-1][0]
    result: Any = copy.deepcopy(first)
    holder, name = layers_of(result, depth)
    chosen = []
    for model, index in picks:
        source, _ = layers_of(model, depth)
        chosen.append(copy.deepcopy(getattr(source, name)[index]))
    setattr(holder, name, nn.ModuleList(chosen))
    other, _ = layers_of(last, depth)
    for after in _AFTER:
        if hasattr(other, after):
            setattr(holder, after, copy.deepcopy(getattr(other, after)))
    for path, owner in last.named_modules():
        for head in _HEADS:
            if isinstance(getattr(owner, head, None), nn.Module):
                setattr(result.get_submodule(path), head, copy.deepcopy(getattr(owner, head)))
    base = _pooled(last)
    if base is not None:
        _pooled(result).pooler = copy.deepcopy(base.pooler)  # type: ignore[union-attr]
    if getattr(result.config, "tie_word_embeddings", False):
        result.tie_weights()
    for config in _configs(result):
        _cut(config, [index for _, index in picks], depth)
    return result.eval()


def _pooled(model: nn.Module) -> Any:
    return next((part for part in model.modules() if getattr(part, "pooler", None) is not None), None)


def _configs(model: nn.Module) -> list[Any]:
    found: list[Any] = []
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None or any(config is one for one in found) or not hasattr(config, "num_hidden_layers"):
            continue
        if not any(sense in type(config).__name__ for sense in ("Vision", "Siglip", "CLIP", "Pixtral")):
            found.append(config)
    return found


def _cut(config: Any, indices: Sequence[int], depth: int) -> None:
    """Set the configuration's depth, and keep only the entries of these layers in its lists."""
    lists = {name: getattr(config, name, None) for name in _LISTS}
    lists = {name: one for name, one in lists.items() if isinstance(one, (list, tuple)) and len(one) == depth}
    cut: dict[str, Any] = {name: [value[index] for index in indices] for name, value in lists.items()}
    cut["num_hidden_layers"] = len(indices)
    # Some keys are computed properties and cannot be set. A subclass overrides them with plain values.
    config.__class__ = type(type(config).__name__, (type(config),), cut)
    for name, value in cut.items():
        if name in vars(config):
            vars(config)[name] = value
