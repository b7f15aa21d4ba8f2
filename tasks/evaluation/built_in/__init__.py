"""Score models on tasks that lm-eval does not have, such as to rank texts for queries.

``contract`` defines the interface of such a task, ``leaf`` presents it to the code that loads lm-eval's tasks, and each
kind of task has a module, which ``registry`` lists. ``relevance`` scores texts for queries, and ``ranking`` measures
the rankings.
"""

from mergegate.tasks.evaluation.built_in.contract import BuiltInScore, BuiltInTask, TaskDocument
from mergegate.tasks.evaluation.built_in.leaf import BuiltInLeaf
from mergegate.tasks.evaluation.built_in.mteb_task import MtebTask
from mergegate.tasks.evaluation.built_in.registry import BUILT_IN_TASKS, AnyBuiltInTask
from mergegate.tasks.evaluation.built_in.retrieval import RetrievalTask

__all__ = [
    "BUILT_IN_TASKS",
    "AnyBuiltInTask",
    "BuiltInLeaf",
    "BuiltInScore",
    "BuiltInTask",
    "MtebTask",
    "RetrievalTask",
    "TaskDocument",
]
