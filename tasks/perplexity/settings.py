"""Define the ``perplexity`` section of a profile: the held-out text and the allowed drift."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from mergegate.merge_core.parsing import LocalPath
from mergegate.tasks.perplexity.measurement import WindowSettings


def _percentage(value: object) -> object:
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            return float(value.strip()[:-1]) / 100
        except ValueError:
            raise ValueError(f"{value!r} is no percentage such as 5%") from None
    if isinstance(value, (int, float)) and value >= 1:
        raise ValueError(f"{value} is more than double; write {value}% for per cent")
    return value


Percentage = Annotated[float, BeforeValidator(_percentage, json_schema_input_type=float | str), Field(gt=0, lt=1)]


class DriftLimits(BaseModel):
    """Limits on how much the perplexity of a merge may exceed that of its better parent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_increase: Percentage = 0.05
    warn_increase: Percentage = 0.02
    reference: str | tuple[str, ...] = "fine-tunes"  # parents to compare with; the best one counts

    @model_validator(mode="after")
    def _warns_before_it_fails(self) -> Self:
        if self.warn_increase > self.max_increase:
            raise ValueError(f"warn_increase ({self.warn_increase:g}) must not exceed max_increase")
        return self


class PerplexitySettings(BaseModel):
    """The held-out text and the allowed drift, in a profile under ``perplexity``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    documents: LocalPath = Field(description="jsonl with one document a line, or plain text with one a paragraph.")
    field: str = Field(default="text", min_length=1, description="Of a jsonl line.")
    max_increase: Percentage = Field(default=0.05, description="'5%' or 0.05 over the better parent; more fails.")
    warn_increase: Percentage | None = Field(default=None, description="Default: 2 %, or max_increase if less.")
    max_length: int = Field(default=2048, ge=2, description="Tokens a window.")
    reference: str | tuple[str, ...] = Field(
        default="fine-tunes",
        description="Parents of which the better one counts: fine-tunes (what was merged; the base only where it has a "
        "weight of its own), all, or names.",
    )
    max_documents: int | None = Field(default=1000, ge=1, description="The first so many; null: all.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    batch_size: int = Field(default=16, ge=1)
    ensemble: bool = Field(
        default=False, description="Also measure the parents together, see tasks/perplexity/ensemble.py."
    )

    @model_validator(mode="after")
    def _limits_agree(self) -> Self:
        _ = self.limits
        return self

    @property
    def windows(self) -> WindowSettings:
        """Settings that determine the likelihoods."""
        return WindowSettings(
            max_length=self.max_length, documents=self.max_documents, dtype=self.dtype, batch_size=self.batch_size
        )

    @property
    def limits(self) -> DriftLimits:
        """Settings that judge the likelihoods."""
        warn = self.warn_increase if self.warn_increase is not None else min(0.02, self.max_increase)
        return DriftLimits(max_increase=self.max_increase, warn_increase=warn, reference=self.reference)
