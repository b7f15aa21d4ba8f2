"""What the merged model is meant for, and which doubts about its licences a named person has accepted."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, field_validator

from mergegate.merge_core.parsing import LocalPath

Purpose = Literal["commercial", "research"]
Visibility = Literal["public", "private"]


class Use(BaseModel):
    """The use against which licences are judged.

    Attributes:
        purpose: What the merged weights are used for.
        visibility: `public` means that anybody outside receives them (a public or gated repository counts); `private`
            that they stay with the entity that made them.
        commercial_entity: Whether that entity is a company; some research licences forbid it to distribute at all.
        name: Name of the merged model, `org/name` or `name`; some licences rule how it begins.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    purpose: Purpose
    visibility: Visibility
    commercial_entity: bool
    name: str


class LicenseSettings(BaseModel):
    """`checks.license` of a profile. The defaults ask for the most: a company that sells a public model.

    Attributes:
        accepted: Doubts that a person has settled, by licence identifier or by parent as the recipe names it; each
            value says who and why: `llama3.2: "alice: text-only model"`. Turns a review into allowed, never a block.
        table: File whose entries override those of the shipped licence table.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    purpose: Purpose = "commercial"
    visibility: Visibility = "public"
    commercial_entity: bool = True
    accepted: dict[str, str] = {}
    table: LocalPath | None = None

    @field_validator("accepted")
    @classmethod
    def _says_who_and_why(cls, accepted: dict[str, str]) -> dict[str, str]:
        for key, value in accepted.items():
            who, _, why = value.partition(":")
            if not who.strip() or not why.strip():
                raise ValueError(f"{key}: {value!r} must say who accepted it and why, as 'who: why'")
        return accepted

    def use(self, name: str) -> Use:
        """These settings as the intended use of the merged model `name`."""
        return Use(
            purpose=self.purpose, visibility=self.visibility, commercial_entity=self.commercial_entity, name=name
        )
