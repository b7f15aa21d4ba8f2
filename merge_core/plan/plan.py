"""Turn a recipe and checkpoint headers into a list of jobs: inputs, parameter values and offset of each output tensor.

:func:`assemble` collects all problems for :func:`~merge_core.plan.compatibility.plan_with_findings`.
:func:`plan_merge` raises the first blocking problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mergegate.merge_core.architecture import (
    class_difference,
    is_head,
    is_optional,
    parse_layer_place,
    prediction_tensors,
    rename_to_layout,
    with_dtype,
    with_vocabulary,
    without_predictions,
)
from mergegate.merge_core.architecture.experts import split_experts
from mergegate.merge_core.checkpoint import (
    TEXT_KINDS,
    Checkpoint,
    StoredTensor,
    companion_kind,
    read_chat_templates,
    select_chat_templates,
    with_chat_templates,
)
from mergegate.merge_core.checkpoint.vocabulary import TokenizerDefinition
from mergegate.merge_core.errors import Finding, InvalidInput
from mergegate.merge_core.methods import PASSTHROUGH
from mergegate.merge_core.plan.alignment import SPECIAL_KEYS, Alignment, align, follow_tokens
from mergegate.merge_core.plan.companions import (
    gather_companions,
    select_module_weights,
    with_older_names,
    with_older_rope,
)
from mergegate.merge_core.plan.consistency import differing_kinds, self_consistency, unused_tensors
from mergegate.merge_core.plan.file_settings import GENERATION, is_module_weights, serialize_config
from mergegate.merge_core.plan.job_builder import JobBuilder, lost_filters, router_problems
from mergegate.merge_core.plan.jobs import (
    MergePlan,
    Shard,
    TensorJob,
    bulk_dtype,
    lay_out,
    lay_out_modules,
    network_shards,
)
from mergegate.merge_core.plan.mixture import plan_mixture
from mergegate.merge_core.plan.outline import OutputSpec, config_of_slices, outline, with_head
from mergegate.merge_core.plan.tokenizers import with_turn_ends
from mergegate.merge_core.recipe import Recipe, load_recipe

# Prefix of the placeholder directory that a step's result has until it is written.
_STEP_PREFIX = "step:"


def plan_merge(recipe: Recipe, checkpoints: Mapping[str, Checkpoint]) -> MergePlan:
    """Plan the merge of ``recipe``.

    ``checkpoints`` holds an opened checkpoint for every reference in the recipe, by ``str(ref)``.

    Raises:
        InvalidInput: The checkpoints cannot be merged as the recipe requires: different shapes, missing tensors or
            layers, quantized weights, or missing parameter values.
    """
    plan, tables, problems = assemble(recipe, checkpoints)
    for problem in problems:
        if problem.severity == "block":
            raise problem.error()
    return with_findings(plan, tables, problems)


def with_findings(plan: MergePlan, tables: Mapping[str, Checkpoint], problems: Sequence[Finding]) -> MergePlan:
    """Return ``plan`` with the warnings in ``problems`` and the inconsistencies of inputs and results as findings."""
    findings = [problem for problem in problems if problem.severity == "warn"]
    for part in (*plan.steps, plan):
        inconsistencies = [*unused_tensors(part, tables, set())]
        inconsistencies += self_consistency("the result", planned_checkpoint(part))
        for ref in part.recipe.own_references():
            inconsistencies += self_consistency(str(ref), tables[str(ref)])
        findings += (finding for finding in inconsistencies if finding.severity != "info")
    return replace(plan, findings=tuple(findings))


def single_experts(checkpoints: Mapping[str, Checkpoint]) -> dict[str, Checkpoint]:
    """Return ``checkpoints`` with fused experts split, so that a plan does not depend on the layout on disk."""
    return {name: split_experts(checkpoint) for name, checkpoint in checkpoints.items()}


def assemble(
    recipe: Recipe, checkpoints: Mapping[str, Checkpoint]
) -> tuple[MergePlan, dict[str, Checkpoint], list[Finding]]:
    """Return the plan, as complete as possible, all inputs with single experts by reference, and all problems.

    The inputs include the results of the recipe's steps.

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
    return replace(_assemble_one(recipe, tables, problems), steps=tuple(steps)), tables, problems


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
    builder = JobBuilder(recipe, donor, checkpoints, alignment, problems)
    jobs = [job for spec in outline(recipe, donor, checkpoints) if (job := builder.build(spec)) is not None]
    if recipe.router_repair is not None:
        problems += router_problems(recipe, checkpoints)
    config: Mapping[str, Any] = with_dtype(structure, bulk_dtype(jobs))
    if not prediction_tensors(donor).intersection(job.output.name for job in jobs):
        config, declared = without_predictions(config), config
        if config != declared and not recipe.drop_prediction_layers:
            found = "layers for multi-token prediction, but no stored tensor is one of them"
            expected = "a count that agrees with the weights"
            remedy = (
                "nothing to do: the result's count is 0; set base_model to a model that has these layers to get them"
            )
            problems.append(Finding("info", f"{name}: config.json", found, expected, remedy))
    shards = lay_out([job.output for job in jobs], donor)
    if modules.tensors:
        (module,) = recipe.modules  # Only recipes of whole models merge the weights of modules.
        (cut,) = module.slices
        builder = replace(builder, donor=modules.models[name], checkpoints=modules.models, alignment=None)
        specs = (OutputSpec(tensor, module, cut, (tensor,) * len(cut.sources), 0.0) for tensor in modules.tensors)
        module_jobs = [job for spec in specs if (job := builder.build(spec)) is not None]
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


def _outside_layers(checkpoint: Checkpoint) -> set[str]:
    """Return the names of the tensors outside the layers that every model of a class has."""
    names = (name for name in checkpoint.tensors if parse_layer_place(name) is None)
    return {name for name in names if is_head(name) or not is_optional(name)}


def plan_transplant(
    model: Checkpoint,
    donor: Checkpoint,
    tables: Mapping[str, StoredTensor],
    tokenizers: tuple[TokenizerDefinition, TokenizerDefinition],
) -> MergePlan:
    """Return the plan that gives ``model`` the tokenizer of ``donor`` and the token tables ``tables``.

    Raises:
        InvalidInput: The model cannot be planned.
    """
    size = next(iter(tables.values())).shape[0]

    def translate(content: Mapping[str, Any], donor_ids: Mapping[str, Any]) -> dict[str, Any]:
        moved, _ = follow_tokens(content, tokenizers[0].ids, tokenizers[1].ids)
        return {**moved, **{key: donor_ids[key] for key in SPECIAL_KEYS if key in donor_ids}}

    view = replace(
        model, tensors={**model.tensors, **tables}, config=with_vocabulary(translate(model.config, donor.config), size)
    )
    plan = plan_merge(load_recipe({"merge_method": PASSTHROUGH.name, "models": [{"model": "model"}]}), {"model": view})
    companions = plan.companions.only(lambda name: companion_kind(name) not in TEXT_KINDS)
    companions = companions.with_changes(donor.companions.only(lambda name: companion_kind(name) in TEXT_KINDS).sources)
    for checkpoint in (model, donor):
        if (content := checkpoint.companions.json(GENERATION)) is not None:
            donor_settings = donor.companions.json(GENERATION)
            donor_ids = donor.config if donor_settings is None else donor_settings
            merged_settings = {**content, **donor_ids} if checkpoint is donor else translate(content, donor_ids)
            companions = companions.with_changes({GENERATION: serialize_config(merged_settings)})
            break
    return replace(plan, tokenizer=donor, companions=companions, chat_templates=donor.chat_templates)
