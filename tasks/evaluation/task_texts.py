"""Return the text of a task's documents for display. Stored scores contain only hashes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mergegate.tasks.evaluation.task_definition import EvalTask


class DocumentText(NamedTuple):
    """Prompt and target of a document, without few-shot examples."""

    prompt: str
    target: str
    doc_hash: str  # as in ``DocumentScore``


def document_texts(task: EvalTask, positions: Mapping[str, Sequence[int]]) -> dict[tuple[str, int], DocumentText]:
    """Return the prompts and targets of selected documents of a task.

    Args:
        task: Task that contains the documents.
        positions: Positions of the documents in their data, by name of the leaf task.

    Returns:
        Texts by pair of leaf task and position. Documents that no longer exist are left out.

    Raises:
        InvalidInput: The data of the task cannot be loaded.
    """
    from mergegate.tasks.evaluation.harness import open_tasks

    with open_tasks(task) as leaves:
        return {
            (name, doc_id): text_of(leaves[name], leaves[name].eval_docs[doc_id])
            for name, doc_ids in positions.items()
            if name in leaves
            for doc_id in doc_ids
            if doc_id < len(leaves[name].eval_docs)
        }


def question_text(task: Any, document: Mapping[str, Any]) -> str:
    """Return the prompt and target of ``document`` as one text, which is equal for documents that ask the same."""
    texts = (_as_text(task, document, convert(document)) for convert in (task.doc_to_text, task.doc_to_target))
    return "\0".join(texts)


def text_of(task: Any, document: Mapping[str, Any]) -> DocumentText:
    """Return the prompt that lm-eval's ``task`` builds for ``document``, and the expected answer."""
    from lm_eval.utils import handle_non_serializable, hash_string

    serialized = json.dumps(document, indent=2, default=handle_non_serializable, ensure_ascii=False)
    return DocumentText(
        prompt=_as_text(task, document, task.doc_to_text(document)),
        target=_as_text(task, document, task.doc_to_target(document)),
        doc_hash=hash_string(serialized),
    )


def _as_text(task: Any, document: Mapping[str, Any], value: Any) -> str:
    """Convert a prompt or target to text: a target may be the number of a choice, or a list of answers."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int) and task.config.doc_to_choice is not None:
        choices = task.doc_to_choice(document)
        return str(choices[value]) if 0 <= value < len(choices) else str(value)
    if isinstance(value, (list, tuple)):
        return " | ".join(_as_text(task, document, each) for each in value)
    return str(value)
