"""Describe the number formats of safetensors: size, torch name, and treatment in a merge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray


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


class SizedTensor:
    """Base class of stored and computed tensors, with sizes that follow from format and shape."""

    __slots__ = ()

    dtype: DType
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.size


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
