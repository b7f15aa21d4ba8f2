"""Check compatibility: find everything that can be wrong with a merge, from headers and configurations alone.

Besides the findings of the plan, these are:

* **Code** that a release would contain: Python files of a parent, and references to code in its configurations.
  mergegate always loads models with ``trust_remote_code`` off. But users of the release may switch it on, because its
  files require it. So each piece of code is a finding, which a profile accepts by name. The one exception is
  ``trusted`` code: the confined model process runs the code of a repository that the profile names at its commit, also
  for a merge that gets its code from such a repository.
* **The kind of model**: a profile may judge a merge only in ways that fit its kind.
* **Tensors** of each model, and of the planned merge, that differ from the tensors of its class. This finds the errors
  that all models of a merge share: a weight that an exporter left out or wrote several times, or a configuration that
  describes another network.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from mergegate.merge_core import (
    Checkpoint,
    Finding,
    MergePlan,
    PlannedMerge,
    Recipe,
    open_checkpoint,
    plan_with_findings,
)
from mergegate.merge_core.architecture import TEXT_GENERATOR, ModelKind, TaskForm, find_kind, is_of_head, is_optional
from mergegate.merge_core.checkpoint import class_of, is_head, is_module_file, list_uncopied, ties_embeddings
from mergegate.merge_core.checkpoint.vocabulary import TOKENIZER_BOUNDS
from mergegate.merge_core.errors import (
    InvalidInput,
    MergegateError,
    Severity,
    group_findings,
    pip_command,
    to_printable,
    worst_first,
)
from mergegate.merge_core.parsing import open_plain, read_json, read_plain
from mergegate.merge_core.plan import network_shards
from mergegate.tasks.base.stage import StageValue, value_stage
from mergegate.tasks.base.store import NotInKey, digest
from mergegate.tasks.models.checkpoints import (
    Differences,
    ResolvedAdapter,
    ResolvedCheckpoint,
    adapter_findings_of_parents,
    compare_with_classes,
    open_parent,
    require_combinable,
    size_of_adapter,
)
from mergegate.tasks.preflight.segmentation import add_segmentation_shares, tokenizer_class_findings

_WEIGHTS = (".safetensors", ".bin")
_MAX_COMPANION_BYTES = 256 << 20
_MAX_LISTED = 10  # Largest number of further problems in one message.


class HeaderDigest(BaseModel, frozen=True, extra="forbid"):
    """Digest of everything that the check reads from one parent.

    For a directory, it covers the names and sizes of all files and the content of the small ones. For a commit on the
    Hub, it covers the commit's file list.
    """

    ref: str
    digest: str


class Compatibility(StageValue):
    """All findings together, and the size of the job in bytes. Sizes are zero if a finding blocks.

    For an adapter that combines other adapters, ``tensors``, ``bytes_read`` and ``bytes_written`` describe the adapter
    itself.
    """

    remarks: tuple[Finding, ...]
    tensors: int
    bytes_read: int
    bytes_written: int
    # Space for the merged checkpoint, including results of steps that exist until the end. For an adapter, space for it
    # and for the merged model, which is written for programs that cannot load adapters.
    disk: int
    block: int  # Size of the engine's largest block in memory; a merge holds several.
    gpu_block: int  # Size of the engine's largest block on a GPU.
    largest_bytes: int  # Size of the stored weights of the largest model to evaluate.
    largest_parameters: int  # Number of parameters of that model.
    # Kind of the merged model, from its planned configuration and files. If a finding blocks, it may be unknown.
    kind: Annotated[ModelKind, NotInKey, Field(exclude_if=lambda kind: kind == TEXT_GENERATOR)] = TEXT_GENERATOR
    # Memory in addition to blocks, for methods that work on matrices. Other methods need none.
    held: Annotated[int, Field(exclude_if=lambda held: held == 0)] = 0

    def blocking(self) -> tuple[Finding, ...]:
        return tuple(remark for remark in self.remarks if remark.severity == "block")

    def summary(self) -> str:
        if groups := group_findings(self.blocking()):
            more = f" (and {len(groups) - 1} more)" if len(groups) > 1 else ""
            return f"{groups[0].first}{more}"
        warnings = sum(remark.severity == "warn" for remark in self.remarks)
        size = f"{self.tensors} tensors, {self.bytes_written / 1e6:,.1f} MB to write"
        return size + (f", {warnings} warnings" if warnings else "")

    def refusal(self) -> MergegateError | None:
        blocking = self.blocking()
        if not blocking:
            return None
        worst, *others = group_findings(blocking)
        also = "".join(f"\n  also: {group.first}" for group in others[:_MAX_LISTED])
        if len(others) > _MAX_LISTED:
            also += f"\n  also: {len(others) - _MAX_LISTED} more; run 'mergegate check' to see all"
        return replace(worst.first, found=worst.first.found + also).refusal()


def header_digests(parents: Sequence[ResolvedCheckpoint]) -> tuple[HeaderDigest, ...]:
    """Return one digest per parent of names, sizes, headers, small files and output heads, which the check reads."""
    digests = []
    for parent in parents:
        files = _files_digest(parent)
        if parent.adapter:  # Its findings also depend on its card and on whether its factors are zero.
            files = digest([files, _files_digest(parent.adapter), *map(str, parent.adapter.findings(parent.ref))])
        digests.append(HeaderDigest(ref=parent.ref, digest=files))
    return tuple(digests)


@value_stage("compat", version=10)
def check_compatibility(
    recipe: Recipe,
    metadata: Sequence[HeaderDigest],
    parents: Sequence[ResolvedCheckpoint],
    accepted_code: tuple[str, ...] | None = None,
    accepted_tokenizers: tuple[str, ...] = (),
) -> Compatibility:
    """Return findings about the recipe and its parents, before any weight is read or downloaded.

    ``accepted_code`` names the code that the profile allows in the release. None means that the profile has no such
    setting, so code only leads to warnings. ``accepted_tokenizers`` names the parts of tokenizers that may differ.

    Raises:
        InvalidInput: A parent cannot be a checkpoint.
        Refused: A parent cannot be read. This is not stored as a finding, because the Hub may respond next time.
    """
    from mergegate.merge_core.engine import EngineSettings
    from mergegate.merge_core.engine.forecast import estimate_needs

    require_combinable(recipe, parents)
    planned, checkpoints = plan_cached(recipe, parents, metadata, accepted_tokenizers)
    code = custom_code_findings(planned.plan, accepted_code) if planned.plan else ()
    code = (*code, *tokenizer_class_findings(planned.plan, checkpoints))
    findings = worst_first(
        [*add_segmentation_shares(planned), *adapter_findings_of_parents(parents, checkpoints), *code]
    )
    if planned.plan and not planned.blocking:  # Without a plan, the reason is already known.
        findings = worst_first([*findings, *skeleton_findings(planned.plan, checkpoints)])
    sizes = {field: 0 for field in Compatibility.model_fields if field not in ("remarks", "kind")}
    kind = find_kind(planned.plan.config, planned.plan.companions) if planned.plan else TEXT_GENERATOR
    if (plan := planned.plan) and all(finding.severity != "block" for finding in findings):
        # Disk and blocks do not depend on the number of cores or the kind of device.
        needs = estimate_needs(plan, EngineSettings(), cores=1, device="cpu", companion_bytes=plan.companions.nbytes())
        sizes = {"disk": needs.disk, "block": needs.block, "gpu_block": needs.gpu_block, "held": needs.held_bytes}
        sizes |= {"tensors": len(plan.jobs), "bytes_read": plan.bytes_read, "bytes_written": plan.bytes_written}
        evaluated = [
            (checkpoint.nbytes, sum(tensor.numel for tensor in checkpoint.tensors.values()))
            for checkpoint in checkpoints.values()
        ]
        largest = max([*evaluated, (plan.bytes_written, plan.parameters)])
        sizes |= {"largest_bytes": largest[0], "largest_parameters": largest[1]}
        if adapter := size_of_adapter(recipe, parents):
            sizes |= {"tensors": adapter.tensors, "bytes_read": adapter.read, "bytes_written": adapter.nbytes}
            sizes["disk"] += adapter.nbytes + adapter.scratch
    return Compatibility(remarks=tuple(findings), kind=kind, **sizes)


Planned = tuple[PlannedMerge, Mapping[str, Checkpoint]]
# The last plan of this process, by its inputs, so that a check that was not cached does not need a second plan.
_last_plan: dict[str, Planned] = {}


def plan_cached(
    recipe: Recipe,
    parents: Sequence[ResolvedCheckpoint],
    metadata: Sequence[HeaderDigest],
    accepted_tokenizers: Sequence[str] = (),
) -> Planned:
    """Return the plan with its findings, and the headers of the parents by reference.

    If nothing has changed since the last plan of this process, including the header digests ``metadata``, it is
    returned again.
    """
    directories = [
        (str(parent.directory), str(parent.adapter.directory) if parent.adapter else "") for parent in parents
    ]
    key = digest([recipe.canonical(), str(recipe.directory), directories, metadata, sorted(accepted_tokenizers)])
    if key not in _last_plan:
        checkpoints = {parent.ref: open_parent(parent) for parent in parents}
        planned = plan_with_findings(recipe, checkpoints, accepted_tokenizers)
        _last_plan.clear()
        _last_plan[key] = planned, checkpoints
    return _last_plan[key]


def _files_digest(parent: ResolvedCheckpoint | ResolvedAdapter) -> str:
    running = hashlib.sha256()
    if parent.snapshot:
        for name in parent.snapshot.deciding:
            file = parent.snapshot.files[name]
            running.update(f"{name}\0{file.size}\0{file.sha256 or file.blob}\0".encode())
        return running.hexdigest()
    for name in parent.deciding:
        path = parent.directory / name
        running.update(f"{name}\0{path.stat().st_size}\0".encode())
        if path.suffix not in _WEIGHTS or is_module_file(name):
            running.update(read_plain(path, _MAX_COMPANION_BYTES, within=parent.directory))
            continue
        # The bytes that describe a weight file's content: a safetensors header, or the start of other formats.
        with open_plain(path) as weights:
            start = weights.read(8)
            # The checkpoint reader rejects a wrong length. Here the length must only not exhaust the memory.
            length = min(int.from_bytes(start, "little"), os.fstat(weights.fileno()).st_size, 1 << 27)
            running.update(start + (weights.read(length) if path.suffix == ".safetensors" else b""))
    for name in list_uncopied(parent.directory):
        running.update(f"{name}\0".encode(errors="surrogateescape"))
    # The check answers one question from weights: whether a stored output head is the embedding. It asks only if
    # config.json does not declare untied embeddings.
    with suppress(InvalidInput):  # An adapter, or a damaged checkpoint: the check itself reports that.
        if ties_embeddings(read_json(parent.directory / "config.json")) is not False:
            heads = filter(is_head, open_checkpoint(parent.directory).tensors)
            running.update("\0".join(heads).encode())
    return running.hexdigest()


_CONFIGURATIONS = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


def custom_code_findings(plan: MergePlan, accepted_code: Collection[str] | None) -> tuple[Finding, ...]:
    """Return one finding for each code file and each reference to code. A finding blocks unless the code is accepted.

    ``accepted_code`` names the code that the profile accepts. None means that no profile exists, so code leads only to
    a warning.
    """
    donor = plan.donor.directory.name
    code = [(f"{donor}: {name}", name) for name in plan.companions if name.endswith(".py")]
    code += _auto_map_references(f"{donor}: config.json", plan.config)
    for name in _CONFIGURATIONS:
        if (content := plan.companions.json(name, TOKENIZER_BOUNDS)) is not None:
            source = plan.companions.sources[name]
            owner = donor if isinstance(source, bytes) else source.name
            code += _auto_map_references(f"{owner}: {name}", content)
    return tuple(
        Finding("info", location, f"the code {name}, which the profile accepts")
        if accepted_code is not None and name in accepted_code
        else Finding(
            "warn" if accepted_code is None else "block",
            location,
            found=f"the code {name}, which would be part of the release",
            expected="a model without code of its own",
            remedy=f"review the code, then set checks.code.accepted: [{name}] in the profile. mergegate runs it only "
            "if checks.code.trusted names its repository at its commit",
        )
        for location, name in dict.fromkeys(code)
    )


def _auto_map_references(location: str, configuration: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the location and name of each class that transformers would load from a code file or another repository."""
    pending = [configuration.get("auto_map")]
    while pending:
        reference = pending.pop()
        if isinstance(reference, str):
            yield f"{location}: auto_map", reference
        elif isinstance(reference, Mapping):
            pending += reference.values()
        elif isinstance(reference, list):
            pending += reference


# Ability of a model that a part of a profile needs: a type of task, or next-token prediction (``ModelKind.is_causal``).
Ability = TaskForm | Literal["next tokens"]

NEXT_TOKENS: Literal["next tokens"] = "next tokens"
_FORM_NOUNS: Mapping[TaskForm, str] = {
    "text": "text task",
    "pictures": "picture task",
    "retrieval": "retrieval task",
    "transcription": "transcription task",
}
# A guard for a form of task, as a user would write it.
EXAMPLES: Mapping[TaskForm, str] = {
    "text": "{task: gsm8k, guarded_by: best parent, max_drop: 3}",
    "pictures": "{task: questions_about_pictures.yaml, guarded_by: best parent}",
    "retrieval": "{task: {kind: retrieval, data: queries.jsonl, metric: ndcg@10}, guarded_by: best parent}",
    "transcription": "{task: {kind: transcription, data: recordings.jsonl}, guarded_by: best parent}",
}
# Package of each library that loads models and that mergegate does not require, and the extra that installs it.
_EXTRAS: Mapping[str, tuple[str, str]] = {"sentence-transformers": ("sentence_transformers", "embeddings")}


@dataclass(frozen=True)
class KindDemand:
    """A part of a profile that only some kinds of models support."""

    location: str  # Key in the profile, such as ``evaluate.tasks: arc_easy``.
    noun: str  # Noun for the part, with an article: ``a text task``.
    ability: Ability  # Ability that the part needs.
    remedy: str = ""  # How to fix the profile. Default: judge the model by a task that fits.

    def fits(self, kind: ModelKind) -> bool:
        """Return whether a model of this kind has the ability."""
        return kind.is_causal if self.ability == NEXT_TOKENS else self.ability in kind.task_forms


def kind_findings(kind: ModelKind, demands: Sequence[KindDemand], model: str = "the merge") -> Iterator[Finding]:
    """Yield a blocking finding for each demand of a profile that the kind of ``model`` does not meet.

    A kind that mergegate cannot evaluate has one finding. A missing library that loads the merge is a finding too.
    """
    if not demands:
        return  # The profile only merges.
    if not kind.task_forms:
        task = f" ({kind.pipeline_tag})" if kind.pipeline_tag else ""
        yield Finding(
            "block",
            f"the kind of {model}",
            found=f"{kind.noun}{task}, which mergegate cannot evaluate",
            expected="a model that mergegate can evaluate (docs/explanation/kinds-of-models.md)",
            remedy="merge it without a verdict: mergegate merge RECIPE DIRECTORY",
            is_invalid=True,
        )
        return
    for demand in demands:
        if not demand.fits(kind):
            yield Finding(
                "block",
                demand.location,
                found=f"{demand.noun}, but {model} is {kind.noun}",
                expected=_describe_ability(kind, demand.ability),
                remedy=demand.remedy
                or f"add a guard under evaluate.tasks, for example: - {EXAMPLES[kind.task_forms[0]]}",
                cause=f"the kind of {model}",
                is_invalid=True,
            )
    package, extra = _EXTRAS.get(kind.loading_library, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        yield Finding(
            "block",
            f"the kind of {model}",
            found=f"{kind.noun}, but {kind.loading_library}, which loads it, is not installed",
            expected="the extra that evaluates such models",
            remedy=pip_command(f"mergegate[{extra}]"),
            is_invalid=True,
        )


def _describe_ability(kind: ModelKind, ability: Ability) -> str:
    if ability == NEXT_TOKENS:
        return f"a model that predicts each token from the tokens before it; this one is {describe_judging(kind)}"
    return " or ".join(f"a {_FORM_NOUNS[form]}" for form in kind.task_forms)


def describe_judging(kind: ModelKind) -> str:
    """Return how a kind of model is judged, such as ``judged by retrieval tasks``."""
    if not kind.task_forms:
        return "which mergegate merges but cannot evaluate"
    return f"judged by {' and '.join(f'{_FORM_NOUNS[form]}s' for form in kind.task_forms)}"


_EXPORT = "save the model again with the library that trained it, or download it again"


def skeleton_findings(plan: MergePlan, checkpoints: Mapping[str, Checkpoint]) -> list[Finding]:
    """Return a finding for each tensor in which a model differs from its class.

    The result of ``plan`` is compared too. It is reported only if no model has a finding.
    """
    models: dict[str, tuple[Mapping[str, Any], list[Any]]] = {
        name: (checkpoint.config, list(checkpoint.tensors.values())) for name, checkpoint in checkpoints.items()
    }
    if plan.recipe.output is None:  # An adapter is no model.
        stored = [tensor for shard in network_shards(plan.shards) for tensor in shard.stored]
        models["the result"] = (plan.config, stored)
    findings: list[Finding] = []
    for name, differences in zip(models, compare_with_classes(list(models.values())), strict=True):
        if name in checkpoints or not findings:
            findings += _findings(name, models[name][0], differences)
    return findings


def _findings(model: str, config: Mapping[str, Any], differences: Differences) -> Iterator[Finding]:
    class_name = to_printable(class_of(config))
    if differences.reason:
        reason = to_printable(differences.reason)
        expected = f"tensors of the class {class_name}"
        yield Finding("info", f"{model}: tensors", f"not compared with their class: {reason}", expected)
    # Code of the model may define another class of this name.
    worst: Severity = "warn" if config.get("auto_map") else "block"
    rows: list[tuple[Severity, str, str, str]] = []
    expected = f"every tensor that {class_name} builds from config.json"
    for name in differences.missing:
        # A head or a pooler may be new. Training alone uses tensors such as a mask.
        severity = "warn" if is_of_head(name) and not is_head(name) else worst
        rows.append((severity, name, f"missing: {class_name} would fill it with random numbers", expected))
    for name, stored, built in differences.shapes:
        rows.append(
            (worst, name, f"shape {list(stored)}", f"{list(built)}, as {class_name} builds it from config.json")
        )
    for name in differences.unjoined:
        found = f"{class_name} cannot join the stored tensors of this parameter"
        rows.append((worst, name, found, "all of them, such as one for each expert, with one shape"))
    for name in filter(lambda name: not is_optional(name), differences.ignored):
        rows.append(("info", name, f"{class_name} does not load this tensor", f"only tensors of {class_name}"))
    for severity, name, found, expected in rows:
        remedy = "nothing to do, unless other software needs it" if severity == "info" else _EXPORT
        cause = f"{model}: {severity}, {found.partition(' ')[0]}"
        yield Finding(severity, f"{model}: {to_printable(name)}", found, expected, remedy, cause)
