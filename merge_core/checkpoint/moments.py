"""Read and write second moments of the inputs of a model's matrices, measured on a calibration text.

The moments are stored in their own directory, with ``inputs.json`` and safetensors files. Each distinct input (query,
key and value share one) has one float32 tensor, the mean of ``x x'`` over all positions:

* the upper triangle, row by row, as ``[1, in (in + 1) / 2]``;
* only the diagonal, as ``[in]``, if the triangle would be too large;
* no numbers, as ``[0, in]`` or ``[0, 0, in]``, for an expert that no position reached.

The JSON maps each matrix of the network to the tensor of its input. Matrices of experts have the names of separate
experts, regardless of the layout on disk::

    {"positions": 2304, "inputs": {"model.layers.0.self_attn.k_proj.weight": "model.layers.0.self_attn.q_proj.weight"}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.checkpoint.safetensors_file import StoredTensor, read_into
from mergegate.merge_core.checkpoint.statistics_files import read_owners, write_owners
from mergegate.merge_core.errors import InvalidInput

if TYPE_CHECKING:
    from numpy.typing import NDArray

INPUTS = "inputs.json"
FILES_OF_MOMENTS = "inputs-*.safetensors"
_EXPECTED = "second moments as mergegate measures them"


@dataclass(frozen=True)
class StoredMoments:
    """Stored moments of one input, see :class:`merge_core.methods.InputMoments`.

    Args:
        tensor: Tensor with the numbers.
        width: Width of the input, ``in``.
        is_diagonal: Whether only the diagonal is stored.
    """

    tensor: StoredTensor
    width: int
    is_diagonal: bool

    @property
    def is_empty(self) -> bool:
        """Whether no position reached the input."""
        return self.tensor.shape[0] == 0

    def read(self) -> NDArray[np.float64]:
        """Return the moments as float64: a symmetric ``[in, in]`` matrix, or ``[in]`` if only the diagonal is stored.

        Raises:
            InvalidInput: The file cannot be read, or the values are not finite or the squares are negative.
        """
        if self.is_empty:
            return np.zeros(self.width if self.is_diagonal else (self.width, self.width))
        stored = np.empty(self.tensor.shape, np.float32)
        try:
            with self.tensor.file.open("rb") as file:
                read_into(file.fileno(), stored.reshape(-1).view(np.uint8).data, self.tensor.offset, self.tensor.file)
        except OSError as error:
            raise InvalidInput(str(self.tensor.file), found=f"cannot be read: {error.strerror}") from None
        moments = stored.astype(np.float64) if self.is_diagonal else _unpack(stored[0], self.width)
        squares = moments if self.is_diagonal else moments.diagonal()
        if not np.isfinite(moments).all() or (squares < 0).any():
            where = f"{self.tensor.file}: {self.tensor.name}"
            raise InvalidInput(where, found="numbers that are no moments", expected=_EXPECTED, remedy="run again")
        return moments


@dataclass(frozen=True)
class ExpectedMoments:
    """Placeholder in a plan for moments that have not been measured yet, see :class:`merge_core.methods.InputMoments`.

    Args:
        width: Width of the input, ``in``.
        is_diagonal: Whether only the diagonal will be stored.
    """

    width: int
    is_diagonal: bool

    def read(self) -> NDArray[np.float64]:
        """Raise AssertionError, because the moments have not been measured."""
        raise AssertionError("a merge was begun that nobody prepared")


def empty_moments(width: int, *, is_diagonal: bool) -> NDArray[np.float32]:
    """Return the stored form of the moments of an input that no position reached."""
    return np.zeros((0, 0, width) if is_diagonal else (0, width), np.float32)


def pack_moments(moments: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """Return the stored form of moments ``[in, in]`` or ``[in]``."""
    if moments.ndim == 1:
        return moments.astype(np.float32)
    return np.concatenate([row[index:] for index, row in enumerate(moments)]).astype(np.float32)[None]


def _unpack(triangle: NDArray[np.float32], width: int) -> NDArray[np.float64]:
    matrix, start = np.empty((width, width)), 0
    for row in range(width):
        matrix[row, row:] = matrix[row:, row] = triangle[start : start + width - row]
        start += width - row
    return matrix


def moments_file_name(number: int) -> str:
    """Return the name of the file with this number, from 0."""
    return f"inputs-{number:05d}.safetensors"


def write_inputs(directory: Path, inputs: Mapping[str, str], positions: int) -> None:
    """Write ``inputs.json``.

    Args:
        directory: Directory of the files.
        inputs: Name of the stored tensor for each matrix of the network.
        positions: Number of positions that the means cover.
    """
    write_owners(directory / INPUTS, "inputs", inputs, positions)


def open_moments(directory: Path) -> dict[str, StoredMoments]:
    """Return the stored moments by the name of the matrix that is multiplied with the input.

    Raises:
        InvalidInput: Files are missing or damaged, or do not belong together.
    """
    path = directory / INPUTS
    owners = read_owners(path, "inputs", FILES_OF_MOMENTS, _EXPECTED)
    return {name: _moments(tensor, f"{path}: {name}") for name, tensor in owners.items()}


def _moments(tensor: StoredTensor | None, where: str) -> StoredMoments:
    match tensor.shape if tensor is not None and tensor.dtype.code == "F32" else None:
        case (width,) if tensor is not None and width > 0:
            return StoredMoments(tensor, width, is_diagonal=True)
        case (0, *more, width) if tensor is not None and width > 0 and more in ([], [0]):
            return StoredMoments(tensor, width, is_diagonal=bool(more))
        case (1, count) if tensor is not None and count > 0:
            width = (math.isqrt(8 * count + 1) - 1) // 2
            if width * (width + 1) // 2 == count:
                return StoredMoments(tensor, width, is_diagonal=False)
    raise InvalidInput(where, found="nothing that is its input", expected=_EXPECTED, remedy="run again")
