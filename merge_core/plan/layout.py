"""Decide the position of every output byte before the first input byte is read.

If the result has the donor's tensors, it distributes them over files as the donor does. Otherwise tensors are packed in
order into files no larger than the donor's largest. If the donor stores a tensor whole, so does the result, even if
several jobs compute it (one per expert, see ``merge_core.architecture.experts``). Each job then fills a part of its
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mergegate.merge_core.architecture.experts import DiskTensor, disk_name, to_disk_tensors
from mergegate.merge_core.checkpoint import SINGLE_NAME, Checkpoint, DType, SizedTensor, render_header

# Default shard size of Hugging Face, used if the donor is a single file and the result needs several.
DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True)
class OutputTensor(SizedTensor):
    """Name, format and shape of a tensor to write, which is all or a part of a tensor in a file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """One output file.

    Args:
        name: File name.
        header: First bytes of the file: length prefix and JSON header.
        tensors: Names of the computed tensors, in the order of their bytes.
        offsets: Offset of each computed tensor from the start of the file, in bytes.
        size: Size of the whole file, in bytes.
        stored: Tensors that the header lists, in the same order. Each consists of one or more of ``tensors``.
    """

    name: str
    header: bytes
    tensors: tuple[str, ...]
    offsets: tuple[int, ...]
    size: int
    stored: tuple[DiskTensor, ...]

    def dtypes(self) -> dict[str, DType]:
        """Return the format of each computed tensor, by name."""
        return {piece: tensor.dtype for tensor in self.stored for piece in tensor.pieces}


def lay_out(tensors: Sequence[OutputTensor], donor: Checkpoint) -> tuple[Shard, ...]:
    """Return the shards for ``tensors``, in the order of the donor's bytes.

    ``donor`` must have its fused experts split (:func:`merge_core.architecture.experts.split_experts`). If the donor
    lacks any of ``tensors``, the shards keep the order of ``tensors`` instead.
    """
    stored = to_disk_tensors({tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}, donor)
    donor_parts = {disk_name(tensor): tensor.parts for tensor in donor.tensors.values()}
    groups: dict[str, list[DiskTensor]] = {}
    if all(donor_parts.get(tensor.name) for tensor in stored):
        order = {name: position for position, name in enumerate(donor_parts)}
        for tensor in sorted(stored, key=lambda tensor: order[tensor.name]):
            groups.setdefault(donor_parts[tensor.name][0].file.name, []).append(tensor)
    else:
        groups = _pack(stored, donor)
    if len(groups) == 1:
        names = [SINGLE_NAME]
    elif all(name.endswith(".safetensors") for name in groups):
        names = list(groups)
    else:
        names = [f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors" for index in range(len(groups))]
    shards = []
    for name, group in zip(names, groups.values(), strict=True):
        entries = [(tensor.name, tensor.dtype.code, tensor.shape, tensor.nbytes) for tensor in group]
        header = render_header(entries, {"format": "pt"})
        pieces, offsets, position = [], [], len(header)
        for tensor in group:
            for piece in tensor.pieces:
                pieces.append(piece)
                offsets.append(position)
                position += tensor.nbytes // len(tensor.pieces)
        shards.append(Shard(name, header, tuple(pieces), tuple(offsets), position, tuple(group)))
    return tuple(shards)


def _pack(tensors: Sequence[DiskTensor], donor: Checkpoint) -> dict[str, list[DiskTensor]]:
    """Pack tensors in order into files no larger than the donor's largest."""
    file_sizes: dict[str, int] = {}
    for donor_tensor in donor.tensors.values():
        if donor_tensor.parts:
            file = donor_tensor.parts[0].file.name
            file_sizes[file] = file_sizes.get(file, 0) + donor_tensor.nbytes
    is_single = len(file_sizes) <= 1
    limit = max(DEFAULT_SHARD_BYTES, *file_sizes.values(), 0) if is_single else max(file_sizes.values())
    groups: list[list[DiskTensor]] = []
    filled = limit + 1
    for tensor in tensors:
        if filled + tensor.nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    return {str(number): group for number, group in enumerate(groups)}


def requires_index(shards: Sequence[Shard]) -> bool:
    """Return whether readers need :data:`merge_core.checkpoint.INDEX_NAME` because the network is in several files."""
    return len(network_shards(shards)) > 1


def network_shards(shards: Sequence[Shard]) -> tuple[Shard, ...]:
    """Return the files of the network. All others are in the folders of sentence-transformers modules."""
    return tuple(shard for shard in shards if "/" not in shard.name)
