"""Split fused experts into single ones without reading them, and map the merge back to the donor's layout.

If a checkpoint stores all experts of a layer in one (*fused*) tensor, a merge must not treat that tensor as one vector:
sign elections and angles would cover all experts together. Before planning, :func:`split_experts` therefore replaces
each fused tensor by *pieces*, one per expert and projection, under the names of the layout that stores experts
separately. A piece is a contiguous range of the fused tensor, and the engine streams it like a complete tensor.

With the shape ``[experts, 2 * intermediate, hidden]``, gate and up projection become separate pieces. With the shape
``[experts, hidden, 2 * intermediate]`` (Llama 4, GPT-OSS), each row contains both gate and up values, so one piece
contains both. The shapes of ``gate_up_proj`` and ``down_proj`` together determine the layout: ``[E, 2I, H]`` with
``[E, H, I]`` cannot be read as ``[E, H', 2I']`` with ``[E, I', H']``.

Each piece records the fused tensor, so that :func:`to_disk_tensors` can write the merge in the layout of its donor.

Sources of the names: the checkpoints of the families, and the output of transformers 5 with and without
``save_original_format``.

Constants, such as computed router rows, and tensors with reordered rows are in no file either.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mergegate.merge_core.architecture import parse_layer_place
from mergegate.merge_core.checkpoint import (
    BY_CODE,
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

# No router chooses among more experts. A tensor with more rows is something else.
MOST_EXPERTS = 4096
_FUSED = re.compile(r"^(?P<module>.+)\.experts\.(?P<part>[A-Za-z][A-Za-z0-9_]*)$")
# Granite's names of the same two tensors.
_LINEAR = re.compile(r"^(?P<module>.+)\.(?P<part>input_linear|output_linear)\.weight$")
_LINEAR_PARTS = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}
_NUMBER = re.compile(r"\.experts\.([0-9]{1,4})\.")


@dataclass(frozen=True)
class ExpertNames:
    """Names of a family's tensors for experts, in the layout that stores experts separately."""

    gate: str = "gate_proj"  # name of the projection that the activation is applied to
    up: str = "up_proj"  # name of the projection that is multiplied with the gate
    down: str = "down_proj"  # name of the projection back to the hidden size
    # Pairs of prefixes, in memory and on disk, of names inside a layer that differ between the two.
    renamed: tuple[tuple[str, str], ...] = ()


# Families that are not listed here use the default names.
_BLOCK_SPARSE = ExpertNames("w1", "w3", "w2", (("mlp.", "block_sparse_moe."),))
_GRANITE = ExpertNames(renamed=(("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight"),))
_BY_MODEL_TYPE = {
    "mixtral": _BLOCK_SPARSE,
    "minimax": _BLOCK_SPARSE,
    "minimax_m2": _BLOCK_SPARSE,
    "phimoe": ExpertNames("w1", "w3", "w2", (("mlp.router.", "block_sparse_moe.gate."), ("mlp.", "block_sparse_moe."))),
    "lfm2_moe": ExpertNames("w1", "w3", "w2"),
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "granitemoehybrid": _GRANITE,
}


@dataclass(frozen=True)
class DiskLocation:
    """Location of a piece on disk."""

    whole: str  # name of the tensor on disk that contains the piece
    # Names of that tensor's pieces in the order of their bytes, with ``*`` for the expert number. A single name without
    # ``*`` means that the tensor is renamed but not split.
    form: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoredPiece(StoredTensor):
    """Piece of a stored tensor."""

    location: DiskLocation


@dataclass(frozen=True)
class DerivedPiece(DerivedTensor):
    """Piece of the computed tensor ``whole``, which begins at element ``start``."""

    location: DiskLocation
    whole: DerivedTensor
    start: int

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return self.whole.parts

    def identity(self) -> Any:
        return [self.start, self.whole.identity()]

    def open(self, read: ReadStored) -> ReadElements:
        elements = self.whole.open(read)
        return lambda first, into: elements(self.start + first, into)


def split_experts(checkpoint: Checkpoint) -> Checkpoint:
    """Return ``checkpoint`` with each expert as a separate tensor. It stays unchanged if no experts are fused."""
    kinds = (part.get("model_type") for part in config_parts(checkpoint.config))
    names = next((_BY_MODEL_TYPE[kind] for kind in kinds if kind in _BY_MODEL_TYPE), ExpertNames())
    candidates: dict[str, dict[str, AnyTensor]] = {}
    if any(len(tensor.shape) == 3 for tensor in checkpoint.tensors.values()):
        for name, tensor in checkpoint.tensors.items():
            if (module_and_part := _split(name)) is not None:
                module, part = module_and_part
                candidates.setdefault(module, {})[part] = tensor
    # A module has fused experts if all its three-dimensional tensors have the same first dimension.
    fused: dict[str, Mapping[str, AnyTensor]] = {}
    for module, parts in candidates.items():
        sizes = {tensor.shape[0] for tensor in parts.values() if len(tensor.shape) == 3}
        if len(sizes) == 1 and 0 < (experts := sizes.pop()) <= MOST_EXPERTS:
            # A tensor with one number per expert belongs to the router and has the same name in both layouts.
            fused[module] = {
                part: item for part, item in parts.items() if len(item.shape) > 1 and item.shape[0] == experts
            }
    if not fused and not names.renamed:
        return checkpoint
    size = next((part["hidden_size"] for part in config_parts(checkpoint.config) if "hidden_size" in part), None)
    stored_names = set(checkpoint.tensors)
    table: dict[str, AnyTensor] = {}
    for tensor in checkpoint.tensors.values():
        pieces = list(_pieces(tensor, fused, names, size))
        if any(piece.name in stored_names or piece.name in table for piece in pieces if disk_location(piece)):
            pieces = [tensor]  # The name is already in use, and one of the two tensors would be lost.
        table |= {piece.name: piece for piece in pieces}
    return replace(checkpoint, tensors=table)


def disk_location(tensor: AnyTensor) -> DiskLocation | None:
    """Return the location on disk of a piece, or None for a tensor that is stored under its own name."""
    return tensor.location if isinstance(tensor, StoredPiece | DerivedPiece) else None


def _split(name: str) -> tuple[str, str] | None:
    """Return the module and the part in the name of a possibly fused tensor, or None for other names."""
    if match := _FUSED.match(name):
        return match["module"], match["part"]
    if match := _LINEAR.match(name):
        return match["module"], _LINEAR_PARTS[match["part"]]
    return None


def _pieces(
    tensor: AnyTensor, fused_tensors: Mapping[str, Mapping[str, AnyTensor]], names: ExpertNames, hidden_size: int | None
) -> Iterator[AnyTensor]:
    module, part = _split(tensor.name) or ("", "")
    if part not in fused_tensors.get(module, ()) or tensor.dtype.kind != "float":
        # Payloads of quantized models are not plain weights and stay as they are.
        name = _disk_layout_name(tensor.name, names)
        location = DiskLocation(tensor.name, (name,))
        yield tensor if name == tensor.name else _piece(tensor, name, tensor.shape, 0, location)
        return
    parts = _parts(part, fused_tensors[module], names, hidden_size)
    prefix = _disk_layout_name(f"{module}.experts.", names)
    form = tuple(f"{prefix}*.{part}" for part in parts)
    shape = (tensor.shape[1] // len(parts), *tensor.shape[2:]) if len(parts) > 1 else tensor.shape[1:]
    location, size = DiskLocation(tensor.name, form), math.prod(shape)
    for expert in range(tensor.shape[0]):
        for number, name in enumerate(form):
            start = (expert * len(form) + number) * size
            yield _piece(tensor, name.replace("*", str(expert)), shape, start, location)


def _parts(part: str, tensors: Mapping[str, AnyTensor], names: ExpertNames, hidden_size: int | None) -> tuple[str, ...]:
    """Return the names of one expert's pieces in the fused tensor ``part``, in the order of their bytes."""
    up, down = tensors.get("gate_up_proj"), tensors.get("down_proj")
    if up is not None and down is not None and _sizes(up) == (2 * _sizes(down)[1], _sizes(down)[0]):
        projections = {"gate_up_proj": (names.gate, names.up), "down_proj": (names.down,)}
        return tuple(f"{projection}.weight" for projection in projections.get(part, ())) or (part,)
    up = tensors.get("up_proj")
    if part not in ("up_proj", "down_proj") or up is None or down is None:
        return (part,)
    # Without a gate, both layouts have the same shapes. The position of the hidden size determines the layout.
    if _sizes(up) == (_sizes(down)[1], hidden_size) and _sizes(down)[0] == hidden_size != _sizes(up)[0]:
        return (f"{names.up if part == 'up_proj' else names.down}.weight",)
    return (part,)


def _sizes(tensor: AnyTensor) -> tuple[int, int]:
    return (tensor.shape[1], tensor.shape[2]) if len(tensor.shape) == 3 else (0, 0)


def _piece(tensor: AnyTensor, name: str, shape: tuple[int, ...], start: int, location: DiskLocation) -> AnyTensor:
    if isinstance(tensor, DerivedTensor):
        return DerivedPiece(name, tensor.dtype, shape, location, tensor, start)
    return StoredPiece(name, tensor.file, tensor.dtype, shape, tensor.offset + start * tensor.dtype.size, location)


def _disk_layout_name(name: str, names: ExpertNames) -> str:
    place = parse_layer_place(name)
    for memory, disk in names.renamed if place is not None else ():
        if place is not None and place.part.startswith(memory):
            return f"{place.stack}.{place.index}.{disk}{place.part.removeprefix(memory)}"
    return name


@dataclass(frozen=True, slots=True)
class DiskTensor(SizedTensor):
    """Tensor of an output file, which consists of ``pieces`` in the order of their bytes.

    ``dtype`` is the smallest format that can represent the formats of all pieces.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    pieces: tuple[str, ...]


def to_disk_tensors(outputs: Mapping[str, tuple[DType, tuple[int, ...]]], donor: Checkpoint) -> list[DiskTensor]:
    """Return the tensors to write for ``outputs`` (format and shape by name), fused or renamed as in ``donor``.

    Layer numbers may differ from the donor's, so every layer is written in the layout of the donor's layers, whatever
    its number. If an expert is missing or has another shape, the experts are written one by one.
    """
    forms: dict[tuple[str, str], DiskLocation] = {}
    for tensor in donor.tensors.values():
        if (location := disk_location(tensor)) is not None:
            forms.setdefault(_key(tensor.name), location)
    disk_tensors: list[DiskTensor] = []
    written_names: set[str] = set()
    for name, (dtype, shape) in outputs.items():
        if name in written_names:
            continue
        disk = DiskTensor(name, dtype, shape, (name,))
        if forms and (location := forms.get(_key(name))) is not None:
            whole, form = location.whole, location.form
            if (layer := parse_layer_place(name)) is not None:  # Use the form of the donor's layer for this layer.
                whole = _in_layer(whole, layer.index)
                form = tuple(_in_layer(part, layer.index) for part in form)
            if form == (name,):
                disk = DiskTensor(whole, dtype, shape, form)
            elif "*" in form[0]:
                experts = 0
                while all(part.replace("*", str(experts)) in outputs for part in form):
                    experts += 1
                pieces = [part.replace("*", str(expert)) for expert in range(experts) for part in form]
                dtypes = {outputs[piece][0] for piece in pieces}
                has_one_shape = all(outputs[piece][1] == shape for piece in pieces)
                has_one_format = len(dtypes) == 1 or all(piece_dtype.kind == "float" for piece_dtype in dtypes)
                if name in pieces and has_one_shape and has_one_format:
                    rows = (len(form) * shape[0], *shape[1:]) if len(form) > 1 else shape
                    disk = DiskTensor(whole, promote(dtypes), (experts, *rows), tuple(pieces))
        disk_tensors.append(disk)
        written_names.update(disk.pieces)
    return disk_tensors


def _key(name: str) -> tuple[str, str]:
    """Return the stack and the part of the tensor called ``name``, without the numbers of its layer and expert."""
    position = parse_layer_place(name)
    stack, part = (position.stack, position.part) if position else ("", name)
    return stack, _NUMBER.sub(".experts.*.", f".{part}", count=1)


def _in_layer(name: str, index: int) -> str:
    position = parse_layer_place(name)
    return name if position is None else f"{position.stack}.{index}.{position.part}"


def disk_name(tensor: AnyTensor) -> str:
    """Return the name of the tensor on disk that contains ``tensor``, which may be ``tensor`` itself."""
    location = disk_location(tensor)
    return location.whole if location else tensor.name


@dataclass(frozen=True)
class ConstantTensor(DerivedTensor):
    """Float32 tensor of the little-endian ``values``, or of zeros if ``values`` is None."""

    values: bytes | None = field(default=None, repr=False)

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return ()

    def identity(self) -> Any:
        return hashlib.sha256(self.values).hexdigest() if self.values is not None else None

    def open(self, read: ReadStored) -> ReadElements:
        import numpy as np

        stored = np.frombuffer(self.values, np.uint8) if self.values is not None else None

        def elements(first: int, into: NDArray[np.uint8]) -> None:
            start = 4 * first
            into[:] = 0 if stored is None else stored[start : start + len(into)]

        return elements


def constant_tensor(name: str, shape: tuple[int, ...], values: bytes | None = None) -> ConstantTensor:
    """Return a float32 tensor of the little-endian ``values``. Default: zeros."""
    return ConstantTensor(name, BY_CODE["F32"], shape, values)


@dataclass(frozen=True)
class RowPermutation(DerivedTensor):
    """Tensor whose row ``i`` is row ``rows[i]`` of the tensor ``whole``."""

    whole: AnyTensor
    rows: tuple[int, ...]

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return self.whole.parts

    def identity(self) -> Any:
        inner = self.whole.identity() if isinstance(self.whole, DerivedTensor) else None
        return [list(self.rows), inner]

    def open(self, read: ReadStored) -> ReadElements:
        whole, size, width = self.whole, self.dtype.size, self.numel // len(self.rows)
        inner: ReadElements = whole.open(read) if isinstance(whole, DerivedTensor) else partial(read, whole)

        def elements(first: int, into: NDArray[np.uint8]) -> None:
            position, count = 0, len(into) // size
            while position < count:
                row, column = divmod(first + position, width)
                run = min(width - column, count - position)
                inner(self.rows[row] * width + column, into[position * size : (position + run) * size])
                position += run

        return elements


def permuted_rows(tensor: AnyTensor, rows: Sequence[int]) -> RowPermutation:
    """Return a tensor whose row ``i`` is row ``rows[i]`` of ``tensor``."""
    return RowPermutation(tensor.name, tensor.dtype, tensor.shape, tensor, tuple(rows))
