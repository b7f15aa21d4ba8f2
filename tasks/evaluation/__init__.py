"""Evaluate a model on lm-eval tasks, and store a score for every document.

A task is pinned by its content and scored in a separate process by one of several backends. The scores are a table
with one row per document and metric. The package also reads results that lm-eval wrote itself.

The modules behind the public names are imported when a name is first used, because merges need few of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mergegate.tasks.evaluation.backends import Backend, find_backend
    from mergegate.tasks.evaluation.built_in import (
        AnyBuiltInTask,
        BuiltInTask,
        built_in_schemas,
        built_in_tasks,
        form_of_metric,
    )
    from mergegate.tasks.evaluation.choice_probability import AnsweredChoice
    from mergegate.tasks.evaluation.contamination import (
        CalibrationTexts,
        ContaminatedDocuments,
        find_contaminated_documents,
    )
    from mergegate.tasks.evaluation.document_order import SampleUse, interim_looks, sample_ranges
    from mergegate.tasks.evaluation.document_scores import (
        SCORES_FILE,
        DocumentScore,
        PairedScores,
        pair_documents,
        read_document_scores,
        write_document_scores,
    )
    from mergegate.tasks.evaluation.download import FetchedDataset, fetch_datasets
    from mergegate.tasks.evaluation.metrics import choose_known_metrics, choose_metrics
    from mergegate.tasks.evaluation.process import call_with_task_data
    from mergegate.tasks.evaluation.regeneration import lengthen_answers
    from mergegate.tasks.evaluation.repetition import find_repetition, repetition_findings
    from mergegate.tasks.evaluation.results import (
        TaskResults,
        find_results,
        precision_differences,
        read_task,
        require_same_conditions,
    )
    from mergegate.tasks.evaluation.settings import (
        EvaluationSettings,
        PromptSettings,
        Scoring,
        check_thinking,
        resolve_prompt_settings,
    )
    from mergegate.tasks.evaluation.splits import DocumentSet, DocumentSplits, SetName, split_documents
    from mergegate.tasks.evaluation.stage import (
        CountLimit,
        Scores,
        TaskScore,
        TaskScores,
        by_task,
        count_missing_documents,
        count_task,
        data_revisions,
        evaluate_documents,
        find_pinned_data,
        join_parts,
        known_scores,
        pin_data,
        score_table,
    )
    from mergegate.tasks.evaluation.support import (
        MeanOver,
        generates_answers,
        pin_sound_tasks,
        require_declared_mean,
        require_effect,
        require_examples,
        require_supported,
    )
    from mergegate.tasks.evaluation.task_data import TaskData
    from mergegate.tasks.evaluation.task_datasets import TaskDataset
    from mergegate.tasks.evaluation.task_definition import (
        EvalTask,
        is_file_name,
        named_data,
        pin_built_in,
        pin_task,
        read_definition,
        task_form,
    )
    from mergegate.tasks.evaluation.task_loading import clusters_in_order, document_texts
    from mergegate.tasks.evaluation.task_preview import (
        PromptWarning,
        TaskPreview,
        TokenizerSource,
        preview,
        task_prompts,
    )
    from mergegate.tasks.evaluation.text_overlap import find_occurring
    from mergegate.tasks.evaluation.throughput import document_seconds, estimate_document_cost, measured_seconds
    from mergegate.tasks.evaluation.tokenized_task import TokenizedDocument, TokenizedTask, tokenize_task
else:
    # Public names by the module that defines them.
    _EXPORTS = {
        "backends": ("Backend", "find_backend"),
        "built_in": ("AnyBuiltInTask", "BuiltInTask", "built_in_schemas", "built_in_tasks", "form_of_metric"),
        "choice_probability": ("AnsweredChoice",),
        "contamination": ("CalibrationTexts", "ContaminatedDocuments", "find_contaminated_documents"),
        "document_order": ("SampleUse", "interim_looks", "sample_ranges"),
        "document_scores": (
            "DocumentScore",
            "PairedScores",
            "SCORES_FILE",
            "pair_documents",
            "read_document_scores",
            "write_document_scores",
        ),
        "download": ("FetchedDataset", "fetch_datasets"),
        "metrics": ("choose_known_metrics", "choose_metrics"),
        "task_preview": ("PromptWarning", "TaskPreview", "TokenizerSource", "preview", "task_prompts"),
        "process": ("call_with_task_data",),
        "regeneration": ("lengthen_answers",),
        "repetition": ("find_repetition", "repetition_findings"),
        "results": ("TaskResults", "find_results", "precision_differences", "read_task", "require_same_conditions"),
        "settings": (
            "EvaluationSettings",
            "PromptSettings",
            "Scoring",
            "check_thinking",
            "resolve_prompt_settings",
        ),
        "splits": ("DocumentSet", "DocumentSplits", "SetName", "split_documents"),
        "stage": (
            "CountLimit",
            "Scores",
            "TaskScore",
            "TaskScores",
            "by_task",
            "count_missing_documents",
            "count_task",
            "data_revisions",
            "evaluate_documents",
            "find_pinned_data",
            "join_parts",
            "known_scores",
            "pin_data",
            "score_table",
        ),
        "support": (
            "MeanOver",
            "generates_answers",
            "pin_sound_tasks",
            "require_declared_mean",
            "require_effect",
            "require_examples",
            "require_supported",
        ),
        "task_data": ("TaskData",),
        "task_datasets": ("TaskDataset",),
        "task_definition": (
            "EvalTask",
            "is_file_name",
            "named_data",
            "pin_built_in",
            "pin_task",
            "read_definition",
            "task_form",
        ),
        "task_loading": ("clusters_in_order", "document_texts"),
        "text_overlap": ("find_occurring",),
        "throughput": ("document_seconds", "estimate_document_cost", "measured_seconds"),
        "tokenized_task": ("TokenizedDocument", "TokenizedTask", "tokenize_task"),
    }
    _HOMES = {name: module for module, names in _EXPORTS.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
