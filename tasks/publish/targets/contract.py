"""Define the contract of a publishing target: its settings in a profile, and its operations on published releases.

::

    publish: {to: shelf, place: /srv/models}      # in a profile

    class Shelf(PublishTarget):                   # in the module of the target; ``registry`` describes discovery
        to: Literal["shelf"]                      # the target's name in a profile
        place: Path                               # its settings: strict, frozen, each with a description

        def check(self, root): ...                # before the merge: would publishing fail?
        def current_release(self, root): ...      # the release that is published today (the champion)
        def publish(self, request): ...           # all of a release or nothing, and never twice
        @classmethod
        def open(cls, reference): ...             # a published release, to verify or reproduce

A run calls them in that order. Hours may pass between ``check`` and ``publish``, and another publisher may release in
the meantime. To detect that, the ``head`` that ``current_release`` returned is passed to ``publish`` as
``expected_head``.

An alias such as ``production`` points to one of the published versions. A version never changes; an alias moves. To
keep the two apart, an alias consists of letters, ``-`` and ``_``, while nearly every version contains a digit. Each
target detects the rare version whose name looks like an alias.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from mergegate.merge_core.errors import InvalidInput, Refused, suggest
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.publish.content import ReleaseFile
from mergegate.tasks.publish.settings import PublishSettings
from mergegate.tasks.publish.signature import private_key

FIRST = "first"  # names the oldest release
ALIAS_NAME = r"^[A-Za-z][A-Za-z_-]{0,63}$"
_ALIAS_SETTING = "shadow.alias"

OnProgress = Callable[[int, int], None]
"""Callback that receives the number of bytes transferred so far and in total."""


@dataclass(frozen=True)
class PublishRequest:
    """A release to publish.

    Attributes:
        name: Name of the release in the profile.
        version: Version name.
        root: Directory of the profile; relative paths start there.
        hashes: Cached sha256 digests of files that were read before.
        expected_head: ``head`` of the release that this one was compared with. None: any head is accepted.
        on_progress: Callback for the bytes sent.
    """

    files: tuple[ReleaseFile, ...]
    name: str
    version: str
    root: Path
    hashes: HashMemo
    expected_head: str | None = None
    on_progress: OnProgress = lambda sent, total: None


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
    def reference(self) -> str: ...  # names the release in messages
    @property
    def version(self) -> str | None: ...
    def files(self) -> Mapping[str, tuple[int, str]]: ...  # name -> size in bytes, sha256
    def read(self, name: str) -> bytes: ...


@dataclass(frozen=True)
class PublicationBlocked:
    """Continuing would break a guarantee; an operator must decide."""

    found: str
    expected: str
    remedy: str

    def refusal(self, location: str) -> Refused:
        return Refused(location, found=self.found, expected=self.expected, remedy=self.remedy)


def version_taken(version: str, difference: str) -> PublicationBlocked:
    """Return the outcome for a ``version`` that is published with other content. Versions never change."""
    return PublicationBlocked(
        f"the version {version} is already published with other content ({difference})",
        "the same content, because a version never changes",
        "publish under a new version",
    )


def overtaken(current: str, expected: str) -> PublicationBlocked:
    """Return the outcome for a target whose release has changed since this release was compared with it."""
    return PublicationBlocked(
        current,
        expected,
        "run again; mergegate then compares the merge with the current release",
    )


def undone(location: str, writer_hint: str = "") -> Refused:
    """Return the error for a target where another writer undoes every step."""
    return Refused(
        location,
        found="another writer undoes every step as soon as mergegate takes it",
        expected="one publisher at a time",
        remedy=f"find out who else writes to this location, then run again{writer_hint}",
    )


class PublishTarget(PublishSettings, ABC):
    """Base class of all targets."""

    reference_form: ClassVar[str]
    """Form of a reference to a release at this target, for messages: 'the directory of a release'."""

    current_is_local: ClassVar[bool] = False
    """Whether ``current_release`` only reads local files. For other targets it may download a release."""

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
    def current_release(self, root: Path) -> CurrentRelease | None:
        """Return the release that is published today, or None before the first.

        Raises:
            Refused: The target is unavailable. A merge must not pass because its champion was out of reach.
        """

    def earlier_release(self, root: Path, version: str) -> CurrentRelease | None:
        """Return an earlier release, to be the anchor, or None before the first.

        ``version`` is ``first`` for the oldest release, or a version name.

        Raises:
            InvalidInput: There is no such version, or the target does not keep earlier releases.
            Refused: The target is unavailable.
        """
        raise InvalidInput(
            "evaluate.anchor",
            found=f"{version!r}, but the target {self.target_name} does not keep earlier releases",
            expected="a target that keeps them, such as a directory or the Hub",
            remedy="remove 'anchor', or publish to another target",
        )

    def set_alias(self, root: Path, version: str, name: str) -> None:
        """Point the alias ``name`` to the published ``version``. Idempotent; changes no release.

        Raises:
            InvalidInput: There is no such version, ``name`` is a version or not a valid alias, or the target does not
                support aliases.
            Refused: The target rejects the request or is unavailable.
        """
        raise InvalidInput(
            _ALIAS_SETTING,
            found=f"{name!r}, but the target {self.target_name} does not support aliases",
            expected="a target that supports them, such as a directory or the Hub",
            remedy="set 'alias: null', or publish to another target",
        )

    def resolve_alias(self, root: Path, name: str) -> str | None:
        """Return the version that the alias ``name`` points to, or None.

        Raises:
            Refused: The target is unavailable.
        """
        return None

    @property
    def target_name(self) -> str:
        """Name of this target in a profile."""
        return str(getattr(self, "to", type(self).__name__))

    @abstractmethod
    def publish(self, request: PublishRequest) -> Release:
        """Publish exactly the files of ``request`` under its version, and make that the current version.

        The publication is atomic, even if the process is killed; running again completes it. If the release is
        already published, nothing is changed. A version never changes its content.

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


def require_alias_name(name: str, reserved_names: Collection[str]) -> None:
    """Raise InvalidInput if ``name`` cannot be an alias.

    ``reserved_names`` holds the names that the target reserves, such as ``latest``.

    Raises:
        InvalidInput: The name is reserved or contains anything but letters, ``-`` and ``_``.
    """
    if name in reserved_names:
        raise InvalidInput(
            _ALIAS_SETTING,
            found=f"{name!r}, which the target itself moves with every release",
            expected="a name that the target does not use",
            remedy="choose another name, such as 'production'",
        )
    if not re.fullmatch(ALIAS_NAME, name):
        raise InvalidInput(
            _ALIAS_SETTING,
            found=repr(name),
            expected="only letters, '-' and '_', because a name with digits would look like a version",
            remedy="choose another name, such as 'production'",
        )


def alias_conflict(name: str, location: str) -> InvalidInput:
    """Return the error for an alias ``name`` that is already a version at ``location``. Versions never move."""
    return InvalidInput(
        _ALIAS_SETTING,
        found=f"{name!r}, which is a version at {location}",
        expected="a name that is not the name of a version",
        remedy="choose another name for the alias",
    )


def no_such_version(version: str, location: str, versions: Collection[str] = ()) -> InvalidInput:
    """Return the error for an alias of a ``version`` that does not exist at ``location``."""
    return InvalidInput(
        _ALIAS_SETTING,
        found=f"no version {version!r} at {location}",
        expected="a version that was published there",
        remedy=suggest(version, versions) if versions else "check the spelling",
    )


def no_such_anchor(version: str, location: str, versions: Collection[str]) -> InvalidInput:
    """Return the error for an anchor ``version`` that does not exist at ``location``."""
    return InvalidInput(
        "evaluate.anchor",
        found=f"{version!r} is not a version at {location}",
        expected=f"{FIRST!r}, or one of its versions",
        remedy=suggest(version, [FIRST, *versions]),
    )
