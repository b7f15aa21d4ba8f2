"""Observe the states that enter a router, through the matrix product that the network computes with them.

Families differ in how they prepare the states and in how their modules call the router, but all of them multiply the
states by the router's matrix, and then apply softmax or sigmoid to the logits or to the largest of them. This module
inspects the functions that torch calls inside and after the router's module, so it needs no knowledge of the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mergegate.merge_core.architecture.experts import RouterScore

_LINEAR = torch.nn.functional.linear.__name__  # multiplies by the transposed matrix
_PRODUCTS = frozenset({_LINEAR, "matmul", "mm", "__matmul__"})
_SCORES: Mapping[str, RouterScore] = {"softmax": "softmax", "sigmoid": "sigmoid"}


class StatesAreRead(Exception):
    """Signal that the states and the score function are known, so the rest of the network can be skipped."""


class RouterProducts(TorchFunctionMode):
    """Context manager that stores the states that a forward pass multiplies by the matrix of a router.

    Args:
        module: Module of the network that owns the matrix.
        shape: Shape of the matrix: ``(experts, width)``.
        top: Number of experts that the router selects.
    """

    def __init__(self, module: Any, shape: tuple[int, int], top: int) -> None:
        super().__init__()
        self.score: RouterScore | None = None
        self.states: torch.Tensor | None = None  # of the current forward pass
        self._shape, self._is_inside = shape, False
        self._score_widths = {shape[0], top}
        self._hooks = [
            module.register_forward_pre_hook(lambda *_: self._set_inside(True)),
            module.register_forward_hook(lambda *_: self._set_inside(False)),
        ]

    def remove(self) -> None:
        """Remove the hooks from the module."""
        for hook in self._hooks:
            hook.remove()

    def _set_inside(self, is_inside: bool) -> None:
        self._is_inside = is_inside

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        function = getattr(func, "__name__", "")
        if self._is_inside and function in _PRODUCTS and len(args) > 1 and isinstance(args[1], torch.Tensor):
            matrix = self._shape if function == _LINEAR else self._shape[::-1]
            if tuple(args[1].shape) == matrix and args[0].shape[-1] == self._shape[1]:
                self.states = args[0].detach().reshape(-1, self._shape[1])
                if self.score is not None:
                    self._is_inside = False
                    raise StatesAreRead
        elif self.states is not None and self.score is None and function in _SCORES:
            logits = args[0] if args else (kwargs or {}).get("input")
            if isinstance(logits, torch.Tensor) and logits.shape[-1] in self._score_widths:
                self.score, self._is_inside = _SCORES[function], False
                raise StatesAreRead
        return func(*args, **(kwargs or {}))
