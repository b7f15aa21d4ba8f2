"""How a model is scored: what must be equal on both sides of every comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from merge_core.errors import InvalidInput
from merge_core.store import NotInKey


class VllmSettings(BaseModel):
    """How vLLM runs a model, in a profile under ``evaluate.vllm``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs a model is split over.")
    gpu_memory_utilization: Annotated[float, NotInKey] = Field(
        default=0.8,
        gt=0,
        le=1,
        description="Below vLLM's own 0.9: log-probabilities of prompts take room of their own.",
    )


class ModelEndpoint(BaseModel):
    """Where one model is served."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str  # 'http://host:8000/v1'
    model: str  # what the server calls it


class ServerSettings(BaseModel):
    """Which server answers for which model, in a profile under ``evaluate.server``.

    Any server that speaks OpenAI's completions and returns log-probabilities of the prompt. What it serves cannot be
    seen from here: that it is the checkpoint of this run is the word of whoever wrote the profile.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str | None = Field(default=None, pattern=r"^https?://", description="Of every model that has none of its own.")
    models: Mapping[str, str | ModelEndpoint] = Field(
        default_factory=dict, description="By name in this run ('merge'): what the server calls it, or {url, model}."
    )
    concurrency: int = Field(default=8, ge=1, description="Requests under way at once.")

    def at(self, name: str) -> ModelEndpoint:
        """Where the model of this run that is called ``name`` is served; by that name where nothing else is said.

        Raises:
            InvalidInput: when no address is known for it.
        """
        found = self.models.get(name, name)
        if isinstance(found, ModelEndpoint):
            return found
        if self.url is None:
            raise InvalidInput(
                "evaluate.server",
                found=f"no address for {name!r}",
                expected="url for all models, or one for each under 'models'",
                remedy=f"models: {{{name}: {{url: 'http://host:8000/v1', model: {found}}}}}",
            )
        return ModelEndpoint(url=self.url, model=found)


class Scoring(BaseModel):
    """How a model is scored. Equal on both sides of every comparison, and part of the key: it moves scores."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: Literal["hf", "vllm", "served"] = Field(
        default="hf", description="transformers here, vLLM here, or a server that is running already."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="auto: as the checkpoint is stored, which is how it will be used."
    )
    batch_size: int = Field(default=16, ge=1)
    max_length: int | None = Field(default=None, ge=1, description="Tokens; absent: what the model was made for.")
    num_fewshot: int | None = Field(default=None, ge=0, description="Absent: as the task says.")
    chat_template: bool = False
    documents: Annotated[int | None, NotInKey] = Field(  # the part of the documents is in the key instead
        default=None, ge=1, description="A fixed random sample of so many per task or group; absent: all."
    )
    seed: int = Field(default=0, ge=0, description="Of the sample and of the few-shot examples.")
    time_limit: Annotated[float | None, NotInKey] = Field(
        default=None, gt=0, description="Seconds for one part (500 documents at most), loading included; absent: none."
    )
    vllm: VllmSettings | None = Field(default=None, description="Only for backend: vllm.")
    server: Annotated[ServerSettings | None, NotInKey] = Field(default=None, description="Only for backend: served.")

    @model_validator(mode="after")
    def _settings_belong_to_the_backend(self) -> Self:
        if self.vllm is not None and self.backend != "vllm":
            raise ValueError(f"'vllm' is for backend: vllm, not {self.backend}")
        if (self.server is not None) != (self.backend == "served"):
            raise ValueError("'server' and backend: served belong together")
        return self
