"""Observe the inputs of experts and of routers, through the matrix products that the network computes.

**Experts.** Transformers stores all experts of a layer in one parameter, ``[experts, out, in]`` or ``[experts, in,
out]``, so no module has the input of a single expert. But in every model family, the layer finally multiplies an input
by the matrix of one expert. This matrix is a view of the parameter, and its address in memory identifies the expert::

    linear(x, experts[3])       x @ experts[3]       bmm(x_of_each_expert, experts)

This module therefore inspects every product while the network runs and needs no knowledge of the family. Transformers
has several implementations of experts. The eager one is selected, because it computes one expert at a time.

**Routers.** Families differ in how they prepare the states and in how their modules call the router, but all of them
multiply the states by the router's matrix, and then apply softmax or sigmoid to the logits or to the largest of them.
So the functions that torch calls inside and after the router's module are inspected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from mergegate.merge_core.architecture.experts import RouterScore
from mergegate.tasks.merge.calibration import PassIsObserved

_LINEAR = torch.nn.functional.linear.__name__  # multiplies by the transposed matrix, [out, in]
_BY_COLUMNS = frozenset({"matmul", "mm", "__matmul__", "bmm"})  # [in, out]


class ExpertProduct(NamedTuple):
    """One product with the matrix of one expert."""

    parameter: str  # Name of the parameter that contains all experts.
    number: int  # Number of the expert.
    inputs: torch.Tensor  # Input of the product, ``[tokens, in]``.
    positions: torch.Tensor | None  # Positions of these tokens in the window, or None if they cannot be determined.
    inputs_first: bool  # Whether the matrix is ``[in, out]`` in memory.


class ExpertProducts(TorchFunctionMode):
    """Context manager that calls ``on_product`` for each product with the matrix of an expert, before it is computed.

    ``parameters`` holds the parameters with experts, ``[experts, out, in]`` or ``[experts, in, out]``, by name.
    """

    def __init__(self, parameters: Mapping[str, Any], on_product: Callable[[ExpertProduct], None]) -> None:
        super().__init__()
        self._on_product = on_product
        self._sizes = {name: parameter.shape for name, parameter in parameters.items()}
        self._experts_by_address = {
            parameter[number].data_ptr(): (name, number)
            for name, parameter in parameters.items()
            for number in range(len(parameter))
        }
        # Most recent row indices used to index a tensor: the positions of the tokens that are routed to an expert.
        self._token_indices: torch.Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        function = getattr(func, "__name__", "")
        if len(args) > 1 and (function == _LINEAR or function in _BY_COLUMNS):
            inputs, matrix, inputs_first = args[0], args[1], function in _BY_COLUMNS
            expert = self._experts_by_address.get(matrix.data_ptr()) if isinstance(matrix, torch.Tensor) else None
            if expert is not None:
                name, number = expert
                experts, *sizes = self._sizes[name]
                if list(matrix.shape) == sizes:
                    indices = self._token_indices
                    has_positions = indices is not None and inputs.ndim == 2 and len(indices) == len(inputs)
                    positions = indices if has_positions else None
                    self._on_product(ExpertProduct(name, number, inputs, positions, inputs_first))
                elif list(matrix.shape) == [experts, *sizes] and inputs.ndim == 3 and len(inputs) == experts:
                    # Each expert receives all tokens. The tokens that the router did not send to it are zero.
                    for number, rows in enumerate(inputs):
                        positions = rows.any(-1).nonzero()[:, 0]
                        self._on_product(ExpertProduct(name, number, rows[positions], positions, inputs_first))
        elif function == "__getitem__" and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.long:
            self._token_indices = args[1] if args[1].ndim == 1 else self._token_indices
        return func(*args, **(kwargs or {}))


@contextmanager
def eager_experts(modules: Iterable[Any]) -> Iterator[None]:
    """Select the eager implementation of experts within the context.

    If transformers has only one implementation for a model family, its modules stay as they are.
    """
    configs = {id(module.config): module.config for module in modules if hasattr(module, "config")}.values()
    previous = [
        (config, name) for config in configs if (name := getattr(config, "_experts_implementation", None)) is not None
    ]
    for config, _ in previous:
        config._experts_implementation = "eager"
    try:
        yield
    finally:
        for config, name in previous:
            config._experts_implementation = name


_PRODUCTS = frozenset({_LINEAR, "matmul", "mm", "__matmul__"})
_SCORES: Mapping[str, RouterScore] = {"softmax": "softmax", "sigmoid": "sigmoid"}


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
                    raise PassIsObserved
        elif self.states is not None and self.score is None and function in _SCORES:
            logits = args[0] if args else (kwargs or {}).get("input")
            if isinstance(logits, torch.Tensor) and logits.shape[-1] in self._score_widths:
                self.score, self._is_inside = _SCORES[function], False
                raise PassIsObserved
        return func(*args, **(kwargs or {}))
