"""Find documents of a task that also occur in the calibration texts of a merge, which would bias their scores."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict

from mergegate.tasks.checkpoints import TellProgress
from mergegate.tasks.evaluation.lm_eval_tasks import quiet, text_of, user_errors
from mergegate.tasks.evaluation.process import call_with_task_data
from mergegate.tasks.evaluation.stage import CountLimit
from mergegate.tasks.evaluation.task_definition import EvalTask
from mergegate.tasks.evaluation.task_loading import documents_in_set, load_task
from mergegate.tasks.stage import StageValue, value_stage
from mergegate.tasks.store import NotInKey


class CalibrationTexts(BaseModel):
    """Calibration texts of a merge and their digest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str
    texts: Annotated[tuple[str, ...], NotInKey]


class ContaminatedDocuments(StageValue):
    """Number of documents whose prompt and answer both occur in one calibration text."""

    read: int  # documents that occur in the texts
    documents: int  # all documents of the task
    first: str  # prompt of the first document that occurs in the texts

    def summary(self) -> str:
        return f"{self.read:,} of {self.documents:,} documents"


@value_stage("overlap", version=1, subject="task")
def find_contaminated_documents(task: EvalTask, texts: CalibrationTexts, limit: CountLimit) -> ContaminatedDocuments:
    """Count the documents of ``task`` that occur in ``texts``. The data of ``task`` must be pinned.

    Raises:
        InvalidInput: If the data cannot be loaded, or a template of the task fails.
        Refused: If the search takes longer than ``limit``.
    """
    return call_with_task_data(task, _search_texts, (task, texts), "its documents", limit.seconds)


def _search_texts(task: EvalTask, texts: CalibrationTexts, on_progress: TellProgress) -> ContaminatedDocuments:
    """Search the texts for each document. Runs in the model process."""
    normalized_texts = [" ".join(text.split()) for text in texts.texts]
    matches, documents, first = 0, 0, ""
    with quiet(), user_errors(task):
        loaded = load_task(task)
        members = documents_in_set(loaded, task)
        for name, leaf in loaded.leaves.items():
            for position, document in enumerate(leaf.eval_docs):
                if members is not None and (name, position) not in members:
                    continue
                documents += 1
                text = text_of(leaf, document)
                prompt, target = " ".join(text.prompt.split()), " ".join(text.target.split())
                # Checking the first occurrence of the prompt is enough: every later one has less text after it.
                if (prompt or target) and any(
                    (start := known.find(prompt)) >= 0 and target in known[start + len(prompt) :]
                    for known in normalized_texts
                ):
                    matches, first = matches + 1, first or text.prompt
    return ContaminatedDocuments(read=matches, documents=documents, first=first[:80])
