"""Score models and load data in a separate process (``tasks.checkpoints.model_process``).

Data, templates and functions of a task are untrusted, and models and devices hang or crash. The separate process keeps
all of that from taking down the flow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from mergegate.merge_core.files import JournalPlace
from mergegate.tasks.checkpoints import CallNeeds, Model, TellProgress, call_model_process
from mergegate.tasks.evaluation.backends import find_backend
from mergegate.tasks.evaluation.document_order import DocumentRange
from mergegate.tasks.evaluation.settings import Scoring
from mergegate.tasks.evaluation.task_data import LoadedData
from mergegate.tasks.evaluation.task_definition import EvalTask

if TYPE_CHECKING:
    from mergegate.tasks.evaluation.harness import ScoredDocuments

A = TypeVar("A")
LOADED_WITHIN = 1800.0  # default limit in seconds for loading the data of one task, downloads included

__all__ = ["call_with_task_data", "inspect_in_child", "score_in_child"]


def score_in_child(
    model: Model,
    task: EvalTask,
    scoring: Scoring,
    part: DocumentRange,
    device: str,
    on_progress: TellProgress,
    journal: JournalPlace | None = None,
) -> ScoredDocuments:
    """Run ``harness.score_documents`` in the process that holds models, within ``scoring.time_limit``.

    Raises:
        InvalidInput: See ``harness.score_documents``; also if the process died.
        Refused: If the time limit is exceeded.
    """
    backend = find_backend(scoring.backend)
    return call_model_process(
        _score,
        (model, task, scoring, part, device, journal),
        location=f"task {task.name} on {model.name}: {part}",
        models=[model],
        needs=CallNeeds(
            own_process=not backend.frees_memory,
            network=backend.network,
            variables=tuple(backend.environment),
            time_limit=scoring.time_limit,
        ),
        on_progress=on_progress,
    )


def inspect_in_child(task: EvalTask, time_limit: float | None = None) -> LoadedData:
    """Run ``harness.inspect_data`` in the process that holds models, because loading untrusted data can hang or crash.

    Raises:
        InvalidInput: See ``harness.inspect_data``; also if the process died.
        Refused: If loading takes longer than ``time_limit`` seconds.
    """
    return call_with_task_data(task, _look, (task,), "its data", time_limit)


def clusters_in_child(task: EvalTask, field: str, seed: int, time_limit: float | None = None) -> tuple[str, ...]:
    """Run ``harness.clusters_in_order`` in the process that holds models.

    Raises:
        InvalidInput, Refused: See ``inspect_in_child``; also if a document lacks the field.
    """
    return call_with_task_data(task, _clusters, (task, field, seed), "its clusters", time_limit)


def call_with_task_data(
    task: EvalTask, function: Callable[..., A], arguments: tuple[object, ...], subject: str, time_limit: float | None
) -> A:
    """Run a function that may have to load the data of a task in the process that holds models."""
    return call_model_process(
        function,
        arguments,
        location=f"task {task.name}: {subject}",
        needs=CallNeeds(
            network=not task.is_local,  # data that is loaded now needs no network later
            time_limit=LOADED_WITHIN if time_limit is None else time_limit,
        ),
    )


# The functions below run in the child process. Only there are heavy modules imported.


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

    return harness.inspect_data(task)


def _clusters(task: EvalTask, field: str, seed: int, on_progress: TellProgress) -> tuple[str, ...]:
    from mergegate.tasks.evaluation import harness

    return harness.clusters_in_order(task, field, seed)
