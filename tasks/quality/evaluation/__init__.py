"""Evaluate a model on lm-eval tasks, and store a score for every document.

A task is pinned by its content and scored in a separate process by one of several backends. The scores are a table
with one row per document and metric. The package also reads results that lm-eval wrote itself.

The modules behind the public names are imported when a name is first used, because merges need few of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mergegate.tasks.quality.evaluation.backends import Backend, find_backend
    from mergegate.tasks.quality.evaluation.built_in import (
        AnyBuiltInTask,
        BuiltInTask,
        built_in_schemas,
        built_in_tasks,
        form_of_metric,
    )
    from mergegate.tasks.quality.evaluation.definitions.datasets import FetchedDataset, TaskDataset, fetch_datasets
    from mergegate.tasks.quality.evaluation.definitions.support import (
        MeanOver,
        pin_sound_tasks,
        require_declared_mean,
        require_effect,
        require_examples,
        require_supported,
    )
    from mergegate.tasks.quality.evaluation.definitions.task import EvalTask, pin_built_in, pin_task
    from mergegate.tasks.quality.evaluation.definitions.tree import is_file_name, task_tree
    from mergegate.tasks.quality.evaluation.document_order import (
        DocumentSet,
        DocumentSplits,
        SampleUse,
        SetName,
        TaskData,
        interim_looks,
        sample_ranges,
        split_documents,
    )
    from mergegate.tasks.quality.evaluation.results import (
        TaskResults,
        find_results,
        precision_differences,
        read_task,
        require_same_conditions,
    )
    from mergegate.tasks.quality.evaluation.scoring.document_scores import (
        SCORES_FILE,
        DocumentScore,
        PairedScores,
        pair_documents,
        read_document_scores,
        write_document_scores,
    )
    from mergegate.tasks.quality.evaluation.scoring.loading import (
        CountLimit,
        call_with_task_data,
        clusters_in_order,
        document_texts,
    )
    from mergegate.tasks.quality.evaluation.scoring.metrics import AnsweredChoice, choose_known_metrics, choose_metrics
    from mergegate.tasks.quality.evaluation.scoring.overlap import (
        CalibrationTexts,
        ContaminatedDocuments,
        find_contaminated_documents,
        find_occurring,
        find_repetition,
        repetition_findings,
    )
    from mergegate.tasks.quality.evaluation.scoring.prompts import (
        PromptWarning,
        TaskPreview,
        TokenizedDocument,
        TokenizedTask,
        TokenizerSource,
        preview,
        task_prompts,
        tokenize_task,
    )
    from mergegate.tasks.quality.evaluation.scoring.scores import (
        Scores,
        TaskScore,
        TaskScores,
        by_task,
        join_parts,
        score_table,
    )
    from mergegate.tasks.quality.evaluation.settings import (
        EvaluationSettings,
        PromptSettings,
        Scoring,
        check_thinking,
        resolve_prompt_settings,
    )
    from mergegate.tasks.quality.evaluation.stage import (
        count_missing_documents,
        count_task,
        data_revisions,
        document_seconds,
        estimate_document_cost,
        evaluate_documents,
        find_pinned_data,
        known_scores,
        lengthen_answers,
        measured_seconds,
        pin_data,
    )
else:
    _HOMES = {  # public names by the module that defines them
        "backends": "Backend find_backend",
        "built_in": "AnyBuiltInTask BuiltInTask built_in_schemas built_in_tasks form_of_metric",
        "definitions.datasets": "FetchedDataset TaskDataset fetch_datasets",
        "definitions.support": (
            "MeanOver pin_sound_tasks require_declared_mean require_effect require_examples require_supported"
        ),
        "definitions.task": "EvalTask pin_built_in pin_task",
        "definitions.tree": "is_file_name task_tree",
        "results": "TaskResults find_results precision_differences read_task require_same_conditions",
        "scoring.document_scores": (
            "DocumentScore PairedScores SCORES_FILE pair_documents read_document_scores write_document_scores"
        ),
        "scoring.loading": "CountLimit call_with_task_data clusters_in_order document_texts",
        "scoring.metrics": "AnsweredChoice choose_known_metrics choose_metrics",
        "scoring.overlap": (
            "CalibrationTexts ContaminatedDocuments find_contaminated_documents find_occurring find_repetition "
            "repetition_findings"
        ),
        "scoring.prompts": (
            "PromptWarning TaskPreview TokenizedDocument TokenizedTask TokenizerSource preview task_prompts "
            "tokenize_task"
        ),
        "scoring.scores": "Scores TaskScore TaskScores by_task join_parts score_table",
        "settings": "EvaluationSettings PromptSettings Scoring check_thinking resolve_prompt_settings",
        "stage": (
            "count_missing_documents count_task data_revisions document_seconds estimate_document_cost "
            "evaluate_documents find_pinned_data known_scores lengthen_answers measured_seconds pin_data"
        ),
        "document_order": (
            "DocumentSet DocumentSplits SampleUse SetName TaskData interim_looks sample_ranges split_documents"
        ),
    }

    def __getattr__(name: str) -> Any:
        for module, names in _HOMES.items():
            if name in names.split():
                return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
