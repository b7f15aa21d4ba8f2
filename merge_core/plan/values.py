"""Values of a method's parameters, tensor by tensor: worked out once for all tensors that a recipe tells apart by
nothing.

What a recipe can tell tensors apart by is few: the slice, the place along the layers, and which filters match their
names. A mixture of 256 experts has hundreds of tensors of each kind, and the same values are the same object for all.
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
    """What the method is told for one tensor: ``shared`` values, and of each input its own."""

    shared: Mapping[str, Any]
    per_input: tuple[Mapping[str, Any], ...]


class ValueTable:
    """The values of one recipe document, for its ``method``.

    Args:
        recipe: The document.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self.method = recipe, recipe.method
        self._filters = filtered_conditions(recipe)
        # By identity of parts of the recipe, which is kept: they are the same objects for all tensors.
        self._known: dict[tuple[object, ...], TensorValues] = {}

    def of(
        self, spec: OutputSpec, found: Sequence[tuple[Source, AnyTensor]], *, has_base: bool, checked: bool
    ) -> TensorValues:
        """The values for the tensor ``spec``.

        Args:
            spec: Which tensor.
            found: Its inputs, the base first when ``has_base``.
            has_base: Whether the first input is the base.
            checked: Whether the method is asked if the values go together.

        Raises:
            InvalidInput: A required value is missing, or the values do not go together.
        """
        names = (spec.name, *(tensor.name for _, tensor in found)) if self._filters else ()
        matched = tuple(condition.matches(name) for condition in self._filters for name in names)
        sources = tuple(id(source) for source, _ in found)
        key = (id(spec.module), id(spec.cut), spec.t, sources, has_base, checked, matched)
        values = self._known.get(key)
        if values is None:
            values = self._known[key] = self._worked_out(spec, found, has_base)
            if checked:
                self.method.check(values.shared, values.per_input, f"{spec.cut.where}: {spec.name}")
        return values

    def _worked_out(self, spec: OutputSpec, found: Sequence[tuple[Source, AnyTensor]], has_base: bool) -> TensorValues:
        wider = (spec.cut.parameters, spec.module.parameters, self._recipe.parameters)
        shared: dict[str, Any] = {}
        per_input: list[dict[str, Any]] = [{} for _ in found]
        for parameter in self.method.parameters:
            name = parameter.name
            if parameter.scope == "shared":
                shared[name] = _required(value_for(parameter, wider, spec.name, spec.t), name, spec, spec.name)
                continue
            for index, (source, tensor) in enumerate(found):
                if parameter.scope == "non_base" and has_base and index == 0:
                    continue
                scopes: tuple[Parameters, ...] = (source.parameters, *wider)
                value = value_for(parameter, scopes, tensor.name, spec.t)
                per_input[index][name] = _required(value, name, spec, f"{source.model}: {tensor.name}")
        return TensorValues(shared, tuple(per_input))


def _required(value: Any, parameter: str, spec: OutputSpec, what: str) -> Any:
    if value is REQUIRED:
        raise InvalidInput(
            f"{spec.cut.where}: {parameter}",
            found=f"no value for {what}: no filter matches it",
            expected="a value for every tensor",
            remedy="end the list with a value without filter",
        )
    return value
