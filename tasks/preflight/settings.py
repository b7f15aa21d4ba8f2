"""Define the profile settings that accept code, differences between tokenizers, and copies, by the names in findings.

For example::

    checks:
      code:
        accepted: [modeling_acme.py, modeling_acme.AcmeForCausalLM]
        trusted: [acme/model@0123456789abcdef0123456789abcdef01234567]
      tokenizer: {accepted: [pre_tokenizer, chat_template]}
      copies: {accepted: [base]}
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_AT_A_COMMIT = r"^[\w.-]+/[\w.-]+@[0-9a-f]{40}$"


class CodeSettings(BaseModel):
    """Code that may travel with a release."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    accepted: tuple[str, ...] = Field(
        default=(), description="Names of Python files and 'auto_map' classes that may be part of the release."
    )
    trusted: tuple[Annotated[str, Field(pattern=_AT_A_COMMIT)], ...] = Field(
        default=(), description="Repositories whose code mergegate may run, each at a commit: org/name@<40 hex digits>."
    )


class TokenizerSettings(BaseModel):
    """Accepted differences between tokenizers, prompts and processors, after a review."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    accepted: tuple[str, ...] = Field(
        default=(),
        description="Parts in which tokenizers, prompts, processors and configurations may differ: merges, normalizer, "
        "pre_tokenizer, vocabulary, chat_template, prompts, image_mean, id2label, rope_theta, ... (the findings name "
        "them).",
    )


class CopySettings(BaseModel):
    """Parents that a merge may copy. A copy of any other parent, by its weights or all its answers, is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    accepted: tuple[str, ...] = Field(
        default=(), description="Names of parents. A merge may have the same weights or answers as one of them."
    )
