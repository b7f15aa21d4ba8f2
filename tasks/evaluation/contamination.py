"""Find documents of a task that also occur in the calibration texts of a merge, which would bias their scores."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict

from mergegate.tasks.checkpoints import TellProgress
from mergegate.tasks.evaluation.lm_eval_tasks import quiet, text_of, user_errors
from mergegate.tasks.evaluation.process import call_with_task_data
from mergegate.tasks.evaluation.stage import CountLimit
from mergegate.tasks.evaluation.task_definition import EvalTask
from mergegate.tasks.evaluation.task_loading import documents_by_leaf, load_task
from mergegate.tasks.evaluation.text_overlap import find_occurring
from mergegate.tasks.stage import StageValue, value_stage
from mergegate.tasks.store import NotInKey


class CalibrationTexts(BaseModel):
    """Calibration texts of a merge and their digest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str
    texts: Annotated[tuple[str, ...], NotInKey]


class ContaminatedDocuments(StageValue):
    """Number of documents that occur in one of the calibration texts (see ``text_overlap``)."""

    read: int  # documents that occur in the texts
    documents: int  # all documents of the task
    first: str  # prompt of the first document that occurs in the texts

    def summary(self) -> str:
        return f"{self.read:,} of {self.documents:,} documents"


@value_stage("overlap", version=2, subject="task")
def find_contaminated_documents(task: EvalTask, texts: CalibrationTexts, limit: CountLimit) -> ContaminatedDocuments:
    """Count the documents of ``task`` that occur in ``texts``. The data of ``task`` must be pinned.

    Raises:
        InvalidInput: If the data cannot be loaded, or a template of the task fails.
        Refused: If the search takes longer than ``limit``.
    """
    return call_with_task_data(task, _search_texts, (task, texts), "its documents", limit.seconds)


def _search_texts(task: EvalTask, texts: CalibrationTexts, on_progress: TellProgress) -> ContaminatedDocuments:
    """Search the texts for each document. Runs in the model process."""
    documents: list[tuple[str, str]] = []
    with quiet(), user_errors(task):
        for _, leaf, own in documents_by_leaf(load_task(task), task):
            texts_of_leaf = (text_of(leaf, document) for document in own)
            documents += [(text.prompt, text.target) for text in texts_of_leaf]
    found = find_occurring(documents, texts.texts)
    first = documents[found[0]][0][:80] if found else ""
    return ContaminatedDocuments(read=len(found), documents=len(documents), first=first)
