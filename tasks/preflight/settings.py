"""Define what a profile may say under ``checks``: accepted code, tokenizers and copies, and the use of the merge.

For example::

    checks: code: accepted: [modeling_acme.py, modeling_acme.AcmeForCausalLM] trusted:
    [acme/model@0123456789abcdef0123456789abcdef01234567] tokenizer: {accepted: [pre_tokenizer, chat_template]} copies:
    {accepted: [base]}
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator

from mergegate.merge_core.parsing import LocalPath

Purpose = Literal["commercial", "research"]
Visibility = Literal["public", "private"]
_AT_A_COMMIT = r"^[\w.-]+/[\w.-]+@[0-9a-f]{40}$"


class CodeSettings(BaseModel, frozen=True, extra="forbid"):
    """Code that may travel with a release."""

    accepted: tuple[str, ...] = Field(
        default=(), description="Names of Python files and 'auto_map' classes that may be part of the release."
    )
    trusted: tuple[Annotated[str, Field(pattern=_AT_A_COMMIT)], ...] = Field(
        default=(), description="Repositories whose code mergegate may run, each at a commit: org/name@<40 hex digits>."
    )


class TokenizerSettings(BaseModel, frozen=True, extra="forbid"):
    """Accepted differences between tokenizers, prompts and processors, after a review."""

    accepted: tuple[str, ...] = Field(
        default=(),
        description="Parts in which tokenizers, prompts, processors and configurations may differ: merges, normalizer, "
        "pre_tokenizer, vocabulary, chat_template, prompts, image_mean, id2label, rope_theta, ... (the findings name "
        "them).",
    )


class CopySettings(BaseModel, frozen=True, extra="forbid"):
    """Parents that a merge may copy. A copy of any other parent, by its weights or all its answers, is refused."""

    accepted: tuple[str, ...] = Field(
        default=(), description="Names of parents. A merge may have the same weights or answers as one of them."
    )


class Use(BaseModel, frozen=True, extra="forbid"):
    """Intended use of the merged model, which the license rules judge."""

    purpose: Purpose  # Purpose of the merged weights.
    # `public` if anyone outside receives the weights (even from a gated repository); `private` if they stay with the
    # entity that built them.
    visibility: Visibility
    commercial_entity: bool  # Whether that entity is a company; some research licenses forbid any distribution by one.
    name: str  # Name of the merged model, `org/name` or `name`; some licenses require a certain beginning.


class LicenseSettings(BaseModel, frozen=True, extra="forbid"):
    """Settings under `checks.license` of a profile. The defaults are the strictest: a company sells a public model."""

    purpose: Purpose = Field(default="commercial", description="Purpose of the merged weights.")
    visibility: Visibility = Field(
        default="public", description="Whether anyone else receives the weights. A gated repository is public."
    )
    commercial_entity: bool = Field(default=True, description="Whether a company builds the merge.")
    accepted: dict[str, str] = Field(
        default={},
        description="License reviews that a user has settled, by license identifier or by parent, each with who and "
        "why: llama3.2: 'alice: text-only model'. A block cannot be accepted.",
    )
    table: LocalPath | None = Field(
        default=None, description="File with entries that override those of the shipped license table."
    )

    fingerprints: LocalPath | None = Field(
        default=None,
        description="File with fingerprints of further known models, as written by mergegate fingerprint --index. The "
        "project's own index always counts.",
    )
    unrelated: dict[str, dict[str, str]] = Field(
        default={},
        description="Known models that a parent does not descend from although their weights are related, by parent "
        "and known model, each with who and why: math: {acme/model: 'alice: trained from the same seed'}.",
    )

    @field_validator("accepted")
    @classmethod
    def _check_accepted(cls, acceptances: dict[str, str]) -> dict[str, str]:
        for key, value in acceptances.items():
            _require_who_and_why(key, value, "accepted it")
        return acceptances

    @field_validator("unrelated")
    @classmethod
    def _check_unrelated(cls, statements: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        for parent, models in statements.items():
            for model, value in models.items():
                _require_who_and_why(f"{parent}: {model}", value, "says so")
        return statements

    def use(self, name: str) -> Use:
        return Use(
            purpose=self.purpose, visibility=self.visibility, commercial_entity=self.commercial_entity, name=name
        )


def _require_who_and_why(key: str, value: str, act: str) -> None:
    user, _, reason = value.partition(":")
    if not user.strip() or not reason.strip():
        raise ValueError(f"{key}: {value!r} does not name who {act} and why. Write 'who: why'")
