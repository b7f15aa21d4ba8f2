"""The text of a task's documents, for a person who wants to see what was lost. Outcomes keep only hashes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mergegate.tasks.evaluation.task_definition import EvalTask


class DocumentText(NamedTuple):
    """A document as it is asked, without few-shot examples."""

    prompt: str
    target: str
    doc_hash: str  # as in ``DocumentScore``


def document_texts(task: EvalTask, wanted: Mapping[str, Sequence[int]]) -> dict[tuple[str, int], DocumentText]:
    """Texts of documents of ``task``, by the name of the task below it and position; without those that are gone.

    Raises:
        InvalidInput: when the task's data cannot be loaded.
    """
    from mergegate.tasks.evaluation.harness import open_tasks

    with open_tasks(task) as leaves:
        return {
            (name, doc_id): text_of(leaves[name], leaves[name].eval_docs[doc_id])
            for name, doc_ids in wanted.items()
            if name in leaves
            for doc_id in doc_ids
            if doc_id < len(leaves[name].eval_docs)
        }


def asked_of(task: Any, document: Mapping[str, Any]) -> str:
    """What tells ``document`` from those that ask something else: two with other ids may ask the same."""
    said = (_as_text(task, document, way(document)) for way in (task.doc_to_text, task.doc_to_target))
    return "\0".join(said)


def text_of(task: Any, document: Mapping[str, Any]) -> DocumentText:
    """What lm-eval's ``task`` asks about ``document``, and the answer it wants."""
    from lm_eval.utils import handle_non_serializable, hash_string

    serialized = json.dumps(document, indent=2, default=handle_non_serializable, ensure_ascii=False)
    return DocumentText(
        prompt=_as_text(task, document, task.doc_to_text(document)),
        target=_as_text(task, document, task.doc_to_target(document)),
        doc_hash=hash_string(serialized),
    )


def _as_text(task: Any, document: Mapping[str, Any], said: Any) -> str:
    """What a task says of a document, as text: answers may be numbers of choices, or several."""
    if isinstance(said, bool) or said is None:
        return str(said)
    if isinstance(said, int) and task.config.doc_to_choice is not None:
        choices = task.doc_to_choice(document)
        return str(choices[said]) if 0 <= said < len(choices) else str(said)
    if isinstance(said, (list, tuple)):
        return " | ".join(_as_text(task, document, one) for one in said)
    return str(said)
