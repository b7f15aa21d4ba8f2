"""Define the profile settings that accept differences between tokenizers, by the names that the findings use::

checks:
  tokenizer: {accepted: [pre_tokenizer, chat_template]}
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TokenizerSettings(BaseModel):
    """Accepted differences between tokenizers, after a review."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    accepted: tuple[str, ...] = Field(
        default=(),
        description="Parts in which tokenizers may differ: merges, normalizer, pre_tokenizer, vocabulary, "
        "chat_template, ... (the findings name them).",
    )
