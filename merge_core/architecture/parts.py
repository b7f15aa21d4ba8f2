"""Which tensors belong to the main layers, which stand before and after them, and which beside: towers for images or
sound with what joins them to the text, and layers that predict further tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from mergegate.merge_core.architecture.architecture import layer_count
from mergegate.merge_core.architecture.families import find_family, text_part
from mergegate.merge_core.architecture.layers import parse_layer_place, stacks
from mergegate.merge_core.checkpoint import Checkpoint, is_head
from mergegate.merge_core.errors import InvalidInput

Side = Literal["before", "after", "beside", "unknown"]

_BEFORE = frozenset({
    "embed", "embeddings", "embed_tokens", "embed_in", "embed_positions", "position_embeddings", "rotary_emb",
    "tok_embeddings", "word_embeddings", "word_embeddings_layernorm", "wpe", "wte",
})  # fmt: skip
_LAST_NORMS = frozenset({"norm", "ln_f", "norm_f", "final_layernorm", "final_layer_norm", "final_norm"})
_AFTER = _LAST_NORMS | {"lm_head", "embed_out", "output", "score", "classifier"}
# Parts of a path that say that a stack of layers is not the text's.
_OTHER_SENSES = ("vision", "visual", "image", "vit", "audio", "speech", "mtp")
# In a layer that predicts further tokens: what joins the last state with the embedding of the next token.
_JOINT = "eh_proj.weight"


def is_of_head(name: str) -> bool:
    """Return whether the tensor is outside what all classes of a family share: of a head, or a pooler."""
    words = name.split(".")
    return parse_layer_place(name) is None and not _BEFORE.intersection(words) and not _LAST_NORMS.intersection(words)


def main_stack(checkpoint: Checkpoint, where: str) -> str:
    """The stack of layers that ``slices`` cuts.

    Raises:
        InvalidInput: The network has no layers, or several stacks of which none has the config's layer count alone.
    """
    depths = stacks(checkpoint.tensors)
    candidates = list(depths)
    if len(depths) > 1:
        named = layer_count(checkpoint.config)
        candidates = [stack for stack in depths if named in (depths[stack], _depth(checkpoint, stack, depths[stack]))]
    if len(candidates) > 1:
        candidates = [stack for stack in candidates if not _is_beside(stack)]
    if len(candidates) != 1:
        refused = text_part(checkpoint.config).family
        keys = f": {refused.refused[0]}" if refused and refused.refused else ""
        raise InvalidInput(
            f"{where}{keys}",
            found=f"{checkpoint.directory.name} has layers in {', '.join(depths) or 'no stack'}",
            expected="one stack of layers to cut",
            remedy="use 'models'" if not depths or keys else "use 'modules' to say which part is meant",
        )
    return candidates[0]


def main_depth(checkpoint: Checkpoint, stack: str) -> int:
    """Number of layers of ``stack``, without those behind the last one that predict further tokens."""
    return _depth(checkpoint, stack, stacks(checkpoint.tensors).get(stack, 0))


def prediction_tensors(checkpoint: Checkpoint) -> frozenset[str]:
    """Names of the tensors of layers that predict further tokens (multi-token prediction), wherever they stand."""
    text, outer = text_part(checkpoint.config), find_family(checkpoint.config)
    roots = {root for family in (text.family, outer) if family for root in family.predictions}
    ends = {stack: _depth(checkpoint, stack, depth) for stack, depth in stacks(checkpoint.tensors).items()}
    found = set()
    for name in checkpoint.tensors:
        at = parse_layer_place(name)
        if roots.intersection(name.split(".")) or (at is not None and at.index >= ends[at.stack]):
            found.add(name)
    return frozenset(found)


def positions_outside_layers(names: Iterable[str], stack: str, checkpoint: Checkpoint) -> dict[str, Side]:
    """Where tensors that are in no layer of ``stack`` stand to it.

    ``unknown`` where neither name nor family says it. What stands beside belongs together, whatever its name: the
    embeddings of an image, the layers that it goes through, and the projection into the text.
    """
    text, outer = text_part(checkpoint.config), find_family(checkpoint.config)
    known = [family for family in (text.family, outer) if family is not None]
    before = _BEFORE.union(*(family.before for family in known))
    after = frozenset(word for family in known for word in family.after)
    others = tuple(_others(stack, stacks(checkpoint.tensors)))
    # In a network of parts the text's own tensors are under its prefix, or are the head.
    own = stack.rsplit(".", 1)[0] + "." if "." in stack and (others or text.key is not None) else ""
    found: dict[str, Side] = {}
    for name in names:
        words = frozenset(name.split("."))
        if name.startswith(others) or not (name.startswith(own) or is_head(name)):
            found[name] = "beside"
        elif words & after:
            found[name] = "after"
        elif words & before:
            found[name] = "before"
        else:
            found[name] = "after" if is_head(name) or words & _AFTER else "unknown"
    return found


def _depth(checkpoint: Checkpoint, stack: str, depth: int) -> int:
    named = layer_count(checkpoint.config)
    if named is None or not 0 < named < depth or _is_beside(stack):
        return depth
    text = text_part(checkpoint.config)
    counted = [text.config.get(key) for key in (text.family.prediction_keys if text.family else ())]
    joined = all(f"{stack}.{index}.{_JOINT}" in checkpoint.tensors for index in range(named, depth))
    return named if joined or depth - named in counted else depth


def _is_beside(stack: str) -> bool:
    return any(sense in stack for sense in _OTHER_SENSES)


def _others(stack: str, known: Iterable[str]) -> list[str]:
    """Prefixes of the parts of the network that hold the other stacks: ``model.vision_tower.``."""
    own = stack.split(".")
    found = []
    for other in known:
        if other == stack:
            continue
        words = other.split(".")
        same = 0
        while same < min(len(own), len(words)) - 1 and own[same] == words[same]:
            same += 1
        found.append(".".join(words[: same + 1]) + ".")
    return found
