"""Where every output byte will lie, decided before the first input byte is read.

The result keeps the donor's division into files when it has the donor's tensors; otherwise tensors are packed in their
order into files no larger than the donor's largest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from merge_core.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint, DType, render_header

# Hugging Face's long-standing default, used when the donor is a single file and the result needs several.
DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class OutputTensor:
    """Name, format and shape of a tensor that will be written."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * self.dtype.size


@dataclass(frozen=True)
class Shard:
    """One output file.

    Args:
        name: File name.
        header: Its first bytes: length prefix and JSON header.
        tensors: Names of its tensors in the order of their bytes.
        offsets: Where each begins, from the start of the file.
        size: Bytes of the whole file.
    """

    name: str
    header: bytes
    tensors: tuple[str, ...]
    offsets: tuple[int, ...]
    size: int


def lay_out(tensors: Sequence[OutputTensor], donor: Checkpoint) -> tuple[Shard, ...]:
    """Shards for ``tensors``, each in the order of the donor's bytes (new tensors in the order given)."""
    groups = _groups_of_donor(tensors, donor)
    if groups is None:
        groups = _packed(tensors, _shard_limit(donor))
    if len(groups) == 1:
        names = [SINGLE_NAME]
    elif all(name.endswith(".safetensors") for name in groups):
        names = list(groups)
    else:
        names = [f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors" for index in range(len(groups))]
    return tuple(_shard(name, group) for name, group in zip(names, groups.values(), strict=True))


def index_text(shards: Sequence[Shard]) -> tuple[str, str] | None:
    """Name and content of the index, None when a single file needs none."""
    if len(shards) == 1:
        return None
    weight_map = {name: shard.name for shard in shards for name in shard.tensors}
    total = sum(shard.size - len(shard.header) for shard in shards)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return INDEX_NAME, json.dumps(content, indent=2) + "\n"


def _shard(name: str, tensors: Sequence[OutputTensor]) -> Shard:
    header = render_header(
        [(tensor.name, tensor.dtype.code, tensor.shape, tensor.nbytes) for tensor in tensors], {"format": "pt"}
    )
    offsets, position = [], len(header)
    for tensor in tensors:
        offsets.append(position)
        position += tensor.nbytes
    return Shard(name, header, tuple(tensor.name for tensor in tensors), tuple(offsets), position)


def _groups_of_donor(tensors: Sequence[OutputTensor], donor: Checkpoint) -> dict[str, list[OutputTensor]] | None:
    order = {name: position for position, name in enumerate(donor.tensors)}
    if any(tensor.name not in order for tensor in tensors):
        return None
    groups: dict[str, list[OutputTensor]] = {}
    for tensor in sorted(tensors, key=lambda tensor: order[tensor.name]):
        groups.setdefault(donor.tensors[tensor.name].parts[0].file.name, []).append(tensor)
    return groups


def _packed(tensors: Sequence[OutputTensor], limit: int) -> dict[str, list[OutputTensor]]:
    groups: list[list[OutputTensor]] = []
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
        file = tensor.parts[0].file.name
        sizes[file] = sizes.get(file, 0) + tensor.nbytes
    return max(sizes.values()) if len(sizes) > 1 else max(DEFAULT_SHARD_BYTES, *sizes.values())
