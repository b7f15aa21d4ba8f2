"""Define tensors that are computed while they are read, such as a weight with an adapter or a decoded quantized weight.

A structural change that only moves numbers (a renumbered layer, one expert of a fused tensor) needs no derived tensor:
a new :class:`~merge_core.checkpoint.safetensors_file.StoredTensor` refers to the same bytes. A derived tensor changes
the numbers. It names the stored tensors that it depends on and computes any range of its elements, so the engine can
stream it in blocks like a stored tensor.
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
