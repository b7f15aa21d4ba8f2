"""Define the settings of the ``evaluate`` section of a profile that determine scores, and resolve prompt settings.

The settings of a guard override those of the profile. The keys have the names and the effects of lm-eval's
``simple_evaluate``::

    own = PromptSettings(num_fewshot=5, apply_chat_template=True)
    settings = resolve_prompt_settings(own, scoring)
    settings.num_fewshot, settings.is_chat, settings.is_multiturn      # 5, True, True
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, field_validator, model_validator

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import LocalPath
from mergegate.tasks.evaluation.backends import find_backend
from mergegate.tasks.evaluation.backends.server import ServerSettings
from mergegate.tasks.evaluation.backends.vllm import VllmSettings
from mergegate.tasks.evaluation.document_order import CHUNK_SIZE
from mergegate.tasks.store import NotInKey

_BACKEND_SETTINGS = ("vllm", "server")  # fields that belong to one backend each

# Type of a generation setting: a number, a switch, a text, or several texts (``until``).
GenerationValue = (
    StrictBool
    | StrictInt
    | Annotated[float, Field(strict=True, allow_inf_nan=False)]
    | StrictStr
    | tuple[StrictStr, ...]
)


class Scoring(BaseModel):
    """How a model is scored. It is equal on both sides of every comparison and part of the key, as it moves scores."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: str = Field(
        default="hf",
        description="hf: transformers here; vllm: vLLM here; served: a server that is running already; or one that an "
        "installed package adds.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto",
        description="auto: as the checkpoint is stored, which is how it will be used; float32 on a processor without "
        "units for that format.",
    )
    batch_size: int = Field(default=16, ge=1)
    max_length: int | None = Field(default=None, ge=1, description="Tokens; absent: what the model was made for.")
    num_fewshot: int | None = Field(default=None, ge=0, description="Absent: as the task says.")
    chat_template: bool = False
    documents: Annotated[Annotated[int, Field(ge=1)] | Literal["all"] | None, NotInKey] = Field(  # the part is in keys
        default=None,
        description="A fixed random sample of so many per task or group is looked at first, then more where it does "
        "not decide; absent: 500. all: every document at once.",
    )
    # lm-eval draws with NumPy, whose seeds have 32 bits.
    seed: int = Field(default=0, ge=0, lt=2**32, description="Seed of the sample and the few-shot examples.")
    time_limit: Annotated[float | None, NotInKey] = Field(
        default=None, gt=0, description="Seconds for one part (500 documents at most), loading included; absent: none."
    )
    vllm: VllmSettings | None = Field(default=None, description="Only for backend: vllm.")
    server: Annotated[ServerSettings | None, NotInKey] = Field(default=None, description="Only for backend: served.")

    @property
    def first_look(self) -> int | None:
        """Number of documents in the first look at a task. If it is None, a single look uses all documents."""
        return None if self.documents == "all" else self.documents or CHUNK_SIZE

    @property
    def own_settings(self) -> BaseModel | None:
        """Settings of the selected backend. It is None if the backend has none or the profile does not set them."""
        name = find_backend(self.backend).settings
        settings: BaseModel | None = getattr(self, name) if name else None
        return settings

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
        if backend.needs_settings and self.own_settings is None:
            raise ValueError(f"backend: {self.backend} needs {backend.settings!r}")
        return self


class EvaluationSettings(Scoring):
    """Settings of the ``evaluate`` section, without the guards and the gate rule, which ``tasks.gate`` adds."""

    data: LocalPath | None = Field(
        default=None,
        description="Directory with the datasets of all tasks (by name, YAML files, those of a sweep) whose data "
        "do not lie beside them, relative to the profile: as the Hub lays them out, or files by task or dataset. Then "
        "nothing is asked of a network. Absent: the Hub, or its cache.",
    )
    allow_code: tuple[str, ...] = Field(
        default=(),
        description="Tasks, as named under 'tasks', whose generated code is run to score it (humaneval, mbpp), each "
        "program in a process of its own with nothing in reach. Absent: no code of a model is run.",
    )

    @property
    def scoring(self) -> Scoring:
        """Settings that determine scores."""
        return Scoring.model_validate({name: getattr(self, name) for name in Scoring.model_fields})


class PromptSettings(BaseModel):
    """Prompt settings of one task that override those of the profile; absent keys change nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_fewshot: StrictInt | None = Field(
        default=None, ge=0, description="Of this task, in place of evaluate.num_fewshot."
    )
    gen_kwargs: dict[str, GenerationValue] | None = Field(
        default=None, min_length=1, description="Settings of generation, laid over the task's own: {max_gen_toks: 512}."
    )
    system_instruction: StrictStr | None = Field(
        default=None, min_length=1, description="What stands before everything else; with a chat template, its system."
    )
    apply_chat_template: StrictBool | None = Field(
        default=None, description="Of this task, in place of evaluate.chat_template."
    )
    fewshot_as_multiturn: StrictBool | None = Field(
        default=None,
        description="With a chat template: each example a turn of its own (as where it is absent), or all in one.",
    )

    @field_validator("gen_kwargs")
    @classmethod
    def _asks_for_one_answer(cls, settings: dict[str, GenerationValue] | None) -> dict[str, GenerationValue] | None:
        if settings and settings.get("num_return_sequences", 1) != 1:
            raise ValueError("one answer to a question: num_return_sequences is not for this")
        return settings

    @model_validator(mode="after")
    def _turns_are_of_a_chat(self) -> Self:
        if self.fewshot_as_multiturn is not None and self.apply_chat_template is False:
            raise ValueError("fewshot_as_multiturn is for a chat template, and apply_chat_template is false")
        return self

    def content_key(self) -> object:
        # Only keys that are set, so that a key added in a later version does not change existing keys.
        return {name: value for name in PromptSettings.model_fields if (value := getattr(self, name)) is not None}

    @property
    def own(self) -> PromptSettings | None:
        """The prompt settings without those of a subclass; None if none is set."""
        values = {name: getattr(self, name) for name in PromptSettings.model_fields}
        return PromptSettings(**values) if any(value is not None for value in values.values()) else None

    def described(self) -> str:
        """Return a summary on one line: ``num_fewshot 5, chat template, gen_kwargs max_gen_toks=64``."""
        parts = []
        if self.num_fewshot is not None:
            parts.append(f"num_fewshot {self.num_fewshot}")
        if self.apply_chat_template is not None:
            parts.append("chat template" if self.apply_chat_template else "no chat template")
        if self.fewshot_as_multiturn is not None:
            parts.append("examples as turns" if self.fewshot_as_multiturn else "examples in one turn")
        if self.system_instruction is not None:
            text = " ".join(self.system_instruction.split())
            parts.append(f"system instruction {text if len(text) <= 60 else text[:59] + '…'!r}")
        if self.gen_kwargs:
            parts.append("gen_kwargs " + " ".join(f"{key}={value}" for key, value in sorted(self.gen_kwargs.items())))
        return ", ".join(parts)


@dataclass(frozen=True)
class ResolvedPromptSettings:
    """Prompt settings of a task after all defaults are applied."""

    num_fewshot: int | None  # None: the task's own number
    is_chat: bool
    is_multiturn: bool  # whether each example is a turn of its own; only if is_chat
    system_instruction: str | None
    gen_kwargs: Mapping[str, GenerationValue]


def resolve_prompt_settings(own: PromptSettings | None, scoring: Scoring) -> ResolvedPromptSettings:
    """Combine ``scoring`` with the settings of a guard, if any (``own``), which take precedence."""
    settings = own or PromptSettings()
    is_chat = scoring.chat_template if settings.apply_chat_template is None else settings.apply_chat_template
    return ResolvedPromptSettings(
        num_fewshot=scoring.num_fewshot if settings.num_fewshot is None else settings.num_fewshot,
        is_chat=is_chat,
        is_multiturn=is_chat and settings.fewshot_as_multiturn is not False,
        system_instruction=settings.system_instruction,
        gen_kwargs=settings.gen_kwargs or {},
    )
