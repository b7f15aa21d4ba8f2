"""Decide the next step from the state of a bucket to a complete release, as a pure function.

::

    prefix/latest.json                     the pointer: the current version, and every version with its content hash
    prefix/3f9a0c71b2de/…                  the files of a version, under their own names
    prefix/v2-3f9a0c71b2de/…               the files of a version that has a name
    prefix/.listings/3f9a0c71b2de.json     size and sha256 of every file of a version
    prefix/production.json                 an alias: the version that it points to, in the pointer's format

A version is released once the pointer names it. The state is read again after each step, so a lost answer, a kill or a
second publisher just leads to another state. The order of the steps guarantees:

* The path of a version ends in a hash of its files. So two publishers never write different bytes to one object, and
  the next run completes the work of an interrupted run.
* The pointer moves in one write, after the store's own checksums have confirmed every object. The store rejects the
  write if the pointer is not the one for which it was decided.
* A version that the pointer has named keeps its content.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from mergegate.tasks.publish.content import VERSION_DIGITS
from mergegate.tasks.publish.targets.contract import PublicationBlocked, overtaken, version_taken
from mergegate.tasks.store import merkle

POINTER = "latest.json"
LISTINGS = ".listings/"
NO_POINTER = ""  # head of a location without a pointer


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

    def find(self, version: str) -> ReleasedVersion | None:
        """Return the version with this name, or None."""
        return next((item for item in self.versions if item.version == version), None)


class VersionListing(BaseModel):
    """Size in bytes and sha256 of each file of a version, by name."""

    model_config = ConfigDict(strict=True, frozen=True)

    files: dict[str, tuple[int, str]]


@dataclass(frozen=True)
class DesiredVersion:
    """The release to publish, with size in bytes and sha256 of each file by name."""

    version: str
    files: Mapping[str, tuple[int, str]]

    @property
    def entry(self) -> ReleasedVersion:
        """Entry of this version in the pointer."""
        digest = merkle(self.files)
        content = digest[:VERSION_DIGITS]
        path = content if self.version == content else f"{self.version}-{content}"
        return ReleasedVersion(version=self.version, path=path, digest=digest)


@dataclass(frozen=True)
class ObservedLocation:
    """State of a location in a bucket.

    Attributes:
        pointer: None before the first release.
        head: Entity tag of the pointer, or ``NO_POINTER``. A guarded write requires that it has not changed.
        has_listing: Whether the listing of the version exists.
        confirmed_files: Files of the version whose content the store's own checksums confirm.
        foreign_files: Objects below the version's path that are not in the release.
    """

    pointer: Pointer | None
    head: str
    has_listing: bool
    confirmed_files: frozenset[str]
    foreign_files: tuple[str, ...] = ()


@dataclass(frozen=True)
class SendFiles:
    """Send the files in ``names``, and the listing of all files."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class MovePointer:
    """Write the pointer if its head is still ``head``."""

    pointer: Pointer
    head: str


@dataclass(frozen=True)
class UpToDate:
    """The release is complete and current."""


S3Step = SendFiles | MovePointer | UpToDate | PublicationBlocked


def next_s3_step(desired_state: DesiredVersion, observed_state: ObservedLocation, expected_head: str) -> S3Step:
    """Return the next step toward the desired version.

    ``expected_head`` is the head of the pointer that the release was compared with. Publication is blocked if the
    pointer has another head and does not name this release as the current one.
    """
    entry, pointer = desired_state.entry, observed_state.pointer
    previous = pointer.find(desired_state.version) if pointer else None
    if previous is not None and previous.digest != entry.digest:
        return version_taken(desired_state.version, previous.digest[:VERSION_DIGITS])
    is_current = pointer is not None and pointer.current == desired_state.version
    if not is_current and observed_state.head != expected_head:
        return overtaken(
            f"another release ({pointer.current if pointer else 'none'}) is current there now",
            "the release that this one was compared with",
        )
    if observed_state.foreign_files:
        return PublicationBlocked(
            f"{observed_state.foreign_files[0]} is among the files of this version but not part of the release",
            "only the files of the release",
            "find out who wrote it, and remove it",
        )
    missing = tuple(sorted(set(desired_state.files) - observed_state.confirmed_files))
    if missing or not observed_state.has_listing:
        return SendFiles(missing)
    if is_current:
        return UpToDate()
    earlier = pointer.versions if pointer else ()
    versions = earlier if previous else (*earlier, entry)
    return MovePointer(Pointer(current=desired_state.version, versions=versions), observed_state.head)
