"""Read the results in a verified release as typed values, for export to another tool.

The values are those of the files in ``evidence/``, bit for bit. Means and standard errors are computed from the
outcomes of the documents as an evaluation computes them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.evaluation import DocumentScore, Scores, TaskScore, by_task, score_table
from mergegate.tasks.gate import EVIDENCE_RECORD, EVIDENCE_TABLES, RELEASES, VerdictRecord, read_measurements
from mergegate.tasks.perplexity import DocumentLikelihood, Likelihoods, read_documents
from mergegate.tasks.publish.content import BOM, SUMS, read_document, variant_evidence
from mergegate.tasks.publish.targets import PublishedRelease
from mergegate.tasks.publish.targets.hub_release import HubRelease
from mergegate.tasks.store import Artifact

Role = Literal["release", "parent", "base", "merge", "earlier release", "unknown"]
LOCAL = "local"  # namespace of models that are not on the Hub and have no known organization


@dataclass(frozen=True)
class ExportedTask:
    """Results of one model on one task.

    Attributes:
        name: Name in the profile: a task of lm-eval, a group, or a built-in task.
        leaves: Scores by document, for each task below a group. A task that is not a group is its own leaf.
        tables: Mean and standard error under each metric, by leaf.
        lm_eval_version: Version of lm-eval.
        is_built_in: Whether mergegate's own task scored the model, and not lm-eval.
        data_digest: Sha256 over documents, examples, templates and settings. Empty if unknown.
        datasets: Datasets on the Hub, as (id, configuration, commit). Empty for local data.
        first_document: Position of the first document in the random order of the task, or None if unknown.
        seed: Seed of that order.
    """

    name: str
    leaves: Mapping[str, tuple[DocumentScore, ...]]
    tables: Mapping[str, tuple[TaskScore, ...]]
    lm_eval_version: str
    is_built_in: bool
    data_digest: str
    datasets: tuple[tuple[str, str, str], ...]
    first_document: int | None
    seed: int


@dataclass(frozen=True)
class ExportedText:
    """Likelihood of the held-out text under one model."""

    total: Likelihoods
    documents: tuple[DocumentLikelihood, ...]


@dataclass(frozen=True)
class ExportedModel:
    """A model in the evidence, with its results.

    Attributes:
        name: Name in the run, which the verdict uses, such as ``merge``.
        role: ``release`` for the model that is released.
        id: Id of the form ``org/name``.
        reference: Reference in the recipe, or that of the release. Never a path of this machine.
        identity: Commit on the Hub, or sha256. Empty if the release does not state it.
        variant: Type of the quantized variant whose evidence this is. Empty in the release of a merge.
    """

    name: str
    role: Role
    id: str
    reference: str
    identity: str
    tasks: tuple[ExportedTask, ...]
    text: ExportedText | None = None
    variant: str = ""


@dataclass(frozen=True)
class ExportedRelease:
    """All results in a release.

    Attributes:
        name: Name of the release.
        version: Digest of its SHA256SUMS.
        base_models: References of the models that it was merged from.
        versions: Versions of the libraries, by name.
        scoring: Settings of the evaluation. Empty if the release does not state them.
        prompts: Prompt settings that differ from ``scoring``, by task.
    """

    name: str
    version: str
    models: tuple[ExportedModel, ...]
    base_models: tuple[str, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    scoring: Mapping[str, Any] = field(default_factory=dict)
    prompts: Mapping[str, str] = field(default_factory=dict)


def read_release_results(
    release: PublishedRelease,
    files: Mapping[str, tuple[int, str]],
    statement: Mapping[str, Any],
    organization: str | None,
) -> ExportedRelease:
    """Return the results in a release, whose files have been verified.

    Args:
        release: The release.
        files: Size and sha256 of each file.
        statement: Its provenance.
        organization: Publisher. None: the supplier in the bill of materials, or the namespace on the Hub.

    Raises:
        InvalidInput: The release has no evidence.
        Refused: The evidence does not have the form that mergegate writes.
    """
    records = [name for name in sorted(files) if re.fullmatch(r"evidence/([^/]+/)?gate\.json", name)]
    if not records:
        raise InvalidInput(
            release.reference,
            found=f"no file {EVIDENCE_RECORD}, so there are no results to export",
            expected="a release with the outcomes of its documents",
            remedy="publish the merge again with this version of mergegate",
        )
    try:
        return _read(release, files, statement, organization, records)
    except (ArithmeticError, AttributeError, InvalidInput, LookupError, TypeError, ValueError) as error:
        detail = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise Refused(
            release.reference,
            found=f"evidence that cannot be read: {detail}",
            expected="the files in evidence/ as mergegate writes them",
            remedy="download the release again from its target, and ask its publisher if the error persists",
        ) from None


def _read(
    release: PublishedRelease,
    files: Mapping[str, tuple[int, str]],
    statement: Mapping[str, Any],
    organization: str | None,
    records: Sequence[str],
) -> ExportedRelease:
    predicate = statement["predicate"]
    definition = predicate["buildDefinition"]
    evaluation = predicate.get("mergegate_evaluation", {})
    dependencies = {
        item["name"]: item for item in definition["resolvedDependencies"] if item["annotations"]["role"] != "text"
    }
    bom = read_document(release.read(BOM), BOM) if BOM in files else {}
    component = bom.get("metadata", {}).get("component", {})
    references = evaluation.get("models") or {  # Releases of earlier versions name their parents in the BOM only.
        str(item.get("bom-ref", "")).removeprefix("parent:"): str(item["name"])
        for item in component.get("pedigree", {}).get("ancestors", ())
    }
    hub_id = release.repo if isinstance(release, HubRelease) else ""
    stated_supplier = component.get("supplier", {}).get("name") or bom.get("metadata", {}).get("supplier", {}).get(
        "name"
    )
    publisher = organization or stated_supplier or hub_id.partition("/")[0]
    name = str(component.get("name") or definition["externalParameters"]["profile"])
    namespace = portable_name(publisher) if publisher else LOCAL
    version = files[SUMS][1]
    is_built_in = "text" not in evaluation.get("task_forms", ["text"])
    models: list[ExportedModel] = []
    for path in records:
        variant = path.removeprefix("evidence/").rpartition("/")[0]
        record = VerdictRecord.model_validate(read_document(release.read(path), path))
        merged = record.inputs["plan"]["merged"]
        names = {table: variant_evidence(table, variant) if variant else table for table in EVIDENCE_TABLES}
        tables = {table: release.read(name) for table, name in names.items() if name in files}
        for model, tasks, text in _measured_models(record, tables, is_built_in):
            reference, identity = references.get(model, ""), ""
            role: Role = "earlier release" if model in RELEASES else "unknown"
            model_id = f"{LOCAL}/{portable_name(model)}"
            if model == merged:
                own_id = f"{namespace}/{portable_name(f'{name}-{variant}' if variant else name)}"
                is_address = bool(hub_id) or "://" in release.reference
                role, model_id = "release", hub_id or own_id
                reference, identity = release.reference if is_address else name, version
            elif variant:
                (merge,) = dependencies.values()
                role, model_id = "merge", f"{namespace}/{portable_name(merge['name'])}"
                reference, identity = merge["name"], merge["digest"]["sha256"]
            elif reference in dependencies:
                parent = dependencies[reference]
                package = re.fullmatch(r"pkg:huggingface/([^/@]+/[^/@]+)@.*", parent["uri"])
                role, model_id = parent["annotations"]["role"], package[1] if package else model_id
                identity = parent["digest"].get("gitCommit") or parent["digest"]["sha256"]
            models.append(ExportedModel(model, role, model_id, reference, identity, tasks, text, variant))
    versions = definition.get("internalParameters", {}).get("versions", {})
    return ExportedRelease(
        name=name,
        version=version,
        models=tuple(models),
        base_models=tuple(dependencies),
        versions={str(library): str(number) for library, number in versions.items()},
        scoring=evaluation.get("scoring") or {},
        prompts=evaluation.get("prompts") or {},
    )


def _measured_models(
    record: VerdictRecord, tables: Mapping[str, bytes], is_built_in: bool
) -> Iterator[tuple[str, tuple[ExportedTask, ...], ExportedText | None]]:
    """Yield name, tasks and likelihoods of every model in a record, in the order of the record."""
    with TemporaryDirectory(prefix="mergegate-export-") as scratch:
        scores, likelihoods = read_measurements(record, tables, Path(scratch))
        for model in dict.fromkeys((*scores, *likelihoods)):
            tasks = tuple(
                _exported_task(task, measured.rows, measured.parts, is_built_in)
                for task, measured in by_task(model, scores.get(model, ())).items()
            )
            artifact = likelihoods.get(model)
            text = ExportedText(artifact.value, read_documents(artifact.directory)) if artifact else None
            yield model, tasks, text


def _exported_task(
    task: str, rows: Sequence[DocumentScore], parts: Sequence[Artifact[Scores]], is_built_in: bool
) -> ExportedTask:
    leaves: dict[str, list[DocumentScore]] = {}
    for row in rows:
        leaves.setdefault(row.task, []).append(row)
    if not all(math.isfinite(row.outcome) for row in rows):
        raise ValueError(f"a score of {task} is not a finite number")
    value = parts[0].value
    data = value.data.get(task)
    return ExportedTask(
        name=task,
        leaves={leaf: tuple(sorted(each, key=lambda row: row.doc_id)) for leaf, each in leaves.items()},
        tables={leaf: score_table(leaf, each) for leaf, each in leaves.items()},
        lm_eval_version=value.lm_eval_version,
        is_built_in=is_built_in,
        data_digest=data.digest if data else "",
        datasets=tuple((each.path, each.name or "", each.revision) for each in data.sources) if data else (),
        first_document=value.part.first if value.part else None,
        seed=value.seed,
    )


def portable_name(text: str) -> str:
    """Return ``text`` as one component of a path that every system accepts."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:80].rstrip(".") or "model"
    return f"{name}-" if name.lower() in ("con", "prn", "aux", "nul") else name
