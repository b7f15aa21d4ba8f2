"""Read the scores of each document from files that another library wrote, without running any model.

``files`` finds the files of one model, and picks the format by the content of a file. ``lm_eval`` and
``inspect_scores`` each read one format, and ``contract`` defines what a gate gets from either of them.
"""

from mergegate.tasks.quality.evaluation.results.contract import (
    TaskResults,
    precision_differences,
    require_same_conditions,
)
from mergegate.tasks.quality.evaluation.results.files import find_results, read_task
