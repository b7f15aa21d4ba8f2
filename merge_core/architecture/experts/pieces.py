"""Fused experts as single ones: a table of pieces over the same bytes, and the way back to what lies on disk.

Where a checkpoint holds the experts of a layer in one tensor, a merge must not take that tensor for one vector: an
election of signs or an angle would mean something else than in a checkpoint that holds each expert alone. So before
anything is planned, every table is made one of single experts (:func:`split_experts`), under the names of the layout
that
writes them one by one. An expert is a contiguous run of a fused tensor, and so are its gate and its up projection where
the tensor is ``[experts, 2 * intermediate, hidden]``; nothing is read for it, and the engine streams pieces as it does
whole tensors.

Where it is ``[experts, hidden, 2 * intermediate]`` (Llama 4, GPT-OSS) gate and up lie side by side in every row, and
the piece is one expert's both. Which it is, the shapes of ``gate_up_proj`` and ``down_proj`` together say:
``[E, 2I, H]`` with ``[E, H, I]`` cannot be read as ``[E, H', 2I']`` with ``[E, I', H']``.

Each piece knows the tensor that it lies in, so a result can be written in the layout of its donor
(:func:`to_disk_tensors`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from mergegate.merge_core.architecture import parse_layer_place
from mergegate.merge_core.architecture.experts.naming import ExpertNames, expert_names
from mergegate.merge_core.checkpoint import (
    AnyTensor,
    Checkpoint,
    DerivedTensor,
    DType,
    ReadElements,
    ReadStored,
    SizedTensor,
    StoredTensor,
    config_parts,
    promote,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# No router chooses among more: a tensor of so many rows is something else.
MOST_EXPERTS = 4096
_FUSED = re.compile(r"^(?P<module>.+)\.experts\.(?P<part>[A-Za-z][A-Za-z0-9_]*)$")
# Granite's names of the same two tensors.
_LINEAR = re.compile(r"^(?P<module>.+)\.(?P<part>input_linear|output_linear)\.weight$")
_LINEAR_PARTS = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}
_NUMBER = re.compile(r"\.experts\.([0-9]{1,4})\.")


@dataclass(frozen=True)
class DiskPlace:
    """Where a piece lies.

    Args:
        whole: Name of the tensor on disk.
        form: Names of the pieces that it consists of, in the order of their bytes, with ``*`` for the expert's number;
            one name without a star for a tensor that only has another name.
    """

    whole: str
    form: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoredPiece(StoredTensor):
    """A run of a stored tensor under a name of its own."""

    place: DiskPlace


@dataclass(frozen=True)
class DerivedPiece(DerivedTensor):
    """A run of a computed tensor under a name of its own.

    Args:
        place: Where it lies.
        whole: What it is a run of.
        start: Its first element there.
    """

    place: DiskPlace
    whole: DerivedTensor
    start: int

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return self.whole.parts

    def identity(self) -> Any:
        return [self.start, self.whole.identity()]

    def open(self, read: ReadStored) -> ReadElements:
        elements = self.whole.open(read)

        def run(first: int, into: NDArray[np.uint8]) -> None:
            elements(self.start + first, into)

        return run


Piece: TypeAlias = StoredPiece | DerivedPiece


def split_experts(checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` with each expert of its fused tensors under a name of its own; the same where there are none."""
    names = expert_names(checkpoint.config)
    fused = _fused_modules(checkpoint.tensors)
    if not fused and not names.renamed:
        return checkpoint
    size = _hidden_size(checkpoint.config)
    taken = set(checkpoint.tensors)
    table: dict[str, AnyTensor] = {}
    for tensor in checkpoint.tensors.values():
        pieces = list(_pieces(tensor, fused, names, size))
        if any(piece.name in taken or piece.name in table for piece in pieces if place_of(piece)):
            pieces = [tensor]  # The name is taken: a table in which two tensors had it would lose one.
        table |= {piece.name: piece for piece in pieces}
    return replace(checkpoint, tensors=table)


def place_of(tensor: AnyTensor) -> DiskPlace | None:
    """Where a piece lies; None for a tensor that lies on disk as it is."""
    return tensor.place if isinstance(tensor, StoredPiece | DerivedPiece) else None


@dataclass(frozen=True)
class _Module:
    """Fused tensors of one module by part, and their number of experts."""

    tensors: Mapping[str, AnyTensor]
    experts: int


def _split(name: str) -> tuple[str, str] | None:
    """Module and part of a name that may be a fused tensor's."""
    if match := _FUSED.match(name):
        return match["module"], match["part"]
    if match := _LINEAR.match(name):
        return match["module"], _LINEAR_PARTS[match["part"]]
    return None


def _fused_modules(tensors: Mapping[str, AnyTensor]) -> dict[str, _Module]:
    """Modules whose experts are fused: all their tensors of three dimensions have one and the same first."""
    if not any(len(tensor.shape) == 3 for tensor in tensors.values()):
        return {}
    found: dict[str, dict[str, AnyTensor]] = {}
    for name, tensor in tensors.items():
        if (at := _split(name)) is not None:
            found.setdefault(at[0], {})[at[1]] = tensor
    modules = {}
    for module, parts in found.items():
        sizes = {tensor.shape[0] for tensor in parts.values() if len(tensor.shape) == 3}
        if len(sizes) == 1 and 0 < (experts := sizes.pop()) <= MOST_EXPERTS:
            # One number for each expert is a part of the router, and is called so in both layouts.
            of_each = {
                part: tensor for part, tensor in parts.items() if len(tensor.shape) > 1 and tensor.shape[0] == experts
            }
            modules[module] = _Module(of_each, experts)
    return modules


def _pieces(
    tensor: AnyTensor, fused: Mapping[str, _Module], names: ExpertNames, hidden: int | None
) -> Iterator[AnyTensor]:
    at = _split(tensor.name)
    module = fused.get(at[0]) if at else None
    if at is None or module is None or at[1] not in module.tensors or not _is_plain(tensor):
        name = _renamed(tensor.name, names)
        yield tensor if name == tensor.name else _piece(tensor, name, tensor.shape, 0, DiskPlace(tensor.name, (name,)))
        return
    parts = _parts(at[1], module, names, hidden)
    prefix = _renamed(f"{at[0]}.experts.", names)
    form = tuple(f"{prefix}*.{part}" for part in parts)
    shape = (tensor.shape[1] // len(parts), *tensor.shape[2:]) if len(parts) > 1 else tensor.shape[1:]
    place, size = DiskPlace(tensor.name, form), math.prod(shape)
    for expert in range(module.experts):
        for number, name in enumerate(form):
            start = (expert * len(form) + number) * size
            yield _piece(tensor, name.replace("*", str(expert)), shape, start, place)


def _is_plain(tensor: AnyTensor) -> bool:
    """Whether the elements of a tensor are weights, one after the other: payloads of quantised models are not."""
    return tensor.dtype.kind == "float"


def _parts(part: str, module: _Module, names: ExpertNames, hidden: int | None) -> tuple[str, ...]:
    """What one expert's share of the fused tensor ``part`` is called, in the order in which it lies there."""
    up, down = module.tensors.get("gate_up_proj"), module.tensors.get("down_proj")
    if up is not None and down is not None and _sizes(up) == (2 * _sizes(down)[1], _sizes(down)[0]):
        own = {"gate_up_proj": (names.gate, names.up), "down_proj": (names.down,)}
        return tuple(f"{projection}.weight" for projection in own.get(part, ())) or (part,)
    up = module.tensors.get("up_proj")
    if part not in ("up_proj", "down_proj") or up is None or down is None:
        return (part,)
    # Without a gate both readings have the same shapes: which of the sizes is the hidden one decides.
    if _sizes(up) == (_sizes(down)[1], hidden) and _sizes(down)[0] == hidden != _sizes(up)[0]:
        return (f"{names.up if part == 'up_proj' else names.down}.weight",)
    return (part,)


def _sizes(tensor: AnyTensor) -> tuple[int, int]:
    return (tensor.shape[1], tensor.shape[2]) if len(tensor.shape) == 3 else (0, 0)


def _piece(tensor: AnyTensor, name: str, shape: tuple[int, ...], start: int, place: DiskPlace) -> Piece:
    if isinstance(tensor, DerivedTensor):
        return DerivedPiece(name, tensor.dtype, shape, place, tensor, start)
    return StoredPiece(name, tensor.file, tensor.dtype, shape, tensor.offset + start * tensor.dtype.size, place)


def _renamed(name: str, names: ExpertNames) -> str:
    at = parse_layer_place(name)
    if at is None or not names.renamed:
        return name
    return f"{at.stack}.{at.index}.{names.on_disk(at.part)}"


def _hidden_size(config: Mapping[str, Any]) -> int | None:
    return next((part["hidden_size"] for part in config_parts(config) if "hidden_size" in part), None)


@dataclass(frozen=True, slots=True)
class DiskTensor(SizedTensor):
    """A tensor of an output file.

    Args:
        name: As the file has it.
        dtype: Its format: one that holds what any of its pieces would be written in.
        shape: Its sizes.
        pieces: Names of what is computed for it, in the order of their bytes.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    pieces: tuple[str, ...]


def to_disk_tensors(outputs: Mapping[str, tuple[DType, tuple[int, ...]]], donor: Checkpoint) -> list[DiskTensor]:
    """What the tensors ``outputs`` are written as: fused, or under another name, where those of ``donor`` are.

    Layers may have other numbers than in the donor: a layer's parts are written as the same parts of any of its layers.
    Experts that do not fill a tensor of the donor's form (one is missing, or has another size) are written one by one.

    Args:
        outputs: Format and shape by name.
        donor: From :func:`split_experts`.
    """
    forms = _forms(donor.tensors.values())
    found: list[DiskTensor] = []
    done: set[str] = set()
    for name, (dtype, shape) in outputs.items():
        if name in done:
            continue
        form = forms.get(_key(name)) if forms else None
        disk = _fused(name, form, outputs) if form else None
        found.append(disk := disk or DiskTensor(name, dtype, shape, (name,)))
        done.update(disk.pieces)
    return found


def _fused(name: str, place: DiskPlace, outputs: Mapping[str, tuple[DType, tuple[int, ...]]]) -> DiskTensor | None:
    """The tensor that holds ``name``, if all that belongs into it is there."""
    at, own = parse_layer_place(name), place
    if at is not None:  # The same part of another layer.
        own = DiskPlace(_in_layer(place.whole, at.index), tuple(_in_layer(part, at.index) for part in place.form))
    dtype, shape = outputs[name]
    if "*" not in own.form[0]:
        return DiskTensor(own.whole, dtype, shape, own.form) if own.form == (name,) else None
    experts = 0
    pieces: list[str] = []
    while all(part.replace("*", str(experts)) in outputs for part in own.form):
        pieces += [part.replace("*", str(experts)) for part in own.form]
        experts += 1
    if name not in pieces or any(outputs[piece][1] != shape for piece in pieces):
        return None
    dtypes = {outputs[piece][0] for piece in pieces}
    if len(dtypes) > 1 and any(one.kind != "float" for one in dtypes):
        return None
    rows = (len(own.form) * shape[0], *shape[1:]) if len(own.form) > 1 else shape
    return DiskTensor(own.whole, promote(dtypes), (experts, *rows), tuple(pieces))


def _forms(tensors: Iterable[AnyTensor]) -> dict[tuple[str, str], DiskPlace]:
    forms: dict[tuple[str, str], DiskPlace] = {}
    for tensor in tensors:
        if (place := place_of(tensor)) is not None:
            forms.setdefault(_key(tensor.name), place)
    return forms


def _key(name: str) -> tuple[str, str]:
    """A tensor's place but for the numbers of layer and expert."""
    at = parse_layer_place(name)
    stack, part = (at.stack, at.part) if at else ("", name)
    return stack, _NUMBER.sub(".experts.*.", f".{part}", count=1)


def _in_layer(name: str, index: int) -> str:
    at = parse_layer_place(name)
    return name if at is None else f"{at.stack}.{index}.{at.part}"


def disk_name(tensor: AnyTensor) -> str:
    """Name of the tensor on disk that ``tensor`` is, or is a piece of."""
    place = place_of(tensor)
    return place.whole if place else tensor.name
