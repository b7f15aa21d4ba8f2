"""Define the ``perplexity`` section of a profile: the held-out text and the limits on drift."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from mergegate.merge_core.parsing import LocalPath
from mergegate.tasks.quality.perplexity.measurement import WindowSettings


def _percentage(value: object) -> object:
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            return float(value.strip()[:-1]) / 100
        except ValueError:
            raise ValueError(f"{value!r} is not a percentage such as 5%") from None
    if isinstance(value, (int, float)) and value >= 1:
        raise ValueError(f"{value} means {100 * value:g} %; write {value}% for {value} percent")
    return value


Percentage = Annotated[float, BeforeValidator(_percentage, json_schema_input_type=float | str), Field(gt=0, lt=1)]


class DriftLimits(BaseModel):
    """Limits on how much the perplexity of a merge may exceed that of its best parent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_increase: Percentage = 0.05
    warn_increase: Percentage = 0.02
    max_broken_documents: Percentage = 0.01
    reference: str | tuple[str, ...] = "fine-tunes"  # parents to compare with; the best one counts

    @model_validator(mode="after")
    def _warns_before_it_fails(self) -> Self:
        if self.warn_increase > self.max_increase:
            raise ValueError(f"warn_increase ({self.warn_increase:g}) must not exceed max_increase")
        return self


class PerplexitySettings(BaseModel):
    """The held-out text and the allowed drift, in a profile under ``perplexity``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    documents: LocalPath = Field(
        description="Held-out text: jsonl with one document per line, or plain text with one per paragraph."
    )
    field: str = Field(
        default="text", min_length=1, description="Field of a jsonl line that has the text. Default: text."
    )
    max_increase: Percentage = Field(
        default=0.05,
        description="Largest increase over the better parent that passes, such as 5% or 0.05. Default: 5%.",
    )
    warn_increase: Percentage | None = Field(
        default=None,
        description="Increase above which a warning is given. Default: 2%, or max_increase if that is smaller.",
    )
    max_broken_documents: Percentage = Field(
        default=0.01,
        description="Largest share of broken documents. A document is broken if it loses more than 0.5 nats per token "
        "on average, and at least 8 nats in total. Default: 1%.",
    )
    stratum: str | None = Field(
        default=None,
        min_length=1,
        description="Field of a jsonl line that names the stratum of a document. Each stratum of eight or more "
        "documents has its own check. Default: the first of language, lang and source that the document has.",
    )
    max_length: int = Field(default=2048, ge=2, description="Number of tokens in a window. Default: 2048.")
    reference: str | tuple[str, ...] = Field(
        default="fine-tunes",
        description="Parents from which the better one is chosen: fine-tunes (the merged models; the base only if it "
        "has a weight; of a training run, only the last checkpoint), all, or names. Default: fine-tunes.",
    )
    max_documents: int | None = Field(
        default=1000, ge=1, description="Number of distinct documents, from the first. null: all. Default: 1000."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="Format of the weights, as in evaluate.dtype."
    )
    batch_size: int = Field(default=16, ge=1, description="Sequences per batch.")
    ensemble: bool = Field(
        default=False,
        description="Also measure the ensemble of the parents, which averages their probabilities. Default: false.",
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
        """Settings by which the likelihoods are judged."""
        warn = self.warn_increase if self.warn_increase is not None else min(0.02, self.max_increase)
        return DriftLimits(
            max_increase=self.max_increase,
            warn_increase=warn,
            max_broken_documents=self.max_broken_documents,
            reference=self.reference,
        )
