"""Evaluation: lm-eval scores of one model, document by document, as a cached stage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from merge_core.keys import NotInKey
from tasks.stage import StageValue


class EvalTask(BaseModel):
    """An lm-eval task pinned by content: definition and local data are hashed, so a changed document is a new task."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # what lm-eval calls it
    digest: str  # sha256 over the definition and its local data
    definition: Annotated[Path | None, NotInKey]  # a local YAML, None for a task that lm-eval ships


class Scoring(BaseModel):
    """How a model is scored. Equal on both sides of every comparison, and part of the key: it moves scores."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: Literal["hf"] = "hf"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    batch_size: int = Field(default=16, ge=1)
    max_length: int | None = Field(default=None, ge=1)
    num_fewshot: int | None = Field(default=None, ge=0)
    chat_template: bool = False
    documents: int | None = Field(default=None, ge=1)  # a fixed seeded sample of so many per task; None: all
    seed: int = 0


class TaskScore(BaseModel):
    """Score of one task under one metric, in [0, 1] for accuracies, with the standard error of its mean."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    metric: str  # lm-eval's 'acc,none', 'exact_match,flexible-extract'
    n: int  # documents
    score: float
    stderr: float
    higher_is_better: bool


class Scores(StageValue):
    """Scores of one model. The artifact holds ``outcomes.parquet``, one row a document, task and metric:
    ``task, metric, doc_id, doc_hash, prompt_hash, target_hash, outcome``."""

    model: Annotated[str, NotInKey]
    tasks: tuple[TaskScore, ...]
    lm_eval_version: str

    def summary(self) -> str:
        return " · ".join(f"{score.task} {100 * score.score:.1f}" for score in self.tasks)
