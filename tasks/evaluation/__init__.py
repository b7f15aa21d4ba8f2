"""Evaluation: lm-eval scores of one model on one task, document by document and part by part.

A task is pinned by content, scored in a process of its own by one of several backends, and kept as a table of document
scores. Results that lm-eval has written itself are read here too.
"""

from mergegate.tasks.evaluation.allowed_code import allow_code, require_evaluated
from mergegate.tasks.evaluation.asked_data import AskedDataset
from mergegate.tasks.evaluation.asking import AskedHow, Asking, asking_of
from mergegate.tasks.evaluation.backends import Backend, find_backend
from mergegate.tasks.evaluation.choice_probability import AnsweredChoice
from mergegate.tasks.evaluation.division import Division, DocumentSet, SetName, divide
from mergegate.tasks.evaluation.document_scores import (
    SCORES_FILE,
    DocumentScore,
    Paired,
    pair_documents,
    read_document_scores,
    score_of_sample,
    write_document_scores,
)
from mergegate.tasks.evaluation.fetching import FetchedDataset, fetch_datasets
from mergegate.tasks.evaluation.group_mean import MeanOver, require_own_mean
from mergegate.tasks.evaluation.lm_eval_results import (
    ResultsFile,
    TaskResults,
    check_alike,
    find_results,
    precision_differences,
    read_task,
)
from mergegate.tasks.evaluation.metrics import (
    JudgedMetrics,
    MetricSetting,
    choose_known_metrics,
    choose_metrics,
    default_metric,
)
from mergegate.tasks.evaluation.pace import AskedDocument, asked_of_document, document_seconds, measured_seconds
from mergegate.tasks.evaluation.posed import PosedDocument, PosedTask, pose
from mergegate.tasks.evaluation.preview import TaskPreview, TokenizerPlace, preview
from mergegate.tasks.evaluation.process import clusters_in_child
from mergegate.tasks.evaluation.read_before import DocumentsRead, TextsRead, documents_read
from mergegate.tasks.evaluation.scoring import Scoring, looks
from mergegate.tasks.evaluation.stage import (
    CountLimit,
    Scores,
    TaskScore,
    TaskScores,
    by_task,
    count_task,
    data_revisions,
    document_count,
    evaluate_to,
    join_parts,
    known_scores,
    pin_data,
    pinned_data_before,
    score_table,
    unknown_documents,
)
from mergegate.tasks.evaluation.support import pin_sound_tasks, require_effect, require_examples, require_supported
from mergegate.tasks.evaluation.task_data import DataSource, TaskData
from mergegate.tasks.evaluation.task_definition import EvalTask, is_file_name, named_data, pin_task, read_definition
from mergegate.tasks.evaluation.task_texts import document_texts

__all__ = [
    "SCORES_FILE",
    "AnsweredChoice",
    "AskedDataset",
    "AskedDocument",
    "AskedHow",
    "Asking",
    "Backend",
    "CountLimit",
    "DataSource",
    "Division",
    "DocumentScore",
    "DocumentSet",
    "DocumentsRead",
    "EvalTask",
    "FetchedDataset",
    "JudgedMetrics",
    "MeanOver",
    "MetricSetting",
    "Paired",
    "PosedDocument",
    "PosedTask",
    "ResultsFile",
    "Scores",
    "Scoring",
    "SetName",
    "TaskData",
    "TaskPreview",
    "TaskResults",
    "TaskScore",
    "TaskScores",
    "TextsRead",
    "TokenizerPlace",
    "allow_code",
    "asked_of_document",
    "asking_of",
    "by_task",
    "check_alike",
    "choose_known_metrics",
    "choose_metrics",
    "clusters_in_child",
    "count_task",
    "data_revisions",
    "default_metric",
    "divide",
    "document_count",
    "document_seconds",
    "document_texts",
    "documents_read",
    "evaluate_to",
    "fetch_datasets",
    "find_backend",
    "find_results",
    "is_file_name",
    "join_parts",
    "known_scores",
    "looks",
    "measured_seconds",
    "named_data",
    "pair_documents",
    "pin_data",
    "pin_sound_tasks",
    "pin_task",
    "pinned_data_before",
    "pose",
    "precision_differences",
    "preview",
    "read_definition",
    "read_document_scores",
    "read_task",
    "require_effect",
    "require_evaluated",
    "require_examples",
    "require_own_mean",
    "require_supported",
    "score_of_sample",
    "score_table",
    "unknown_documents",
    "write_document_scores",
]
