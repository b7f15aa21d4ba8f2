"""Compute the values of a method's parameters, once for all tensors that the recipe does not distinguish.

A recipe can distinguish tensors only by their slice, by their position along the layers, and by the filters that match
their names. A mixture of 256 experts has hundreds of tensors of each kind, and all of a kind share one value object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mergegate.merge_core.checkpoint import AnyTensor
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.methods import REQUIRED
from mergegate.merge_core.plan.filters import filtered_conditions
from mergegate.merge_core.plan.outline import OutputSpec
from mergegate.merge_core.recipe import Parameters, Recipe, Source, value_for


@dataclass(frozen=True)
class TensorValues:
    """Parameter values for one tensor: ``shared`` ones, and a mapping for each input."""

    shared: Mapping[str, Any]
    per_input: tuple[Mapping[str, Any], ...]


class ValueTable:
    """Parameter values of one recipe document for its ``method``.

    Args:
        recipe: The document.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self.method = recipe, recipe.method
        self._filters = filtered_conditions(recipe)
        # The keys use the identity of parts of the recipe. self._recipe keeps them alive, so an identity is
        # never reused.
        self._cache: dict[tuple[object, ...], TensorValues] = {}

    def for_tensor(
        self, spec: OutputSpec, inputs: Sequence[tuple[Source, AnyTensor]], *, has_base: bool, checked: bool
    ) -> TensorValues:
        """Return the values for the tensor ``spec``.

        Args:
            spec: Output tensor.
            inputs: Inputs of the tensor, the base first if ``has_base``.
            has_base: Whether the first input is the base.
            checked: Whether the method validates the combination of values.

        Raises:
            InvalidInput: A required value is missing, or the values are incompatible.
        """
        tensor_names = (spec.name, *(tensor.name for _, tensor in inputs)) if self._filters else ()
        matched = tuple(condition.matches(name) for condition in self._filters for name in tensor_names)
        sources = tuple(id(source) for source, _ in inputs)
        key = (id(spec.module), id(spec.cut), spec.t, sources, has_base, checked, matched)
        values = self._cache.get(key)
        if values is None:
            values = self._cache[key] = self._compute(spec, inputs, has_base)
            if checked:
                self.method.check(values.shared, values.per_input, f"{spec.cut.location}: {spec.name}")
        return values

    def _compute(self, spec: OutputSpec, inputs: Sequence[tuple[Source, AnyTensor]], has_base: bool) -> TensorValues:
        wider = (spec.cut.parameters, spec.module.parameters, self._recipe.parameters)
        shared: dict[str, Any] = {}
        per_input: list[dict[str, Any]] = [{} for _ in inputs]
        for parameter in self.method.parameters:
            name = parameter.name
            if parameter.scope == "shared":
                shared[name] = _required(value_for(parameter, wider, spec.name, spec.t), name, spec, spec.name)
                continue
            for index, (source, tensor) in enumerate(inputs):
                if parameter.scope == "non_base" and has_base and index == 0:
                    continue
                scopes: tuple[Parameters, ...] = (source.parameters, *wider)
                value = value_for(parameter, scopes, tensor.name, spec.t)
                per_input[index][name] = _required(value, name, spec, f"{source.model}: {tensor.name}")
        return TensorValues(shared, tuple(per_input))


def _required(value: Any, parameter: str, spec: OutputSpec, subject: str) -> Any:
    if value is REQUIRED:
        raise InvalidInput(
            f"{spec.cut.location}: {parameter}",
            found=f"no value for {subject}: no filter matches it",
            expected="a value for every tensor",
            remedy="end the list with a value without filter",
        )
    return value
