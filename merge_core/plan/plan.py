"""Turn a recipe and checkpoint headers into a list of jobs: inputs, parameter values and offset of each output tensor.

:func:`assemble` collects all problems for :func:`~merge_core.plan.compatibility.plan_with_findings`.
:func:`plan_merge` raises the first blocking problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

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
    parse_layer_place,
    prediction_tensors,
    rename_to_layout,
    unloaded_tensors,
    with_dtype,
    with_vocabulary,
    without_predictions,
)
from mergegate.merge_core.architecture.experts import find_routers, split_experts
from mergegate.merge_core.checkpoint import (
    AnyTensor,
    Checkpoint,
    DType,
    ExpectedImportance,
    ExpectedMoments,
    StoredMoments,
    StoredTensor,
    promote,
    read_chat_templates,
    select_chat_templates,
    with_chat_templates,
)
from mergegate.merge_core.errors import Finding, InvalidInput
from mergegate.merge_core.plan.alignment import Alignment, align, unknown_rows
from mergegate.merge_core.plan.companions import gather_companions
from mergegate.merge_core.plan.consistency import self_consistency, unused_tensors
from mergegate.merge_core.plan.finding_groups import different_head, different_size, different_vocabulary, not_loaded
from mergegate.merge_core.plan.jobs import Input, MergePlan, TensorJob, bulk_dtype
from mergegate.merge_core.plan.layout import OutputTensor, Shard, lay_out, network_shards
from mergegate.merge_core.plan.mixture import plan_mixture
from mergegate.merge_core.plan.module_weights import is_module_weights, lay_out_modules, select_module_weights
from mergegate.merge_core.plan.older_readers import with_older_names, with_older_rope
from mergegate.merge_core.plan.outline import OutputSpec, outline, with_head
from mergegate.merge_core.plan.rows import RowMap
from mergegate.merge_core.plan.special_ids import GENERATION, SPECIAL_KEYS, serialize_config
from mergegate.merge_core.plan.stacking import config_of_slices, differing_kinds
from mergegate.merge_core.plan.turn_ends import with_turn_ends
from mergegate.merge_core.plan.values import ValueTable, lost_filters
from mergegate.merge_core.recipe import Recipe, Source

# Prefix of the placeholder directory that a step's result has until it is written.
_STEP_PREFIX = "step:"


def plan_merge(recipe: Recipe, checkpoints: Mapping[str, Checkpoint]) -> MergePlan:
    """Plan the merge of ``recipe``.

    ``checkpoints`` holds an opened checkpoint for every reference in the recipe, by ``str(ref)``.

    Raises:
        InvalidInput: The checkpoints cannot be merged as the recipe requires: different shapes, missing tensors or
            layers, quantized weights, or missing parameter values.
    """
    plan, problems = assemble(recipe, checkpoints)
    blocking = [problem for problem in problems if problem.severity == "block"]
    if blocking:
        raise blocking[0].error()
    return with_findings(plan, checkpoints, problems)


def with_findings(plan: MergePlan, checkpoints: Mapping[str, Checkpoint], problems: Sequence[Finding]) -> MergePlan:
    """Return ``plan`` with the warnings in ``problems`` and the inconsistencies of inputs and results as findings."""
    tables = {**single_experts(checkpoints), **{str(step.recipe.name): planned_checkpoint(step) for step in plan.steps}}
    findings = [problem for problem in problems if problem.severity == "warn"]
    for part in (*plan.steps, plan):
        inconsistencies = [
            *unused_tensors(part, tables, set()),
            *self_consistency("the result", planned_checkpoint(part)),
        ]
        for ref in part.recipe.own_references():
            inconsistencies += self_consistency(str(ref), tables[str(ref)])
        findings += (finding for finding in inconsistencies if finding.severity != "info")
    return replace(plan, findings=tuple(findings))


def single_experts(checkpoints: Mapping[str, Checkpoint]) -> dict[str, Checkpoint]:
    """Return ``checkpoints`` with fused experts split, so that a plan does not depend on the layout on disk."""
    return {name: split_experts(checkpoint) for name, checkpoint in checkpoints.items()}


def assemble(recipe: Recipe, checkpoints: Mapping[str, Checkpoint]) -> tuple[MergePlan, list[Finding]]:
    """Return the plan, as complete as possible, and all problems with it.

    Raises:
        InvalidInput: The plan would be meaningless, because a reference has no checkpoint or a required parameter has
            no value.
    """
    tables, steps = single_experts(checkpoints), []
    problems: list[Finding] = []
    for step in recipe.steps:
        plan = _assemble_one(step, tables, problems)
        tables[str(step.name)] = planned_checkpoint(plan)
        steps.append(plan)
    return replace(_assemble_one(recipe, tables, problems), steps=tuple(steps)), problems


def planned_checkpoint(plan: MergePlan) -> Checkpoint:
    """Return the checkpoint that a plan will write, so that another plan can use it as an input before it exists.

    Its files are in the placeholder directory ``step:<name>``; see :func:`step_of`.
    """
    directory = Path(f"{_STEP_PREFIX}{plan.recipe.name}")
    stored: dict[str, StoredTensor] = {}
    for shard in plan.shards:
        file, begins = directory / shard.name, dict(zip(shard.tensors, shard.offsets, strict=True))
        for tensor in shard.stored:
            offset = begins[tensor.pieces[0]]
            stored[tensor.name] = StoredTensor(tensor.name, file, tensor.dtype, tensor.shape, offset)
    network = {tensor.name for shard in network_shards(plan.shards) for tensor in shard.stored}
    return split_experts(
        Checkpoint(
            plan.tokenizer.directory,
            plan.config,
            {name: tensor for name, tensor in stored.items() if name in network},
            plan.companions,
            plan.chat_templates,
            module_tensors={name: tensor for name, tensor in stored.items() if name not in network},
        )
    )


def step_of(file: Path) -> str | None:
    """Return the name of the step that will write ``file``, or None if no step of the recipe writes it."""
    first = file.parts[0]
    return first.removeprefix(_STEP_PREFIX) if first.startswith(_STEP_PREFIX) else None


def _assemble_one(recipe: Recipe, checkpoints: Mapping[str, Checkpoint], problems: list[Finding]) -> MergePlan:
    for ref in recipe.own_references():
        if str(ref) not in checkpoints:
            raise InvalidInput(
                str(ref), found="its checkpoint was not opened", expected="an opened checkpoint for every reference"
            )
    name = str(recipe.donor)
    donor = checkpoints[name]
    own_models = {str(ref): checkpoints[str(ref)] for ref in recipe.own_references()}
    modules = select_module_weights(recipe, own_models)
    problems += modules.findings
    if recipe.mixture is not None:
        mixture_jobs, mixture_config = plan_mixture(recipe, recipe.mixture, checkpoints, problems)
        shards = lay_out([job.output for job in mixture_jobs], donor)
        return _build_plan(recipe, mixture_jobs, shards, mixture_config, checkpoints, None)
    checkpoints = {model: rename_to_layout(donor, checkpoint) for model, checkpoint in checkpoints.items()}
    alignment = align(recipe, checkpoints, name)
    donor, lost_heads = with_head(recipe, donor, checkpoints)
    problems += lost_heads
    if recipe.drop_prediction_layers:
        dropped = prediction_tensors(donor)
        donor = replace(donor, tensors={key: tensor for key, tensor in donor.tensors.items() if key not in dropped})
    structure: Mapping[str, Any] = donor.config
    if (sliced := config_of_slices(recipe, donor, checkpoints)) is not None:
        structure = sliced[0]
        problems += sliced[1]
    else:
        for ref in recipe.own_references():
            if ref != recipe.donor:
                problems += differing_kinds(name, donor, str(ref), checkpoints[str(ref)])
    document = _Document(recipe, donor, checkpoints, alignment, ValueTable(recipe), problems)
    all_jobs = [_job(document, spec) for spec in outline(recipe, donor, checkpoints)]
    jobs = [_with_new_router(recipe, job) for job in all_jobs if job is not None]
    if recipe.router_repair is not None:
        problems += _router_problems(recipe, checkpoints)
    config: Mapping[str, Any] = with_dtype(structure, bulk_dtype(jobs))
    if not prediction_tensors(donor).intersection(job.output.name for job in jobs):
        config, declared = without_predictions(config), config
        if config != declared and not recipe.drop_prediction_layers:
            problems.append(
                Finding(
                    "info",
                    f"{name}: config.json",
                    found="layers for multi-token prediction, but no stored tensor is one of them",
                    expected="a count that agrees with the weights",
                    remedy="nothing to do: the result's count is 0; set base_model to a model that has these layers to "
                    "get them",
                )
            )
    shards = lay_out([job.output for job in jobs], donor)
    if modules.tensors:
        (module,) = recipe.modules  # Only recipes of whole models merge the weights of modules.
        (cut,) = module.slices
        document = replace(document, donor=modules.models[name], checkpoints=modules.models, alignment=None)
        specs = (OutputSpec(tensor, module, cut, (tensor,) * len(cut.sources), 0.0) for tensor in modules.tensors)
        module_jobs = [job for spec in specs if (job := _job(document, spec)) is not None]
        shards += lay_out_modules([job.output for job in module_jobs])
        jobs += module_jobs
    problems += lost_filters(recipe, jobs)
    # If the donor declares no class, take that of a model that has the same tensors outside the layers.
    for candidate in checkpoints.values() if not donor.class_name else ():
        differs_in_head = bool(candidate.class_name) and class_difference(donor, candidate) == "head"
        if differs_in_head and _outside_layers(candidate) == _outside_layers(donor):
            config = {**config, "architectures": [candidate.class_name]}
            break
    if alignment is not None:
        unmatched_keys: list[str] = []
        if name != alignment.tokenizer_name:
            config, unmatched_keys = alignment.translate(config, name)
        config = with_vocabulary(config, alignment.size)
        problems += (
            Finding(
                "warn" if key.rpartition(".")[2] in SPECIAL_KEYS else "block",
                f"{name}: config.json: {key}",
                found="the result's tokenizer lacks this token",
                expected="tokens of the result",
                remedy=f"set tokenizer: {{source: union}} in {recipe.location}, or add the token under tokenizer: "
                "tokens",
            )
            for key in unmatched_keys
        )
        problems += alignment.remarks
    return _build_plan(recipe, jobs, shards, config, checkpoints, alignment)


def _build_plan(
    recipe: Recipe,
    jobs: Sequence[TensorJob],
    shards: Sequence[Shard],
    config: Mapping[str, Any],
    checkpoints: Mapping[str, Checkpoint],
    alignment: Alignment | None,
) -> MergePlan:
    """Return the plan that executes ``jobs``, whose outputs are in ``shards``."""
    donor_name = str(recipe.donor)
    tokenizer, rewritten = checkpoints[donor_name], dict[str, bytes | None]()
    if alignment is not None:
        tokenizer, rewritten = alignment.tokenizer, dict(alignment.rewritten)
        files = checkpoints[donor_name].companions
        is_provided = donor_name == alignment.tokenizer_name or GENERATION in tokenizer.companions
        if GENERATION in files and not is_provided:  # The donor's settings get the result's token ids.
            settings, _ = alignment.translate(files.json(GENERATION) or {}, donor_name)
            rewritten[GENERATION] = serialize_config(settings)
    jobs_by_name = {job.output.name: job for job in jobs}
    dtypes = {name: dtype for shard in shards for name, dtype in shard.dtypes().items()}
    ordered = tuple(
        job if job.output.dtype == dtypes[name] else replace(job, output=replace(job.output, dtype=dtypes[name]))
        for shard in shards
        for name in shard.tensors
        for job in [jobs_by_name[name]]
    )
    parents = parents_of(recipe, ordered, checkpoints)
    companions = gather_companions(checkpoints[donor_name], tokenizer, parents).with_changes(rewritten)
    merged_folders = {shard.name.partition("/")[0] for shard in shards if "/" in shard.name}
    replaced = [file for file in companions if is_module_weights(file) and file.partition("/")[0] in merged_folders]
    companions = companions.with_changes(dict.fromkeys(replaced))
    templates = read_chat_templates(companions)
    models = {str(ref): checkpoints[str(ref)] for ref in recipe.own_references()}
    if recipe.chat_template is not None:
        model_templates = [parent.chat_templates for parent in models.values()]
        templates = select_chat_templates(recipe.chat_template, model_templates, f"{recipe.location}: chat_template")
        companions = with_chat_templates(companions, templates)
    companions = with_turn_ends(companions, tokenizer, recipe.chat_template, templates, models, alignment)
    return MergePlan(
        recipe=recipe,
        donor=checkpoints[donor_name],
        jobs=ordered,
        shards=tuple(shards),
        config=with_older_rope(config),
        bytes_read=sum(job.nbytes_in for job in ordered),
        bytes_written=sum(shard.size for shard in shards),
        tokenizer=tokenizer,
        companions=with_older_names(companions),
        chat_templates=templates,
    )


def parents_of(
    recipe: Recipe, jobs: Iterable[TensorJob], checkpoints: Mapping[str, Checkpoint]
) -> dict[str, Checkpoint]:
    """Return the models that contribute weights (``jobs``) or the configuration to the result, by reference."""
    names = dict.fromkeys([str(recipe.donor), *(item.model for job in jobs for item in job.inputs)])
    # Router rows that a recipe declares come from no model.
    return {name: checkpoints[name] for name in names if name in checkpoints}


@dataclass(frozen=True)
class _Document:
    """One recipe document with everything needed to plan its jobs, and the list that collects problems."""

    recipe: Recipe
    donor: Checkpoint
    checkpoints: Mapping[str, Checkpoint]
    alignment: Alignment | None
    values: ValueTable
    problems: list[Finding]

    @cached_property
    def unloaded_names(self) -> frozenset[str]:
        """Names of the donor's tensors that its class ignores."""
        return unloaded_tensors(self.donor)


def _job(document: _Document, spec: OutputSpec) -> TensorJob | None:
    """Return the job that computes ``spec``, or None if there is nothing to compute or a problem prevents it."""
    recipe, alignment, problems = document.recipe, document.alignment, document.problems
    method, cut = recipe.method, spec.cut
    inputs: list[tuple[Source, AnyTensor]] = []
    headless: list[str] = []  # Models whose class has another head.
    dropped: list[str] = []  # Models without a tensor that their class ignores.
    for source, name in zip(cut.sources, spec.source_names, strict=True):
        tensor = find_tensor(document.checkpoints[str(source.model)], name)
        if tensor is not None:
            inputs.append((source, tensor))
        elif is_of_head(name) and class_difference(document.donor, document.checkpoints[str(source.model)]) == "head":
            headless.append(str(source.model))
        elif name in document.unloaded_names:
            dropped.append(str(source.model))
        elif not is_optional(name) or is_head(name):
            problems.append(
                Finding(
                    "block",
                    f"{source.model}: {name}",
                    found="missing" + (", and no embedding can replace it" if is_head(name) else ""),
                    expected="a tensor that every model has",
                    remedy="merge models of one architecture",
                    cause=different_size(str(source.model)),
                )
            )
            return None
    lacking = (headless or dropped) if inputs else []
    if lacking:
        inputs = [next((item for item in inputs if item[0].model == recipe.donor), inputs[0])]
        cause = different_head(lacking[0]) if headless else not_loaded(lacking[0])
        reason = "the class of this model has a different head, or none"
        if not headless:
            reason = f"transformers drops tensors that {document.donor.class_name} does not load"
        if headless or all(problem.cause != cause for problem in problems):
            problems.append(
                Finding(
                    "warn",
                    f"{lacking[0]}: {spec.name}",
                    found=f"missing: {reason}",
                    expected="one class for all models" if headless else "every tensor in every model",
                    remedy=f"nothing to do: the result gets {'the tensor' if headless else 'such tensors'} of "
                    f"{inputs[0][0].model} unchanged",
                    cause=cause,
                )
            )
    if method.base != "ordinary" and cut.base is not None:
        # The sort is stable: the base first, then the others in recipe order.
        inputs.sort(key=lambda item: item[0].model != cut.base)
    if not inputs:
        return None
    has_base = method.base in ("required", "optional") and inputs[0][0].model == cut.base
    if method.base == "required" and not has_base and not lacking:
        problems.append(
            Finding(
                "block",
                f"{cut.base}: {spec.name}",
                found="missing in the base",
                expected=f"a tensor in the base: {method.name} merges differences from it",
                remedy="use a base that has this tensor",
            )
        )
        return None
    tensors = [tensor for _, tensor in inputs]
    dtype = _output_dtype(document, spec.name, inputs)
    maps: Mapping[str, RowMap] = {}
    if alignment is not None and has_vocabulary_rows(spec.name):
        maps = alignment.maps([str(source.model) for source, _ in inputs])
    elif alignment is not None and alignment.maps([str(source.model) for source, _ in inputs]):
        unknown_findings = (unknown_rows(str(source.model), tensor, alignment) for source, tensor in inputs)
        if (unknown := next(filter(None, unknown_findings), None)) is not None:
            problems.append(unknown)
            return None
    if dtype is None or not _same_shape(spec.name, inputs, problems, by_token=bool(maps)):
        return None
    shape = (alignment.size, *tensors[0].shape[1:]) if alignment is not None and maps else tensors[0].shape
    min_models, _ = method.models
    is_copied = bool(lacking) or (len(inputs) == 1 and method.single_input == "copy" and min_models > 1)
    tensor_values = document.values.for_tensor(spec, inputs, has_base=has_base, checked=not is_copied)
    # Rows that other models lend have no importance.
    is_weighted = not maps and dtype.kind == "float"
    mode: Literal["merge", "copy", "equal"] = "copy" if is_copied else "merge"
    return TensorJob(
        output=OutputTensor(spec.name, dtype, shape),
        inputs=tuple(
            Input(str(source.model), tensor, maps.get(str(source.model)), moments, importance if is_weighted else None)
            for source, tensor in inputs
            for moments, importance in [_measurements(recipe, str(source.model), tensor)]
        ),
        has_base=has_base,
        shared=tensor_values.shared,
        per_input=tensor_values.per_input,
        mode="equal" if dtype.kind == "exact" else mode,
    )


# Origin, in messages, of routers that were refitted.
_ROUTER_ORIGIN = "router_repair"


def _with_new_router(recipe: Recipe, job: TensorJob) -> TensorJob:
    """Return the job that copies the refitted router instead of merging the routers of the models, if there is one."""
    tensor = recipe.repaired.tensors.get(job.output.name) if recipe.repaired else None
    if tensor is None:
        return job
    return replace(job, inputs=(Input(_ROUTER_ORIGIN, tensor),), has_base=False, per_input=({},), mode="copy")


def _router_problems(recipe: Recipe, checkpoints: Mapping[str, Checkpoint]) -> list[Finding]:
    """Return a finding for each model whose routers cannot be refitted or cannot guide the merge."""
    findings, donor = [], find_routers(checkpoints[str(recipe.donor)])
    for ref in dict.fromkeys((recipe.donor, *recipe.texts)) if donor else (recipe.donor,):
        routers = find_routers(checkpoints[str(ref)])
        missing = next((module for module in donor if module not in routers), None)
        if donor and missing is None:
            continue
        findings.append(
            Finding(
                "block",
                f"{recipe.location}: router_repair",
                found=f"{ref} has no router at {missing}" if missing else f"{ref} has no router of experts",
                expected="mixtures of experts of one family, whose routers multiply the states by one matrix",
                remedy="remove router_repair",
            )
        )
    return findings


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


def _output_dtype(document: _Document, name: str, inputs: Sequence[tuple[Source, AnyTensor]]) -> DType | None:
    recipe, config, problems = document.recipe, document.donor.config, document.problems
    first = inputs[0][1].dtype
    if first.kind == "float" and all(tensor.dtype is first for _, tensor in inputs):
        target = recipe.out_dtype or recipe.dtype or first
        if first.torch_name != "float32" or not keeps_float32(config, name, target):
            return target
        problems.append(
            Finding(
                "info",
                f"the result: {name}",
                found=f"float32, although the recipe states {target.torch_name}",
                expected="the precision of the models, because their class computes with this tensor in float32",
                remedy="nothing to do",
                cause="the result: tensors in float32",
            )
        )
        return first
    dtypes = {tensor.dtype for _, tensor in inputs}
    kinds = {dtype.kind for dtype in dtypes}
    if kinds == {"float"}:
        return recipe.out_dtype or recipe.dtype or promote(dtypes)
    source, tensor = next(item for item in inputs if item[1].dtype.kind != "float")
    if "packed" in kinds:
        problems.append(
            Finding(
                "block",
                f"{source.model}: {name}",
                found=f"{tensor.dtype.code}, which stores quantized weights",
                expected="bfloat16, float16, float32 or float64 weights",
                remedy="merge the unquantized models, then quantize the result",
            )
        )
        return None
    if len(dtypes) > 1:
        other_codes = ", ".join(sorted(dtype.code for dtype in dtypes - {tensor.dtype}))
        problems.append(
            Finding(
                "block",
                f"{source.model}: {name}",
                found=f"{tensor.dtype.code}, but {other_codes} in other models",
                expected="one format, because integers are copied and not merged",
                remedy="merge models whose tensors have the same formats",
            )
        )
        return None
    return tensor.dtype


def _same_shape(
    name: str, inputs: Sequence[tuple[Source, AnyTensor]], problems: list[Finding], *, by_token: bool
) -> bool:
    """Return whether all inputs have one shape, and add a finding for each other shape.

    With ``by_token``, rows are matched by token, so the number of rows may differ.
    """
    first_source, first = inputs[0]
    same = True
    for source, tensor in inputs[1:]:
        same_width = len(first.shape) == len(tensor.shape) and first.shape[1:] == tensor.shape[1:]
        if tensor.shape == first.shape or (by_token and same_width):
            continue
        same = False
        vocabulary = same_width and (is_before_layers(name) or is_head(name))
        cause = different_vocabulary if vocabulary else different_size
        problems.append(
            Finding(
                "block",
                f"{source.model}: {name}",
                found=f"shape {list(tensor.shape)}",
                expected=(
                    f"rows of shape {list(first.shape[1:])}, as in {first_source.model}"
                    if by_token
                    else f"{list(first.shape)}, as in {first_source.model}"
                ),
                remedy=(
                    "resize the embeddings of one model, or set tokenizer_source"
                    if vocabulary
                    else "merge models of one architecture and size"
                ),
                cause=cause(str(source.model)),
            )
        )
    return same


def _outside_layers(checkpoint: Checkpoint) -> set[str]:
    """Return the names of the tensors outside the layers that every model of a class has."""
    names = (name for name in checkpoint.tensors if parse_layer_place(name) is None)
    return {name for name in names if is_head(name) or not is_optional(name)}
