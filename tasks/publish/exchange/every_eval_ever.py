"""Write the results of a release in the schema of Every Eval Ever: a record per model and task, and a row per score.

The files are in the layout of the project's data store::

    data/TASK/DEVELOPER/MODEL/UUID.json              scores of one model on one task, and on each task of a group
    data/TASK/DEVELOPER/MODEL/UUID_samples.jsonl     one row per document and metric

The evidence has no texts, so a row has the hashes of prompt and target, and no answer. The held-out text has no rows,
because they describe answers. The UUID depends on the evidence only: an export does not duplicate an earlier one.

Source: every-eval-ever 0.3.0, ``eval.schema.json`` and ``instance_level_eval.schema.json``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from mergegate.tasks.evaluation import DocumentScore, TaskScore
from mergegate.tasks.publish.exchange.inspect_log import withheld
from mergegate.tasks.publish.exchange.release_results import (
    LOCAL,
    UNKNOWN_ORGANIZATION,
    ExportedModel,
    ExportedRelease,
    ExportedTask,
    ExportedText,
    portable_name,
)

SCHEMA_VERSION = "0.3.0"
_INFINITE = "Infinity"


@dataclass(frozen=True)
class _Metric:
    """Properties that follow from the name of a metric: its id in the registry of the project, and its bounds."""

    id: str = ""
    low: float | str | None = 0.0
    high: float | str | None = 1.0
    unit: str = "proportion"


_METRICS = {
    "acc": _Metric("accuracy"),
    "acc_norm": _Metric(),
    "acc_bytes": _Metric(),
    "exact_match": _Metric("exact-match"),
    "em": _Metric("exact-match"),
    "f1": _Metric("f1"),
    "wer": _Metric("wer", 0.0, _INFINITE),
    "cer": _Metric("cer", 0.0, _INFINITE),
    "accuracy": _Metric(),  # of a ranking: whether the first text is relevant
    "mrr": _Metric(),
    "mcc": _Metric(low=-1.0, unit=""),
    "perplexity": _Metric("perplexity", 1.0, _INFINITE, ""),
    "bits_per_byte": _Metric("", 0.0, _INFINITE, "bits_per_byte"),
}
_RANK_METRICS = ("ndcg@", "mrr@", "recall@", "precision@", "map@", "hit_rate@")
_ENGINES = {"hf": "transformers", "vllm": "vllm", "llama_cpp": "llama-cpp-python"}  # backend → library


@dataclass(frozen=True)
class EvaluationRecord:
    """One record and its rows. ``path`` is relative, with forward slashes; ``rows_path`` is empty without rows."""

    path: str
    content: Mapping[str, Any]
    rows_path: str
    rows: bytes


def evaluation_records(release: ExportedRelease, export_time: datetime) -> Iterator[EvaluationRecord]:
    """Yield the record of every model and task. ``export_time`` is in UTC."""
    written: set[str] = set()
    for model in release.models:
        tasks: list[ExportedTask | ExportedText] = [*model.tasks]
        # A score that is not finite has no form in JSON.
        tasks += [model.text] if model.text and model.text.total.perplexity is not None else []
        for task in tasks:
            record = _record(release, model, task, export_time)
            if record.path not in written:  # Variants of one merge may share the evidence of the merge.
                written.add(record.path)
                yield record


def _record(
    release: ExportedRelease, model: ExportedModel, task: ExportedTask | ExportedText, export_time: datetime
) -> EvaluationRecord:
    name = task.name if isinstance(task, ExportedTask) else "perplexity"
    time = str(int(export_time.timestamp()))
    evaluation_id = f"{name}/{model.id}/{time}"
    rows: list[dict[str, Any]] = []
    if isinstance(task, ExportedTask):
        tables = {"": task.table} | (task.tables if task.is_group else {})
        results = [_result(release, task, leaf, score) for leaf, table in tables.items() for score in table]
        rows = [
            _row(evaluation_id, model.id, row, _result_id(task.name, row.task if task.is_group else "", row.metric))
            for leaf_rows in task.leaves.values()
            for row in leaf_rows
        ]
    else:
        results = _text_results(task)
    # Variants of one merge may share the evidence of the merge, whatever release contains it.
    origin = (model.identity,) if model.role == "merge" else (release.version, model.variant, model.name)
    scores = [(result["evaluation_result_id"], result["score_details"]) for result in results]
    digest = hashlib.sha256(json.dumps([origin, model.id, name, scores]).encode()).digest()
    uuid = UUID(bytes=digest[:16], version=4)
    collection = portable_name(name)
    folder = f"data/{collection}/{model.id}"
    rows_path = f"{folder}/{uuid}_samples.jsonl" if rows else ""
    text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows).encode()
    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "evaluation_id": evaluation_id,
        "retrieved_timestamp": time,
        "source_metadata": {
            "source_name": "mergegate",
            "source_type": "evaluation_run",
            "source_organization_name": release.organization,
            "evaluator_relationship": _relationship(release, model),
            "additional_details": {
                "release": release.name,
                "release_sha256": release.version,
                "retrieved_timestamp": "time of the export, because a release contains no dates",
                "texts": "withheld: the evidence of a release contains hashes only",
            },
        },
        "eval_library": _library(release, task),
        "model_info": _model_info(release, model),
        "evaluation_results": results,
    }
    if rows:
        content["detailed_evaluation_results"] = {
            "format": "jsonl",
            "file_path": rows_path,
            "hash_algorithm": "sha256",
            "checksum": hashlib.sha256(text).hexdigest(),
            "total_rows": len(rows),
        }
    return EvaluationRecord(f"{folder}/{uuid}.json", content, rows_path, text)


def _relationship(release: ExportedRelease, model: ExportedModel) -> str:
    """Return the relationship between the publisher, who evaluated, and the model."""
    if model.role == "release" or model.namespace == portable_name(release.organization) != UNKNOWN_ORGANIZATION:
        return "first_party"
    if model.role in ("merge", "earlier release"):  # The publisher built it, too.
        return "first_party"
    return "other" if model.namespace == LOCAL else "third_party"


def _library(release: ExportedRelease, task: ExportedTask | ExportedText) -> dict[str, Any]:
    version = release.versions.get("mergegate", "unknown")
    if isinstance(task, ExportedText) or task.is_built_in:
        return {"name": "mergegate", "version": version}
    return {"name": "lm_eval", "version": task.lm_eval_version, "additional_details": {"mergegate": version}}


def _model_info(release: ExportedRelease, model: ExportedModel) -> dict[str, Any]:
    details = {
        "deployment_type": "self_deployed",
        "model_availability": "open_weights" if model.on_hub else "unknown",
        "name_in_run": model.name,
        "role": model.role,
        "reference": model.reference,
        "identity": model.identity,
        "variant": model.variant,
        "base_models": json.dumps(list(release.base_models)) if model.role == "release" else "",
        "dtype": str(release.scoring.get("dtype", "")),
    }
    info: dict[str, Any] = {
        "name": release.name if model.role == "release" else model.name,
        "id": model.id,
        "developer": model.namespace,
        "additional_details": {name: value for name, value in details.items() if value},
    }
    if backend := release.scoring.get("backend"):
        library = _ENGINES.get(backend, str(backend))
        info["inference_engine"] = {"name": library, "version": release.versions.get(library, "unknown")}
    return info


def _result_id(task: str, leaf: str, metric: str) -> str:
    """Return the id of a score within a record. ``leaf`` is empty for the score of the whole task."""
    return f"{task}/{leaf}:{metric}" if leaf else f"{task}:{metric}"


def _result(release: ExportedRelease, task: ExportedTask, leaf: str, score: TaskScore) -> dict[str, Any]:
    """Return the score under one metric, of ``leaf`` or of the whole task if that is empty."""
    name = leaf or task.name
    metric, _, variant = score.metric.partition(",")
    known = _METRICS.get(metric)
    if known is None and (metric.startswith(_RANK_METRICS) or task.score_range != (0.0, 1.0)):
        known = _Metric("", *task.score_range, "proportion" if task.score_range == (0.0, 1.0) else "")
    harness = "mergegate" if task.is_built_in else "lm_eval"
    config: dict[str, Any] = {
        "evaluation_description": f"{name}: mean of {metric} over the documents",
        "metric_id": (known.id if known else "") or f"{harness}.{metric}",
        "metric_name": metric,
        "metric_parameters": {"filter": variant} if variant else {},
        "lower_is_better": not score.higher_is_better,
    }
    if known and _is_within(score.score, known):
        config |= {"score_type": "continuous", "min_score": known.low, "max_score": known.high}
        config |= {"metric_unit": known.unit} if known.unit else {}
    else:
        config["additional_details"] = {"bounds_status": "unknown"}
    uncertainty: dict[str, Any] = {"num_samples": score.n}
    if score.n > 1:
        uncertainty["standard_error"] = {"value": score.stderr, "method": "analytic"}
    result: dict[str, Any] = {
        "evaluation_result_id": _result_id(task.name, leaf, score.metric),
        "evaluation_name": name,
        "source_data": _source(task, name),
        "metric_config": config,
        "score_details": {"score": score.score, "uncertainty": uncertainty},
    }
    if generation := _generation(release, task):
        result["generation_config"] = generation
    return result


def _is_within(score: float, metric: _Metric) -> bool:
    low, high = (bound if isinstance(bound, float) else None for bound in (metric.low, metric.high))
    return (low is None or score >= low) and (high is None or score <= high)


def _source(task: ExportedTask, name: str) -> dict[str, Any]:
    details = {"data_sha256": task.data_digest} if task.data_digest else {}
    names = {each[0] for each in task.datasets}
    if len(names) != 1:
        details |= {"datasets": json.dumps([list(each) for each in task.datasets])} if task.datasets else {}
        return {"dataset_name": name, "source_type": "other", "additional_details": details}
    details |= {"revision": ", ".join(sorted({each[2] for each in task.datasets if each[2]}))}
    details |= {"config": ", ".join(sorted({each[1] for each in task.datasets if each[1]}))}
    return {
        "dataset_name": name,
        "source_type": "hf_dataset",
        "hf_repo": names.pop(),
        "additional_details": {key: value for key, value in details.items() if value},
    }


def _generation(release: ExportedRelease, task: ExportedTask) -> dict[str, Any]:
    """Return what is known about the prompts and the generation of answers. Empty if nothing is."""
    arguments: dict[str, Any] = {}
    budgets = {row.budgets[-1] for rows in task.leaves.values() for row in rows if row.budgets}
    if len(budgets) == 1 and min(budgets) > 0:
        arguments["max_tokens"] = min(budgets)
    if isinstance(thinks := release.scoring.get("enable_thinking"), bool):
        arguments["reasoning"] = thinks
    names = (
        "num_fewshot",
        "chat_template",
        "max_length",
        "think_end_token",
        "chat_template_args",
        "seed",
        "batch_size",
    )
    details = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name in names
        if (value := release.scoring.get(name)) is not None
    }
    details |= {"max_tokens": json.dumps(sorted(budgets))} if len(budgets) > 1 else {}
    details |= {"prompt_settings": prompts} if (prompts := release.prompts.get(task.name)) else {}
    config = {"generation_args": arguments, "additional_details": details}
    return {name: value for name, value in config.items() if value}


def _row(evaluation_id: str, model_id: str, row: DocumentScore, result_id: str) -> dict[str, Any]:
    raw, reference = withheld(row.prompt_hash), withheld(row.target_hash)
    lengths = {"answer_tokens": row.answer_tokens, "thinking_tokens": row.thinking_tokens, "budgets": row.budgets}
    metadata = {
        "doc_hash": row.doc_hash,
        "prompt_hash": row.prompt_hash,
        "target_hash": row.target_hash,
        "metric": row.metric,
        "cluster": row.cluster,
        "answer_number": row.answer,
        "answer_ends": ", ".join(row.ended),
        **{name: json.dumps(list(values)) for name, values in lengths.items() if values},
        "prompt_cut": "" if row.prompt_cut is None else str(row.prompt_cut),
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "evaluation_id": evaluation_id,
        "model_id": model_id,
        "evaluation_name": row.task,
        "evaluation_result_id": result_id,
        "sample_id": str(row.doc_id),
        "sample_hash": hashlib.sha256(f"{raw}{reference}".encode()).hexdigest(),
        "interaction_type": "single_turn",
        "input": {"raw": raw, "reference": [reference]},
        "output": {"raw": ["withheld"] * len(row.ended)},
        "answer_attribution": [],
        "evaluation": {"score": row.outcome, "is_correct": row.outcome == (1.0 if row.higher_is_better else 0.0)},
        "metadata": {name: value for name, value in metadata.items() if value},
    }


def _text_results(text: ExportedText) -> list[dict[str, Any]]:
    total = text.total
    details: dict[str, object] = {"documents": total.documents, "tokens": total.tokens, "bytes": total.bytes}
    details |= {"vocabulary_sha256": total.vocabulary, **({"window": total.window} if total.window else {})}
    results = []
    for name, value in (("perplexity", total.perplexity), ("bits_per_byte", total.bits_per_byte)):
        metric = _METRICS[name]
        config = {
            "evaluation_description": "likelihood of held-out text, over all of its tokens",
            "metric_id": metric.id or f"mergegate.{name}",
            "metric_name": name,
            "lower_is_better": True,
            "score_type": "continuous",
            "min_score": metric.low,
            "max_score": metric.high,
        }
        config |= {"metric_unit": metric.unit} if metric.unit else {}
        results.append(
            {
                "evaluation_result_id": f"perplexity:{name}",
                "evaluation_name": "perplexity",
                "source_data": {
                    "dataset_name": "held-out text",
                    "source_type": "other",
                    "additional_details": {key: str(each) for key, each in details.items()},
                },
                "metric_config": config,
                "score_details": {"score": value, "uncertainty": {"num_samples": total.documents}},
            }
        )
    return results
