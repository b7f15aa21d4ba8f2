"""Evaluation: lm-eval scores of one model on one task, document by document and part by part.

A task is pinned by content, scored in a process of its own by one of several backends, and kept as a table of document
scores. Results that lm-eval has written itself are read here too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasks.evaluation.backends import Backend, find_backend
    from tasks.evaluation.document_scores import (
        SCORES_FILE,
        DocumentScore,
        Paired,
        pair_documents,
        read_document_scores,
        score_of_sample,
        write_document_scores,
    )
    from tasks.evaluation.lm_eval_results import (
        ResultsFile,
        TaskResults,
        check_alike,
        find_results,
        precision_differences,
        read_task,
    )
    from tasks.evaluation.sampling import looks
    from tasks.evaluation.scoring import Scoring
    from tasks.evaluation.stage import (
        Scores,
        TaskScore,
        TaskScores,
        by_task,
        default_metric,
        document_count,
        evaluate_to,
        join_parts,
        score_table,
    )
    from tasks.evaluation.task_definition import EvalTask, pin_task, read_definition
    from tasks.evaluation.task_texts import document_texts

# Loaded when they are asked for: the process that scores needs no Prefect, which takes longer to import than torch.
_HOMES = {
    "Backend": "backends",
    "find_backend": "backends",
    "SCORES_FILE": "document_scores",
    "DocumentScore": "document_scores",
    "Paired": "document_scores",
    "pair_documents": "document_scores",
    "read_document_scores": "document_scores",
    "score_of_sample": "document_scores",
    "write_document_scores": "document_scores",
    "ResultsFile": "lm_eval_results",
    "TaskResults": "lm_eval_results",
    "check_alike": "lm_eval_results",
    "find_results": "lm_eval_results",
    "precision_differences": "lm_eval_results",
    "read_task": "lm_eval_results",
    "looks": "sampling",
    "Scoring": "scoring",
    "Scores": "stage",
    "TaskScore": "stage",
    "TaskScores": "stage",
    "by_task": "stage",
    "default_metric": "stage",
    "document_count": "stage",
    "evaluate_to": "stage",
    "join_parts": "stage",
    "score_table": "stage",
    "EvalTask": "task_definition",
    "pin_task": "task_definition",
    "read_definition": "task_definition",
    "document_texts": "task_texts",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = [
    "SCORES_FILE",
    "Backend",
    "DocumentScore",
    "EvalTask",
    "Paired",
    "ResultsFile",
    "Scores",
    "Scoring",
    "TaskResults",
    "TaskScore",
    "TaskScores",
    "by_task",
    "check_alike",
    "default_metric",
    "document_count",
    "document_texts",
    "evaluate_to",
    "find_backend",
    "find_results",
    "join_parts",
    "looks",
    "pair_documents",
    "pin_task",
    "precision_differences",
    "read_definition",
    "read_document_scores",
    "read_task",
    "score_of_sample",
    "score_table",
    "write_document_scores",
]
