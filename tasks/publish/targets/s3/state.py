"""What a place in a bucket looks like, and the next step from there to a release: a pure function from state to step.

::

    prefix/latest.json                     the pointer: which version is current, every version and its content
    prefix/3f9a0c71b2de/…                  the files of a version, under their own names
    prefix/v2-3f9a0c71b2de/…               the same of a version with a name of its own
    prefix/.listings/3f9a0c71b2de.json     size and sha256 of every file of a version
    prefix/production.json                 an alias: the version that it means, as the pointer has it

Readers follow the pointer, so what it does not name is nobody's release yet. The order of the steps keeps the promises:

* the files of a version lie under a name that ends in a hash of them: no two publishers ever write different bytes to
  one object, and what a run that was cut off has left is completed by the next;
* the pointer moves in one write, guarded by the state that it was decided on, and only when every object was seen to
  hold its bytes, by the checksum that the store itself keeps of it;
* a version that the pointer has named once keeps its content.

After each step the place is looked at again, so a lost answer, a kill and a second publisher are just other states to
start from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from mergegate.tasks.store import merkle

POINTER = "latest.json"
LISTINGS = ".listings/"
NOTHING_THERE = ""  # the head of a place without a pointer
_DIGITS = 12


class ReleasedVersion(BaseModel):
    """One version in the pointer. ``digest`` covers name, size and sha256 of each of its files."""

    model_config = ConfigDict(strict=True, frozen=True)

    version: str
    path: str
    digest: str = Field(pattern="^[0-9a-f]{64}$")


class Pointer(BaseModel):
    """``latest.json``: the version that is current, and all of them in the order in which they were first released."""

    model_config = ConfigDict(strict=True, frozen=True)

    current: str
    versions: tuple[ReleasedVersion, ...]

    def named(self, version: str) -> ReleasedVersion | None:
        """The version of that name."""
        return next((one for one in self.versions if one.version == version), None)

    @property
    def released(self) -> ReleasedVersion | None:
        """The version that is current; None only where somebody has edited the pointer by hand."""
        return self.named(self.current)


class VersionListing(BaseModel):
    """What a version consists of: name -> size in bytes, sha256."""

    model_config = ConfigDict(strict=True, frozen=True)

    files: dict[str, tuple[int, str]]


@dataclass(frozen=True)
class DesiredVersion:
    """The release that shall stand there: name -> size in bytes, sha256."""

    version: str
    files: Mapping[str, tuple[int, str]]

    @property
    def entry(self) -> ReleasedVersion:
        """How the pointer will name it."""
        digest = merkle(self.files)
        content = digest[:_DIGITS]
        path = content if self.version == content else f"{self.version}-{content}"
        return ReleasedVersion(version=self.version, path=path, digest=digest)


@dataclass(frozen=True)
class ObservedPlace:
    """The place as it is now.

    Attributes:
        pointer: None before the first release.
        head: What a guarded write of the pointer names: its entity tag, or ``NOTHING_THERE``.
        listed: Whether the listing of the version lies there.
        held: Files of the version whose bytes the store holds, by its own checksum.
        foreign: Objects beside them that are of no file of it.
    """

    pointer: Pointer | None
    head: str
    listed: bool
    held: frozenset[str]
    foreign: tuple[str, ...] = ()


@dataclass(frozen=True)
class SendFiles:
    """Bring these files there, and the listing of all."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class MovePointer:
    """Write the pointer, if it is still the one that ``head`` names."""

    pointer: Pointer
    head: str


@dataclass(frozen=True)
class UpToDate:
    """The release is whole and current."""


@dataclass(frozen=True)
class Conflict:
    """Going on would break a promise; a person must decide."""

    found: str
    expected: str
    remedy: str


PlaceStep = SendFiles | MovePointer | UpToDate | Conflict


def step_to(desired: DesiredVersion, observed: ObservedPlace, expected_head: str) -> PlaceStep:
    """The one thing to do now.

    Args:
        expected_head: Of the pointer that the release was judged against: one that is neither that nor already this
            release was moved meanwhile.
    """
    entry, pointer = desired.entry, observed.pointer
    before = pointer.named(desired.version) if pointer else None
    if before is not None and before.digest != entry.digest:
        return Conflict(
            f"the version {desired.version} is already published with other content ({before.digest[:_DIGITS]})",
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
    others = pointer.versions if pointer else ()
    versions = others if before else (*others, entry)
    return MovePointer(Pointer(current=desired.version, versions=versions), observed.head)
