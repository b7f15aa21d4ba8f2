"""Adapt a built-in task to the part of lm-eval's task interface that mergegate reads.

A *leaf* is one of lm-eval's task objects, as opposed to a group of tasks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from mergegate.tasks.evaluation.built_in.contract import BuiltInTask, TaskDocument

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
