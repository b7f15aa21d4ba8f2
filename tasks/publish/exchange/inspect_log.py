"""Write the results of a release as logs of inspect_ai, one per model and task, in its JSON format.

The evidence has no texts, so ``input`` and ``target`` of a sample state the hash of what is withheld. The scorers of a
log are lm-eval's labels of the metrics, such as ``acc,none``, with the metrics ``mean`` and ``stderr`` of inspect_ai,
which can compute them again from the samples. The held-out text is a task of its own, ``perplexity``, whose scores are
those of the scorer ``perplexity`` of inspect_ai.

The format requires a date, and a release contains none. The logs are therefore not part of a release. Anyone can create
them from the release, and they state the time of the export.

Source: inspect_ai 0.3.285, ``inspect_ai.log.EvalLog``, version 2 of the format.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from mergegate.tasks.evaluation import DocumentScore
from mergegate.tasks.gate import versions_here
from mergegate.tasks.publish.exchange.release_results import (
    ExportedModel,
    ExportedRelease,
    ExportedTask,
    ExportedText,
    portable_name,
)

_ENDS = {"length": "max_tokens", "context": "model_length", "": "unknown"}  # to ``stop_reason``; others: 'stop'
_PERPLEXITY = "perplexity"


def inspect_logs(release: ExportedRelease, export_time: datetime) -> Iterator[tuple[str, bytes]]:
    """Yield relative path and content of every log. ``export_time`` is in UTC."""
    folders: dict[str, int] = {}
    for model in release.models:
        parts = [portable_name(each) for each in (model.variant, model.name) if each]
        folder = "/".join(parts)
        folders[folder] = folders.get(folder, 0) + 1
        folder += f"-{folders[folder]}" if folders[folder] > 1 else ""
        for task in model.tasks:
            for leaf in task.leaves:
                yield _file(folder, _task_log(release, model, task, leaf, export_time))
        if model.text is not None:
            yield _file(folder, _text_log(release, model, model.text, export_time))


def _file(folder: str, log: dict[str, Any]) -> tuple[str, bytes]:
    """Return content and path of a log by inspect_ai's convention: time, task and id. It lists no other JSON files."""
    spec = log["eval"]
    time = spec["created"].replace(":", "-")
    path = f"{folder}/{time}_{portable_name(spec['task']).replace('_', '-')}_{spec['eval_id']}.json"
    return path, (json.dumps(log, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _task_log(
    release: ExportedRelease, model: ExportedModel, task: ExportedTask, leaf: str, export_time: datetime
) -> dict[str, Any]:
    rows, table = task.leaves[leaf], task.tables[leaf]
    documents: dict[int, list[DocumentScore]] = {}
    for row in rows:
        documents.setdefault(row.doc_id, []).append(row)
    scorers = [
        {
            "name": score.metric,
            "metrics": [{"name": "inspect_ai/mean"}, {"name": "inspect_ai/stderr"}],
            "metadata": {"higher_is_better": score.higher_is_better},
        }
        for score in table
    ]
    scores = [
        {
            "name": score.metric,
            "scorer": score.metric,
            "scored_samples": score.n,
            "unscored_samples": len(documents) - score.n,
            "metrics": {
                "mean": {"name": "mean", "value": score.score},
                "stderr": {"name": "stderr", "value": score.stderr},
            },
            "metadata": {"higher_is_better": score.higher_is_better},
        }
        for score in table
    ]
    budgets = {row.budgets[-1] for row in rows if row.budgets}
    metadata = {
        "task": task.name,
        "lm_eval_version": task.lm_eval_version,
        "library": "mergegate" if task.is_built_in else "lm_eval",
        "higher_is_better": {score.metric: score.higher_is_better for score in table},
        "data_digest": task.data_digest or None,
        "datasets": [{"id": name, "config": config, "revision": commit} for name, config, commit in task.datasets],
        "sample": {"seed": task.seed, "first_document": task.first_document},
        "prompt_settings": release.prompts.get(task.name),
    }
    dataset = {
        "name": task.datasets[0][0] if len({each[0] for each in task.datasets}) == 1 else leaf,
        "samples": len(documents),
        "sample_ids": list(documents),
        "shuffled": False,
    }
    spec = _spec(release, model, leaf, task.data_digest[:16] or 0, dataset, scorers, metadata, export_time)
    spec["model_generate_config"] = {"max_tokens": min(budgets)} if len(budgets) == 1 else {}
    samples = [_sample(spec["model"], each) for each in documents.values()]
    return _log(spec, samples, scores)


def _sample(model: str, rows: Sequence[DocumentScore]) -> dict[str, Any]:
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
    choices: list[dict[str, Any]] = [
        {
            "message": {"role": "assistant", "content": "withheld", "source": "generate", "model": model},
            "stop_reason": _ENDS.get(end, "stop"),
        }
        for end in first.ended
    ]
    scores: dict[str, dict[str, Any]] = {}
    for row in rows:
        # Two models have the same number if they gave the same answer to the document.
        notes: dict[str, Any] = {"answer_number": int(row.answer)} if row.answer.isdecimal() else {}
        notes |= {} if has_one_chance else {"chance": row.chance}
        scores[row.metric] = {"value": row.outcome, **({"metadata": notes} if notes else {})}
    return {
        "id": first.doc_id,
        "epoch": 1,
        "input": _withheld(first.prompt_hash),
        "target": _withheld(first.target_hash),
        "messages": [],
        "output": {
            "model": model,
            "choices": choices,
            "completion": choices[0]["message"]["content"] if choices else "",
        },
        "scores": scores,
        "metadata": metadata,
        "store": {},
        "events": [],
        "model_usage": {},
        "attachments": {},
    }


def _text_log(
    release: ExportedRelease, model: ExportedModel, text: ExportedText, export_time: datetime
) -> dict[str, Any]:
    """Return the log of the held-out text. A document without a finite likelihood has no score."""
    scorer = {
        "name": _PERPLEXITY,
        "metrics": [{"name": f"inspect_ai/{name}"} for name in ("perplexity_per_token", "perplexity_per_seq")],
        "metadata": {"higher_is_better": False},
    }
    total = text.total
    finite = [row for row in text.documents if math.isfinite(row.loglik)]
    metrics = {"perplexity_per_token": total.perplexity}
    if total.perplexity is not None:
        per_document = math.fsum(-row.loglik / row.tokens for row in finite) / len(finite)
        metrics["perplexity_per_seq"] = math.exp(min(700.0, per_document))
    score = {
        "name": _PERPLEXITY,
        "scorer": _PERPLEXITY,
        "scored_samples": len(finite),
        "unscored_samples": len(text.documents) - len(finite),
        "metrics": {name: {"name": name, "value": value} for name, value in metrics.items() if value is not None},
        "metadata": {"higher_is_better": False, "bits_per_byte": total.bits_per_byte},
    }
    metadata = {
        "library": "mergegate",
        "higher_is_better": {_PERPLEXITY: False},
        "tokens": total.tokens,
        "bytes": total.bytes,
        "loglik": total.loglik,
        "bits_per_byte": total.bits_per_byte,
        "vocabulary": total.vocabulary,
        "window": total.window,
    }
    ids = [row.doc_id for row in text.documents]
    dataset = {"name": "held-out text", "samples": len(ids), "sample_ids": ids, "shuffled": False}
    spec = _spec(release, model, _PERPLEXITY, 0, dataset, [scorer], metadata, export_time)
    samples = []
    for row in text.documents:
        sample: dict[str, Any] = {
            "id": row.doc_id,
            "epoch": 1,
            "input": _withheld(row.hash),
            "target": "",
            "messages": [],
            "output": {"model": spec["model"], "choices": [], "completion": ""},
            "scores": {},
            "metadata": {"doc_hash": row.hash, "bytes": row.bytes, **({"stratum": row.stratum} if row.stratum else {})},
            "store": {},
            "events": [],
            "model_usage": {},
            "attachments": {},
        }
        if math.isfinite(row.loglik):
            counts = {"num_tokens": row.tokens, "sum_log_probs": row.loglik}
            sample["scores"] = {_PERPLEXITY: {"value": -row.loglik / row.tokens, "metadata": counts}}
        samples.append(sample)
    return _log(spec, samples, [score])


def _spec(
    release: ExportedRelease,
    model: ExportedModel,
    task: str,
    version: str | int,
    dataset: Mapping[str, Any],
    scorers: Sequence[Mapping[str, Any]],
    metadata: Mapping[str, Any],
    export_time: datetime,
) -> dict[str, Any]:
    """Return the specification of an evaluation, whose ids are hashes over the release, the model and the task."""
    scoring = release.scoring
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
        "created": export_time.isoformat(timespec="seconds"),
        "task": task,
        "task_id": task_id,
        "task_version": version,
        "task_args": {name: value for name, value in scoring.items() if value is not None},
        "dataset": dict(dataset),
        "model": f"{backend}/{model.id}" if backend else model.id,
        "model_args": {"revision": model.identity} if model.identity else {},
        "config": {},
        "packages": dict(release.versions),
        "metadata": {**metadata, "mergegate": origin},
        "scorers": list(scorers),
    }


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
    """Return 22 hex digits that depend on all parts."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:22]


def _withheld(sha256: str) -> str:
    """Return the text that replaces a text outside the evidence."""
    return f"withheld (sha256 {sha256})" if sha256 else "withheld"
