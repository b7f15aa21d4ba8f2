"""Define the section ``serve`` of a profile."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from mergegate.merge_core.parsing import LocalPath
from mergegate.tasks.base.store import NotInKey

_PROMPTS = (
    "the quick brown fox",
    "once upon a time there was",
    "to make a cup of tea, first",
    "the capital of france is",
)
_TEXTS = (
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

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="Dtype in which the server computes. Default: auto, the dtype of most weights."
    )
    max_model_len: int | None = Field(
        default=None, ge=16, description="Longest request in tokens. Default: the model's own limit, at most 4096."
    )
    tensor_parallel_size: int = Field(default=1, ge=1, description="Number of GPUs for one model. Default: 1.")
    arguments: tuple[str, ...] = Field(default=(), description="Additional arguments of vLLM.")
    environment: dict[str, str] = Field(default={}, description="Additional environment variables of the server.")
    python: Annotated[LocalPath | None, NotInKey] = Field(
        default=None,
        description="Interpreter of the environment in which vLLM is installed. "
        "Default: that of the environment which 'make serve-env' builds.",
    )
    command: tuple[str, ...] | None = Field(
        default=None, description="Command line of another server, with {model}, {port} and {name}. Default: vLLM."
    )
    version: str = Field(
        default="", description="Version of the server in 'command'. A different version causes a new verdict."
    )

    # Exceeding one of these two limits says something about the machine, not about the model. It leads to no verdict,
    # so the limits need not be in a key.
    startup_timeout: Annotated[float, NotInKey] = Field(
        default=900, gt=0, description="Longest time until the server answers, in seconds. Default: 900."
    )
    timeout: Annotated[float, NotInKey] = Field(
        default=3600, gt=0, description="Longest time for all checks, in seconds. Default: 3600."
    )
    request_timeout: float = Field(
        default=120, gt=0, description="Longest time for one answer, in seconds. Default: 120."
    )

    prompts: tuple[str, ...] = Field(
        default=_PROMPTS, min_length=1, description="Prompts that the server continues greedily."
    )
    texts: tuple[str, ...] = Field(
        default=_TEXTS,
        min_length=1,
        description="Texts whose likelihood must be the same on the server and in transformers.",
    )
    stops: tuple[str, ...] = Field(
        default=(), description="Prompts whose continuation must end before the limit of tokens."
    )
    max_tokens: int = Field(default=64, ge=8, description="Length limit of one continuation, in tokens. Default: 64.")
    max_difference: float = Field(
        default=0.05,
        gt=0,
        description="Largest average difference between the server and transformers, in nats per token. Default: 0.05.",
    )
    min_tokens_per_second: float | None = Field(
        default=None, gt=0, description="Smallest rate of one stream that passes. Default: no minimum."
    )
    chat: bool | None = Field(
        default=None, description="Whether the model must chat. Default: only if it has a chat template."
    )
    parents: Annotated[bool, NotInKey] = Field(
        default=False, description="Whether the parents are served and measured in the same way. Default: false."
    )

    @field_validator("command")
    @classmethod
    def _require_port(cls, command: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if command is not None and (not command or not any("{port}" in word for word in command)):
            raise ValueError("the command does not contain the placeholder {port}; add it where the port belongs")
        return command
