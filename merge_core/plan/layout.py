"""Where every output byte will lie, decided before the first input byte is read.

The result keeps the donor's division into files when it has the donor's tensors; otherwise tensors are packed in their
order into files no larger than the donor's largest. What is one tensor in the donor's files is one in the result's,
also where several jobs compute it (one an expert, see ``merge_core.architecture.experts``): each fills a part of its
bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from mergegate.merge_core.architecture.experts import DiskTensor, disk_name, to_disk_tensors
from mergegate.merge_core.checkpoint import SINGLE_NAME, Checkpoint, DType, SizedTensor, render_header

# Hugging Face's long-standing default, used when the donor is a single file and the result needs several.
DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True)
class OutputTensor(SizedTensor):
    """Name, format and shape of a tensor that will be written: alone, or as a part of one of a file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """One output file.

    Args:
        name: File name.
        header: Its first bytes: length prefix and JSON header.
        tensors: Names of what is computed for it, in the order of their bytes.
        offsets: Where each begins, from the start of the file.
        size: Bytes of the whole file.
        stored: Its tensors as its header has them, in the same order, each of one or several of ``tensors``.
    """

    name: str
    header: bytes
    tensors: tuple[str, ...]
    offsets: tuple[int, ...]
    size: int
    stored: tuple[DiskTensor, ...]

    def dtypes(self) -> dict[str, DType]:
        """Format of each of ``tensors``."""
        return {piece: tensor.dtype for tensor in self.stored for piece in tensor.pieces}


def lay_out(tensors: Sequence[OutputTensor], donor: Checkpoint) -> tuple[Shard, ...]:
    """Shards for ``tensors``, each in the order of the donor's bytes (new tensors in the order given).

    Args:
        tensors: What is computed.
        donor: Whose layout the result gets; its experts one by one
        (:func:`merge_core.architecture.experts.split_experts`).
    """
    stored = to_disk_tensors({tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}, donor)
    groups = _groups_of_donor(stored, donor)
    if groups is None:
        groups = _packed(stored, _shard_limit(donor))
    if len(groups) == 1:
        names = [SINGLE_NAME]
    elif all(name.endswith(".safetensors") for name in groups):
        names = list(groups)
    else:
        names = [f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors" for index in range(len(groups))]
    return tuple(_shard(name, group) for name, group in zip(names, groups.values(), strict=True))


def requires_index(shards: Sequence[Shard]) -> bool:
    """Whether a reader cannot do without :data:`merge_core.checkpoint.INDEX_NAME`: a single file needs none."""
    return len(shards) > 1


def index_text(shards: Sequence[Shard]) -> str:
    """Content of the index."""
    weight_map = {tensor.name: shard.name for shard in shards for tensor in shard.stored}
    total = sum(shard.size - len(shard.header) for shard in shards)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(content, indent=2) + "\n"


def _shard(name: str, tensors: Sequence[DiskTensor]) -> Shard:
    header = render_header(
        [(tensor.name, tensor.dtype.code, tensor.shape, tensor.nbytes) for tensor in tensors], {"format": "pt"}
    )
    pieces, offsets, position = [], [], len(header)
    for tensor in tensors:
        for piece in tensor.pieces:
            pieces.append(piece)
            offsets.append(position)
            position += tensor.nbytes // len(tensor.pieces)
    return Shard(name, header, tuple(pieces), tuple(offsets), position, tuple(tensors))


def _groups_of_donor(tensors: Sequence[DiskTensor], donor: Checkpoint) -> dict[str, list[DiskTensor]] | None:
    own = {disk_name(tensor): tensor.parts for tensor in donor.tensors.values()}
    order = {name: position for position, name in enumerate(own)}
    if any(not own.get(tensor.name) for tensor in tensors):
        return None
    groups: dict[str, list[DiskTensor]] = {}
    for tensor in sorted(tensors, key=lambda tensor: order[tensor.name]):
        groups.setdefault(own[tensor.name][0].file.name, []).append(tensor)
    return groups


def _packed(tensors: Sequence[DiskTensor], limit: int) -> dict[str, list[DiskTensor]]:
    groups: list[list[DiskTensor]] = []
    filled = limit + 1
    for tensor in tensors:
        if filled + tensor.nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    return {str(number): group for number, group in enumerate(groups)}


def _shard_limit(donor: Checkpoint) -> int:
    sizes: dict[str, int] = {}
    for tensor in donor.tensors.values():
        if not tensor.parts:
            continue
        file = tensor.parts[0].file.name
        sizes[file] = sizes.get(file, 0) + tensor.nbytes
    return max(sizes.values()) if len(sizes) > 1 else max(DEFAULT_SHARD_BYTES, *sizes.values(), 0)
