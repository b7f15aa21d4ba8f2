"""Define the section ``serve`` of a profile. Importing this module is cheap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from mergegate.merge_core.parsing import LocalPath
from mergegate.tasks.store import NotInKey

PLACES = ("{model}", "{port}", "{name}")  # placeholders in a configured command

PROMPTS = (
    "the quick brown fox",
    "once upon a time there was",
    "to make a cup of tea, first",
    "the capital of france is",
)
TEXTS = (
    "the committee met in the spring to hear what had become of its plan, and it was not pleased with the answer.",
    "def area(width, height):\n    return width * height\n",
    "In 2019, about 4.2 million people visited the museum; a year later, fewer than 900 000 did.",
)


class ServeSettings(BaseModel):
    """How the merge is served before it is released: the section ``serve`` of a profile.

    Without ``command``, the server is vLLM from the environment that ``make serve-env`` builds. ``command`` is the
    command line of another server that speaks the OpenAI API. mergegate fills in ``{model}``, ``{port}`` and
    ``{name}``. The server must listen on 127.0.0.1.
    """

    renamed_keys: ClassVar[Mapping[str, str]] = {
        "ready_within": "startup_timeout",
        "answer_within": "request_timeout",
        "total_within": "timeout",
    }

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="auto: as the checkpoint stores it."
    )
    max_model_len: int | None = Field(default=None, ge=16, description="Tokens; absent: the model's own, at most 4096.")
    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs.")
    arguments: tuple[str, ...] = Field(default=(), description="Further arguments of vLLM.")
    environment: dict[str, str] = Field(default={}, description="Further variables of the server's environment.")
    python: Annotated[LocalPath | None, NotInKey] = Field(
        default=None, description="Interpreter of vLLM's environment; see make serve-env."
    )
    command: tuple[str, ...] | None = Field(default=None, description="Another server's command line.")
    version: str = Field(default="", description="Of that other server: part of what a verdict is cached by.")

    # Exceeding one of these two limits says something about the machine, not about the model. It leads to no verdict,
    # so the limits need not be in a key.
    startup_timeout: Annotated[float, NotInKey] = Field(
        default=900, gt=0, description="Seconds until the server must answer."
    )
    timeout: Annotated[float, NotInKey] = Field(
        default=3600, gt=0, description="Seconds of all; then the server is ended."
    )
    request_timeout: float = Field(default=120, gt=0, description="Seconds one answer may take.")

    prompts: tuple[str, ...] = Field(default=PROMPTS, min_length=1, description="To be continued, greedily.")
    texts: tuple[str, ...] = Field(default=TEXTS, min_length=1, description="Whose likelihood must agree.")
    stops: tuple[str, ...] = Field(default=(), description="Prompts whose continuation must end by itself.")
    max_tokens: int = Field(default=64, ge=8, description="Of one continuation.")
    max_difference: float = Field(
        default=0.05, gt=0, description="Nats a token, on average, between the server and transformers."
    )
    min_tokens_per_second: float | None = Field(default=None, gt=0, description="Of one stream.")
    chat: bool | None = Field(default=None, description="Whether it must chat; absent: if it has a chat template.")
    parents: Annotated[bool, NotInKey] = Field(default=False, description="Measure the parents in the same way.")

    @field_validator("command")
    @classmethod
    def _names_a_port(cls, command: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if command is not None and (not command or not any("{port}" in word for word in command)):
            raise ValueError("the command must say where its port goes: {port}")
        return command
