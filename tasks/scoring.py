"""How a model is scored: what must be equal on both sides of every comparison."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Scoring(BaseModel):
    """How a model is scored. Equal on both sides of every comparison, and part of the key: it moves scores."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: Literal["hf"] = "hf"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="auto: as the checkpoint is stored, which is how it will be used."
    )
    batch_size: int = Field(default=16, ge=1)
    max_length: int | None = Field(default=None, ge=1, description="Tokens; absent: what the model was made for.")
    num_fewshot: int | None = Field(default=None, ge=0, description="Absent: as the task says.")
    chat_template: bool = False
    documents: int | None = Field(
        default=None, ge=1, description="A fixed random sample of so many per task or group; absent: all."
    )
    seed: int = Field(default=0, ge=0, description="Of the sample and of the few-shot examples.")
