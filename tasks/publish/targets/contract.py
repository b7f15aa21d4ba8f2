"""Define the contract of a publishing target: its settings in a profile, and four operations on published releases.

::

    publish: {to: shelf, place: /srv/models}      # in a profile

    class Shelf(PublishTarget):                   # in the module of the target; ``registry`` describes discovery
        to: Literal["shelf"]                      # the target's name in a profile
        place: Path                               # its settings: strict, frozen, each with a description

        def check(self, root): ...                # before the merge: would publishing fail?
        def current(self, root): ...              # the release that is published today (the champion)
        def publish(self, files, ...): ...        # all of a release or nothing, and never twice
        @classmethod
        def open(cls, reference): ...             # a published release, to verify or reproduce

A run calls them in that order. Hours may pass between ``check`` and ``publish``, and another publisher may release in
the meantime. To detect that, the ``head`` that ``current`` returned is passed to ``publish`` as ``expected_head``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.parsing import LocalPath
from mergegate.tasks.publish.approval import ApprovalSettings
from mergegate.tasks.publish.content import ReleaseFile
from mergegate.tasks.publish.signature import private_key

FIRST = "first"  # names the oldest release
_VERSION = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"

OnProgress = Callable[[int, int], None]
"""Callback that receives the number of bytes transferred so far and in total."""


@dataclass(frozen=True)
class Release:
    """A published release. ``new`` is false if it had been published before and nothing changed."""

    name: str
    version: str
    location: Path | str  # a directory, or the URL of a page
    label: str  # short form of the location, for people
    new: bool

    def summary(self) -> str:
        return f"{self.version} at {self.label}" if self.new else f"{self.version} is released already"


@dataclass(frozen=True)
class CurrentRelease:
    """The release that is published today, downloaded to this machine.

    Attributes:
        directory: Directory of the complete checkpoint.
        head: State of the target in the target's own terms. Pass it to ``publish`` as ``expected_head``: nothing is
            published if the state has changed. None: the target cannot tell, or does not need to.
        version: Version name. Empty: the name of ``directory``.
        location: Published location, as in ``Release``. None: ``directory``.
        complete: Whether every step of the publication was completed. If not, publishing the same release again
            completes it.
    """

    directory: Path
    head: str | None = None
    version: str = ""
    location: Path | str | None = None
    complete: bool = True

    @property
    def name(self) -> str:
        """Version name for people."""
        return self.version or self.directory.name


class PublishedRelease(Protocol):
    """A published release that can be read. ``version`` is its public name if that is a content hash."""

    @property
    def where(self) -> str: ...
    @property
    def version(self) -> str | None: ...
    def files(self) -> Mapping[str, tuple[int, str]]: ...  # name -> size in bytes, sha256
    def read(self, name: str) -> bytes: ...


class PublishTarget(BaseModel, ABC):
    """Base class of all targets. Its settings are common to all: version name, signing key and approval."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    known_as: ClassVar[str]
    """Form of a reference to a release at this target, for messages: 'the directory of a release'."""

    shows_itself: ClassVar[bool] = False
    """Whether ``current`` only reads local files. For other targets it may download a release."""

    version: str | None = Field(
        default=None,
        pattern=_VERSION,
        description="Name of this version; absent: the first 12 digits of its content hash.",
    )
    sign_key: LocalPath | None = Field(
        default=None,
        description="EC private key (P-256, PEM) that signs every file of the release; absent: not signed.",
    )

    approval: ApprovalSettings | bool = Field(
        default=False, description="Whether a person has to say yes first, and within which time."
    )

    @property
    def asks(self) -> ApprovalSettings | None:
        """Approval settings, or None if publication needs no approval."""
        if isinstance(self.approval, bool):
            return ApprovalSettings() if self.approval else None
        return self.approval

    @property
    def is_public(self) -> bool:
        """Whether outsiders can see a release. If so, its licenses must have been checked for redistribution."""
        return False

    @property
    @abstractmethod
    def address(self) -> str:
        """Reference that the model card tells readers to pass to ``mergegate verify``; '.' for a local directory."""

    @abstractmethod
    def check(self, root: Path) -> None:
        """Raise an error if publishing would fail for a reason that can be known now. Leave no trace at the target.

        Args:
            root: Directory of the profile; relative paths start there.

        Raises:
            InvalidInput: A prerequisite, such as a token, is missing.
            Refused: The target denies write access or is unavailable.
        """

    @abstractmethod
    def current(self, root: Path) -> CurrentRelease | None:
        """Return the release that is published today, or None before the first.

        Raises:
            Refused: The target is unavailable. A merge must not pass because its champion was out of reach.
        """

    def earlier(self, root: Path, version: str) -> CurrentRelease | None:
        """Return an earlier release, to be the anchor, or None before the first.

        Args:
            version: ``first`` for the oldest release, or a version name.

        Raises:
            InvalidInput: There is no such version, or the target does not keep earlier releases.
            Refused: The target is unavailable.
        """
        raise InvalidInput(
            "evaluate.anchor",
            found=f"{version!r}, and a target ({self.to_name}) that keeps no earlier releases",
            expected="a target that does, like a directory or the Hub",
            remedy="leave 'anchor' out, or publish elsewhere",
        )

    def set_alias(self, root: Path, version: str, name: str) -> None:
        """Point the alias ``name`` to the published ``version``. Idempotent; changes no release.

        Raises:
            InvalidInput: There is no such version, ``name`` is a version or not a valid alias, or the target does not
                support aliases.
            Refused: The target rejects the request or is unavailable.
        """
        raise InvalidInput(
            "shadow.alias",
            found=f"{name!r}, and a target ({self.to_name}) that keeps no aliases",
            expected="a target that does, like a directory or the Hub",
            remedy="say 'alias: null', or publish elsewhere",
        )

    def aliased(self, root: Path, name: str) -> str | None:
        """Return the version that the alias ``name`` points to, or None.

        Raises:
            Refused: The target is unavailable.
        """
        return None

    @property
    def to_name(self) -> str:
        """Name of this target in a profile."""
        return str(getattr(self, "to", type(self).__name__))

    @abstractmethod
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
        """Publish exactly ``files`` as ``version`` and make it the current version.

        The publication is atomic, even if the process is killed; running again completes it. If the release is
        already published, nothing is changed. A version never changes its content.

        Args:
            name: Name of the release in the profile.
            expected_head: ``head`` of the release that this one was compared with. None: any head is accepted.
            hashes: Cached sha256 digests of files that were read before.

        Raises:
            Refused: The version exists with different content, a source file has changed since the gate, the target's
                head is not ``expected_head``, or the target rejects the request.
        """

    @classmethod
    @abstractmethod
    def open(cls, reference: str) -> PublishedRelease | None:
        """Open a release by a user's reference, without a profile. Return None if it has another target's form.

        Raises:
            InvalidInput: The reference has this target's form, but there is no such release or it is unavailable.
        """


def check_target(target: PublishTarget | None, root: Path) -> None:
    """Raise an error if publishing would fail: check the signing key, then the target.

    Args:
        target: Target of the profile. None: nothing is published.
        root: Directory of the profile; relative paths start there.

    Raises:
        InvalidInput: The signing key is missing, or as ``PublishTarget.check``.
        Refused: As ``PublishTarget.check``.
    """
    if target is None:
        return
    if target.sign_key is not None:
        private_key(root / target.sign_key)
    target.check(root)
