"""Decide the next step from the state of a Hub repository to a complete release, as a pure function.

A publication calls this function in a loop: read the state, decide, take one step, read again. The loop keeps no memory
between steps, so a lost answer, a kill or a second publisher just leads to another state, and running again is always
correct. The order of the steps guarantees:

* ``main`` moves in one commit, from the complete old release to the complete new one.
* The Hub accepts that commit only on the head for which it was decided, so it never overwrites another release.
* A tag is created once, on a commit whose content was compared with the gated files, and it never moves.
* A new repository is not visible to outsiders before its release is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mergegate.tasks.checkpoints.hub import RemoteFile
from mergegate.tasks.publish.targets.contract import PublicationBlocked, overtaken, version_taken

Gated = Literal["auto", "manual", False]
RepositoryVisibility = Literal["public", "private"]

MAIN = "main"
# Prefix of staging branches. Only mergegate uses it; branches of interrupted runs are deleted.
STAGING = "mergegate-staging/"
# The Hub writes this file itself when another file needs large file storage.
WRITTEN_BY_HUB = frozenset({".gitattributes"})


@dataclass(frozen=True)
class DesiredFile:
    """A file that passed the gate. ``blob`` is its git blob id, or None if the file is too large for one."""

    size: int
    sha256: str
    blob: str | None

    def matches(self, remote: RemoteFile | None) -> bool:
        """Return whether the Hub's own hash confirms that ``remote`` has exactly this content."""
        if remote is None or remote.size != self.size:
            return False
        return remote.sha256 == self.sha256 if remote.sha256 is not None else remote.blob == self.blob


@dataclass(frozen=True)
class Head:
    """A commit and the files in it."""

    commit: str
    files: Mapping[str, RemoteFile]


@dataclass(frozen=True)
class DesiredState:
    """The release to publish."""

    version: str
    files: Mapping[str, DesiredFile]
    visibility: RepositoryVisibility = "private"
    gated: Gated = False

    @property
    def branch(self) -> str:
        """Name of the staging branch."""
        return STAGING + self.version

    def missing(self, head: Head) -> tuple[str, ...]:
        """Return the files that ``head`` lacks or has with different content."""
        return tuple(name for name, file in sorted(self.files.items()) if not file.matches(head.files.get(name)))

    def stale(self, head: Head) -> tuple[str, ...]:
        """Return files of ``head`` that are not in the release, such as shards of an older one."""
        return tuple(sorted(set(head.files) - set(self.files) - WRITTEN_BY_HUB))

    def is_on(self, head: Head) -> bool:
        """Return whether ``head`` contains exactly this release."""
        return not self.missing(head) and not self.stale(head)


@dataclass(frozen=True)
class ObservedState:
    """State of the repository. ``main`` is None if the repository or its branch ``main`` does not exist."""

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
    """Create the repository. It starts as private even for a public release, to hide incomplete files."""


@dataclass(frozen=True)
class ChangeSettings:
    """Change the visibility of the repository."""

    private: bool
    gated: Gated


@dataclass(frozen=True)
class CreateBranch:
    """Create the staging branch at the commit ``start``."""

    start: str


@dataclass(frozen=True)
class StageFiles:
    """Commit to the staging branch so that it contains exactly the release."""

    parent: str
    missing: tuple[str, ...]
    stale: tuple[str, ...]


@dataclass(frozen=True)
class Promote:
    """Commit to ``main`` so that it has the files of ``source``. Fails if the head of ``main`` is not ``parent``."""

    parent: str
    source: Head
    missing: tuple[str, ...]
    stale: tuple[str, ...]


@dataclass(frozen=True)
class Tag:
    """Tag ``commit`` with the version."""

    commit: str


@dataclass(frozen=True)
class DeleteBranch:
    """Delete a staging branch."""

    branch: str


@dataclass(frozen=True)
class Done:
    """The release is published at ``commit``."""

    commit: str


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


def next_step(desired_state: DesiredState, observed_state: ObservedState, expected_head: str | None = None) -> Step:
    """Return the next step toward the desired state.

    ``expected_head`` is the head of ``main`` that the release was compared with. Publication is blocked if the head of
    ``main`` is neither that nor this release. None: any head is accepted.
    """
    if not observed_state.exists:
        return CreateRepository()
    main = observed_state.main
    if main is None:
        return PublicationBlocked(
            "the repository has no branch 'main'",
            "a model repository with a first commit",
            "create the repository again on the Hub",
        )
    if (tagged := observed_state.tagged) is not None:
        if not desired_state.is_on(tagged):
            return version_taken(
                desired_state.version, (*desired_state.missing(tagged), *desired_state.stale(tagged))[0]
            )
        # Another mergegate release is current; the version that passed now replaces it. Changes that a user committed
        # to main after the release are left alone.
        superseded = any(
            commit == main.commit and name != desired_state.version for name, commit in observed_state.tags.items()
        )
        if superseded and not desired_state.is_on(main):
            promotion = Promote(main.commit, tagged, desired_state.missing(main), desired_state.stale(main))
            return _blocked(desired_state, observed_state, main, expected_head) or promotion
        if observed_state.staged is not None:  # only an unfinished publication changes the visibility
            if desired_state.visibility == "public" and (
                observed_state.private or observed_state.gated != desired_state.gated
            ):
                return ChangeSettings(private=False, gated=desired_state.gated)
            return DeleteBranch(desired_state.branch)
        return DeleteBranch(observed_state.leftovers[0]) if observed_state.leftovers else Done(tagged.commit)

    if blocked := _blocked(desired_state, observed_state, main, expected_head):
        return blocked
    strictness = (False, "auto", "manual").index
    if not observed_state.private and strictness(desired_state.gated) > strictness(observed_state.gated):
        return ChangeSettings(private=False, gated=desired_state.gated)
    if desired_state.is_on(main):
        return Tag(main.commit)
    if observed_state.staged is None:
        return CreateBranch(main.commit)
    if not desired_state.is_on(observed_state.staged):
        return StageFiles(
            observed_state.staged.commit,
            desired_state.missing(observed_state.staged),
            desired_state.stale(observed_state.staged),
        )
    return Promote(main.commit, observed_state.staged, desired_state.missing(main), desired_state.stale(main))


def _blocked(
    desired_state: DesiredState, observed_state: ObservedState, main: Head, expected_head: str | None
) -> PublicationBlocked | None:
    """Return why ``main`` must not move: a private release would become visible, or ``main`` has changed."""
    if not observed_state.private and desired_state.visibility == "private":
        return PublicationBlocked(
            "the repository is public",
            "a private repository, because the profile sets 'visibility: private'",
            "set 'visibility: public' in the profile, or make the repository private on the Hub",
        )
    if expected_head is None or main.commit == expected_head or desired_state.is_on(main):
        return None
    return overtaken(
        f"main is at {main.commit[:12]} now", f"{expected_head[:12]}, the head that this release was compared with"
    )
