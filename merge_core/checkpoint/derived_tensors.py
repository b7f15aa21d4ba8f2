"""Define tensors that are computed while they are read, such as a weight with an adapter or a decoded quantized weight.

A structural change that only moves numbers (a renumbered layer, one expert of a fused tensor) is a table of
:class:`~merge_core.checkpoint.safetensors_file.StoredTensor` over the same bytes. The engine does not notice it. A
change of the numbers themselves is a derived tensor. It names the stored tensors that it depends on and computes any
range of its elements in its own format, so the engine can stream it in blocks like a stored tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from mergegate.merge_core.checkpoint.dtypes import DType, SizedTensor
from mergegate.merge_core.checkpoint.safetensors_file import StoredTensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes: TypeAlias = NDArray[np.uint8]

# Called with a tensor, the first element and a buffer. Fills the buffer with stored elements in their stored format.
ReadStored: TypeAlias = "Callable[[StoredTensor, int, Bytes], None]"
# Called with the first element and a buffer. Fills the buffer with elements of one tensor in the tensor's own format.
ReadElements: TypeAlias = "Callable[[int, Bytes], None]"


@dataclass(frozen=True)
class DerivedTensor(SizedTensor, ABC):
    """A tensor that is computed from stored tensors.

    Args:
        name: Tensor name.
        dtype: Format of its numbers. Its values are defined as rounded once to this format.
        shape: Size of each dimension.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    @abstractmethod
    def parts(self) -> tuple[StoredTensor, ...]:
        """All stored tensors that it depends on. The first is the tensor that it replaces."""

    @abstractmethod
    def identity(self) -> Any:
        """Return everything except its parts that determines its numbers, as JSON-compatible data."""

    @abstractmethod
    def open(self, read: ReadStored) -> ReadElements:
        """Prepare the data that every block needs, such as small factors and norms, and return the reader.

        Args:
            read: Reader of stored tensors.

        Returns:
            A reader of the tensor's elements that several threads may call concurrently.

        Raises:
            InvalidInput: A part cannot be read.
        """


AnyTensor: TypeAlias = StoredTensor | DerivedTensor
