"""Resolve how a task is prompted: the settings of its guard override those of the profile.

The keys have the names and the effects of lm-eval's ``simple_evaluate``::

    own = PromptSettings(num_fewshot=5, apply_chat_template=True)
    settings = resolve_prompt_settings(own, scoring)
    settings.num_fewshot, settings.is_chat, settings.is_multiturn      # 5, True, True
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, field_validator, model_validator

from mergegate.tasks.evaluation.scoring import Scoring

# Type of a generation setting: a number, a switch, a text, or several texts (``until``).
GenerationValue = (
    StrictBool
    | StrictInt
    | Annotated[float, Field(strict=True, allow_inf_nan=False)]
    | StrictStr
    | tuple[StrictStr, ...]
)


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
