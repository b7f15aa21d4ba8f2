"""What a Hub repository looks like, and the next step from there to a release: a pure function from state to step.

A publication is this function and a loop: look, decide, do one thing, look again. Whatever happens in between (a lost
answer, a kill, a second publisher) is just another state to start from, so nothing is ever remembered between steps and
running again is always right. The order of the steps keeps the promises:

* ``main`` moves in one commit, from all of the old release to all of the new one;
* that commit is guarded by the head it was decided on: a release somebody else made meanwhile is never written over;
* a tag is made once, on a commit whose content was compared with what was gated, and never moves;
* nobody outside sees a new repository before its release is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mergegate.tasks.checkpoints.hub import RemoteFile

Gated = Literal["auto", "manual", False]
RepositoryVisibility = Literal["public", "private"]

MAIN = "main"
# Ours alone: branches below it are staging places, and those of dead runs are swept away.
STAGING = "mergegate-staging/"
# The Hub writes it itself, when a file needs large file storage.
WRITTEN_BY_HUB = frozenset({".gitattributes"})


@dataclass(frozen=True)
class DesiredFile:
    """A file as it was gated. ``blob`` is None where it is too large to be a plain git blob."""

    size: int
    sha256: str
    blob: str | None

    def is_held_by(self, remote: RemoteFile | None) -> bool:
        """Whether the Hub's own hash says that it holds these very bytes."""
        if remote is None or remote.size != self.size:
            return False
        return remote.sha256 == self.sha256 if remote.sha256 is not None else remote.blob == self.blob


@dataclass(frozen=True)
class Head:
    """A commit and the files it lists."""

    commit: str
    files: Mapping[str, RemoteFile]


@dataclass(frozen=True)
class DesiredState:
    """The release that shall stand there."""

    version: str
    files: Mapping[str, DesiredFile]
    visibility: RepositoryVisibility = "private"
    gated: Gated = False

    @property
    def branch(self) -> str:
        """Where it is staged."""
        return STAGING + self.version

    def missing(self, head: Head) -> tuple[str, ...]:
        """Files that ``head`` lacks, or holds with other content."""
        return tuple(name for name, file in sorted(self.files.items()) if not file.is_held_by(head.files.get(name)))

    def stale(self, head: Head) -> tuple[str, ...]:
        """Files of ``head`` that the release does not have: shards of an older one."""
        return tuple(sorted(set(head.files) - set(self.files) - WRITTEN_BY_HUB))

    def is_on(self, head: Head) -> bool:
        """Whether ``head`` lists exactly this release."""
        return not self.missing(head) and not self.stale(head)


@dataclass(frozen=True)
class ObservedState:
    """The repository as it is now. ``main`` None: there is no repository, or it has no ``main``."""

    exists: bool
    private: bool = True
    gated: Gated = False
    main: Head | None = None
    staged: Head | None = None
    tagged: Head | None = None
    tags: Mapping[str, str] = field(default_factory=dict)  # every tag -> commit
    leftovers: tuple[str, ...] = ()  # staging branches of other versions


@dataclass(frozen=True)
class CreateRepository:
    """Make it, private whatever the profile says: nobody shall look in before the release is there."""


@dataclass(frozen=True)
class ChangeSettings:
    """Change who may see it."""

    private: bool
    gated: Gated


@dataclass(frozen=True)
class CreateBranch:
    """Make the staging branch."""

    start: str


@dataclass(frozen=True)
class StageFiles:
    """One commit on the staging branch, after which it lists exactly the release."""

    parent: str
    missing: tuple[str, ...]
    stale: tuple[str, ...]


@dataclass(frozen=True)
class Promote:
    """One commit on ``main`` that makes it list what ``source`` lists. Fails when its head is not ``parent``."""

    parent: str
    source: Head
    missing: tuple[str, ...]
    stale: tuple[str, ...]


@dataclass(frozen=True)
class Tag:
    """Give ``commit`` the version's name."""

    commit: str


@dataclass(frozen=True)
class DeleteBranch:
    """Remove a staging branch."""

    branch: str


@dataclass(frozen=True)
class Done:
    """The release stands at ``commit``."""

    commit: str


@dataclass(frozen=True)
class PublicationBlocked:
    """Going on would break a promise; a person must decide."""

    found: str
    expected: str
    remedy: str


Step = (
    CreateRepository
    | ChangeSettings
    | CreateBranch
    | StageFiles
    | Promote
    | Tag
    | DeleteBranch
    | Done
    | PublicationBlocked
)


def next_step(desired: DesiredState, observed: ObservedState, expected_head: str | None = None) -> Step:
    """The one thing to do now.

    Args:
        desired: The release.
        observed: The repository, just read.
        expected_head: Head of ``main`` that the release was judged against. A ``main`` that is neither that nor already
            this release was changed meanwhile. None: whatever is there.
    """
    if not observed.exists:
        return CreateRepository()
    main = observed.main
    if main is None:
        return PublicationBlocked(
            "it has no branch 'main'", "a model repository with a first commit", "create it anew on the Hub"
        )
    if observed.tagged is not None:
        return _after_tag(desired, observed, main, observed.tagged, expected_head)
    if (stop := _forbidden(desired, observed)) or (stop := _changed(desired, main, expected_head)):
        return stop
    if not observed.private and _strictness(desired.gated) > _strictness(observed.gated):
        return ChangeSettings(private=False, gated=desired.gated)
    if desired.is_on(main):
        return Tag(main.commit)
    if observed.staged is None:
        return CreateBranch(main.commit)
    if not desired.is_on(observed.staged):
        return StageFiles(observed.staged.commit, desired.missing(observed.staged), desired.stale(observed.staged))
    return Promote(main.commit, observed.staged, desired.missing(main), desired.stale(main))


def _after_tag(
    desired: DesiredState, observed: ObservedState, main: Head, tagged: Head, expected_head: str | None
) -> Step:
    """The version has its name already; what may be left is to make it the current one again, and to tidy up."""
    if not desired.is_on(tagged):
        odd = (*desired.missing(tagged), *desired.stale(tagged))[0]
        return PublicationBlocked(
            f"the version {desired.version} is already published with other content ({odd})",
            "a version that never changes",
            "publish under a new version, or delete the tag by hand",
        )
    # Another of our releases is current: the one that was let through now takes its place. What a person changed on
    # main after the release is theirs and stays.
    superseded = any(commit == main.commit and name != desired.version for name, commit in observed.tags.items())
    if superseded and not desired.is_on(main):
        return (
            _forbidden(desired, observed)
            or _changed(desired, main, expected_head)
            or Promote(main.commit, tagged, desired.missing(main), desired.stale(main))
        )
    if observed.staged is not None:  # only a publication that is under way opens anything
        if desired.visibility == "public" and (observed.private or observed.gated != desired.gated):
            return ChangeSettings(private=False, gated=desired.gated)
        return DeleteBranch(desired.branch)
    if observed.leftovers:
        return DeleteBranch(observed.leftovers[0])
    return Done(tagged.commit)


def _forbidden(desired: DesiredState, observed: ObservedState) -> PublicationBlocked | None:
    if observed.private or desired.visibility == "public":
        return None
    return PublicationBlocked(
        "the repository is public",
        "a private one, as the profile says",
        "say 'visibility: public' in the profile, or make the repository private by hand",
    )


def _changed(desired: DesiredState, main: Head, expected_head: str | None) -> PublicationBlocked | None:
    if expected_head is None or main.commit == expected_head or desired.is_on(main):
        return None
    return PublicationBlocked(
        f"main is at {main.commit[:12]} now",
        f"{expected_head[:12]}, the head that this release was compared with",
        "run again: it is judged anew, against what is published now",
    )


def _strictness(gated: Gated) -> int:
    return (False, "auto", "manual").index(gated)
