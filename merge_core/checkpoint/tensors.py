"""Describe the tensors of a checkpoint: number formats, tensors stored in files, and tensors computed while reading.

A derived tensor changes numbers, such as a weight with an adapter or a decoded quantized weight. It names the stored
tensors that it depends on and computes any range of its elements, so the engine can stream it in blocks like a stored
tensor. A change that only moves numbers (a renumbered layer, one expert of a fused tensor) needs none: a new
:class:`StoredTensor` refers to the same bytes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True)
class DType:
    """Number format of a stored tensor.

    Args:
        code: Name in a safetensors header (``BF16``).
        torch_name: Name of the attribute of ``torch`` (``bfloat16``).
        size: Bytes per element.
        kind: Treatment in a merge. ``float`` tensors are merged. ``exact`` ones (integers, booleans) must be equal in
            all parents and are copied. ``packed`` ones (complex numbers, 8-bit floats of quantized models) are refused.
    """

    code: str
    torch_name: str
    size: int
    kind: Literal["float", "exact", "packed"]


_ALL = (
    DType("F64", "float64", 8, "float"),
    DType("F32", "float32", 4, "float"),
    DType("F16", "float16", 2, "float"),
    DType("BF16", "bfloat16", 2, "float"),
    DType("I64", "int64", 8, "exact"),
    DType("I32", "int32", 4, "exact"),
    DType("I16", "int16", 2, "exact"),
    DType("I8", "int8", 1, "exact"),
    DType("U64", "uint64", 8, "exact"),
    DType("U32", "uint32", 4, "exact"),
    DType("U16", "uint16", 2, "exact"),
    DType("U8", "uint8", 1, "exact"),
    DType("BOOL", "bool", 1, "exact"),
    DType("C64", "complex64", 8, "packed"),
    DType("F8_E4M3", "float8_e4m3fn", 1, "packed"),
    DType("F8_E5M2", "float8_e5m2", 1, "packed"),
    DType("F8_E8M0", "float8_e8m0fnu", 1, "packed"),
)
BY_CODE = {dtype.code: dtype for dtype in _ALL}
BY_TORCH_NAME = {dtype.torch_name: dtype for dtype in _ALL}

# Formats that a recipe may select. mergekit also accepts int64, which is useless for weights.
RECIPE_NAMES = ("bfloat16", "float16", "float32", "float64")

# Mask of the exponent bits of each float format. All of these bits are set in NaN and infinity, and in no other number.
EXPONENTS: Mapping[str, np.unsignedinteger[Any]] = {
    "F64": np.uint64(0x7FF0000000000000),
    "F32": np.uint32(0x7F800000),
    "F16": np.uint16(0x7C00),
    "BF16": np.uint16(0x7F80),
}


def patterns(stored_bytes: NDArray[np.uint8], dtype: DType) -> NDArray[Any]:
    """Return a view of ``stored_bytes`` as bit patterns of a float format, one unsigned integer per number."""
    return stored_bytes.view(EXPONENTS[dtype.code].dtype)


def numbers(patterns: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """Return the numbers that bit patterns represent. bfloat16 becomes float32, because numpy has no bfloat16."""
    if dtype.code == "BF16":
        return (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return patterns.view(dtype.torch_name)


def promote(dtypes: Iterable[DType]) -> DType:
    """Return the smallest float format that can represent all ``dtypes``: float32 for bfloat16 and float16."""
    distinct = set(dtypes)
    if len(distinct) == 1:
        return distinct.pop()
    return BY_CODE["F64"] if BY_CODE["F64"] in distinct else BY_CODE["F32"]


class SizedTensor:
    """Base class of stored and computed tensors, with sizes that follow from format and shape."""

    __slots__ = ()

    dtype: DType
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.size


# Slots save memory: a very large model has 50,000 tensors, and every parent has them.
@dataclass(frozen=True, slots=True)
class StoredTensor(SizedTensor):
    """Location, format and shape of one tensor in a file.

    Args:
        name: Name in the checkpoint's table of tensors.
        file: File that contains the bytes.
        dtype: Number format in the file.
        shape: Size of each dimension. Empty for a scalar.
        offset: Position of the first byte, from the start of the file.
    """

    name: str
    file: Path
    dtype: DType
    shape: tuple[int, ...]
    offset: int

    @property
    def full_name(self) -> str:
        return f"{self.file}: {self.name}"

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """Tensor itself, because a :class:`.DerivedTensor` has the same property."""
        return (self,)


# Called with a tensor, the index of the first element and a buffer. Fills the buffer with elements as they are stored.
ReadStored: TypeAlias = "Callable[[StoredTensor, int, Bytes], None]"
# Called with the index of the first element and a buffer. Fills the buffer with elements in the tensor's own format.
ReadElements: TypeAlias = "Callable[[int, Bytes], None]"


@dataclass(frozen=True)
class DerivedTensor(SizedTensor, ABC):
    """A tensor that is computed from stored tensors, and whose values are rounded once to ``dtype``."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    @abstractmethod
    def parts(self) -> tuple[StoredTensor, ...]:
        """Stored tensors that the values depend on. The first is the tensor that this one replaces."""

    @abstractmethod
    def identity(self) -> Any:
        """Return JSON-compatible data that, together with ``parts``, determines the values."""

    @abstractmethod
    def open(self, read: ReadStored) -> ReadElements:
        """Prepare the data that every block needs, such as scales and norms, and return a reader of the elements.

        Several threads may call the returned reader concurrently. It reads stored tensors with ``read``.

        Raises:
            InvalidInput: A stored tensor cannot be read.
        """


AnyTensor: TypeAlias = StoredTensor | DerivedTensor


def elements_of(tensor: AnyTensor, read: ReadStored) -> ReadElements:
    """Return a reader for the elements of ``tensor``. It calls ``read`` to read stored tensors."""
    if isinstance(tensor, DerivedTensor):
        return tensor.open(read)
    return lambda first, into: read(tensor, first, into)
