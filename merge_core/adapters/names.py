"""Map the names of a model's tensors in memory, which adapters use, to their names on disk.

transformers renames, joins and splits tensors when it loads them (:mod:`merge_core.architecture.conversions`). Stored
tensors are therefore looked up by their names in memory. Adapters of other versions of transformers, and networks that
it does not contain, use similar names with an additional or missing prefix around the language model, or another name
for the mixture block. If no name is equal, names are reduced to the parts that all layouts share. If two tensors have
the same reduced name, only their full names identify them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mergegate.merge_core.adapters.tensors import JoinedRows, MemoryRows
from mergegate.merge_core.architecture import Conversions, InMemory
from mergegate.merge_core.checkpoint import TEXT_PARTS, AnyTensor, Checkpoint
from mergegate.merge_core.errors import InvalidInput

# Containers around a text model that only some layouts have. Vision and audio towers keep their names.
_CONTAINERS = frozenset({"model", "language_model", "transformer", "backbone"})
_SAME_PART = {"block_sparse_moe": "mlp", "embed_out": "lm_head"}
# Name of a tensor of one expert, which may be a slice of a fused tensor, and the names of its separate projections.
_EXPERT = re.compile(r"^(?P<module>.+\.experts)\.(?P<number>[0-9]{1,5})\.(?P<part>\w+?)(?:\.weight)?$")
_GATE, _UP, _DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")


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


class StoredNames:
    """Index of a checkpoint's tensors by their names in memory."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._tensors = checkpoint, checkpoint.tensors
        kind = checkpoint.config.get("model_type")
        self._containers = _CONTAINERS | ({kind} if isinstance(kind, str) else set())
        self._conversions = Conversions(checkpoint.config, checkpoint.class_name, checkpoint.tensors)
        self._in_memory: dict[str, list[tuple[str, InMemory]]] = {}
        self._reduced: dict[str, dict[str, None]] = {}
        self._experts: dict[str, dict[int, dict[str, str]]] = {}
        for name, tensor in checkpoint.tensors.items():
            # A part of a stored tensor already has its name in memory.
            place = InMemory((name,)) if isinstance(tensor, MemoryRows) else self._conversions.in_memory(name)
            for own in place.names:
                self._in_memory.setdefault(own, []).append((name, place))
            for known in (name, *(() if place.operations else place.names)):
                self._reduced.setdefault(self._reduce(known), {})[name] = None
            if match := _EXPERT.match(name):
                module = self._experts.setdefault(self._reduce(match["module"]), {})
                module.setdefault(int(match["number"]), {})[match["part"]] = name

    @property
    def is_known(self) -> bool:
        """Whether the network is in transformers' table of conversions, or has several parts and generates text."""
        return self._conversions.is_known

    def in_memory(self, name: str) -> str:
        """Return the name in memory of the stored tensor called ``name``.

        Raises:
            InvalidInput: The model has several parts, and mergegate does not know its names in memory. Or transformers
                computes the tensor in memory from several tensors, or in another way that mergegate does not know.
        """
        config = self._checkpoint.config
        if not self._conversions.is_known and any(key in config for key in TEXT_PARTS):
            raise InvalidInput(
                f"{self._checkpoint.directory.name}: config.json: model_type",
                found=f"{config.get('model_type')!r:.60}, a model with several parts",
                expected="a text model, or a model with several parts that transformers can generate text with",
            )
        if isinstance(self._tensors.get(name), MemoryRows):
            return name
        place = self._conversions.in_memory(name)
        if place.operations:
            raise InvalidInput(
                f"{self._checkpoint.directory.name}: {name}",
                found=f"transformers converts it ({_described(place)}) when it loads the model",
                expected="a tensor that it only renames",
            )
        return place.names[0]

    def find(self, name: str) -> AnyTensor | None:
        """Return the tensor that is called ``name`` in memory, or None if no tensor, or more than one, matches."""
        places = self._in_memory.get(name, [])
        if places:
            (own, place), *others = places
            return None if others or place.operations else self._tensors[own]
        if name in self._tensors:
            return self._tensors[name]
        matches = list(self._reduced.get(self._reduce(name), ()))
        return self._tensors[matches[0]] if len(matches) == 1 else None

    def conversion(self, name: str) -> str | None:
        """Return how transformers computes the parameter called ``name`` in memory, or None if it only renames it."""
        places = self._in_memory.get(name, [])
        return next((f"{own}: {_described(place)}" for own, place in places if place.operations), None)

    def find_parameter(self, module: str, parameter: str) -> tuple[ExpertSlice, ...]:
        """Return the tensors on disk that form a parameter in memory: a single one, or those of each expert.

        Args:
            module: Name in memory of the parameter's module, such as ``model.layers.0.mlp.experts``.
            parameter: Last part of the parameter's name, such as ``gate_up_proj``.
        """
        joined = self._joined(f"{module}.{parameter}")
        if joined:
            return joined
        if (tensor := self.find(f"{module}.{parameter}")) is not None:
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

    def _joined(self, name: str) -> tuple[ExpertSlice, ...]:
        """Return the tensors that transformers stacks by expert, or joins by rows, to the parameter called ``name``."""
        slices, first_rows = list[ExpertSlice](), dict[int | None, int]()
        places = sorted(self._in_memory.get(name, []), key=lambda item: (item[1].source, item[1].number or 0))
        for own, place in places:
            tensor, steps = self._tensors[own], [operation.name for operation in place.operations]
            is_stacked = steps[:1] == ["MergeModulelist"] and place.number is not None
            rest = place.operations[1:] if is_stacked else place.operations
            dimension = 1 if is_stacked or len(tensor.shape) == 3 else 0
            if not steps or any(step.name != "Concatenate" for step in rest) or len(rest) > 1:
                return ()
            if any(step.settings.get("dim", 0) != dimension for step in rest):
                return ()
            first = first_rows.get(place.number, 0)
            first_rows[place.number] = first + tensor.shape[dimension - 1 if is_stacked else dimension]
            slices.append(ExpertSlice(tensor, place.number, first))
        return tuple(slices)

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


def split_stored(checkpoint: Checkpoint) -> Checkpoint:
    """Return ``checkpoint`` with the parameters that transformers forms from rows of a stored tensor instead of it.

    Examples are query, key and value of a fused projection, and rows in another order for rotary positions.
    :func:`join_stored` is the reverse.
    """
    conversions = Conversions(checkpoint.config, checkpoint.class_name, checkpoint.tensors)
    tensors: dict[str, AnyTensor] = {}
    for name, tensor in checkpoint.tensors.items():
        is_split = isinstance(tensor, MemoryRows)
        rows = [] if is_split else _rows_in_memory(tensor, conversions.in_memory(name), checkpoint.config)
        tensors.update({part.name: part for part in rows} if rows else {name: tensor})
    return replace(checkpoint, tensors=tensors)


def join_stored(checkpoint: Checkpoint, original: Checkpoint) -> Checkpoint:
    """Return ``checkpoint``, derived from ``split_stored(original)``, with the stored tensors of ``original``."""
    split = split_stored(original)
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in split.tensors}
    parts: dict[str, list[MemoryRows]] = {}
    for name, tensor in split.tensors.items():
        if isinstance(tensor, MemoryRows) and tensor.source.name in original.tensors:
            parts.setdefault(tensor.source.name, []).append(tensor)
        elif name in checkpoint.tensors:
            tensors[name] = checkpoint.tensors[name]
    for name, rows in parts.items():
        source, changed = (
            original.tensors[name],
            [part for part in rows if not isinstance(checkpoint.tensors[part.name], MemoryRows)],
        )
        tensors[name] = source
        if changed:
            new = tuple(checkpoint.tensors[part.name] for part in changed)
            tensors[name] = JoinedRows(name, source.dtype, source.shape, source, tuple(changed), new)
    order = dict.fromkeys((*(name for name in original.tensors if name in tensors), *tensors))
    return replace(checkpoint, tensors={name: tensors[name] for name in order})


def _rows_in_memory(tensor: AnyTensor, place: InMemory, config: Mapping[str, Any]) -> list[MemoryRows]:
    """Return the parameters that contain rows of ``tensor``, or an empty list if it is converted in another way."""
    rows, chunks, permutation = tensor.shape[0] if tensor.shape else 0, len(place.names), None
    for position, operation in enumerate(place.operations):
        if operation.name == "PermuteForRope" and permutation is None:
            permutation = operation.settings
        elif position or operation.name != "Chunk" or operation.settings.get("dim", 0):
            return []
    settings = config
    if permutation is not None:
        settings = config.get(permutation.get("subconfig_key", ""), config)
    if not place.operations or rows % chunks or (permutation is not None and permutation.get("inverse")):
        return []
    parts = []
    for position, name in enumerate(place.names):
        only = permutation.get("permute_layer_names") if permutation is not None else ()
        count = 0
        if permutation is not None and (only is None or any(word in name for word in only)):
            value = settings.get("num_attention_heads") if isinstance(settings, Mapping) else None
            if type(value) is not int or value < 1 or rows // chunks % (2 * value):
                return []
            count = value
        shape = (rows // chunks, *tensor.shape[1:])
        parts.append(MemoryRows(name, tensor.dtype, shape, tensor, position * (rows // chunks), count))
    return parts


def _described(place: InMemory) -> str:
    return ", ".join(operation.name for operation in place.operations)
