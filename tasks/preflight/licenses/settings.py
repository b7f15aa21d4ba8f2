"""Define the intended use of the merged model, and the license reviews that a named user has accepted."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from mergegate.merge_core.parsing import LocalPath

Purpose = Literal["commercial", "research"]
Visibility = Literal["public", "private"]


class Use(BaseModel):
    """Intended use of the merged model, which the license rules judge.

    Attributes:
        purpose: Purpose of the merged weights.
        visibility: `public` if anyone outside receives the weights (even from a gated repository); `private` if they
            stay with the entity that built them.
        commercial_entity: Whether that entity is a company; some research licenses forbid any distribution by one.
        name: Name of the merged model, `org/name` or `name`; some licenses require a certain beginning.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    purpose: Purpose
    visibility: Visibility
    commercial_entity: bool
    name: str


class LicenseSettings(BaseModel):
    """Settings under `checks.license` of a profile. The defaults are the strictest: a company sells a public model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
            user, _, reason = value.partition(":")
            if not user.strip() or not reason.strip():
                raise ValueError(f"{key}: {value!r} does not name who accepted it and why. Write 'who: why'")
        return acceptances

    @field_validator("unrelated")
    @classmethod
    def _check_unrelated(cls, statements: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        for parent, models in statements.items():
            for model, value in models.items():
                user, _, reason = value.partition(":")
                if not user.strip() or not reason.strip():
                    raise ValueError(
                        f"{parent}: {model}: {value!r} does not name who says so and why. Write 'who: why'"
                    )
        return statements

    def use(self, name: str) -> Use:
        return Use(
            purpose=self.purpose, visibility=self.visibility, commercial_entity=self.commercial_entity, name=name
        )
