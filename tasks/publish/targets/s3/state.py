"""Decide the next step from the state of a bucket to a complete release, as a pure function.

::

    prefix/latest.json                     the pointer: the current version, and every version with its content hash
    prefix/3f9a0c71b2de/…                  the files of a version, under their own names
    prefix/v2-3f9a0c71b2de/…               the files of a version that has a name
    prefix/.listings/3f9a0c71b2de.json     size and sha256 of every file of a version
    prefix/production.json                 an alias: the version that it points to, in the pointer's format

Readers follow the pointer, so a version that it does not name is not yet released. The order of the steps guarantees:

* The path of a version ends in a hash of its files. So two publishers never write different bytes to one object, and
  the next run completes what an interrupted run left.
* The pointer moves in one write. The write is guarded by the state that it was decided on, and happens only after the
  store's own checksums confirmed every object.
* A version that the pointer has named keeps its content.

The state is read again after each step, so a lost answer, a kill or a second publisher is just another state to start
from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from mergegate.tasks.store import merkle

POINTER = "latest.json"
LISTINGS = ".listings/"
NOTHING_THERE = ""  # head of a location without a pointer
_DIGITS = 12


class ReleasedVersion(BaseModel):
    """One version in the pointer. ``digest`` covers name, size and sha256 of each of its files."""

    model_config = ConfigDict(strict=True, frozen=True)

    version: str
    path: str
    digest: str = Field(pattern="^[0-9a-f]{64}$")


class Pointer(BaseModel):
    """Content of ``latest.json``: the current version, and all versions in the order of their first release."""

    model_config = ConfigDict(strict=True, frozen=True)

    current: str
    versions: tuple[ReleasedVersion, ...]

    def named(self, version: str) -> ReleasedVersion | None:
        """Return the version of this name, or None."""
        return next((item for item in self.versions if item.version == version), None)

    @property
    def released(self) -> ReleasedVersion | None:
        """Current version, or None if a user edited the pointer by hand."""
        return self.named(self.current)


class VersionListing(BaseModel):
    """Size in bytes and sha256 of each file of a version, by name."""

    model_config = ConfigDict(strict=True, frozen=True)

    files: dict[str, tuple[int, str]]


@dataclass(frozen=True)
class DesiredVersion:
    """The release to publish. ``files``: size in bytes and sha256 by name."""

    version: str
    files: Mapping[str, tuple[int, str]]

    @property
    def entry(self) -> ReleasedVersion:
        """Entry of this version in the pointer."""
        digest = merkle(self.files)
        content = digest[:_DIGITS]
        path = content if self.version == content else f"{self.version}-{content}"
        return ReleasedVersion(version=self.version, path=path, digest=digest)


@dataclass(frozen=True)
class ObservedLocation:
    """State of a location in a bucket.

    Attributes:
        pointer: None before the first release.
        head: Condition for a guarded write of the pointer: its entity tag, or ``NOTHING_THERE``.
        listed: Whether the listing of the version exists.
        held: Files of the version whose content the store's own checksums confirm.
        foreign: Objects below the version's path that are not in the release.
    """

    pointer: Pointer | None
    head: str
    listed: bool
    held: frozenset[str]
    foreign: tuple[str, ...] = ()


@dataclass(frozen=True)
class SendFiles:
    """Send these files, and the listing of all files."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class MovePointer:
    """Write the pointer if its state is still ``head``."""

    pointer: Pointer
    head: str


@dataclass(frozen=True)
class UpToDate:
    """The release is complete and current."""


@dataclass(frozen=True)
class Conflict:
    """Continuing would break a guarantee; an operator must decide."""

    found: str
    expected: str
    remedy: str


S3Step = SendFiles | MovePointer | UpToDate | Conflict


def step_to(desired: DesiredVersion, observed: ObservedLocation, expected_head: str) -> S3Step:
    """Return the next step toward the desired version.

    Args:
        expected_head: Head of the pointer when the release was compared. If the pointer has neither this head nor names
            this release, it has moved in the meantime.
    """
    entry, pointer = desired.entry, observed.pointer
    previous = pointer.named(desired.version) if pointer else None
    if previous is not None and previous.digest != entry.digest:
        return Conflict(
            f"the version {desired.version} is already published with other content ({previous.digest[:_DIGITS]})",
            "a version that never changes",
            "publish under a new version",
        )
    current = pointer is not None and pointer.current == desired.version
    if not current and observed.head != expected_head:
        return Conflict(
            f"another release ({pointer.current if pointer else 'none'}) is current there now",
            "the one that this release was compared with",
            "run again: it is judged anew, against what is published now",
        )
    if observed.foreign:
        return Conflict(
            f"{observed.foreign[0]} lies among the files of this version, and is none of them",
            "nothing but the release",
            "find out who put it there, and remove it",
        )
    missing = tuple(sorted(set(desired.files) - observed.held))
    if missing or not observed.listed:
        return SendFiles(missing)
    if current:
        return UpToDate()
    earlier = pointer.versions if pointer else ()
    versions = earlier if previous else (*earlier, entry)
    return MovePointer(Pointer(current=desired.version, versions=versions), observed.head)
