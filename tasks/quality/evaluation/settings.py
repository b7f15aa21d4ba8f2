"""Define the settings in the ``evaluate`` section of a profile that determine scores, and resolve prompt settings.

The settings of a guard override those of the profile. Their names and effects are those of lm-eval's
``simple_evaluate``::

    own = PromptSettings(num_fewshot=5, apply_chat_template=True)
    settings = resolve_prompt_settings(own, scoring)
    settings.num_fewshot, settings.is_chat, settings.is_multiturn      # 5, True, True
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    field_validator,
    model_validator,
)

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import LocalPath
from mergegate.tasks.base.store import NotInKey
from mergegate.tasks.quality.evaluation.backends import find_backend
from mergegate.tasks.quality.evaluation.backends.server import ServerSettings
from mergegate.tasks.quality.evaluation.backends.vllm import VllmSettings
from mergegate.tasks.quality.evaluation.document_order import CHUNK_SIZE

_BACKEND_SETTINGS = ("vllm", "server")  # fields that belong to one backend each

# Type of a generation setting: a number, a switch, a text, or several texts (``until``).
GenerationValue = (
    StrictBool
    | StrictInt
    | Annotated[float, Field(strict=True, allow_inf_nan=False)]
    | StrictStr
    | tuple[StrictStr, ...]
)


# Type of the end of a thought: a text, or the id of a token. lm-eval reads digits as an id.
ThinkEndToken = Annotated[
    Annotated[StrictInt, Field(ge=0)] | Annotated[StrictStr, Field(min_length=1)],
    AfterValidator(lambda value: int(value) if isinstance(value, str) and value.isdecimal() else value),
]

_TEMPLATE_SETTINGS = ("enable_thinking", "chat_template_args")
_THINKING_SETTINGS = (*_TEMPLATE_SETTINGS, "think_end_token")
# Arguments of a chat template that mergegate sets itself.
_OWN_TEMPLATE_ARGUMENTS = ("conversation", "tokenize", "add_generation_prompt", "continue_final_message")


def _check_template_arguments(arguments: dict[str, GenerationValue] | None) -> dict[str, GenerationValue] | None:
    for name in arguments or ():
        if name == "enable_thinking":
            raise ValueError("enable_thinking is a setting of its own: move it out of chat_template_args")
        if name in _OWN_TEMPLATE_ARGUMENTS:
            raise ValueError(f"mergegate sets {name!r} itself")
    return arguments


TemplateArguments = Annotated[
    dict[str, GenerationValue], Field(min_length=1), AfterValidator(_check_template_arguments)
]


class Scoring(BaseModel):
    """How a model is scored. It is equal on both sides of every comparison and part of the key, as it moves scores."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: str = Field(
        default="hf",
        description="Backend that runs models: hf (transformers), vllm (vLLM in this environment), served (a running "
        "server), or one of an installed package. Default: hf.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto",
        description="Data type of the weights. auto: that of the checkpoint, or float32 on a processor that does not "
        "support it. Default: auto.",
    )
    batch_size: int = Field(default=16, ge=1, description="Sequences per batch.")
    max_length: int | None = Field(
        default=None,
        ge=1,
        description="Largest number of tokens in a request. Default: the context length of the model.",
    )
    num_fewshot: int | None = Field(
        default=None, ge=0, description="Number of few-shot examples. Default: the number in the task."
    )
    chat_template: bool = Field(default=False, description="Whether prompts are chats in the template of the model.")
    enable_thinking: StrictBool | None = Field(
        default=None,
        description="Value of enable_thinking in the chat template. true also requires think_end_token. Default: not "
        "set, so the template decides.",
    )
    think_end_token: ThinkEndToken | None = Field(
        default=None,
        description="Text or token id that ends a thought, such as '</think>'. Only the text after it is scored, and "
        "stop strings do not end an answer before it. Default: none.",
    )
    chat_template_args: TemplateArguments | None = Field(
        default=None, description="Further arguments of the chat template, such as {reasoning_effort: low}."
    )
    documents: Annotated[Annotated[int, Field(ge=1)] | Literal["all"] | None, NotInKey] = Field(  # the part is in keys
        default=None,
        description="Size of the first random sample per task or group. If it does not decide, mergegate evaluates "
        "more. all: a single look at every document. Default: 500.",
    )
    # lm-eval draws with NumPy, whose seeds have 32 bits.
    seed: int = Field(
        default=0, ge=0, lt=2**32, description="Seed of the sample and the few-shot examples. Default: 0."
    )
    time_limit: Annotated[float | None, NotInKey] = Field(
        default=None,
        gt=0,
        description="Time limit in seconds for one part (at most 500 documents), including loading. Default: none.",
    )
    vllm: VllmSettings | None = Field(default=None, description="Settings of backend vllm.")
    server: Annotated[ServerSettings | None, NotInKey] = Field(default=None, description="Settings of backend served.")

    def content_key(self) -> object:
        # Settings for thinking are in the key only if set, so that they do not change existing keys.
        fields = type(self).model_fields
        return {
            name: getattr(self, name)
            for name in fields
            if NotInKey not in fields[name].metadata
            and not (name in _THINKING_SETTINGS and getattr(self, name) is None)
        }

    @property
    def first_look(self) -> int | None:
        """Number of documents in the first look at a task. None: a single look uses all documents."""
        return None if self.documents == "all" else self.documents or CHUNK_SIZE

    @property
    def own_settings(self) -> BaseModel | None:
        """Settings of the selected backend, or None if it has none or the profile does not set them."""
        name = find_backend(self.backend).settings
        settings: BaseModel | None = getattr(self, name) if name else None
        return settings

    def for_backend(self, backend: str) -> Self:
        """Return these settings with another backend, without the settings that belong to the present one."""
        if backend == self.backend:
            return self
        return self.model_copy(update={"backend": backend, **dict.fromkeys(_BACKEND_SETTINGS)})

    @field_validator("backend")
    @classmethod
    def _check_backend(cls, backend: str) -> str:
        try:
            return find_backend(backend).name
        except InvalidInput as error:
            raise ValueError(f"{error.found}; expected: {error.expected}") from None

    @model_validator(mode="after")
    def _check_backend_settings(self) -> Self:
        backend = find_backend(self.backend)
        for name in _BACKEND_SETTINGS:
            if getattr(self, name) is not None and backend.settings != name:
                raise ValueError(f"{name!r} is not a setting of backend: {self.backend}")
        if backend.needs_settings and self.own_settings is None:
            raise ValueError(f"backend: {self.backend} needs {backend.settings!r}")
        return self


class EvaluationSettings(Scoring):
    """Settings of the ``evaluate`` section, without the guards and the gate rule, which ``gate`` adds."""

    data: LocalPath | None = Field(
        default=None,
        description="Directory with the datasets of all tasks whose data is not next to them, relative to the profile. "
        "Datasets have the layout of the Hub, or are files named after a task or dataset. No network is needed then. "
        "Default: the Hub, or its cache.",
    )
    allow_code: tuple[str, ...] = Field(
        default=(),
        description="Tasks, as named under 'tasks', whose generated code may be run to score it (such as humaneval or "
        "mbpp). Each program runs in its own sandboxed process. Default: none.",
    )

    resample: bool = Field(
        default=True,
        description="Whether to judge each new merge on other documents than the last one, so that the documents do "
        "not wear out. This applies to tasks with a guard against the champion and more documents than the first look. "
        "The references are evaluated on these documents, too, on each document once. false: the same documents judge "
        "every merge. Default: true.",
    )

    @property
    def scoring(self) -> Scoring:
        """Settings that determine scores."""
        return Scoring.model_validate({name: getattr(self, name) for name in Scoring.model_fields})


class PromptSettings(BaseModel):
    """Prompt settings of one task that override those of the profile; absent keys change nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_fewshot: StrictInt | None = Field(
        default=None, ge=0, description="Number of few-shot examples of this task. Default: evaluate.num_fewshot."
    )
    gen_kwargs: dict[str, GenerationValue] | None = Field(
        default=None,
        min_length=1,
        description="Generation settings that override the task's own, such as {max_gen_toks: 512}.",
    )
    system_instruction: StrictStr | None = Field(
        default=None,
        min_length=1,
        description="Text before everything else. With a chat template, it is the system message.",
    )
    apply_chat_template: StrictBool | None = Field(
        default=None, description="Whether to apply the chat template for this task. Default: evaluate.chat_template."
    )
    fewshot_as_multiturn: StrictBool | None = Field(
        default=None,
        description="With a chat template: whether each few-shot example is its own turn; false: all are in one "
        "turn. Default: true.",
    )

    enable_thinking: StrictBool | None = Field(
        default=None, description="Value of enable_thinking in the chat template. Default: evaluate.enable_thinking."
    )
    think_end_token: ThinkEndToken | None = Field(
        default=None, description="Text or token id that ends a thought. Default: evaluate.think_end_token."
    )
    chat_template_args: TemplateArguments | None = Field(
        default=None,
        description="Arguments of the chat template that are added to evaluate.chat_template_args or override them.",
    )

    @field_validator("gen_kwargs")
    @classmethod
    def _check_one_answer(cls, settings: dict[str, GenerationValue] | None) -> dict[str, GenerationValue] | None:
        if settings and settings.get("num_return_sequences", 1) != 1:
            raise ValueError("num_return_sequences must be 1: mergegate scores one answer per document")
        return settings

    @model_validator(mode="after")
    def _check_multiturn(self) -> Self:
        if self.fewshot_as_multiturn is not None and self.apply_chat_template is False:
            raise ValueError("fewshot_as_multiturn needs a chat template, but apply_chat_template is false")
        return self

    def content_key(self) -> object:
        # Only keys that are set, so that a key added in a later version does not change existing keys.
        return {name: value for name in PromptSettings.model_fields if (value := getattr(self, name)) is not None}

    @property
    def own_prompt_settings(self) -> PromptSettings | None:
        """These prompt settings without the other fields of a subclass; None if none is set."""
        values = {name: getattr(self, name) for name in PromptSettings.model_fields}
        return PromptSettings(**values) if any(value is not None for value in values.values()) else None

    def describe(self) -> str:
        """Return a one-line summary, such as ``num_fewshot 5, chat template, gen_kwargs max_gen_toks=64``."""
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
        if self.enable_thinking is not None:
            parts.append("thinking" if self.enable_thinking else "no thinking")
        if self.think_end_token is not None:
            parts.append(f"think_end_token {self.think_end_token!r}")
        if self.chat_template_args:
            arguments = " ".join(f"{key}={value}" for key, value in sorted(self.chat_template_args.items()))
            parts.append(f"chat_template_args {arguments}")
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
    enable_thinking: bool | None = None  # None: the template decides
    think_end_token: int | str | None = None
    chat_template_args: Mapping[str, GenerationValue] = field(default_factory=dict)  # without enable_thinking

    @property
    def template_arguments(self) -> dict[str, GenerationValue]:
        """All arguments of the chat template."""
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {**self.chat_template_args, **thinking}


def resolve_prompt_settings(task_settings: PromptSettings | None, scoring: Scoring) -> ResolvedPromptSettings:
    """Combine ``scoring`` with the prompt settings of a guard (``task_settings``), which take precedence."""
    settings = task_settings or PromptSettings()
    is_chat = scoring.chat_template if settings.apply_chat_template is None else settings.apply_chat_template
    enable_thinking = scoring.enable_thinking if settings.enable_thinking is None else settings.enable_thinking
    think_end_token = scoring.think_end_token if settings.think_end_token is None else settings.think_end_token
    return ResolvedPromptSettings(
        num_fewshot=scoring.num_fewshot if settings.num_fewshot is None else settings.num_fewshot,
        is_chat=is_chat,
        is_multiturn=is_chat and settings.fewshot_as_multiturn is not False,
        system_instruction=settings.system_instruction,
        gen_kwargs=settings.gen_kwargs or {},
        # Only a chat template reads these settings, and the profile may set them for other tasks.
        enable_thinking=enable_thinking if is_chat else None,
        think_end_token=think_end_token,
        chat_template_args={**(scoring.chat_template_args or {}), **(settings.chat_template_args or {})}
        if is_chat
        else {},
    )


def fewshot_count(task_count: int | None, profile_count: int | None) -> int | None:
    """Return the number of few-shot examples. As on lm-eval's command line, a 0 that the task itself sets stays."""
    return task_count if profile_count is None or task_count == 0 else profile_count


def check_thinking(task: str, task_settings: PromptSettings | None, scoring: Scoring) -> None:
    """Check that the settings for thinking of one task fit together.

    Raises:
        ValueError: If ``enable_thinking`` lacks ``think_end_token``, or a setting of the task has no effect.
    """
    resolved = resolve_prompt_settings(task_settings, scoring)
    if not resolved.is_chat and task_settings is not None:
        for name in _TEMPLATE_SETTINGS:
            if getattr(task_settings, name) is not None:
                raise ValueError(f"{task}: {name} requires a chat template: set apply_chat_template: true")
    if resolved.enable_thinking and resolved.think_end_token is None:
        raise ValueError(
            f"{task}: enable_thinking requires think_end_token, the text that ends a thought, such as '</think>'"
        )
