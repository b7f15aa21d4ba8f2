"""Define the interface of a built-in task: a task that mergegate scores itself, without lm-eval.

lm-eval asks models to continue texts. Embedding models, cross-encoders and speech models need other tasks. A built-in
task defines its documents, its metrics and how a loaded model is scored. Everything else (samples, interim looks,
pairing, verdicts) is that of lm-eval's tasks::

    evaluate:
      tasks:
        - task: {kind: retrieval, data: queries.jsonl, metric: ndcg@10}
          guarded_by: best parent
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.architecture import TaskForm

if TYPE_CHECKING:
    from mergegate.tasks.models.checkpoints import LoadedModel, TellProgress
    from mergegate.tasks.quality.evaluation.document_order import DataSource

TaskDocument = Mapping[str, Any]
"""One document of a task as plain data: a query with its texts, or a recording with its transcript."""


class BuiltInScore(NamedTuple):
    """Scores of one document by metric, in [0, 1], and a human-readable answer.

    For ``ended`` and ``tokens`` of a generated answer, see ``AnswerEnd``.
    """

    scores: Mapping[str, float]
    answer: str = ""
    ended: str = ""
    tokens: int | None = None


class BuiltInTask(BaseModel):
    """Built-in task: its settings, documents and scoring."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    form: ClassVar[TaskForm]
    # Distributions that affect the scores. Their versions are part of the cache key.
    libraries: ClassVar[tuple[str, ...]] = ()
    # Fields that are paths on this machine. The content of the files is pinned, not their names.
    path_fields: ClassVar[frozenset[str]] = frozenset({"data"})

    @property
    def pinned_settings(self) -> dict[str, Any]:
        """Settings that affect the scores, as plain data."""
        return self.model_dump(mode="json", exclude=set(self.path_fields))

    @property
    def name(self) -> str:
        """Name of the task, unless the guard sets one."""
        raise NotImplementedError

    @property
    def judged_by(self) -> str:
        """Metric that judges the task."""
        raise NotImplementedError

    @property
    def metrics(self) -> Mapping[str, bool]:
        """All metrics of a document, and whether higher is better for each. They include ``judged_by``."""
        raise NotImplementedError

    def resolve(self, root: Path) -> Self:
        """Return the task with absolute paths. Relative paths are relative to ``root``.

        Raises:
            InvalidInput: A file does not exist, or a package is missing.
        """
        raise NotImplementedError

    def files(self) -> tuple[Path, ...]:
        """Return all files that determine the documents. Empty if the data is downloaded."""
        raise NotImplementedError

    def sources(self) -> tuple[DataSource, ...]:
        """Return the datasets that ``documents`` downloads. Called in the model process."""
        return ()

    def documents(self) -> Sequence[TaskDocument]:
        """Load all documents.

        Raises:
            InvalidInput: A file is damaged. The message names the line and the field.
        """
        raise NotImplementedError

    def check_model(self, name: str, directory: Path, documents: Sequence[TaskDocument]) -> None:
        """Check that the files of a model, without its weights, suffice to process ``documents``.

        Raises:
            InvalidInput: They do not. The message names the model, and a missing package.
        """

    def prompt_of(self, document: TaskDocument) -> str:
        """Return the prompt as text: the query, or the name of the recording."""
        raise NotImplementedError

    def target_of(self, document: TaskDocument) -> str:
        """Return the expected answer as text."""
        raise NotImplementedError

    def chance_of(self, document: TaskDocument) -> Mapping[str, float]:
        """Return the expected scores of a random answer by metric. Metrics without an entry have 0."""
        return {}

    def score(
        self, model: LoadedModel, documents: Sequence[TaskDocument], batch_size: int, on_progress: TellProgress
    ) -> Iterator[BuiltInScore]:
        """Yield the scores of ``documents`` in order. ``on_progress`` is called with the done and total numbers.

        Raises:
            InvalidInput: The model cannot process a document.
        """
        raise NotImplementedError


OUTPUT_TYPE = "built-in"


def mean(scores: Sequence[float]) -> float:
    """Average scores. The name of the aggregation shows that a metric can judge document by document."""
    return sum(scores) / len(scores)


class BuiltInLeaf:
    """A built-in task as one of lm-eval's task objects.

    Its documents and settings are pinned, sampled, compared and previewed like those of any other task. Only scoring
    differs (``harness``).
    """

    VERSION = 0
    OUTPUT_TYPE = OUTPUT_TYPE

    def __init__(self, task: BuiltInTask) -> None:
        self.task = task

    @cached_property
    def eval_docs(self) -> Sequence[TaskDocument]:
        return self.task.documents()

    @property
    def config(self) -> Mapping[str, str]:
        """Settings that the digest of the data covers. No setting of lm-eval applies."""
        return {"settings": json.dumps(self.task.pinned_settings, sort_keys=True)}

    def aggregation(self) -> dict[str, Any]:
        return dict.fromkeys(self.task.metrics, mean)

    def higher_is_better(self) -> Mapping[str, bool]:
        return self.task.metrics

    def get_config(self, key: str) -> None:
        """Return None: no setting of lm-eval applies."""

    def doc_to_text(self, document: TaskDocument) -> str:
        return self.task.prompt_of(document)

    def doc_to_target(self, document: TaskDocument) -> str:
        return self.task.target_of(document)
