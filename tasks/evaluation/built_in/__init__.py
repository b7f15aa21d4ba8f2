"""Score models on tasks that lm-eval does not have, such as ranking texts for queries.

``contract`` defines the interface of such a task, and ``leaf`` adapts it to lm-eval's task interface. Each kind of task
has a module, and ``registry`` lists them. ``relevance`` scores texts for queries, ``ranking`` measures rankings, and
``error_rates`` compares transcripts.
"""

from mergegate.tasks.evaluation.built_in.contract import BuiltInScore, BuiltInTask
from mergegate.tasks.evaluation.built_in.leaf import BuiltInLeaf
from mergegate.tasks.evaluation.built_in.mteb_task import MtebTask
from mergegate.tasks.evaluation.built_in.registry import (
    AnyBuiltInTask,
    built_in_schemas,
    built_in_tasks,
    form_of_metric,
)
from mergegate.tasks.evaluation.built_in.retrieval import RetrievalTask
from mergegate.tasks.evaluation.built_in.transcription import TranscriptionTask
