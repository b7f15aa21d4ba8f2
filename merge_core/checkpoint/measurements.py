"""Read and write measurements of a model on a calibration text: moments of layer inputs, and importance of weights.

Each measurement has its own directory with safetensors files and a JSON file that maps names to the stored tensors.

**Moments** (``inputs.json``): second moments of the inputs of the model's matrices. Each distinct input (query, key and
value share one) has one float32 tensor, the mean of ``x x'`` over all positions of the text:

* the upper triangle, row by row, as ``[1, in (in + 1) / 2]``;
* only the diagonal, as ``[in]``, if the triangle would be too large;
* no numbers, as ``[0, in]`` or ``[0, 0, in]``, for an expert that no position reached.

The JSON maps each matrix of the network to the tensor of its input. Every expert has its own entries, even if the
checkpoint stores all experts of a layer in one tensor::

    {"positions": 2304, "inputs": {"model.layers.0.self_attn.k_proj.weight": "model.layers.0.self_attn.q_proj.weight"}}

**Importance** (``importance.json``): for each measured tensor, a float32 tensor with the same name and shape. Its
elements are the mean over all positions of the squared derivative of the log-likelihood of the model's own prediction,
which is the diagonal of its Fisher information. The JSON maps each tensor of the model to the stored tensor, because a
tied head and the embedding share one::

    {"positions": 2304, "tensors": {"lm_head.weight": "model.embed_tokens.weight", ...}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core.checkpoint.safetensors_file import read_header, read_into
from mergegate.merge_core.checkpoint.tensors import StoredTensor
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import read_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

INPUTS = "inputs.json"
FILES_OF_MOMENTS = "inputs-*.safetensors"
IMPORTANCE = "importance.json"
FILES_OF_IMPORTANCE = "importance-*.safetensors"
_KEYS = {INPUTS: "inputs", IMPORTANCE: "tensors"}
_MOMENTS = "second moments as mergegate measures them"
_IMPORTANCE = "the importance of elements as mergegate measures it"
_RERUN = "run mergegate again to repeat the measurement"


@dataclass(frozen=True)
class StoredMoments:
    """Moments of one input of ``width`` elements, stored in ``tensor`` (see :class:`merge_core.methods.InputMoments`).

    If ``is_diagonal``, only the diagonal of the matrix is stored.
    """

    tensor: StoredTensor
    width: int
    is_diagonal: bool

    @property
    def is_empty(self) -> bool:
        """Whether no position reached this input, as for an unused expert."""
        return self.tensor.shape[0] == 0

    def read(self) -> NDArray[np.float64]:
        """Return the moments as float64: a symmetric ``[in, in]`` matrix, or ``[in]`` for a diagonal."""
        if self.is_empty:
            return np.zeros(self.width if self.is_diagonal else (self.width, self.width))
        stored = np.empty(self.tensor.shape, np.float32)
        try:
            with self.tensor.file.open("rb") as file:
                read_into(file.fileno(), stored.reshape(-1).view(np.uint8).data, self.tensor.offset, self.tensor.file)
        except OSError as error:
            raise InvalidInput(str(self.tensor.file), found=f"the file cannot be read: {error.strerror}") from None
        if self.is_diagonal:
            moments = stored.astype(np.float64)
        else:
            moments, start = np.empty((self.width, self.width)), 0
            for row in range(self.width):
                moments[row, row:] = moments[row:, row] = stored[0, start : start + self.width - row]
                start += self.width - row
        squares = moments if self.is_diagonal else moments.diagonal()
        if not np.isfinite(moments).all() or (squares < 0).any():
            found = "its values are not finite, or squares are negative"
            raise InvalidInput(self.tensor.full_name, found=found, expected=_MOMENTS, remedy=_RERUN)
        return moments


@dataclass(frozen=True)
class ExpectedMoments:
    """Placeholder in a plan for :class:`StoredMoments` that have not been measured yet."""

    width: int
    is_diagonal: bool

    def read(self) -> NDArray[np.float64]:
        """Raise AssertionError, because the moments have not been measured."""
        raise AssertionError("the merge started before its inputs were measured")


def empty_moments(width: int, *, is_diagonal: bool) -> NDArray[np.float32]:
    """Return the stored form of the moments of an input of ``width`` elements that no position reached."""
    return np.zeros((0, 0, width) if is_diagonal else (0, width), np.float32)


def pack_moments(moments: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """Return the stored form of moments with the shape ``[in, in]`` or ``[in]``."""
    if moments.ndim == 1:
        return moments.astype(np.float32)
    return np.concatenate([row[index:] for index, row in enumerate(moments)]).astype(np.float32)[None]


def measurement_file_name(index: str, number: int) -> str:
    """Return the name of safetensors file ``number`` (from 0) for the JSON file ``INPUTS`` or ``IMPORTANCE``."""
    return f"{index.removesuffix('.json')}-{number:05d}.safetensors"


def write_measurement(path: Path, owners: Mapping[str, str], positions: int) -> None:
    """Write the JSON file of a measurement to ``path``, whose name is ``inputs.json`` or ``importance.json``.

    Args:
        path: Path of the JSON file.
        owners: Name of the stored tensor for each measured matrix or tensor of the model.
        positions: Number of positions of the text over which the means were taken.
    """
    text = json.dumps({"positions": positions, _KEYS[path.name]: dict(owners)}, indent=1)
    path.write_text(f"{text}\n", encoding="utf-8")


def open_moments(directory: Path) -> dict[str, StoredMoments]:
    """Return the stored moments in ``directory``, by the name of the matrix that each input is multiplied with."""
    path = directory / INPUTS
    measured: dict[str, StoredMoments] = {}
    for name, tensor in _read_owners(path, FILES_OF_MOMENTS, _MOMENTS).items():
        match tensor.shape if tensor is not None and tensor.dtype.code == "F32" else None:
            case (width,) if tensor is not None and width > 0:
                measured[name] = StoredMoments(tensor, width, is_diagonal=True)
            case (0, *more, width) if tensor is not None and width > 0 and more in ([], [0]):
                measured[name] = StoredMoments(tensor, width, is_diagonal=bool(more))
            case (1, count) if tensor is not None and count > 0:
                width = (math.isqrt(8 * count + 1) - 1) // 2
                if width * (width + 1) // 2 == count:
                    measured[name] = StoredMoments(tensor, width, is_diagonal=False)
        if name not in measured:
            found = "no stored moments of its input"
            raise InvalidInput(f"{path}: {name}", found=found, expected=_MOMENTS, remedy=_RERUN)
    return measured


@dataclass(frozen=True, slots=True)
class ExpectedImportance:
    """Placeholder in a plan for the importance of a tensor of this shape, which has not been measured yet."""

    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return 4 * math.prod(self.shape)


def open_importance(directory: Path) -> dict[str, StoredTensor]:
    """Return the stored importance in ``directory``, by the name of the model's tensor."""
    path = directory / IMPORTANCE
    importance = {}
    for name, tensor in _read_owners(path, FILES_OF_IMPORTANCE, _IMPORTANCE).items():
        if tensor is None or tensor.dtype.code != "F32":
            raise InvalidInput(f"{path}: {name}", found="no stored tensor", expected=_IMPORTANCE, remedy=_RERUN)
        importance[name] = tensor
    return importance


def _read_owners(path: Path, pattern: str, expected: str) -> dict[str, StoredTensor | None]:
    """Return the stored tensor, or None if it is missing, for each name in a JSON file of ``write_measurement``."""
    key = _KEYS[path.name]
    content: Any = read_json(path)
    owners = content.get(key) if isinstance(content, Mapping) else None
    tensors = {tensor.name: tensor for file in sorted(path.parent.glob(pattern)) for tensor in read_header(file)}
    if not isinstance(owners, Mapping):
        raise InvalidInput(str(path), found=f"the key {key!r} is missing", expected=expected, remedy=_RERUN)
    return {name: tensors.get(owner) if isinstance(owner, str) else None for name, owner in owners.items()}
