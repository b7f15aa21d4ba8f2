"""Score models on tasks that lm-eval does not have, such as to rank texts for queries.

``contract`` defines the interface of such a task, ``leaf`` presents it to the code that loads lm-eval's tasks, and each
kind of task has a module, which ``registry`` lists. ``relevance`` scores texts for queries, and ``ranking`` measures
the rankings.
"""

from mergegate.tasks.evaluation.built_in.contract import BuiltInScore, BuiltInTask, TaskDocument
from mergegate.tasks.evaluation.built_in.leaf import BuiltInLeaf
from mergegate.tasks.evaluation.built_in.mteb_task import MtebTask
from mergegate.tasks.evaluation.built_in.registry import AnyBuiltInTask, built_in_schemas, built_in_tasks
from mergegate.tasks.evaluation.built_in.retrieval import RetrievalTask
from mergegate.tasks.evaluation.built_in.transcription import TranscriptionTask

__all__ = [
    "AnyBuiltInTask",
    "BuiltInLeaf",
    "BuiltInScore",
    "BuiltInTask",
    "MtebTask",
    "RetrievalTask",
    "TaskDocument",
    "TranscriptionTask",
    "built_in_schemas",
    "built_in_tasks",
]
