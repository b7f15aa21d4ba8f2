"""Compute the values of a method's parameters, once for all tensors that the recipe does not distinguish.

A recipe can distinguish tensors only by their slice, by their position along the layers, and by name filters. A mixture
of 256 experts has hundreds of tensors of each kind, and all tensors of a kind share one value object.

A merge addresses fused experts one by one, so a filter for the name of a fused tensor would silently match nothing.
:func:`lost_filters` reports such filters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mergegate.merge_core.architecture.experts import disk_name
from mergegate.merge_core.checkpoint import AnyTensor
from mergegate.merge_core.errors import Finding, InvalidInput
from mergegate.merge_core.methods import REQUIRED
from mergegate.merge_core.plan.jobs import TensorJob
from mergegate.merge_core.plan.outline import OutputSpec
from mergegate.merge_core.recipe import Condition, Parameters, Recipe, Source, value_for


@dataclass(frozen=True)
class TensorValues:
    """Parameter values for one tensor: values that all inputs share, and a mapping for each input."""

    shared: Mapping[str, Any]
    per_input: tuple[Mapping[str, Any], ...]


class ValueTable:
    """Values of the method's parameters in one recipe document."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self.method = recipe, recipe.method
        self._filters = _filtered_conditions(recipe)
        # The keys use the identity of parts of the recipe. self._recipe keeps them alive, so an identity is
        # never reused.
        self._cache: dict[tuple[object, ...], TensorValues] = {}

    def for_tensor(
        self, spec: OutputSpec, inputs: Sequence[tuple[Source, AnyTensor]], *, has_base: bool, checked: bool
    ) -> TensorValues:
        """Return the parameter values for the tensor ``spec``. With ``checked``, the method checks them.

        Raises:
            InvalidInput: A required value is missing, or the values are incompatible.
        """
        tensor_names = (spec.name, *(tensor.name for _, tensor in inputs)) if self._filters else ()
        matched = tuple(condition.matches(name) for condition in self._filters for name in tensor_names)
        sources = tuple(id(source) for source, _ in inputs)
        key = (id(spec.module), id(spec.cut), spec.t, sources, has_base, checked, matched)
        if key in self._cache:
            return self._cache[key]
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
        values = self._cache[key] = TensorValues(shared, tuple(per_input))
        if checked:
            self.method.check(values.shared, values.per_input, f"{spec.cut.location}: {spec.name}")
        return values


def lost_filters(recipe: Recipe, jobs: Sequence[TensorJob]) -> Iterator[Finding]:
    """Yield a finding for each filter that matches only names on disk, not the names that the merge uses."""
    filters = _filtered_conditions(recipe)
    if not filters:
        return
    tensors = [item.tensor for job in jobs for item in job.inputs]
    names = {tensor.name for tensor in tensors} | {job.output.name for job in jobs}
    fused = {disk_name(tensor): tensor.name for tensor in reversed(tensors) if disk_name(tensor) not in names}
    if not fused:
        return
    for condition in filters:
        if any(condition.matches(name) for name in names):
            continue
        example = next((name for disk, name in fused.items() if condition.matches(disk)), None)
        if example is not None:
            yield Finding(
                "block",
                condition.location,
                found=f"filter {condition.filter!r} only matches names of fused tensors",
                expected=f"a part of the name of a single expert, such as {example}",
                remedy="use the name of the projection in a single expert, because experts are merged one by one",
            )


def _filtered_conditions(recipe: Recipe) -> tuple[Condition, ...]:
    """Return the conditions of one recipe document that apply to some tensors only."""
    scopes = [recipe.parameters, *(module.parameters for module in recipe.modules)]
    scopes += [*(cut.parameters for cut in recipe.slices), *(source.parameters for source in recipe.sources)]
    conditions = (condition for scope in scopes for setting in scope.settings for condition in setting.conditions)
    return tuple(condition for condition in conditions if condition.filter is not None)


def _required(value: Any, parameter: str, spec: OutputSpec, subject: str) -> Any:
    if value is REQUIRED:
        raise InvalidInput(
            f"{spec.cut.location}: {parameter}",
            found=f"no value for {subject}, because no filter matches it",
            expected="a value for every tensor",
            remedy="add a value without a filter at the end of the list",
        )
    return value
