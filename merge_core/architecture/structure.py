"""Derive the structure of a network from its tensor names and config: layers, parts, sizes and roles of tensors.

The location of a tensor is the stack of layers, the layer and the part of the layer. Every Hugging Face layout writes
it into the name (``model.layers.3.mlp.up_proj.weight``, ``transformer.h.3.…``), so no table of architectures is needed.
Only the first number in a name is a layer number, so the experts of a layer are parts of the layer.

The role, or *kind*, is query, up projection, norm, embedding and so on. The few names that Hugging Face layouts use
have the same meaning in all of them. A fused projection, such as one matrix for query, key and value, is a kind of its
own. A bias has the kind of its weight.

The parts of a network are the main layers, the tensors before and after them, and all others: image or audio towers
with their projections, and layers for multi-token prediction.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from mergegate.merge_core.architecture.conversions import Conversions, is_ignored, tied_source
from mergegate.merge_core.architecture.families import find_family, text_part
from mergegate.merge_core.checkpoint import (
    AnyTensor,
    Checkpoint,
    DType,
    config_parts,
    is_embedding,
    is_head,
    ties_embeddings,
)
from mergegate.merge_core.errors import InvalidInput

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


# Further tensors with one row per token: biases of heads, heads of encoders, and T5's embedding. ``is_embedding`` does
# not include T5's, because it cannot replace a missing head: T5 scales the output of a tied head.
_TOKEN_ROWS = re.compile(
    r"^(?:.*\.)?(?:(?:lm_head|embed_out|lm_head\.decoder|predictions|predictions\.decoder)\.bias"
    r"|(?:lm_head|predictions)\.decoder\.weight)$|^shared\.weight$|^generator_lm_head\.bias$"
)
# Buffers that some versions of a library store and others compute.
_BUFFERS = ("rotary_emb.inv_freq", "position_ids", "masked_bias", "attn.bias")

LAYER_COUNT_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def has_vocabulary_rows(name: str) -> bool:
    """Return whether the tensor called ``name`` has one row per token: an embedding, a head or the bias of a head."""
    return is_embedding(name) or is_head(name) or bool(_TOKEN_ROWS.match(name))


def class_difference(first: Checkpoint, second: Checkpoint) -> Literal["none", "head", "network"]:
    """Return how the networks of two checkpoints differ, according to ``model_type`` and ``architectures``.

    Returns:
        ``head`` if one checkpoint is the base network of the other's family (``BertModel``) or if its config contains
        no class, ``network`` for two families or two classes with different heads, and ``none`` for equal classes.
    """
    classes = (first.class_name, second.class_name)
    if classes[0] == classes[1] != "":
        return "none"
    families = (first.config.get("model_type"), second.config.get("model_type"))
    if all(families) and families[0] != families[1]:
        return "network"
    if classes[0] == classes[1]:
        return "none"
    if not all(classes):
        return "head"
    return "head" if all(families) and any(map(is_base_class, classes)) else "network"


def is_base_class(name: str) -> bool:
    return name.endswith("Model") and "Head" not in name


def is_optional(name: str) -> bool:
    """Return whether checkpoints may omit the tensor called ``name``, although others of their architecture have it."""
    return name.endswith(_BUFFERS) or is_head(name)


def find_tensor(checkpoint: Checkpoint, name: str) -> AnyTensor | None:
    """Return the tensor called ``name``, or None. For a tied tensor that is not stored, return what it is tied to."""
    tensor = checkpoint.tensors.get(name) or checkpoint.tensors.get(tied_source(checkpoint, name) or "")
    if tensor is not None or not is_head(name) or ties_embeddings(checkpoint.config) is False:
        return tensor
    embeddings = [candidate for candidate in checkpoint.tensors.values() if is_embedding(candidate.name)]
    return embeddings[0] if len(embeddings) == 1 else None


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    size: int | None = _first(config, "vocab_size")
    return size


def layer_count(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers according to a config, or None. Layers for multi-token prediction do not count.

    A family with several encoders may have a number for each (``lxmert``). Then no single number is the depth.
    """
    count = _first(config, *LAYER_COUNT_KEYS)
    if isinstance(count, int):
        return count
    text = text_part(config)
    lists = (text.config.get(key) for key in (text.family.depth_of if text.family else ()))
    return next((len(kinds) for kinds in lists if kinds), None)


def _first(config: Mapping[str, Any], *keys: str) -> Any:
    values = (part.get(key) for part in config_parts(config) for key in keys)
    return next((value for value in values if value is not None), None)


def with_dtype(config: Mapping[str, Any], dtype: DType | None) -> dict[str, Any]:
    """Return a copy of ``config`` with ``dtype`` as the declared format of the weights, or unchanged if it is None."""
    result: dict[str, Any] = copy.deepcopy(dict(config))
    parts: list[Any] = config_parts(result)
    if dtype is not None:
        keys = [(part, key) for part in parts for key in ("dtype", "torch_dtype") if part.get(key) is not None]
        for part, key in keys or [(result, "torch_dtype")]:
            part[key] = dtype.torch_name
    return result


def dtype_in(config: Mapping[str, Any]) -> str:
    """Return the format of the weights that ``config`` declares, such as ``bfloat16``, or an empty string."""
    dtypes = (part.get(key) for part in config_parts(config) for key in ("dtype", "torch_dtype"))
    return next((name.removeprefix("torch.") for name in dtypes if isinstance(name, str)), "")


def with_vocabulary(config: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return a copy of ``config`` in which every ``vocab_size``, also that of the text part, is ``size``."""
    result: dict[str, Any] = copy.deepcopy(dict(config))
    parts: list[Any] = config_parts(result)
    for part in parts:
        if part.get("vocab_size") is not None:
            part["vocab_size"] = size
    return result


def has_own_head(checkpoint: Checkpoint) -> bool:
    return any(is_head(name) for name in checkpoint.tensors) and ties_embeddings(checkpoint.config) is not True


Side = Literal["before", "after", "beside", "unknown"]

_BEFORE = frozenset({
    "embed", "embeddings", "embed_tokens", "embed_in", "embed_positions", "position_embeddings", "rotary_emb",
    "tok_embeddings", "word_embeddings", "word_embeddings_layernorm", "wpe", "wte",
})  # fmt: skip
_LAST_NORMS = frozenset({"norm", "ln_f", "norm_f", "final_layernorm", "final_layer_norm", "final_norm"})
_AFTER = _LAST_NORMS | {"lm_head", "embed_out", "output", "score", "classifier"}
# Parts of a path that identify a stack of layers that reads pictures or sound, or any stack outside the text network.
_SENSES = ("vision", "visual", "image", "vit", "audio", "speech")
_OTHER_STACKS = (*_SENSES, "mtp")
_PREDICTIONS = re.compile(r"(?:^|\.)(?:mtp|nextn)(?:_[a-z]+)?\.")
# Layers for multi-token prediction at the end of the main stack contain this projection. It joins the last state with
# the embedding of the next token.
_JOINT = "eh_proj.weight"


def is_of_head(name: str) -> bool:
    """Return whether the tensor called ``name`` belongs to a head or a pooler, in which classes of a family differ."""
    words = name.split(".")
    return parse_layer_place(name) is None and not _BEFORE.intersection(words) and not _LAST_NORMS.intersection(words)


def is_of_tower(name: str) -> bool:
    """Return whether the tensor called ``name`` belongs to a layer that reads pictures or sound."""
    place = parse_layer_place(name)
    return place is not None and any(sense in place.stack for sense in _SENSES)


def main_stack(checkpoint: Checkpoint, location: str) -> str:
    """Return the stack from which ``slices`` of a recipe selects layers. Errors name ``location``.

    Raises:
        InvalidInput: The network has no layers, or several stacks and not exactly one with the config's layer count.
    """
    depths = stacks(checkpoint.tensors)
    candidates = list(depths)
    if len(depths) > 1:
        count = layer_count(checkpoint.config)
        candidates = [stack for stack in depths if count in (depths[stack], _depth(checkpoint, stack, depths[stack]))]
    if len(candidates) > 1:
        candidates = [stack for stack in candidates if not _is_beside(stack)]
    if len(candidates) != 1:
        family = text_part(checkpoint.config).family
        keys = f": {family.refused[0]}" if family and family.refused else ""
        raise InvalidInput(
            f"{location}{keys}",
            found=f"layers of {checkpoint.directory.name} are in {', '.join(depths) or 'no stack'}",
            expected="one stack of layers to cut",
            remedy="use 'models'" if not depths or keys else "select a part of the network with 'modules'",
        )
    return candidates[0]


def main_depth(checkpoint: Checkpoint, stack: str) -> int:
    return _depth(checkpoint, stack, stacks(checkpoint.tensors).get(stack, 0))


def prediction_tensors(checkpoint: Checkpoint) -> frozenset[str]:
    """Return the names of the tensors of layers for multi-token prediction."""
    ends = {stack: _depth(checkpoint, stack, depth) for stack, depth in stacks(checkpoint.tensors).items()}
    tensors = set()
    for name in checkpoint.tensors:
        position = parse_layer_place(name)
        if _PREDICTIONS.search(name) or (position is not None and position.index >= ends[position.stack]):
            tensors.add(name)
    return frozenset(tensors)


def unloaded_tensors(checkpoint: Checkpoint) -> frozenset[str]:
    """Return the names of the tensors that a writer drops, because the class does not load them.

    These are layers for multi-token prediction, and other tensors that the class in transformers ignores.
    """
    ignored = {name for name in checkpoint.tensors if is_ignored(checkpoint, name)}
    return prediction_tensors(checkpoint) | ignored


def positions_outside_layers(names: Iterable[str], stack: str, checkpoint: Checkpoint) -> dict[str, Side]:
    """Return where the tensors called ``names``, which are not in ``stack``, are in relation to its layers, by name.

    ``before`` and ``after`` mean the order of computation, and ``beside`` another part of the network, such as an image
    tower. The position is ``unknown`` if neither the name nor the description of the family determines it.
    """
    text, outer = text_part(checkpoint.config), find_family(checkpoint.config)
    families = [family for family in (text.family, outer) if family is not None]
    before = _BEFORE.union(*(family.before for family in families))
    after = frozenset(word for family in families for word in family.after)
    other_prefixes: tuple[str, ...] = ()  # Parts of the network with the other stacks, such as ``model.vision_tower.``.
    own_words = stack.split(".")
    for other_stack in stacks(checkpoint.tensors).keys() - {stack}:
        words = other_stack.split(".")
        shared = 0
        while shared < min(len(own_words), len(words)) - 1 and own_words[shared] == words[shared]:
            shared += 1
        other_prefixes += (".".join(words[: shared + 1]) + ".",)
    # In a network with several parts, the tensors of the text network have its prefix or are the head. The prefix is
    # that of the innermost part with more than the layers, such as ``text_model.`` of ``text_model.encoder.layers``.
    own_prefix = ""
    for end in range(len(own_words) - 1, 0, -1) if other_prefixes or text.key is not None else ():
        own_prefix = ".".join(own_words[:end]) + "."
        if any(name.startswith(own_prefix) and not name.startswith(f"{stack}.") for name in checkpoint.tensors):
            break
    sides: dict[str, Side] = {}
    for name in names:
        name_words = frozenset(name.split("."))
        if name.startswith(other_prefixes) or not (name.startswith(own_prefix) or is_head(name)):
            sides[name] = "beside"
        elif name_words & after:
            sides[name] = "after"
        elif name_words & before:
            sides[name] = "before"
        else:
            sides[name] = "after" if is_head(name) or name_words & _AFTER else "unknown"
    return sides


def _depth(checkpoint: Checkpoint, stack: str, depth: int) -> int:
    count = layer_count(checkpoint.config)
    if count is None or not 0 < count < depth or _is_beside(stack):
        return depth
    text = text_part(checkpoint.config)
    prediction_counts = [text.config.get(key) for key in (text.family.prediction_keys if text.family else ())]
    are_joined = all(f"{stack}.{index}.{_JOINT}" in checkpoint.tensors for index in range(count, depth))
    are_ignored = all(is_ignored(checkpoint, f"{stack}.{index}.") for index in range(count, depth))
    return count if are_joined or are_ignored or depth - count in prediction_counts else depth


def _is_beside(stack: str) -> bool:
    return any(part in stack for part in _OTHER_STACKS)


def rename_to_layout(donor: Checkpoint, parent: Checkpoint) -> Checkpoint:
    """Return ``parent`` with the tensor names of ``donor``, or unchanged if no renaming leads to these names.

    A renaming between layouts of the donor's family applies, in either direction, if it produces all tensor names of
    the donor that are not optional. Otherwise, the prefix of the base network (``bert.``, ``model.``,
    ``transformer.``) is added or removed if the layer names then agree. Models with a head store this prefix, and the
    base network alone does not.
    """
    needed = {name for name in donor.tensors if not is_optional(name)}
    if needed <= parent.tensors.keys():
        return parent
    if donor.config.get("model_type") == parent.config.get("model_type"):
        parent = _with_loaded_names(donor, parent)
        if needed <= parent.tensors.keys():
            return parent
    family = find_family(donor.config)
    for layout in family.layouts if family else ():
        for pairs in (layout, [(new, old) for old, new in layout]):
            names = {}
            for name in parent.tensors:
                # Replace the longest old prefix. A name that already has the new prefix stays as it is, because
                # 'model.' is also a prefix of 'model.language_model.'.
                is_new = any(name.startswith(new) and new.startswith(old) for old, new in pairs)
                fitting = [pair for pair in pairs if name.startswith(pair[0])] if not is_new else []
                old, new = max(fitting, key=lambda pair: len(pair[0]), default=("", ""))
                names[name] = new + name.removeprefix(old)
            if (renamed := _renamed(parent, names)) is not parent and needed <= renamed.tensors.keys():
                return renamed
    donor_stacks, parent_stacks = stacks(donor.tensors).keys(), stacks(parent.tensors).keys()
    if donor_stacks & parent_stacks:
        return parent
    for prefix in sorted({f"{stack.partition('.')[0]}." for stack in donor_stacks | parent_stacks if "." in stack}):
        if all(prefix + stack in donor_stacks for stack in parent_stacks):
            # Heads have no prefix in either layout.
            names = {
                name: prefix + name if parse_layer_place(name) or prefix + name in donor.tensors else name
                for name in parent.tensors
            }
        elif all(stack.removeprefix(prefix) in donor_stacks for stack in parent_stacks):
            names = {name: name.removeprefix(prefix) for name in parent.tensors}
        else:
            continue
        if (renamed := _renamed(parent, names)) is not parent:
            return renamed
    return parent


def _renamed(parent: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """Return ``parent`` with new names for its tensors, or unchanged if two tensors would have one name."""
    if len(set(names.values())) != len(names):
        return parent
    return replace(parent, tensors={names[name]: tensor for name, tensor in parent.tensors.items()})


def _with_loaded_names(donor: Checkpoint, parent: Checkpoint) -> Checkpoint:
    """Return ``parent`` with the donor's name for each tensor that transformers loads under the same name.

    Such names are ``LayerNorm.gamma`` and ``LayerNorm.weight``. Tensors that transformers joins or splits keep their
    names.
    """
    donor_names = {loaded: name for name, loaded in _loaded_names(donor).items()}
    loaded_names = _loaded_names(parent)
    # Two stored tensors may have one name in memory, such as a tensor and its copy.
    return _renamed(parent, {name: donor_names.get(loaded_names.get(name, ()), name) for name in parent.tensors})


def _loaded_names(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """Return the names in memory of each stored tensor that transformers neither joins nor splits."""
    conversions = Conversions(checkpoint.config, checkpoint.class_name, checkpoint.tensors)
    loaded = {name: conversions.in_memory(name) for name in checkpoint.tensors}
    return {name: memory.names for name, memory in loaded.items() if not memory.operations}
