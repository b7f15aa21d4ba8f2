"""What flows into the matrices of a model, measured on a text: second moments of inputs, in files of their own.

A directory with ``inputs.json`` and safetensors files. Of each distinct input (query, key and value share one) there is
one tensor of float32: the mean of ``x x'`` over all positions, of which the upper triangle is kept row by row
``[1, in (in + 1) / 2]``; or, where that would be too large, its diagonal ``[in]``; of an expert that no position
reached nothing, ``[0, in]`` or ``[0, 0, in]``. The JSON says which matrix of the network is multiplied with which of
them; matrices of experts go by the names that they have one by one, whatever the layout on disk::

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
    """Where the moments of one input lie: :class:`merge_core.methods.InputMoments`.

    Args:
        tensor: The numbers.
        width: ``in``.
        is_diagonal: Whether only the squares are kept.
    """

    tensor: StoredTensor
    width: int
    is_diagonal: bool

    @property
    def is_nothing(self) -> bool:
        """Whether no position reached it."""
        return self.tensor.shape[0] == 0

    def read(self) -> NDArray[np.float64]:
        """float64, symmetric ``[in, in]``; ``[in]`` where only the squares are kept.

        Raises:
            InvalidInput: They cannot be read, or are no moments: not finite, or squares below zero.
        """
        if self.is_nothing:
            return np.zeros(self.width if self.is_diagonal else (self.width, self.width))
        stored = np.empty(self.tensor.shape, np.float32)
        try:
            with self.tensor.file.open("rb") as file:
                read_into(file.fileno(), stored.reshape(-1).view(np.uint8).data, self.tensor.offset, self.tensor.file)
        except OSError as error:
            raise InvalidInput(str(self.tensor.file), found=f"cannot be read: {error.strerror}") from None
        found = stored.astype(np.float64) if self.is_diagonal else _unpacked(stored[0], self.width)
        squares = found if self.is_diagonal else found.diagonal()
        if not np.isfinite(found).all() or (squares < 0).any():
            where = f"{self.tensor.file}: {self.tensor.name}"
            raise InvalidInput(where, found="numbers that are no moments", expected=_EXPECTED, remedy="run again")
        return found


@dataclass(frozen=True)
class ExpectedMoments:
    """Moments that are still to be measured, as far as a plan can know them: :class:`merge_core.methods.InputMoments`.

    Args:
        width: ``in``.
        is_diagonal: Whether only the squares will be kept.
    """

    width: int
    is_diagonal: bool

    def read(self) -> NDArray[np.float64]:
        """There is nothing to read yet."""
        raise AssertionError("a merge was begun that nobody prepared")


def empty_moments(width: int, *, is_diagonal: bool) -> NDArray[np.float32]:
    """What is kept of an input that no position had."""
    return np.zeros((0, 0, width) if is_diagonal else (0, width), np.float32)


def pack_moments(moments: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """``[in, in]`` or ``[in]`` as it is kept."""
    if moments.ndim == 1:
        return moments.astype(np.float32)
    return np.concatenate([row[at:] for at, row in enumerate(moments)]).astype(np.float32)[None]


def _unpacked(triangle: NDArray[np.float32], width: int) -> NDArray[np.float64]:
    whole, start = np.empty((width, width)), 0
    for at in range(width):
        whole[at, at:] = whole[at:, at] = triangle[start : start + width - at]
        start += width - at
    return whole


def moments_file_name(number: int) -> str:
    """Name of a file with the moments of a run of layers; ``number`` from 0."""
    return f"inputs-{number:05d}.safetensors"


def write_inputs(directory: Path, inputs: Mapping[str, str], positions: int) -> None:
    """Write ``inputs.json``: by which tensor the input of each matrix is kept; means are over so many positions."""
    write_owners(directory / INPUTS, "inputs", inputs, positions)


def open_moments(directory: Path) -> dict[str, StoredMoments]:
    """The moments in ``directory``, by the name of the matrix that is multiplied with the input.

    Raises:
        InvalidInput: Files that are missing or damaged, or do not belong together.
    """
    place = directory / INPUTS
    owners = read_owners(place, "inputs", FILES_OF_MOMENTS, _EXPECTED)
    return {name: _moments(tensor, f"{place}: {name}") for name, tensor in owners.items()}


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
