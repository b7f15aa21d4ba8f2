"""Score models on tasks that lm-eval does not have, such as ranking texts for queries.

``contract`` defines the interface of such a task, and adapts it to lm-eval's. Each kind of task has a module, and
``ranking`` measures rankings.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, TypeAlias, get_args

from pydantic import Field

from mergegate.merge_core.architecture import TaskForm
from mergegate.tasks.quality.evaluation.built_in.contract import BuiltInLeaf, BuiltInScore, BuiltInTask
from mergegate.tasks.quality.evaluation.built_in.mteb_task import MtebTask
from mergegate.tasks.quality.evaluation.built_in.ranking import parse_metric
from mergegate.tasks.quality.evaluation.built_in.retrieval import RetrievalTask
from mergegate.tasks.quality.evaluation.built_in.transcription import TranscriptionTask

AnyBuiltInTask: TypeAlias = Annotated[RetrievalTask | MtebTask | TranscriptionTask, Field(discriminator="kind")]
_CLASSES: tuple[type[BuiltInTask], ...] = (RetrievalTask, MtebTask, TranscriptionTask)


def built_in_tasks() -> Mapping[str, type[BuiltInTask]]:
    """Return the class of each kind of built-in task, by the name under ``kind``."""
    return {get_args(task.model_fields["kind"].annotation)[0]: task for task in _CLASSES}


def built_in_schemas() -> list[dict[str, Any]]:
    """Return the JSON schema of each kind of built-in task."""
    return [task.model_json_schema() for task in _CLASSES]


def form_of_metric(metric: str) -> TaskForm:
    """Return the form of the tasks that have ``metric``: ``ndcg@10`` is one of retrieval. Default: text."""
    if metric in get_args(TranscriptionTask.model_fields["metric"].annotation):
        return TranscriptionTask.form
    with suppress(ValueError):
        parse_metric(metric)
        return RetrievalTask.form
    return "text"
