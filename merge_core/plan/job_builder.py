"""Build the job of each output tensor: match its inputs, check them, and compute the values of the method's parameters.

A recipe can distinguish tensors only by their slice, by their position along the layers, and by name filters. A mixture
of 256 experts has hundreds of tensors of each kind, so the values are computed once, and all tensors of a kind share
one value object. A merge addresses fused experts one by one, so a filter for the name of a fused tensor would silently
match nothing. :func:`lost_filters` reports such filters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

from mergegate.merge_core.architecture import (
    class_difference,
    find_tensor,
    has_vocabulary_rows,
    input_width,
    is_before_layers,
    is_head,
    is_of_head,
    is_optional,
    is_projection,
    keeps_float32,
    unloaded_tensors,
)
from mergegate.merge_core.architecture.experts import disk_name, find_routers
from mergegate.merge_core.checkpoint import (
    AnyTensor,
    Checkpoint,
    DType,
    ExpectedImportance,
    ExpectedMoments,
    StoredMoments,
    promote,
)
from mergegate.merge_core.errors import Finding, InvalidInput
from mergegate.merge_core.methods import REQUIRED
from mergegate.merge_core.plan.alignment import Alignment, unknown_rows
from mergegate.merge_core.plan.jobs import Input, OutputTensor, RowMap, TensorJob
from mergegate.merge_core.plan.outline import OutputSpec
from mergegate.merge_core.recipe import Condition, Parameters, Recipe, Source, value_for

_Values: TypeAlias = tuple[Mapping[str, Any], tuple[Mapping[str, Any], ...]]
"""Parameter values for one tensor: values that all inputs share, and a mapping for each input."""


@dataclass(frozen=True)
class JobBuilder:
    """One recipe document with everything needed to plan its jobs, and the list that collects problems."""

    recipe: Recipe
    donor: Checkpoint
    checkpoints: Mapping[str, Checkpoint]
    alignment: Alignment | None
    problems: list[Finding]
    # Values of parameters by what the recipe can distinguish. The keys use the identity of parts of the recipe, which
    # ``recipe`` keeps alive, so an identity is never reused.
    _values: dict[tuple[object, ...], _Values] = field(default_factory=dict)

    @cached_property
    def _unloaded_names(self) -> frozenset[str]:
        return unloaded_tensors(self.donor)

    @cached_property
    def _filters(self) -> tuple[Condition, ...]:
        return _filtered_conditions(self.recipe)

    def build(self, spec: OutputSpec) -> TensorJob | None:
        """Return the job that computes ``spec``, or None if there is nothing to compute or a problem prevents it."""
        recipe, alignment, method, cut = self.recipe, self.alignment, self.recipe.method, spec.cut
        inputs: list[tuple[Source, AnyTensor]] = []
        headless: list[str] = []  # Models whose class has another head.
        dropped: list[str] = []  # Models without a tensor that their class ignores.
        for source, name in zip(cut.sources, spec.source_names, strict=True):
            model = str(source.model)
            tensor = find_tensor(self.checkpoints[model], name)
            if tensor is not None:
                inputs.append((source, tensor))
            elif is_of_head(name) and class_difference(self.donor, self.checkpoints[model]) == "head":
                headless.append(model)
            elif name in self._unloaded_names:
                dropped.append(model)
            elif not is_optional(name) or is_head(name):
                self._refuse(
                    f"{model}: {name}",
                    found="missing" + (", and no embedding can replace it" if is_head(name) else ""),
                    expected="a tensor that every model has",
                    remedy="merge models of one architecture",
                    cause=f"{model}: size",
                )
                return None
        if not inputs:
            return None
        lacking = headless or dropped
        if lacking:
            inputs = [next((item for item in inputs if item[0].model == recipe.donor), inputs[0])]
            self._report_lacking(spec.name, headless, dropped, str(inputs[0][0].model))
        if method.base != "ordinary" and cut.base is not None:
            # The sort is stable: the base first, then the others in recipe order.
            inputs.sort(key=lambda item: item[0].model != cut.base)
        has_base = method.base in ("required", "optional") and inputs[0][0].model == cut.base
        if method.base == "required" and not has_base and not lacking:
            self._refuse(
                f"{cut.base}: {spec.name}",
                found="missing in the base",
                expected=f"a tensor in the base: {method.name} merges differences from it",
                remedy="use a base that has this tensor",
            )
            return None
        dtype = self._output_dtype(spec.name, inputs)
        models = [str(source.model) for source, _ in inputs]
        maps: Mapping[str, RowMap] = {}
        if alignment is not None and has_vocabulary_rows(spec.name):
            maps = alignment.maps(models)
        elif alignment is not None and alignment.maps(models):
            unknown_findings = (unknown_rows(str(source.model), tensor, alignment) for source, tensor in inputs)
            if (unknown := next(filter(None, unknown_findings), None)) is not None:
                self.problems.append(unknown)
                return None
        if dtype is None or not self._have_one_shape(spec.name, inputs, by_token=bool(maps)):
            return None
        first_shape = inputs[0][1].shape
        min_models, _ = method.models
        is_copied = bool(lacking) or (len(inputs) == 1 and method.single_input == "copy" and min_models > 1)
        shared, per_input = self._parameter_values(spec, inputs, has_base=has_base, checked=not is_copied)
        mode: Literal["merge", "copy", "equal"] = "copy" if is_copied else "merge"
        if dtype.kind == "exact":
            mode = "equal"
        new_router = recipe.repaired.tensors.get(spec.name) if recipe.repaired else None
        if new_router is not None:  # Copy the refitted router instead of merging the routers of the models.
            job_inputs: tuple[Input, ...] = (Input(_ROUTER_ORIGIN, new_router),)
            has_base, per_input, mode = False, ({},), "copy"
        else:
            # Rows that other models lend have no importance.
            is_weighted = not maps and dtype.kind == "float"
            job_inputs = tuple(
                Input(model, tensor, maps.get(model), moments, importance if is_weighted else None)
                for model, (_, tensor) in zip(models, inputs, strict=True)
                for moments, importance in [_measurements(recipe, model, tensor)]
            )
        shape = (alignment.size, *first_shape[1:]) if alignment is not None and maps else first_shape
        return TensorJob(OutputTensor(spec.name, dtype, shape), job_inputs, has_base, shared, per_input, mode)

    def _parameter_values(
        self, spec: OutputSpec, inputs: Sequence[tuple[Source, AnyTensor]], *, has_base: bool, checked: bool
    ) -> _Values:
        """Return the parameter values for the tensor ``spec``. With ``checked``, the method checks them."""
        tensor_names = (spec.name, *(tensor.name for _, tensor in inputs)) if self._filters else ()
        matched = tuple(condition.matches(name) for condition in self._filters for name in tensor_names)
        sources = tuple(id(source) for source, _ in inputs)
        key = (id(spec.module), id(spec.cut), spec.t, sources, has_base, checked, matched)
        if key in self._values:
            return self._values[key]
        method, wider = self.recipe.method, (spec.cut.parameters, spec.module.parameters, self.recipe.parameters)
        shared: dict[str, Any] = {}
        per_input: list[dict[str, Any]] = [{} for _ in inputs]
        for parameter in method.parameters:
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
        values = self._values[key] = shared, tuple(per_input)
        if checked:
            method.check(*values, f"{spec.cut.location}: {spec.name}")
        return values

    def _refuse(self, location: str, *, found: str, expected: str, remedy: str, cause: str = "") -> None:
        self.problems.append(Finding("block", location, found, expected, remedy, cause))

    def _report_lacking(self, name: str, headless: Sequence[str], dropped_by: Sequence[str], model: str) -> None:
        lacking = (headless or dropped_by)[0]
        if headless:
            found, expected = "the class of this model has a different head, or none", "one class for all models"
            subject, cause = "the tensor", f"{lacking}: head"
        else:
            found = f"transformers drops tensors that {self.donor.class_name} does not load"
            expected, subject, cause = "every tensor in every model", "such tensors", f"{lacking}: not loaded"
        if headless or all(problem.cause != cause for problem in self.problems):
            remedy = f"nothing to do: the result gets {subject} of {model} unchanged"
            self.problems.append(Finding("warn", f"{lacking}: {name}", f"missing: {found}", expected, remedy, cause))

    def _output_dtype(self, name: str, inputs: Sequence[tuple[Source, AnyTensor]]) -> DType | None:
        recipe, first = self.recipe, inputs[0][1].dtype
        dtypes = {tensor.dtype for _, tensor in inputs}
        stated = recipe.out_dtype or recipe.dtype
        if all(dtype.kind == "float" for dtype in dtypes):
            target = stated or promote(dtypes)
            if len(dtypes) > 1 or first.torch_name != "float32" or not keeps_float32(self.donor.config, name, target):
                return target
            finding = Finding(
                "info",
                f"the result: {name}",
                found=f"float32, although the recipe states {target.torch_name}",
                expected="the precision of the models, because their class computes with this tensor in float32",
                remedy="nothing to do",
                cause="the result: tensors in float32",
            )
            self.problems.append(finding)
            return first
        source, tensor = next(item for item in inputs if item[1].dtype.kind != "float")
        if any(dtype.kind == "packed" for dtype in dtypes):
            self._refuse(
                f"{source.model}: {name}",
                found=f"{tensor.dtype.code}, which stores quantized weights",
                expected="bfloat16, float16, float32 or float64 weights",
                remedy="merge the unquantized models, then quantize the result",
            )
            return None
        if len(dtypes) > 1:
            other_codes = ", ".join(sorted(dtype.code for dtype in dtypes - {tensor.dtype}))
            self._refuse(
                f"{source.model}: {name}",
                found=f"{tensor.dtype.code}, but {other_codes} in other models",
                expected="one format, because integers are copied and not merged",
                remedy="merge models whose tensors have the same formats",
            )
            return None
        return tensor.dtype

    def _have_one_shape(self, name: str, inputs: Sequence[tuple[Source, AnyTensor]], *, by_token: bool) -> bool:
        """Return whether all inputs have one shape, and add a finding for each other shape.

        With ``by_token``, rows are matched by token, so the number of rows may differ.
        """
        first_source, first = inputs[0]
        is_equal = True
        for source, tensor in inputs[1:]:
            same_width = len(first.shape) == len(tensor.shape) and first.shape[1:] == tensor.shape[1:]
            if tensor.shape == first.shape or (by_token and same_width):
                continue
            is_equal = False
            vocabulary = same_width and (is_before_layers(name) or is_head(name))
            shape = f"rows of shape {list(first.shape[1:])}" if by_token else f"{list(first.shape)}"
            self._refuse(
                f"{source.model}: {name}",
                found=f"shape {list(tensor.shape)}",
                expected=f"{shape}, as in {first_source.model}",
                remedy="resize the embeddings of one model, or set tokenizer_source"
                if vocabulary
                else "merge models of one architecture and size",
                cause=f"{source.model}: {'vocabulary' if vocabulary else 'size'}",
            )
        return is_equal


# Origin, in messages, of routers that were refitted.
_ROUTER_ORIGIN = "router_repair"


def router_problems(recipe: Recipe, checkpoints: Mapping[str, Checkpoint]) -> Iterator[Finding]:
    donor = find_routers(checkpoints[str(recipe.donor)])
    for ref in dict.fromkeys((recipe.donor, *recipe.texts)) if donor else (recipe.donor,):
        routers = find_routers(checkpoints[str(ref)])
        missing = next((module for module in donor if module not in routers), None)
        if missing is not None or not donor:
            yield Finding(
                "block",
                f"{recipe.location}: router_repair",
                found=f"{ref} has no router at {missing}" if missing else f"{ref} has no router of experts",
                expected="mixtures of experts of one family, whose routers multiply the states by one matrix",
                remedy="remove router_repair",
            )


def _measurements(
    recipe: Recipe, model: str, tensor: AnyTensor
) -> tuple[StoredMoments | ExpectedMoments | None, AnyTensor | ExpectedImportance | None]:
    """Return the measured or expected activation statistics and importance of a tensor of ``model``."""
    if recipe.measured is not None:
        if (statistics := recipe.measured.get(model)) is None:
            return None, None
        importance = statistics.importance.get(tensor.name)
        has_importance = importance is not None and importance.shape == tensor.shape
        return statistics.moments.get(tensor.name), importance if has_importance else None
    reads, moments = recipe.method.traits.reads_text, None
    if reads == "moments" and len(tensor.shape) == 2 and is_projection(tensor.name):
        width = input_width(tensor.name, tensor.shape)
        moments = ExpectedMoments(width, is_diagonal=width > recipe.reading.diagonal_above)
    return moments, ExpectedImportance(tensor.shape) if reads == "importance" else None


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
