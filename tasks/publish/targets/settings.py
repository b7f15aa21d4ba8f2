"""Where a release goes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

_VERSION = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class _Target(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str | None = Field(
        default=None,
        pattern=_VERSION,
        description="Name of this version; absent: the first 12 digits of its content hash.",
    )
    sign_key: Path | None = Field(
        default=None,
        description="EC private key (P-256, PEM) that signs every file of the release; absent: not signed.",
    )


class DirectoryTarget(_Target):
    """A directory that holds every version of the release and a link to the latest one."""

    to: Literal["directory"] = "directory"
    path: Path


class HubTarget(_Target):
    """A model repository on the Hugging Face Hub: ``main`` is the latest release, every version is a tag.

    The address comes from ``HF_ENDPOINT`` and the token from ``HF_TOKEN``, or from a Prefect Secret block.
    """

    to: Literal["hub"]
    repo: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$", description="org/name of the repository."
    )
    visibility: Literal["private", "public"] = Field(
        default="private", description="Who may see it. A new repository is private until its release is complete."
    )
    gated: Literal["auto", "manual"] | None = Field(
        default=None, description="Whether people must ask for a public one: answered by rule, or by hand."
    )
    token_block: str | None = Field(
        default=None, description="Prefect Secret block that holds the token; absent: HF_TOKEN of the environment."
    )

    @model_validator(mode="after")
    def _gates_only_what_is_public(self) -> Self:
        if self.gated and self.visibility == "private":
            raise ValueError("a private repository cannot be gated: say 'visibility: public' too, or leave gated out")
        return self


def _kind(target: object) -> str | None:
    """Which of the targets is meant. A directory need not say so."""
    found = target.get("to", "directory") if isinstance(target, Mapping) else getattr(target, "to", None)
    return found if isinstance(found, str) else None


TARGETS: dict[str, type[BaseModel]] = {"directory": DirectoryTarget, "hub": HubTarget}
Target = Annotated[
    Annotated[DirectoryTarget, Tag("directory")] | Annotated[HubTarget, Tag("hub")], Discriminator(_kind)
]
