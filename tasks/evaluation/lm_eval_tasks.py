"""Work with lm-eval's task objects: silence lm-eval, report errors in a task, and read its metrics and texts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from traceback import extract_tb
from typing import Any, NamedTuple

from mergegate.merge_core.errors import InvalidInput, MergegateError
from mergegate.tasks.evaluation.pictures import describe_prompt, has_pictures, hash_document, pictures_of
from mergegate.tasks.evaluation.task_definition import EvalTask, read_definition


@contextmanager
def quiet() -> Iterator[None]:
    """Silence logs and progress bars of lm-eval, datasets and transformers inside the context."""
    import datasets  # type: ignore[import-untyped]  # ships no types

    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "transformers")]
    levels = [logger.level for logger in loggers]
    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()


@contextmanager
def user_errors(task: EvalTask) -> Iterator[None]:
    """Convert exceptions from a task's own functions and templates, or from averaging its scores, to InvalidInput."""
    from jinja2 import TemplateError

    try:
        yield
    except MergegateError:
        raise
    except Exception as error:
        user_files = {str(file) for file in read_definition(task.definition).files} if task.definition else set()
        frames = extract_tb(error.__traceback__)
        locations = [f"{frame.filename}: line {frame.lineno}" for frame in frames if frame.filename in user_files]
        if not locations and any(frame.filename.endswith("lm_eval/api/metrics.py") for frame in frames):
            raise InvalidInput(
                f"task {task.name}",
                found=f"document scores that lm-eval cannot average: {type(error).__name__}: {error!s:.200}",
                expected="one number per document for a metric with aggregation: mean",
                remedy="correct the task's process_results, or the aggregation of the metric",
            ) from error
        if not locations and not (task.definition and isinstance(error, TemplateError)):
            raise
        raise InvalidInput(
            locations[-1] if locations else str(task.definition),
            found=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            expected="a result for every document",
            remedy="correct the task; `lm-eval run --tasks` with it fails in the same way",
        ) from error


def judging_metrics(name: str, leaf: Any, scored_metrics: Iterable[str]) -> dict[str, bool]:
    """Return the metrics by which a leaf can be judged, and whether higher is better for each.

    Raises:
        InvalidInput: If ``scored_metrics`` contains none of them; the message lists the metrics that the leaf has.
    """
    aggregations, directions = leaf.aggregation(), leaf.higher_is_better()
    metrics = {
        metric: bool(directions[metric])
        for metric, aggregation in aggregations.items()
        if getattr(aggregation, "__name__", "") == "mean" and directions.get(metric) is not None
    }
    if not metrics.keys() & set(scored_metrics):
        names = sorted({*scored_metrics, *aggregations})
        raise InvalidInput(
            f"task {name}",
            found=f"no metric that is a mean over documents with a direction, only {', '.join(names) or 'none at all'}",
            expected="a score per document whose mean is the score of the task",
            remedy="add one under metric_list (aggregation: mean, higher_is_better: ...), or remove the task",
        )
    return metrics


class DocumentText(NamedTuple):
    """Prompt and target of a document, without few-shot examples. Stored scores contain only hashes of these texts."""

    prompt: str
    target: str
    doc_hash: str  # as in ``DocumentScore``


def text_of(task: Any, document: Mapping[str, Any]) -> DocumentText:
    """Return the prompt and the expected answer that lm-eval's ``task`` builds for ``document``."""
    from lm_eval.utils import handle_non_serializable, hash_string

    if has_pictures(task):
        pictures = pictures_of(task, document, f"task {task.config.task}")
        return DocumentText(
            prompt=describe_prompt(_as_text(task, document, task.doc_to_text(document)), pictures),
            target=_as_text(task, document, task.doc_to_target(document)),
            doc_hash=hash_document(document, pictures),
        )
    serialized = json.dumps(document, indent=2, default=handle_non_serializable, ensure_ascii=False)
    return DocumentText(
        prompt=_as_text(task, document, task.doc_to_text(document)),
        target=_as_text(task, document, task.doc_to_target(document)),
        doc_hash=hash_string(serialized),
    )


def _as_text(task: Any, document: Mapping[str, Any], value: Any) -> str:
    """Convert a prompt or target to text. A target may be the number of a choice, or a list of answers."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int) and task.config.doc_to_choice is not None:
        choices = task.doc_to_choice(document)
        return str(choices[value]) if 0 <= value < len(choices) else str(value)
    if isinstance(value, (list, tuple)):
        return " | ".join(_as_text(task, document, each) for each in value)
    return str(value)
