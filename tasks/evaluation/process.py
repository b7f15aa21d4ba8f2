"""Score models and load data in a separate process (``tasks.checkpoints.model_process``).

Data, templates and functions of a task are untrusted, and models and devices can hang or crash. The separate process
protects the flow from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mergegate.tasks.checkpoints import CallNeeds, TellProgress, call_model_process
from mergegate.tasks.evaluation.backends import find_backend
from mergegate.tasks.evaluation.document_scores import DocumentScore
from mergegate.tasks.evaluation.harness import ScoringJob, score_documents
from mergegate.tasks.evaluation.task_data import LoadedData
from mergegate.tasks.evaluation.task_definition import EvalTask
from mergegate.tasks.evaluation.task_loading import inspect_data

A = TypeVar("A")
LOADED_WITHIN = 1800.0  # default limit in seconds for loading the data of one task, downloads included


def score_in_child(job: ScoringJob, on_progress: TellProgress) -> tuple[DocumentScore, ...]:
    """Run ``harness.score_documents`` in the model process, within ``scoring.time_limit``.

    Raises:
        InvalidInput: See ``harness.score_documents``; also if the process died.
        Refused: If the time limit is exceeded.
    """
    backend = find_backend(job.scoring.backend)
    return call_model_process(
        score_documents,
        (job,),
        location=f"task {job.task.name} on {job.model.name}: {job.part}",
        models=[job.model],
        needs=CallNeeds(
            own_process=not backend.frees_memory,
            network=backend.network,
            variables=tuple(backend.environment),
            time_limit=job.scoring.time_limit,
        ),
        on_progress=on_progress,
    )


def inspect_in_child(task: EvalTask, time_limit: float | None = None) -> LoadedData:
    """Run ``task_loading.inspect_data`` in the model process, because loading untrusted data can hang or crash.

    Raises:
        InvalidInput: See ``task_loading.inspect_data``; also if the process died.
        Refused: If loading takes longer than ``time_limit`` seconds.
    """
    return call_with_task_data(task, inspect_data, (task,), "its data", time_limit)


def call_with_task_data(
    task: EvalTask, function: Callable[..., A], arguments: tuple[object, ...], subject: str, time_limit: float | None
) -> A:
    """Call ``function`` with ``arguments`` and ``on_progress`` in the model process, where it may load a task's data.

    ``subject`` describes the work in messages. ``time_limit`` is in seconds. None: ``LOADED_WITHIN``.
    """
    return call_model_process(
        function,
        arguments,
        location=f"task {task.name}: {subject}",
        needs=CallNeeds(
            network=not task.is_local,  # data that is loaded now needs no network later
            time_limit=LOADED_WITHIN if time_limit is None else time_limit,
        ),
    )
