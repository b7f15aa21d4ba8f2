"""Define small tensors whose values are known before a merge, such as computed router rows and zero biases."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mergegate.merge_core.checkpoint import BY_CODE, DerivedTensor, ReadElements, ReadStored, StoredTensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class ConstantTensor(DerivedTensor):
    """Float32 tensor that is not read from a file.

    Args:
        values: Little-endian float32 values, or None for zeros.
    """

    values: bytes | None = field(default=None, repr=False)

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return ()

    def identity(self) -> Any:
        return hashlib.sha256(self.values).hexdigest() if self.values is not None else None

    def open(self, read: ReadStored) -> ReadElements:
        import numpy as np

        stored = np.frombuffer(self.values, np.uint8) if self.values is not None else None

        def elements(first: int, into: NDArray[np.uint8]) -> None:
            start = 4 * first
            into[:] = 0 if stored is None else stored[start : start + len(into)]

        return elements


def constant_tensor(name: str, shape: tuple[int, ...], values: bytes | None = None) -> ConstantTensor:
    """Return a float32 tensor with the little-endian ``values``, or zeros by default."""
    return ConstantTensor(name, BY_CODE["F32"], shape, values)
