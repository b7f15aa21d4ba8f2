"""Keys and values of a batch in memory with room behind them: a token that is written is added, and nothing is moved.

What transformers keeps of a sequence (``DynamicCache``) is copied whole, in every layer, for each token that comes: of
sixteen sequences of 560 tokens under 135 M parameters a fifth of what a token took, and far more where memory is busy.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Tokens that there is room for whenever memory is taken anew, which is the only time that anything is copied.
_ROOM = 256


def growing_cache() -> Any:
    """An empty cache of transformers, for networks whose layers keep keys and values of all tokens."""
    from transformers.cache_utils import Cache

    return Cache(layer_class_to_replicate=_growing_layer())


@cache
def _growing_layer() -> type[Any]:
    """The class of its layers; transformers is imported with it."""
    from transformers.cache_utils import DynamicLayer

    class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
        """``keys`` and ``values``, ``[batch, heads, length, size]``, are views of memory that is longer."""

        keys: torch.Tensor
        values: torch.Tensor

        def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
            """Begin with memory for sequences and heads like these, and no token."""
            self.dtype, self.device = key_states.dtype, key_states.device
            self._memory = [_longer(states[:, :, :0], 0) for states in (key_states, value_states)]
            self._show(0)
            self.is_initialized = True

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Those of new tokens behind the others; all of them, as transformers wants them."""
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            begin = self.keys.shape[-2]  # transformers shortens the views to take tokens back
            end = begin + key_states.shape[-2]
            if end > self._memory[0].shape[-2]:
                self._memory = [_longer(memory[:, :, :begin], end) for memory in self._memory]
            for memory, states in zip(self._memory, (key_states, value_states), strict=True):
                memory[:, :, begin:end] = states
            self._show(end)
            return self.keys, self.values

        def batch_select_indices(self, indices: torch.Tensor) -> None:
            """Keep these sequences only."""
            self._memory = [memory[indices] for memory in self._memory]
            self._show(self.keys.shape[-2])

        def _show(self, length: int) -> None:
            self.keys, self.values = (memory[:, :, :length] for memory in self._memory)

    return GrowingLayer


def _longer(states: torch.Tensor, length: int) -> torch.Tensor:
    """A copy with memory for ``length`` tokens and some more."""
    batch, heads, known, size = states.shape
    memory = states.new_empty((batch, heads, length + _ROOM, size))
    memory[:, :, :known] = states
    return memory
