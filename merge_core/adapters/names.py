"""From the names that a model has in memory, which adapters carry, to those that its tensors have on disk.

The two differ where a library renamed parts of a network and kept the files as they were: a prefix more or less around
the language model, the block of a mixture under another name, experts one by one or in one tensor. So a name is reduced
to what all layouts agree on, and that is looked up. Two tensors that reduce to one name are told apart by their whole
names only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mergegate.merge_core.architecture import parse_layer_place
from mergegate.merge_core.architecture.experts import expert_names
from mergegate.merge_core.checkpoint import AnyTensor, Checkpoint
from mergegate.merge_core.errors import InvalidInput

# Containers around a text model that layouts have or have not. Towers of images and sound keep their names.
_CONTAINERS = frozenset({"model", "language_model", "transformer", "backbone"})
_SAME_PART = {"block_sparse_moe": "mlp", "embed_out": "lm_head"}
# One expert of a mixture, also as a piece of a tensor of all; and what its projections are called one by one.
_EXPERT = re.compile(r"^(?P<module>.+\.experts)\.(?P<number>[0-9]{1,5})\.(?P<part>\w+?)(?:\.weight)?$")
_GATE, _UP, _DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
# A mixture in which the experts are modules of their own names on disk, and one module in memory.
_FUSED_ELSEWHERE = {"gate_up_proj": "input_linear.weight", "down_proj": "output_linear.weight"}


@dataclass(frozen=True)
class ExpertPlace:
    """What a stored tensor is of a parameter of fused experts.

    Args:
        tensor: The stored one.
        experts: Which experts it holds: one, or None for all of them.
        first_row: Of its rows in an expert's matrix of the parameter.
    """

    tensor: AnyTensor
    experts: int | None = None
    first_row: int = 0


# Layouts on disk of models with a tower beside the text model: prefix on disk → prefix in memory, by family.
_WITH_TOWERS = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
_QWEN_VISION = {"visual.": "model.visual.", "model.": "model.language_model."}
_PREFIXES: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("gemma3", "llava", "mistral3"), _WITH_TOWERS),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _QWEN_VISION),
    "gpt_neox": {"embed_out.": "lm_head."},
    "nemotron_h": {"backbone.": "model."},
}


def memory_name(name: str, checkpoint: Checkpoint) -> str:
    """The name in memory of a stored tensor of ``checkpoint``.

    Raises:
        InvalidInput: A model of several parts whose names in memory are not known here.
    """
    kind = checkpoint.config.get("model_type")
    parts = [key for key in checkpoint.config if key.endswith("_config") and key != "quantization_config"]
    table = _PREFIXES.get(kind) if isinstance(kind, str) else None
    if table is None:
        if "text_config" in parts:
            raise InvalidInput(
                f"{checkpoint.directory.name}: config.json: model_type",
                found=f"{kind!r:.60}, a model of several parts",
                expected="a text model, or one of " + ", ".join(sorted(_PREFIXES)),
            )
        return _in_mixture(name, checkpoint.config)
    if name.startswith(("model.language_model.", "model.visual.", "model.vision_tower.", "lm_head.")):
        return name
    return next((new + name.removeprefix(old) for old, new in table.items() if name.startswith(old)), name)


def _in_mixture(name: str, config: Mapping[str, Any]) -> str:
    """The name in memory of a tensor of a layer, where mixtures have another there."""
    at = parse_layer_place(name)
    for memory, disk in expert_names(config).renamed if at else ():
        if at is not None and at.part.startswith(disk):
            return f"{at.stack}.{at.index}.{memory}{at.part.removeprefix(disk)}"
    for parameter, disk in _FUSED_ELSEWHERE.items():
        if name.endswith(f".block_sparse_moe.{disk}"):
            return f"{name.removesuffix(disk)}experts.{parameter}"
    return name


class StoredNames:
    """The tensors of a checkpoint, found by the names that they have in memory."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tensors = checkpoint.tensors
        kind = checkpoint.config.get("model_type")
        self._expert_names = expert_names(checkpoint.config)
        self._containers = _CONTAINERS | ({kind} if isinstance(kind, str) else set())
        self._reduced: dict[str, list[str]] = {}
        self._experts: dict[str, dict[int, dict[str, str]]] = {}
        for name in checkpoint.tensors:
            self._reduced.setdefault(self._reduce(name), []).append(name)
            if found := _EXPERT.match(name):
                module = self._experts.setdefault(self._reduce(found["module"]), {})
                module.setdefault(int(found["number"]), {})[found["part"]] = name

    def find(self, name: str) -> AnyTensor | None:
        """The tensor that is called ``name`` in memory; None where there is none, or more than one."""
        if name in self._tensors:
            return self._tensors[name]
        for known in (name, self._on_disk(name)):
            found = self._reduced.get(self._reduce(known), [])
            if len(found) == 1:
                return self._tensors[found[0]]
        return None

    def find_parameter(self, module: str, parameter: str) -> tuple[ExpertPlace, ...]:
        """The stored tensors of a parameter that is adapted itself: it, or the experts' own; empty where there is none.

        Args:
            module: Name in memory of what has the parameter (``model.layers.0.mlp.experts``).
            parameter: Its last name (``gate_up_proj``).
        """
        tensor = self.find(f"{module}.{parameter}")
        if tensor is None and parameter in _FUSED_ELSEWHERE and module.endswith(".experts"):
            tensor = self.find(f"{module.removesuffix('.experts')}.{_FUSED_ELSEWHERE[parameter]}")
        if tensor is not None:
            return (ExpertPlace(tensor),)
        experts = self._experts.get(self._reduce(module), {})
        pieces = [one for one in self._parts(experts, (parameter,), 0) if not one.tensor.name.endswith(".weight")]
        if pieces:  # Of a tensor of all experts, taken apart.
            return tuple(pieces)
        if parameter == "down_proj":
            return tuple(self._parts(experts, _DOWN, 0))
        gates = self._parts(experts, _GATE, 0)
        if parameter == "up_proj" and not gates:
            return tuple(self._parts(experts, _UP, 0))
        if parameter == "gate_up_proj":
            rows = {place.tensor.shape[0] for place in gates}
            return (*gates, *self._parts(experts, _UP, rows.pop())) if len(rows) == 1 else ()
        return ()

    def _parts(
        self, experts: Mapping[int, Mapping[str, str]], names: Iterable[str], first_row: int
    ) -> list[ExpertPlace]:
        return [
            ExpertPlace(self._tensors[parts[name]], number, first_row)
            for number, parts in sorted(experts.items())
            for name in names
            if name in parts
        ]

    def _on_disk(self, name: str) -> str:
        at = parse_layer_place(name)
        return name if at is None else f"{at.stack}.{at.index}.{self._expert_names.on_disk(at.part)}"

    def _reduce(self, name: str) -> str:
        parts = name.split(".")
        while len(parts) > 1 and parts[0] in self._containers:
            parts = parts[1:]
        return ".".join(_SAME_PART.get(part, part) for part in parts)
