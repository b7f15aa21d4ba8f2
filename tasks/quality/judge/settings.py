"""Define the ``judge`` section of a profile: settings for answers, judgments, the verdict and the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from mergegate.merge_core.parsing import LocalPath
from mergegate.tasks.base.http import plain_address
from mergegate.tasks.base.store import NotInKey
from mergegate.tasks.quality.gate import MARGIN_ABOVE_MAX_DROP

P = TypeVar("P", bound=BaseModel)

DIMENSIONS: Mapping[str, str] = {
    "correctness": "The facts, reasoning and results are correct, and agree with the reference answer if there is one.",
    "relevance": "The answer fulfills the request completely, adds nothing else, and has the requested form.",
    "clarity": "The answer is easy to follow, has no padding or repetition, and is complete.",
}


class Generation(BaseModel):
    """Generation settings of both models, which decode greedily. Part of the key of the answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_new_tokens: int = Field(default=512, ge=1, description="Largest number of tokens in an answer. Default: 512.")
    chat_template: bool = Field(
        default=True,
        description="Apply the chat template of each model. If false, models continue the prompt as plain text. "
        "Default: true.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="Format of the weights, as in evaluate.dtype."
    )
    batch_size: int = Field(default=8, ge=1, description="Sequences per batch.")


class JudgmentSettings(BaseModel):
    """Settings that determine a judgment. Part of its key, together with the text of the rubric."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1, description="Name of the judge on the server.")
    dimensions: Mapping[str, str] = Field(
        default=DIMENSIONS,
        min_length=1,
        description="Dimensions to judge: a name, and a description of a good answer. Default: correctness, relevance, "
        "clarity.",
    )
    max_tokens: int | None = Field(
        default=2048,
        ge=1,
        description="Largest number of tokens in a judgment. null: the limit of the server. Default: 2048.",
    )

    @field_validator("dimensions")
    @classmethod
    def _check_dimension_names(cls, dimensions: Mapping[str, str]) -> Mapping[str, str]:
        if reserved := sorted({"reasoning", "verdict"} & set(dimensions)):
            raise ValueError(f"{reserved[0]!r} is a reserved name: it is part of every judgment")
        return dimensions


class ControlSettings(BaseModel):
    """Number of control pairs, see ``judge.questions``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    control_share: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="Number of control pairs, relative to the judged pairs, and at least 24. A control pair is an "
        "answer with a damaged copy of it, which a reliable judge finds. Default: 0.1.",
    )


class AnswerLimits(BaseModel):
    """Limits that hold whatever the judge prefers: on its control pairs, and on the length and end of the answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_controls_found: float = Field(
        default=0.25,
        ge=0,
        lt=1,
        description="Share of the control pairs that the judge must be shown to find. Default: 0.25, the share that a "
        "judge finds by tossing coins.",
    )
    max_length_ratio: float | None = Field(
        default=2.0,
        gt=1,
        description="Largest length of the new model's answers, relative to the reference's. null: no limit. "
        "Default: 2.",
    )
    max_cut_off: float = Field(
        default=5.0,
        ge=0,
        le=100,
        description="Largest share of answers that the token limit may cut off beyond the reference's share, in "
        "points. The judge stage is inconclusive if either share exceeds it. Default: 5.",
    )


class JudgeRule(AnswerLimits):
    """Rule for passing a win rate. Points are those of the win rate: 50 is even."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_shortfall: float = Field(
        default=3.0,
        ge=0,
        le=50,
        description="Largest win-rate shortfall below even, in points, that passes. Default: 3.",
    )
    margin: float | None = Field(
        default=None,
        gt=0,
        le=50,
        description="Largest upper bound of the shortfall that passes, in points. Default: max_shortfall + 1.",
    )
    confidence: float = Field(
        default=0.95, gt=0.5, lt=1, description="One-sided confidence of each bound. Default: 0.95."
    )
    min_consistency: float = Field(
        default=0.7,
        ge=0,
        le=1,
        description="Smallest share of pairs with the same choice in both orders; below it, the verdict is "
        "inconclusive. Default: 0.7.",
    )
    on_inconclusive: Literal["block", "warn", "pass"] = Field(
        default="block",
        description="Effect of an inconclusive verdict: block publication, warn, or pass. Default: block.",
    )

    @model_validator(mode="after")
    def _check_margin(self) -> Self:
        if self.margin is not None and self.margin < self.max_shortfall:
            raise ValueError(f"margin ({self.margin:g}) must be at least max_shortfall ({self.max_shortfall:g})")
        return self

    @property
    def upper_limit(self) -> float:
        """Non-inferiority margin: the largest upper bound of the shortfall that passes, in points."""
        return self.margin if self.margin is not None else self.max_shortfall + MARGIN_ABOVE_MAX_DROP


class JudgeServer(BaseModel):
    """Address of the judge's server and retry policy. They never affect a judgment and never contain a secret."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: Annotated[str, NotInKey] = Field(
        description="Address of an OpenAI-compatible server, such as http://localhost:8000/v1."
    )
    api_key_env: Annotated[str | None, NotInKey] = Field(
        default=None, min_length=1, description="Environment variable that holds the API key. Default: send no key."
    )
    timeout: Annotated[float, NotInKey] = Field(
        default=120.0, gt=0, description="Time limit of one request, in seconds. Default: 120."
    )
    attempts: Annotated[int, NotInKey] = Field(
        default=6,
        ge=1,
        description="Largest number of attempts per request, which is repeated after status 429, 5xx or no answer. "
        "Default: 6.",
    )
    concurrency: Annotated[int, NotInKey] = Field(
        default=4, ge=1, le=256, description="Number of concurrent requests. Default: 4."
    )

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        return plain_address(url)


class JudgeSettings(Generation, JudgmentSettings, ControlSettings, JudgeRule, JudgeServer):
    """Prompts, models, judge and passing rule, in a profile under ``judge``."""

    prompts: LocalPath = Field(
        description="jsonl file with prompt (or turns) and optionally reference in each line, or MT-Bench's questions."
    )
    references: LocalPath | None = Field(default=None, description="File with MT-Bench's reference answers.")
    guarded_by: str = Field(min_length=1, description="Model whose answers the merge's answers are compared with.")
    sample: int | None = Field(
        default=None, ge=2, description="Number of prompts in a fixed random sample. Default: all prompts."
    )
    seed: int = Field(default=0, ge=0, description="Seed of the sample. Default: 0.")

    def part(self, kind: type[P]) -> P:
        return kind.model_validate({name: getattr(self, name) for name in kind.model_fields})
