"""Find documents of a task in the calibration texts of a merge: text that a model has read cannot judge it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict

from mergegate.tasks.checkpoints import TellProgress
from mergegate.tasks.evaluation.process import call_with_task_data
from mergegate.tasks.evaluation.stage import CountLimit
from mergegate.tasks.evaluation.task_definition import EvalTask
from mergegate.tasks.stage import StageValue, value_stage
from mergegate.tasks.store import NotInKey

# Separator of texts, which prevents matches across two of them.
_APART = "\0"


class CalibrationTexts(BaseModel):
    """Calibration texts, and their digest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str
    texts: Annotated[tuple[str, ...], NotInKey]


class ContaminatedDocuments(StageValue):
    """Number of documents whose prompt and answer both occur in one of the texts."""

    read: int  # documents that occur in the texts
    documents: int  # all documents of the task
    first: str  # prompt of the first document that occurs in the texts

    def summary(self) -> str:
        return f"{self.read:,} of {self.documents:,} documents"


@value_stage("overlap", version=1, subject="task")
def find_contaminated_documents(task: EvalTask, texts: CalibrationTexts, limit: CountLimit) -> ContaminatedDocuments:
    """Count the documents of ``task``, whose data is pinned, that occur in ``texts``.

    Raises:
        InvalidInput: If the data cannot be loaded, or a template of the task fails.
        Refused: If the search takes longer than ``limit``.
    """
    return call_with_task_data(task, _count_matches, (task, texts), "its documents", limit.seconds)


def _count_matches(task: EvalTask, texts: CalibrationTexts, on_progress: TellProgress) -> ContaminatedDocuments:
    """Search the documents; runs in the process that holds models."""
    from mergegate.tasks.evaluation.harness import documents_in_set, load_task, quiet, user_errors
    from mergegate.tasks.evaluation.task_texts import text_of

    corpus = _APART.join(_plain(text) for text in texts.texts)
    matches, documents, first = 0, 0, ""
    with quiet(), user_errors(task):
        loaded = load_task(task)
        counted = documents_in_set(loaded, task)
        for name, leaf in loaded.leaves.items():
            for position, document in enumerate(leaf.eval_docs):
                if counted is not None and (name, position) not in counted:
                    continue
                documents += 1
                text = text_of(leaf, document)
                if _occurs_in(corpus, _plain(text.prompt), _plain(text.target)):
                    matches, first = matches + 1, first or text.prompt
    return ContaminatedDocuments(read=matches, documents=documents, first=first[:80])


def _plain(text: str) -> str:
    return " ".join(text.split())


def _occurs_in(corpus: str, prompt: str, target: str) -> bool:
    """Return whether one of the texts contains the prompt followed by the answer."""
    if not prompt:
        return bool(target) and target in corpus
    at = corpus.find(prompt)
    while at >= 0:
        end = corpus.find(_APART, at)
        if target in corpus[at + len(prompt) : end if end >= 0 else len(corpus)]:
            return True
        at = corpus.find(prompt, at + 1)
    return False
