"""Scoring, and looking at data, in the process that holds models (``tasks.checkpoints.model_process``).

Data, templates and functions of a task are foreign, models and devices hang and die: none of it takes the flow along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from mergegate.merge_core.files import JournalPlace
from mergegate.tasks.checkpoints import Model, TellProgress, call_model_process
from mergegate.tasks.evaluation.backends import find_backend
from mergegate.tasks.evaluation.scoring import DocumentRange, Scoring
from mergegate.tasks.evaluation.task_data import LoadedData
from mergegate.tasks.evaluation.task_definition import EvalTask

if TYPE_CHECKING:
    from mergegate.tasks.evaluation.harness import ScoredDocuments

A = TypeVar("A")
LOADED_WITHIN = 1800.0  # seconds for the data of one task, downloads included, where nobody has set a limit

__all__ = ["ask_about_task", "look_in_child", "score_in_child"]


def score_in_child(
    model: Model,
    task: EvalTask,
    scoring: Scoring,
    part: DocumentRange,
    device: str,
    on_progress: TellProgress,
    journal: JournalPlace | None = None,
) -> ScoredDocuments:
    """As ``harness.score_documents``, in the process that holds models, within ``scoring.time_limit``.

    Raises:
        InvalidInput: as ``harness.score_documents``; or when the process died.
        Refused: when the time limit is over.
    """
    backend = find_backend(scoring.backend)
    return call_model_process(
        _score,
        (model, task, scoring, part, device, journal),
        where=f"task {task.name} on {model.name}: {part}",
        models=[model],
        own_process=not backend.frees_memory,
        network=backend.network,
        passing=backend.environment,
        time_limit=scoring.time_limit,
        on_progress=on_progress,
    )


def look_in_child(task: EvalTask, time_limit: float | None = None) -> LoadedData:
    """``harness.look_at_data`` in that process: loading foreign data can hang and die just as well.

    Raises:
        InvalidInput: as ``harness.look_at_data``; or when the process died.
        Refused: when ``time_limit`` seconds are over.
    """
    return ask_about_task(task, _look, (task,), "its data", time_limit)


def clusters_in_child(task: EvalTask, field: str, seed: int, time_limit: float | None = None) -> tuple[str, ...]:
    """``harness.clusters_in_order`` in that process.

    Raises:
        InvalidInput, Refused: as ``look_in_child``; or when a document has no such field.
    """
    return ask_about_task(task, _clusters, (task, field, seed), "its clusters", time_limit)


def ask_about_task(
    task: EvalTask, function: Callable[..., A], arguments: tuple[object, ...], what: str, time_limit: float | None
) -> A:
    """Ask about the data of a task, which may have to be loaded for that."""
    return call_model_process(
        function,
        arguments,
        where=f"task {task.name}: {what}",
        network=not task.is_local,  # what is loaded now need not be asked for later
        time_limit=LOADED_WITHIN if time_limit is None else time_limit,
    )


# There, and only there, what is heavy is imported.


def _score(
    model: Model,
    task: EvalTask,
    scoring: Scoring,
    part: DocumentRange,
    device: str,
    journal: JournalPlace | None,
    on_progress: TellProgress,
) -> ScoredDocuments:
    from mergegate.tasks.evaluation import harness

    return harness.score_documents(model, task, scoring, part, device, on_progress, journal)


def _look(task: EvalTask, on_progress: TellProgress) -> LoadedData:
    from mergegate.tasks.evaluation import harness

    return harness.look_at_data(task)


def _clusters(task: EvalTask, field: str, seed: int, on_progress: TellProgress) -> tuple[str, ...]:
    from mergegate.tasks.evaluation import harness

    return harness.clusters_in_order(task, field, seed)
