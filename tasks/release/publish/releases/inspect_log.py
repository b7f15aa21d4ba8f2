"""Write the results of a release as logs of inspect_ai, one per model and task, in its JSON format.

The values are those of the files in ``evidence/``, bit for bit. Means and standard errors are computed from the
outcomes of the documents as an evaluation computes them. The evidence has no texts, so ``input`` and ``target`` of a
sample state the hash of what is withheld. The scorers of a log are lm-eval's labels of the metrics, such as
``acc,none``, with the metrics ``mean`` and ``stderr`` of inspect_ai, which can compute them again from the samples. The
held-out text is a task of its own, ``perplexity``, whose scores are those of the scorer ``perplexity`` of inspect_ai.

The format requires a date, and a release contains none. The logs are therefore not part of a release. Anyone can create
them from the release, and they state the time of the export.

Source: inspect_ai 0.3.285, ``inspect_ai.log.EvalLog``, version 2 of the format.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.quality.evaluation import DocumentScore, Scores, by_task, score_table
from mergegate.tasks.quality.gate import (
    EVIDENCE_RECORD,
    EVIDENCE_TABLES,
    RELEASES,
    VerdictRecord,
    read_measurements,
    versions_here,
)
from mergegate.tasks.quality.perplexity import DocumentLikelihood, Likelihoods, read_documents
from mergegate.tasks.release.publish.content import BOM, SUMS, read_document, variant_evidence
from mergegate.tasks.release.publish.targets import PublishedRelease
from mergegate.tasks.release.publish.targets.hub import HubRelease

Role = Literal["release", "parent", "base", "merge", "earlier release", "unknown"]
LOCAL = "local"  # namespace of models that are not on the Hub and have no known organization
_ENDS = {"length": "max_tokens", "context": "model_length", "": "unknown"}  # to ``stop_reason``; others: 'stop'
_PERPLEXITY = "perplexity"


@dataclass(frozen=True)
class ExportedTask:
    """Results of one model on one task."""

    name: str  # name in the profile: a task of lm-eval, a group, or a built-in task
    # Scores by document, for each task below a group. A task that is not a group is its own leaf.
    leaves: Mapping[str, Sequence[DocumentScore]]
    scores: Scores  # what was measured, with its data and versions


_Text = tuple[Likelihoods, tuple[DocumentLikelihood, ...]]
_Measured = tuple[str, tuple[ExportedTask, ...], _Text | None]


@dataclass(frozen=True)
class ExportedModel:
    """A model in the evidence, with its results."""

    name: str  # name in the run, which the verdict uses, such as ``merge``
    role: Role  # ``release`` for the model that is released
    id: str  # id of the form ``org/name``
    reference: str  # reference in the recipe, or that of the release. Never a path of this machine.
    identity: str  # commit on the Hub, or sha256. Empty if the release does not state it.
    tasks: tuple[ExportedTask, ...]
    text: _Text | None = None  # likelihood of the held-out text, in total and by document
    variant: str = ""  # type of the quantized variant whose evidence this is. Empty in the release of a merge.


@dataclass(frozen=True)
class ExportedRelease:
    """All results in a release."""

    name: str  # name of the release
    version: str  # digest of its SHA256SUMS
    models: tuple[ExportedModel, ...]
    base_models: tuple[str, ...]  # references of the models that it was merged from
    is_built_in: bool  # whether mergegate's own tasks scored the models, and not lm-eval
    versions: Mapping[str, str] = field(default_factory=dict)  # versions of the libraries, by name
    # Settings of the evaluation. Empty if the release does not state them.
    scoring: Mapping[str, Any] = field(default_factory=dict)
    prompts: Mapping[str, str] = field(default_factory=dict)  # prompt settings that differ from ``scoring``, by task


def read_release_results(
    release: PublishedRelease,
    files: Mapping[str, tuple[int, str]],
    statement: Mapping[str, Any],
    organization: str | None,
) -> ExportedRelease:
    """Return the results in a release, whose files have been verified. ``statement`` is its provenance.

    ``organization`` is the publisher. None: the supplier in the bill of materials, or the namespace on the Hub.
    """
    records = [name for name in sorted(files) if re.fullmatch(r"evidence/([^/]+/)?gate\.json", name)]
    if not records:
        raise InvalidInput(
            release.reference,
            found=f"no file {EVIDENCE_RECORD}, so there are no results to export",
            expected="a release with the outcomes of its documents",
            remedy="publish the merge again with this version of mergegate",
        )
    with _explained_errors(release.reference):
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
        models: list[ExportedModel] = []
        for path in records:
            variant = path.removeprefix("evidence/").rpartition("/")[0]
            record = VerdictRecord.model_validate(read_document(release.read(path), path))
            merged = record.inputs["plan"]["merged"]
            names = {table: variant_evidence(table, variant) if variant else table for table in EVIDENCE_TABLES}
            tables = {table: release.read(name) for table, name in names.items() if name in files}
            for model, tasks, text in _measured_models(record, tables):
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
            is_built_in="text" not in evaluation.get("task_forms", ["text"]),
            versions={str(library): str(number) for library, number in versions.items()},
            scoring=evaluation.get("scoring") or {},
            prompts=evaluation.get("prompts") or {},
        )


@contextmanager
def _explained_errors(reference: str) -> Iterator[None]:
    """Raise Refused for evidence in another form than mergegate writes, which can cause any of these errors."""
    try:
        yield
    except (ArithmeticError, AttributeError, InvalidInput, LookupError, TypeError, ValueError) as error:
        detail = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise Refused(
            reference,
            found=f"evidence that cannot be read: {detail}",
            expected="the files in evidence/ as mergegate writes them",
            remedy="download the release again from its target, and ask its publisher if the error persists",
        ) from None


def _measured_models(record: VerdictRecord, tables: Mapping[str, bytes]) -> Iterator[_Measured]:
    """Yield name, tasks and likelihoods of every model in a record, in the order of the record."""
    with TemporaryDirectory(prefix="mergegate-export-") as scratch:
        scores, likelihoods = read_measurements(record, tables, Path(scratch))
        for model in dict.fromkeys((*scores, *likelihoods)):
            tasks = []
            for task, measured in by_task(model, scores.get(model, ())).items():
                leaves: dict[str, list[DocumentScore]] = {}
                for row in measured.rows:
                    leaves.setdefault(row.task, []).append(row)
                if not all(math.isfinite(row.outcome) for row in measured.rows):
                    raise ValueError(f"a score of {task} is not a finite number")
                tasks.append(ExportedTask(task, leaves, measured.parts[0].value))
            artifact = likelihoods.get(model)
            yield model, tuple(tasks), (artifact.value, read_documents(artifact.directory)) if artifact else None


def portable_name(text: str) -> str:
    """Return ``text`` as one component of a path that every system accepts."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:80].rstrip(".") or "model"
    return f"{name}-" if name.lower() in ("con", "prn", "aux", "nul") else name


def inspect_logs(release: ExportedRelease, export_time: datetime) -> Iterator[tuple[str, bytes]]:
    """Yield relative path and content of every log. ``export_time`` is in UTC.

    A path follows inspect_ai's convention: time, task and id. It lists no other JSON files.
    """
    folders: dict[str, int] = {}
    time = export_time.isoformat(timespec="seconds")
    for model in release.models:
        folder = "/".join(portable_name(each) for each in (model.variant, model.name) if each)
        folders[folder] = folders.get(folder, 0) + 1
        folder += f"-{folders[folder]}" if folders[folder] > 1 else ""
        logs = _Logs(release, model, time)
        of_tasks = [logs.task_log(task, leaf) for task in model.tasks for leaf in task.leaves]
        for log in [*of_tasks, *([logs.text_log(*model.text)] if model.text else [])]:
            spec = log["eval"]
            task_name = portable_name(spec["task"]).replace("_", "-")
            path = f"{folder}/{time.replace(':', '-')}_{task_name}_{spec['eval_id']}.json"
            yield path, (json.dumps(log, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


@dataclass(frozen=True)
class _Logs:
    """Logs of one model in a release, which was exported at ``time``."""

    release: ExportedRelease
    model: ExportedModel
    time: str

    def task_log(self, task: ExportedTask, leaf: str) -> dict[str, Any]:
        measured, rows = task.scores, sorted(task.leaves[leaf], key=lambda row: row.doc_id)
        table, data = score_table(leaf, task.leaves[leaf]), measured.data.get(task.name)
        documents: dict[int, list[DocumentScore]] = {}
        for row in rows:
            documents.setdefault(row.doc_id, []).append(row)
        scorers, scores = [], []
        for score in table:
            notes = {"higher_is_better": score.higher_is_better}
            scorers.append(_scorer(score.metric, ("mean", "stderr"), notes))
            values = {"mean": score.score, "stderr": score.stderr}
            scores.append(_score(score.metric, score.n, len(documents), values, notes))
        sources = data.sources if data else ()
        metadata = {
            "task": task.name,
            "lm_eval_version": measured.lm_eval_version,
            "library": "mergegate" if self.release.is_built_in else "lm_eval",
            "higher_is_better": {score.metric: score.higher_is_better for score in table},
            "data_digest": (data.digest if data else "") or None,
            "datasets": [{"id": each.path, "config": each.name or "", "revision": each.revision} for each in sources],
            "sample": {"seed": measured.seed, "first_document": measured.part.first if measured.part else None},
            "prompt_settings": self.release.prompts.get(task.name),
        }
        paths = {each.path for each in sources}
        dataset = (paths.pop() if len(paths) == 1 else leaf, list(documents))
        spec = self._spec(leaf, (data.digest[:16] if data else "") or 0, dataset, scorers, metadata)
        budgets = {row.budgets[-1] for row in rows if row.budgets}
        spec["model_generate_config"] = {"max_tokens": min(budgets)} if len(budgets) == 1 else {}
        return _log(spec, [_task_sample(spec["model"], each) for each in documents.values()], scores)

    def text_log(self, total: Likelihoods, documents: Sequence[DocumentLikelihood]) -> dict[str, Any]:
        """Return the log of the held-out text. A document without a finite likelihood has no score."""
        finite = [row for row in documents if math.isfinite(row.loglik)]
        metrics = {} if total.perplexity is None else {"perplexity_per_token": total.perplexity}
        if total.perplexity is not None:
            per_document = math.fsum(-row.loglik / row.tokens for row in finite) / len(finite)
            metrics["perplexity_per_seq"] = math.exp(min(700.0, per_document))
        notes: dict[str, object] = {"higher_is_better": False}
        scorer = _scorer(_PERPLEXITY, ("perplexity_per_token", "perplexity_per_seq"), notes)
        notes = {**notes, "bits_per_byte": total.bits_per_byte}
        score = _score(_PERPLEXITY, len(finite), len(documents), metrics, notes)
        metadata = {"library": "mergegate", "higher_is_better": {_PERPLEXITY: False}}
        fields = ("tokens", "bytes", "loglik", "bits_per_byte", "vocabulary", "window")
        metadata |= {name: getattr(total, name) for name in fields}
        dataset = ("held-out text", [row.doc_id for row in documents])
        spec = self._spec(_PERPLEXITY, 0, dataset, [scorer], metadata)
        samples = []
        for row in documents:
            scores = {}
            if math.isfinite(row.loglik):
                counts = {"num_tokens": row.tokens, "sum_log_probs": row.loglik}
                scores = {_PERPLEXITY: {"value": -row.loglik / row.tokens, "metadata": counts}}
            about = {"doc_hash": row.hash, "bytes": row.bytes, **({"stratum": row.stratum} if row.stratum else {})}
            output = {"model": spec["model"], "choices": [], "completion": ""}
            samples.append(_sample(row.doc_id, (_withheld(row.hash), ""), output, scores, about))
        return _log(spec, samples, [score])

    def _spec(
        self,
        task: str,
        version: str | int,
        dataset: tuple[str, Sequence[int]],
        scorers: Sequence[Mapping[str, Any]],
        metadata: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the specification of an evaluation, whose ids are hashes over the release, the model and the task.

        ``dataset`` has the name of the data and the numbers of the documents.
        """
        release, model, scoring = self.release, self.model, self.release.scoring
        backend = scoring.get("backend")
        origin = {
            "release": release.name,
            "release_sha256": release.version,
            "model": model.name,
            "role": model.role,
            "reference": model.reference,
            "identity": model.identity or None,
            "variant": model.variant or None,
            "base_models": list(release.base_models) if model.role == "release" else [],
            "exported_by": f"mergegate {versions_here()['mergegate']}",
            "created": "time of the export, because a release contains no dates",
            "texts": "withheld: the evidence of a release contains hashes only",
        }
        task_id = _id(release.version, task, str(metadata.get("task", "")))
        return {
            "eval_id": _id(task_id, model.variant, model.name),
            "run_id": _id(release.version, model.variant, model.name),
            "created": self.time,
            "task": task,
            "task_id": task_id,
            "task_version": version,
            "task_args": {name: value for name, value in scoring.items() if value is not None},
            "dataset": {"name": dataset[0], "samples": len(dataset[1]), "sample_ids": dataset[1], "shuffled": False},
            "model": f"{backend}/{model.id}" if backend else model.id,
            "model_args": {"revision": model.identity} if model.identity else {},
            "config": {},
            "packages": dict(release.versions),
            "metadata": {**metadata, "mergegate": origin},
            "scorers": list(scorers),
        }


def _task_sample(model: str, rows: Sequence[DocumentScore]) -> dict[str, Any]:
    """Return the sample of one document, with a score for each metric."""
    first = rows[0]
    metadata: dict[str, Any] = {
        "doc_hash": first.doc_hash,
        "prompt_hash": first.prompt_hash,
        "target_hash": first.target_hash,
    }
    has_one_chance = len({row.chance for row in rows}) == 1
    metadata |= {"chance": first.chance} if has_one_chance else {}
    metadata |= {"cluster": first.cluster} if first.cluster else {}
    lengths = {"answer_tokens": first.answer_tokens, "thinking_tokens": first.thinking_tokens, "budgets": first.budgets}
    metadata |= {name: list(values) for name, values in lengths.items() if values}
    metadata |= {} if first.prompt_cut is None else {"prompt_cut": first.prompt_cut}
    message = {"role": "assistant", "content": "withheld", "source": "generate", "model": model}
    choices = [{"message": {**message}, "stop_reason": _ENDS.get(end, "stop")} for end in first.ended]
    scores: dict[str, dict[str, Any]] = {}
    for row in rows:
        # Two models have the same number if they gave the same answer to the document.
        notes: dict[str, Any] = {"answer_number": int(row.answer)} if row.answer.isdecimal() else {}
        notes |= {} if has_one_chance else {"chance": row.chance}
        scores[row.metric] = {"value": row.outcome, **({"metadata": notes} if notes else {})}
    output = {"model": model, "choices": choices, "completion": "withheld" if choices else ""}
    texts = (_withheld(first.prompt_hash), _withheld(first.target_hash))
    return _sample(first.doc_id, texts, output, scores, metadata)


def _scorer(name: str, metrics: Sequence[str], metadata: Mapping[str, object]) -> dict[str, Any]:
    return {"name": name, "metrics": [{"name": f"inspect_ai/{each}"} for each in metrics], "metadata": metadata}


def _score(
    name: str, scored_documents: int, documents: int, values: Mapping[str, float], metadata: Mapping[str, object]
) -> dict[str, Any]:
    return {
        "name": name,
        "scorer": name,
        "scored_samples": scored_documents,
        "unscored_samples": documents - scored_documents,
        "metrics": {metric: {"name": metric, "value": value} for metric, value in values.items()},
        "metadata": metadata,
    }


def _sample(
    number: int,
    texts: tuple[str, str],
    output: Mapping[str, Any],
    scores: Mapping[str, Any],
    metadata: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the sample of a document. ``texts`` are what replaces its input and its target."""
    sample = {"id": number, "epoch": 1, "input": texts[0], "target": texts[1], "messages": [], "output": output}
    sample |= {"scores": scores, "metadata": metadata}
    return sample | {"store": {}, "events": [], "model_usage": {}, "attachments": {}}


def _log(
    spec: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], scores: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    return {
        "version": 2,
        "status": "success",
        "eval": spec,
        "plan": {"name": "plan", "steps": [], "config": {}},
        "results": {"total_samples": len(samples), "completed_samples": len(samples), "scores": scores},
        "stats": {"started_at": "", "completed_at": "", "model_usage": {}},
        "samples": samples,
    }


def _id(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:22]


def _withheld(sha256: str) -> str:
    return f"withheld (sha256 {sha256})" if sha256 else "withheld"
