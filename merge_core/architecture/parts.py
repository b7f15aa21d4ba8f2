"""Assign tensors to the parts of a network: the main layers, the tensors before and after them, and all other parts.

Other parts are image or audio towers with their projections, and layers for multi-token prediction.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from mergegate.merge_core.architecture.architecture import layer_count
from mergegate.merge_core.architecture.families import find_family, text_part
from mergegate.merge_core.architecture.loading import is_ignored
from mergegate.merge_core.architecture.tensor_kinds import parse_layer_place, stacks
from mergegate.merge_core.checkpoint import Checkpoint, is_head
from mergegate.merge_core.errors import InvalidInput

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
    """Return the number of layers in ``stack``, without layers for multi-token prediction at its end."""
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
