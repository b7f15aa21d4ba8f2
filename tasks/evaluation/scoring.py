"""How a model is scored: what must be equal on both sides of every comparison."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from merge_core.errors import InvalidInput
from merge_core.store import NotInKey
from tasks.evaluation.backends import find_backend
from tasks.evaluation.backends.served import ServerSettings
from tasks.evaluation.backends.vllm import VllmSettings

_BACKEND_SETTINGS = ("vllm", "server")  # fields that are one backend's own


class Scoring(BaseModel):
    """How a model is scored. Equal on both sides of every comparison, and part of the key: it moves scores."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: str = Field(
        default="hf",
        description="hf: transformers here; vllm: vLLM here; served: a server that is running already; or one that an "
        "installed package adds.",
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

    @field_validator("backend")
    @classmethod
    def _is_known(cls, backend: str) -> str:
        try:
            return find_backend(backend).name
        except InvalidInput as error:
            raise ValueError(f"{error.found}; expected: {error.expected}") from None

    @model_validator(mode="after")
    def _settings_belong_to_the_backend(self) -> Self:
        backend = find_backend(self.backend)
        for name in _BACKEND_SETTINGS:
            if getattr(self, name) is not None and backend.settings != name:
                raise ValueError(f"{name!r} is not for backend: {self.backend}")
        if backend.needs_settings and getattr(self, backend.settings) is None:
            raise ValueError(f"backend: {self.backend} needs {backend.settings!r}")
        return self
