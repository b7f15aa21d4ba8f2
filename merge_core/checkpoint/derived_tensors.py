"""Tensors whose numbers are computed while they are read: an adapter applied to a weight, a quantised payload decoded.

Wherever a change of structure moves numbers but does not change them (a layer under another number, one expert of a
fused tensor), it is a table of :class:`~merge_core.checkpoint.safetensors_file.StoredTensor` over the same bytes, and
the engine knows nothing of it. What changes numbers is a tensor of this kind: it says which stored tensors it is made
of, and gives any run of its own elements in its own format, so it is streamed block by block like one that is stored.
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

# (tensor, first element, memory to fill): the elements of a stored tensor from ``first`` on, as they are stored.
ReadStored: TypeAlias = "Callable[[StoredTensor, int, Bytes], None]"
# (first element, memory to fill): the elements of one tensor from ``first`` on, in its own format.
ReadElements: TypeAlias = "Callable[[int, Bytes], None]"


@dataclass(frozen=True)
class DerivedTensor(SizedTensor, ABC):
    """A tensor that is computed from stored ones.

    Args:
        name: Tensor name.
        dtype: Format of its numbers; one rounding to it is part of what it is.
        shape: Sizes per dimension.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    @abstractmethod
    def parts(self) -> tuple[StoredTensor, ...]:
        """All stored tensors that it is made of; the one in whose place it stands first."""

    @abstractmethod
    def identity(self) -> Any:
        """JSON-able form of what decides its numbers beside those of its parts."""

    @abstractmethod
    def open(self, read: ReadStored) -> ReadElements:
        """Prepare what every block needs (small factors, norms); the result is called from several threads.

        Raises:
            InvalidInput: For parts that cannot be read.
        """


AnyTensor: TypeAlias = StoredTensor | DerivedTensor
