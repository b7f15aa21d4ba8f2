"""What every target promises. A target is one file: its settings in a profile, and what can be asked of the place.

::

    publish: {to: shelf, place: /srv/models}      # in a profile

    class Shelf(PublishTarget):                   # in the file of the target; see ``registry`` for how it is found
        to: Literal["shelf"]                      # what a profile says to mean it
        place: Path                               # its settings: strict, frozen, each with a description

        def check(self, root): ...                # before anything is merged: would publishing fail?
        def current(self, root): ...              # what is released there today, to be the champion
        def publish(self, files, ...): ...        # all of a release or nothing, and never twice
        @classmethod
        def open(cls, named): ...                 # a release there, to be verified and made again

A run asks in that order. ``check`` may be hours before ``publish``, and somebody else may release in between: what
``current`` says of the place then (``head``) comes back to ``publish`` as ``expected_head``.
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

FIRST = "first"  # among earlier releases
_VERSION = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"

OnProgress = Callable[[int, int], None]
"""Called with bytes that have arrived and bytes that are to arrive."""


@dataclass(frozen=True)
class Release:
    """A release where it stands. ``new`` is false when it stood there already and nothing was touched."""

    name: str
    version: str
    location: Path | str  # a directory, or the address of a page
    place: str  # the same, short: what a person calls the target
    new: bool

    def summary(self) -> str:
        return f"{self.version} at {self.place}" if self.new else f"{self.version} is released already"


@dataclass(frozen=True)
class CurrentRelease:
    """The release that is published today, on this machine.

    Attributes:
        directory: Its checkpoint, whole.
        head: The state of the place, as the target itself calls it: hand it to ``publish`` as ``expected_head``, and
            nothing is published when it has moved. None: the target cannot tell, or need not.
        version: What people call it; empty: as its directory.
        location: Where it stands, as ``Release`` has it; None: where it lies here.
        complete: Whether all that a publication does is done. Else the same is published once more, which finishes it.
    """

    directory: Path
    head: str | None = None
    version: str = ""
    location: Path | str | None = None
    complete: bool = True

    @property
    def name(self) -> str:
        """What people call it."""
        return self.version or self.directory.name


class PublishedRelease(Protocol):
    """A release that can be looked at. ``version`` is the name that others know it by, if that is a content hash."""

    @property
    def where(self) -> str: ...
    @property
    def version(self) -> str | None: ...
    def files(self) -> Mapping[str, tuple[int, str]]: ...  # name -> size in bytes, sha256
    def read(self, name: str) -> bytes: ...


class PublishTarget(BaseModel, ABC):
    """A place for releases. What is common to all: a name for the version, a key to sign with, and who is asked."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    known_as: ClassVar[str]
    """How a person names a release there, for messages: 'the directory of a release'."""

    shows_itself: ClassVar[bool] = False
    """Whether ``current`` is a look at what lies here anyway. Elsewhere it may be a download."""

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
        """How a person is asked before anything is published; None: nobody is."""
        if isinstance(self.approval, bool):
            return ApprovalSettings() if self.approval else None
        return self.approval

    @property
    def is_public(self) -> bool:
        """Whether people outside can see a release there: then its licences must have been checked for that."""
        return False

    @property
    @abstractmethod
    def address(self) -> str:
        """What the card tells its readers to name to ``mergegate verify``; '.' where they have it in a directory."""

    @abstractmethod
    def check(self, root: Path) -> None:
        """See that publishing will not fail, hours later, for something that is wrong now. Leaves no trace there.

        Args:
            root: Directory of the profile, to which paths may be relative.

        Raises:
            InvalidInput: when something that it needs, like a token, is not there.
            Refused: when the place may not be written to, or cannot be asked.
        """

    @abstractmethod
    def current(self, root: Path) -> CurrentRelease | None:
        """The release that is published there today; None before the first.

        Raises:
            Refused: when that cannot be told: a merge must not be let through because its champion was out of reach.
        """

    def earlier(self, root: Path, named: str) -> CurrentRelease | None:
        """A release that was published there before, to be an anchor; None before the first.

        Args:
            named: ``first`` for the oldest, or a version.

        Raises:
            InvalidInput: when there is no such version, or the place keeps no earlier releases.
            Refused: when that cannot be told.
        """
        raise InvalidInput(
            "evaluate.anchor",
            found=f"{named!r}, and a target ({self.to_name}) that keeps no earlier releases",
            expected="a target that does, like a directory or the Hub",
            remedy="leave 'anchor' out, or publish elsewhere",
        )

    def set_alias(self, root: Path, version: str, name: str) -> None:
        """Have ``name`` mean ``version``, which stands there whole. No release is changed. Idempotent.

        Raises:
            InvalidInput: when there is no such version, ``name`` is itself a version or cannot be an alias, or the
                place keeps no aliases.
            Refused: when the place says no, or cannot be asked.
        """
        raise InvalidInput(
            "shadow.alias",
            found=f"{name!r}, and a target ({self.to_name}) that keeps no aliases",
            expected="a target that does, like a directory or the Hub",
            remedy="say 'alias: null', or publish elsewhere",
        )

    def aliased(self, root: Path, name: str) -> str | None:
        """The version that ``name`` means there; None: none.

        Raises:
            Refused: when that cannot be told.
        """
        return None

    @property
    def to_name(self) -> str:
        """What a profile says to mean this target."""
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
        """Make the place hold exactly ``files`` as ``version``, and that version the current one.

        All of it or nothing, also when it is killed in between; running again completes it. Where it stands already
        nothing is touched. A version never changes its content.

        Args:
            name: Of the release, as the profile has it.
            expected_head: ``head`` of the release that this one was compared with; None: whatever is there.
            hashes: Knows the sha256 of files that were read before.

        Raises:
            Refused: when the version exists with other content, a source is not what was gated, the place has another
                head than ``expected_head``, or says no.
        """

    @classmethod
    @abstractmethod
    def open(cls, named: str) -> PublishedRelease | None:
        """The release that a person named, without any profile; None when this is no name of a release there.

        Raises:
            InvalidInput: when it is such a name, and there is nothing under it or it cannot be reached.
        """


def check_target(target: PublishTarget | None, root: Path) -> None:
    """See that publishing will not fail for something that is wrong now: the key to sign with, then the place.

    Args:
        target: None: nothing is to be published.
        root: Directory of the profile, to which paths may be relative.

    Raises:
        InvalidInput: when there is no key to sign with; and as ``PublishTarget.check``.
        Refused: as ``PublishTarget.check``.
    """
    if target is None:
        return
    if target.sign_key is not None:
        private_key(root / target.sign_key)
    target.check(root)
