"""Which documents of a task stand in texts that models have read for their merge: what was read cannot judge."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict

from mergegate.tasks.checkpoints import TellProgress
from mergegate.tasks.evaluation.process import ask_about_task
from mergegate.tasks.evaluation.stage import CountLimit
from mergegate.tasks.evaluation.task_definition import EvalTask
from mergegate.tasks.stage import StageValue, value_stage
from mergegate.tasks.store import NotInKey

# Between texts, so that nothing is found across two of them.
_APART = "\0"


class CalibrationTexts(BaseModel):
    """Texts that were read, and what pins them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str
    texts: Annotated[tuple[str, ...], NotInKey]


class ContaminatedDocuments(StageValue):
    """Documents whose prompt and answer both stand in one of the texts."""

    read: int
    documents: int
    first: str  # the prompt of the first of them

    def summary(self) -> str:
        return f"{self.read:,} of {self.documents:,} documents"


@value_stage("overlap", version=1, subject="task")
def find_contaminated_documents(task: EvalTask, texts: CalibrationTexts, limit: CountLimit) -> ContaminatedDocuments:
    """How many documents of ``task``, whose data are pinned, stand in ``texts``.

    Raises:
        InvalidInput: when the data cannot be loaded, or a template of the task fails.
        Refused: when the time is over.
    """
    return ask_about_task(task, _documents_read_there, (task, texts), "its documents", limit.seconds)


def _documents_read_there(task: EvalTask, texts: CalibrationTexts, on_progress: TellProgress) -> ContaminatedDocuments:
    """In the process that holds models."""
    from mergegate.tasks.evaluation.harness import counted_documents, load_task, mistakes_of, quiet
    from mergegate.tasks.evaluation.task_texts import text_of

    whole = _APART.join(_plain(text) for text in texts.texts)
    found, documents, first = 0, 0, ""
    with quiet(), mistakes_of(task):
        loaded = load_task(task)
        counted = counted_documents(loaded, task)
        for name, leaf in loaded.leaves.items():
            for position, document in enumerate(leaf.eval_docs):
                if counted is not None and (name, position) not in counted:
                    continue
                documents += 1
                said = text_of(leaf, document)
                if _stands_in(whole, _plain(said.prompt), _plain(said.target)):
                    found, first = found + 1, first or said.prompt
    return ContaminatedDocuments(read=found, documents=documents, first=first[:80])


def _plain(text: str) -> str:
    return " ".join(text.split())


def _stands_in(whole: str, prompt: str, target: str) -> bool:
    """Whether one of the texts has the prompt, and the answer behind it."""
    if not prompt:
        return bool(target) and target in whole
    at = whole.find(prompt)
    while at >= 0:
        end = whole.find(_APART, at)
        if target in whole[at + len(prompt) : end if end >= 0 else len(whole)]:
            return True
        at = whole.find(prompt, at + 1)
    return False
