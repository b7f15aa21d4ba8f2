"""What flows into experts that are one parameter, seen in the products that a network computes with it.

Transformers holds all experts of a layer in one parameter, ``[experts, out, in]`` or ``[experts, in, out]``, so there
is no module with an input of its own. But whatever a family makes of its router, in the end an input is multiplied with
the matrix of one expert, which is a view of the parameter: where that begins in memory says whose it is::

    linear(x, experts[3])       x @ experts[3]       bmm(x_of_each_expert, experts)

So every product is looked at while the network computes, and nothing of a family need be known. Of the ways in which
transformers can compute experts, the plain one does it expert by expert; it is chosen as long as somebody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

_BY_ROWS = frozenset({torch.nn.functional.linear.__name__})  # [out, in]
_BY_COLUMNS = frozenset({"matmul", "mm", "__matmul__", "bmm"})  # [in, out]


class ExpertProduct(NamedTuple):
    """A product with the matrix of one expert.

    Args:
        parameter: Name of the parameter of all experts.
        number: The expert's.
        given: What flows in, ``[tokens, in]``.
        positions: Of these tokens in the text that is read; None where nobody knows.
        inputs_first: Whether the matrix is ``[in, out]`` in memory.
    """

    parameter: str
    number: int
    given: torch.Tensor
    positions: torch.Tensor | None
    inputs_first: bool


class ExpertProducts(TorchFunctionMode):
    """Calls ``seen`` for each product with the matrix of an expert, before it is computed. Use it in ``with``.

    Args:
        parameters: ``[experts, out, in]`` or ``[experts, in, out]``, by name.
        seen: Is told of each.
    """

    def __init__(self, parameters: Mapping[str, Any], seen: Callable[[ExpertProduct], None]) -> None:
        super().__init__()
        self._seen = seen
        self._sizes = {name: parameter.shape for name, parameter in parameters.items()}
        self._at = {
            parameter[number].data_ptr(): (name, number)
            for name, parameter in parameters.items()
            for number in range(len(parameter))
        }
        # Numbers of the rows that were last taken out of a tensor: those of tokens that are sent to an expert.
        self._taken: torch.Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        called = getattr(func, "__name__", "")
        if len(args) > 1 and (called in _BY_ROWS or called in _BY_COLUMNS):
            self._look(args[0], args[1], inputs_first=called in _BY_COLUMNS)
        elif called == "__getitem__" and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.long:
            self._taken = args[1] if args[1].ndim == 1 else self._taken
        return func(*args, **(kwargs or {}))

    def _look(self, given: Any, matrix: Any, *, inputs_first: bool) -> None:
        at = self._at.get(matrix.data_ptr()) if isinstance(matrix, torch.Tensor) else None
        if at is None:
            return
        name, number = at
        experts, *sizes = self._sizes[name]
        if list(matrix.shape) == sizes:
            known = self._taken is not None and given.ndim == 2 and len(self._taken) == len(given)
            self._seen(ExpertProduct(name, number, given, self._taken if known else None, inputs_first))
        elif list(matrix.shape) == [experts, *sizes] and given.ndim == 3 and len(given) == experts:
            # All tokens come to each expert, as zeros where its router did not choose it.
            for number, own in enumerate(given):
                positions = own.any(-1).nonzero()[:, 0]
                self._seen(ExpertProduct(name, number, own[positions], positions, inputs_first))


@contextmanager
def experts_one_by_one(modules: Iterable[Any]) -> Iterator[None]:
    """Modules of experts compute in the plain way, where transformers has several: their configuration says which."""
    configs = {id(one.config): one.config for one in modules if hasattr(one, "config")}.values()
    before = [(one, way) for one in configs if (way := getattr(one, "_experts_implementation", None)) is not None]
    for config, _ in before:
        config._experts_implementation = "eager"
    try:
        yield
    finally:
        for config, way in before:
            config._experts_implementation = way
