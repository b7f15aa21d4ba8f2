"""What a profile accepts of tokenizers that differ, by the names that the findings give::

checks:
  tokenizer: {accepted: [pre_tokenizer, chat_template]}
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class TokenizerSettings(BaseModel):
    """Which differences between tokenizers somebody has looked at."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    accepted: tuple[str, ...] = Field(
        default=(),
        description="Parts in which tokenizers may differ: merges, normalizer, pre_tokenizer, vocabulary, "
        "chat_template, ... (the findings name them).",
    )
