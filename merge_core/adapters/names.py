"""Map the names of a model's tensors in memory, which adapters use, to their names on disk.

They differ if a library renamed parts of a network without changing the file format: an additional or missing prefix
around the language model, another name for the mixture block, experts as separate tensors or as one. Names are
therefore reduced to the parts that all layouts share, and looked up in this form. If two tensors have the same reduced
name, only their full names identify them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mergegate.merge_core.architecture import parse_layer_place
from mergegate.merge_core.architecture.experts import expert_names
from mergegate.merge_core.checkpoint import AnyTensor, Checkpoint
from mergegate.merge_core.errors import InvalidInput

# Containers around a text model that only some layouts have. Vision and audio towers keep their names.
_CONTAINERS = frozenset({"model", "language_model", "transformer", "backbone"})
_SAME_PART = {"block_sparse_moe": "mlp", "embed_out": "lm_head"}
# Name of a tensor of one expert, which may be a slice of a fused tensor, and the names of its separate projections.
_EXPERT = re.compile(r"^(?P<module>.+\.experts)\.(?P<number>[0-9]{1,5})\.(?P<part>\w+?)(?:\.weight)?$")
_GATE, _UP, _DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
# Names on disk of a mixture whose experts are separate modules on disk, but one module in memory.
_FUSED_DISK_NAMES = {"gate_up_proj": "input_linear.weight", "down_proj": "output_linear.weight"}


@dataclass(frozen=True)
class ExpertSlice:
    """Part of a parameter that holds all experts in memory, as one tensor on disk contains it.

    Args:
        tensor: Tensor on disk.
        expert: Number of the expert that the tensor belongs to, or None if it contains all experts.
        first_row: Row of the expert's matrix in memory at which the tensor starts.
    """

    tensor: AnyTensor
    expert: int | None = None
    first_row: int = 0


# Prefixes on disk, with the prefixes in memory that replace them, of families in which they differ.
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
    """Return the name in memory of a stored tensor of ``checkpoint``.

    Raises:
        InvalidInput: The model has several parts, and mergegate does not know its names in memory.
    """
    kind = checkpoint.config.get("model_type")
    parts = [key for key in checkpoint.config if key.endswith("_config") and key != "quantization_config"]
    table = _PREFIXES.get(kind) if isinstance(kind, str) else None
    if table is None:
        if "text_config" in parts:
            raise InvalidInput(
                f"{checkpoint.directory.name}: config.json: model_type",
                found=f"{kind!r:.60}, a model with several parts",
                expected="a text model, or one of " + ", ".join(sorted(_PREFIXES)),
            )
        # In some mixtures, the names of layer tensors differ between memory and disk.
        place = parse_layer_place(name)
        for memory, disk in expert_names(checkpoint.config).renamed if place else ():
            if place is not None and place.part.startswith(disk):
                return f"{place.stack}.{place.index}.{memory}{place.part.removeprefix(disk)}"
        for parameter, disk in _FUSED_DISK_NAMES.items():
            if name.endswith(f".block_sparse_moe.{disk}"):
                return f"{name.removesuffix(disk)}experts.{parameter}"
        return name
    if name.startswith(("model.language_model.", "model.visual.", "model.vision_tower.", "lm_head.")):
        return name
    return next((new + name.removeprefix(old) for old, new in table.items() if name.startswith(old)), name)


class StoredNames:
    """Index of a checkpoint's tensors by their names in memory."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tensors = checkpoint.tensors
        kind = checkpoint.config.get("model_type")
        self._expert_names = expert_names(checkpoint.config)
        self._containers = _CONTAINERS | ({kind} if isinstance(kind, str) else set())
        self._reduced: dict[str, list[str]] = {}
        self._experts: dict[str, dict[int, dict[str, str]]] = {}
        for name in checkpoint.tensors:
            self._reduced.setdefault(self._reduce(name), []).append(name)
            if match := _EXPERT.match(name):
                module = self._experts.setdefault(self._reduce(match["module"]), {})
                module.setdefault(int(match["number"]), {})[match["part"]] = name

    def find(self, name: str) -> AnyTensor | None:
        """Return the tensor that is called ``name`` in memory, or None if no tensor, or more than one, matches."""
        if name in self._tensors:
            return self._tensors[name]
        layer = parse_layer_place(name)
        on_disk = f"{layer.stack}.{layer.index}.{self._expert_names.on_disk(layer.part)}" if layer else name
        for candidate in (name, on_disk):
            matches = self._reduced.get(self._reduce(candidate), [])
            if len(matches) == 1:
                return self._tensors[matches[0]]
        return None

    def find_parameter(self, module: str, parameter: str) -> tuple[ExpertSlice, ...]:
        """Return the tensors on disk that form a parameter in memory: a single one, or those of each expert.

        Args:
            module: Name in memory of the parameter's module, such as ``model.layers.0.mlp.experts``.
            parameter: Last part of the parameter's name, such as ``gate_up_proj``.
        """
        tensor = self.find(f"{module}.{parameter}")
        if tensor is None and parameter in _FUSED_DISK_NAMES and module.endswith(".experts"):
            tensor = self.find(f"{module.removesuffix('.experts')}.{_FUSED_DISK_NAMES[parameter]}")
        if tensor is not None:
            return (ExpertSlice(tensor),)
        experts = self._experts.get(self._reduce(module), {})
        slices = [part for part in self._parts(experts, (parameter,), 0) if not part.tensor.name.endswith(".weight")]
        if slices:  # Slices of a fused tensor of all experts.
            return tuple(slices)
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
    ) -> list[ExpertSlice]:
        return [
            ExpertSlice(self._tensors[parts[name]], number, first_row)
            for number, parts in sorted(experts.items())
            for name in names
            if name in parts
        ]

    def _reduce(self, name: str) -> str:
        parts = name.split(".")
        while len(parts) > 1 and parts[0] in self._containers:
            parts = parts[1:]
        return ".".join(_SAME_PART.get(part, part) for part in parts)
