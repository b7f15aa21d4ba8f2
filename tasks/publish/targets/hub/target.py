"""Define the Hub target: resolve the token, check its permissions, and read and publish releases.

``hub_access`` finds the token and ``require_write_access`` checks it. Each operation creates its own access object:
hours may pass between the first and the last, and a commit in between must be seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from mergegate.merge_core.files import HashMemo
from mergegate.tasks.checkpoints.hub import HubAccess, hub_access, require_write_access
from mergegate.tasks.publish.content import ReleaseFile
from mergegate.tasks.publish.targets.alias import require_alias_name
from mergegate.tasks.publish.targets.contract import CurrentRelease, OnProgress, PublishTarget, Release
from mergegate.tasks.publish.targets.hub.aliases import move_tag, read_tag
from mergegate.tasks.publish.targets.hub.publication import publish_hub
from mergegate.tasks.publish.targets.hub.release import HubRelease, download_earlier, download_main, open_on_hub
from mergegate.tasks.publish.targets.hub.state import MAIN


class HubTarget(PublishTarget):
    """A model repository on the Hugging Face Hub. ``main`` is the latest release, and every version is a tag.

    The endpoint comes from ``HF_ENDPOINT``, and the token from ``HF_TOKEN`` or a Prefect Secret block.
    """

    known_as: ClassVar[str] = "org/name@version on the Hub"

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

    @property
    def is_public(self) -> bool:
        return self.visibility == "public"

    @property
    def address(self) -> str:
        return self.repo

    def check(self, root: Path) -> None:
        """Raise an error if the token may not write to the repository."""
        require_write_access(self.repo, self._access())

    def current(self, root: Path) -> CurrentRelease | None:
        """Download the head of ``main``. Its ``head`` is the commit."""
        return download_main(self.repo, self._access())

    def earlier(self, root: Path, version: str) -> CurrentRelease | None:
        """Download the release of a version's tag."""
        return download_earlier(self.repo, version, self._access())

    def publish(
        self,
        files: Sequence[ReleaseFile],
        name: str,
        version: str,
        root: Path,
        *,
        expected_head: str | None,
        hashes: HashMemo,
        on_progress: OnProgress,
    ) -> Release:
        """Make ``main`` and the tag ``version`` contain the release."""
        access = self._access()
        result = publish_hub(
            files,
            self.repo,
            version,
            access,
            hashes,
            visibility=self.visibility,
            gated=self.gated or False,
            expected_head=expected_head,
            on_progress=on_progress,
        )
        return Release(name, version, access.url(self.repo, version), self.repo, result.new)

    def set_alias(self, root: Path, version: str, name: str) -> None:
        """Move the tag ``name`` to the commit of the version."""
        require_alias_name(name, {MAIN})
        move_tag(self.repo, version, name, self._access())

    def aliased(self, root: Path, name: str) -> str | None:
        """Return the version whose commit the tag ``name`` points to."""
        return read_tag(self.repo, name, self._access())

    @classmethod
    def open(cls, reference: str) -> HubRelease | None:
        """Open ``org/name`` (the head of ``main``) or ``org/name@revision``. A public repository needs no token."""
        return open_on_hub(reference)

    def _access(self) -> HubAccess:
        return hub_access(self.token_block, writing=True)
