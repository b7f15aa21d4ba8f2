"""Perplexity: per-document log-likelihoods of one model on held-out text, as a cached stage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from merge_core.keys import NotInKey
from tasks.stage import StageValue


class Documents(BaseModel):
    """Held-out documents pinned by content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Annotated[Path, NotInKey]  # jsonl with one document a line, or plain text with one a paragraph
    sha256: str
    field: str = "text"  # of a jsonl line


class Windows(BaseModel):
    """How documents are read: equal for all models, and part of the key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_length: int = Field(default=2048, ge=2)  # tokens a window
    documents: int | None = Field(default=1000, ge=1)  # the first so many; None: all
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    batch_size: int = Field(default=16, ge=1)


class Likelihoods(StageValue):
    """Likelihood of the held-out text under one model. ``documents.parquet``: ``doc_id, loglik (nats), tokens, bytes``."""

    model: Annotated[str, NotInKey]
    documents: int
    tokens: int
    bytes: int
    loglik: float | None  # nats, summed over all documents; None when any of it is not finite
    perplexity: float | None  # exp(-loglik / tokens)
    bits_per_byte: float | None
    vocabulary: str  # digest of the tokenizer; token perplexities compare only where it is equal

    def summary(self) -> str:
        return f"{self.perplexity:.3f}" if self.perplexity is not None else "not finite"
