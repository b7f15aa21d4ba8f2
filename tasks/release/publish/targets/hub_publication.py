"""Publish to the Hugging Face Hub: read the state, take the next step, and repeat until the release is published.

``next_step`` decides as a pure function. The order of the steps guarantees:

* ``main`` moves in one commit, from the complete old release to the complete new one.
* The Hub accepts that commit only on the head for which it was decided, so it never overwrites another release.
* A tag is created once, on a commit whose content was compared with the gated files, and it never moves.
* A new repository is not visible to outsiders before its release is complete.

After a failed call, the state is read again, because a commit whose answer was lost may have succeeded. Before
outsiders can see the files, they are compared by the Hub's own hashes, so a file that changed on the disk or in transit
never reaches ``main``.

The token is passed to the client directly. Exceptions of the client do not leave this module, because their requests
contain the token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from mergegate.merge_core.errors import Refused
from mergegate.tasks.base.http import status_of
from mergegate.tasks.models.checkpoints.hub import HubAccess, RemoteFile, describe_hub_error, git_blob, is_retryable
from mergegate.tasks.release.publish.content import CARD, ReleaseFile
from mergegate.tasks.release.publish.targets.contract import PublishRequest
from mergegate.tasks.release.publish.targets.reconcile import (
    NotStored,
    Publication,
    PublicationBlocked,
    overtaken,
    version_taken,
)

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi

    Operation = CommitOperationAdd | CommitOperationCopy | CommitOperationDelete

Gated = Literal["auto", "manual", False]
RepositoryVisibility = Literal["public", "private"]
MAIN = "main"
# Prefix of staging branches. Only mergegate uses it; branches of interrupted runs are deleted.
STAGING = "mergegate-staging/"
# The Hub writes this file itself when another file needs large file storage.
WRITTEN_BY_HUB = frozenset({".gitattributes"})
# The Hub stores files above 10 MB as LFS objects, for which only the sha256 can be compared, not a git blob id.
_LARGEST_BLOB = 16 << 20
# Files uploaded together: enough to keep the connection busy, few enough for a progress bar.
_GROUP_BYTES = 1 << 30
_GROUP_FILES = 100
_FAILURES = 10  # in a row: four minutes of waiting
_MAX_WAIT = 60.0  # seconds


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
class Step:
    """One step of a publication, with the values that its action needs.

    =================  =================================================================================================
    CreateRepository   Create the repository. It starts as private even for a public release, to hide incomplete files.
    ChangeSettings     Open the repository, ``gated`` as given.
    CreateBranch       Create the staging branch at ``commit``.
    StageFiles         Commit on ``commit`` of the staging branch, so that it contains exactly the release.
    Promote            Commit to ``main``, so that it has the files of ``source``. Fails if its head is not ``commit``.
    Tag                Tag ``commit`` with the version.
    DeleteBranch       Delete the staging branch ``branch``.
    Done               The release is published at ``commit``.
    =================  =================================================================================================
    """

    action: Literal[
        "CreateRepository", "ChangeSettings", "CreateBranch", "StageFiles", "Promote", "Tag", "DeleteBranch", "Done"
    ]
    commit: str = ""
    missing: tuple[str, ...] = ()  # files to send
    stale: tuple[str, ...] = ()  # files to delete
    source: Head | None = None
    gated: Gated = False
    branch: str = ""


def next_step(
    desired_state: DesiredState, observed_state: ObservedState, expected_head: str | None = None
) -> Step | PublicationBlocked:
    """Return the next step toward the desired state.

    ``expected_head`` is the head of ``main`` that the release was compared with. Publication is blocked if the head of
    ``main`` is neither that nor this release. None: any head is accepted.
    """
    if not observed_state.exists:
        return Step("CreateRepository")
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
            promotion = Step("Promote", main.commit, desired_state.missing(main), desired_state.stale(main), tagged)
            return _blocked(desired_state, observed_state, main, expected_head) or promotion
        if observed_state.staged is not None:  # only an unfinished publication changes the visibility
            if desired_state.visibility == "public" and (
                observed_state.private or observed_state.gated != desired_state.gated
            ):
                return Step("ChangeSettings", gated=desired_state.gated)
            return Step("DeleteBranch", branch=desired_state.branch)
        if observed_state.leftovers:
            return Step("DeleteBranch", branch=observed_state.leftovers[0])
        return Step("Done", tagged.commit)

    if blocked := _blocked(desired_state, observed_state, main, expected_head):
        return blocked
    strictness = (False, "auto", "manual").index
    if not observed_state.private and strictness(desired_state.gated) > strictness(observed_state.gated):
        return Step("ChangeSettings", gated=desired_state.gated)
    if desired_state.is_on(main):
        return Step("Tag", main.commit)
    if (staged := observed_state.staged) is None:
        return Step("CreateBranch", main.commit)
    if not desired_state.is_on(staged):
        return Step("StageFiles", staged.commit, desired_state.missing(staged), desired_state.stale(staged))
    return Step("Promote", main.commit, desired_state.missing(main), desired_state.stale(main), staged)


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


@dataclass(frozen=True)
class PublishedCommit:
    """The commit of a release. ``new`` is false if it had been published before and nothing changed."""

    commit: str
    new: bool


def publish_hub(
    request: PublishRequest,
    repo: str,
    access: HubAccess,
    *,
    visibility: RepositoryVisibility = "private",
    gated: Gated = False,
    wait: Callable[[float], None] = time.sleep,
) -> PublishedCommit:
    """Make ``main`` and the version's tag contain exactly the files of ``request``. Idempotent.

    ``repo`` is ``org/name``. If it does not exist, it is created as private. After a failure, ``wait`` is called with a
    number of seconds before the state is read again.
    """
    files = {
        file.name: DesiredFile(file.size, file.sha256, git_blob(file.read()) if file.size <= _LARGEST_BLOB else None)
        for file in request.files
    }
    desired = DesiredState(request.version, files, visibility, gated)
    publication = _HubPublication(request, access, repo, desired, wait)
    observed, steps = publication.run(request.expected_head)
    assert observed.tagged
    # Deleting the branches of interrupted runs changes no release.
    return PublishedCommit(observed.tagged.commit, any(step.branch in ("", desired.branch) for step in steps))


def transport_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of the client and its transports. Any other exception is a bug in mergegate."""
    from huggingface_hub.errors import EntryNotFoundError, HTTPError  # type: ignore[attr-defined]  # httpx or httpx2

    return (HTTPError, EntryNotFoundError, OSError, ValueError, RuntimeError)


@dataclass(frozen=True)
class _HubPublication(Publication[ObservedState, Step]):
    """API calls of one publication."""

    rounds = 200
    mismatch = "the Hub's listing differs from the files that were sent"
    writer_hint = f"; branches whose names start with {STAGING} belong to mergegate"

    request: PublishRequest
    access: HubAccess
    repo: str
    desired: DesiredState
    wait: Callable[[float], None]

    @property
    def address(self) -> str:
        return f"{self.repo} on the Hub"

    @cached_property
    def files(self) -> dict[str, ReleaseFile]:
        return {file.name: file for file in self.request.files}

    @property
    def api(self) -> HfApi:
        return self.access.api()

    def head(self, observed_state: ObservedState) -> str | None:
        return observed_state.main.commit if observed_state.main else None

    def decide(self, observed_state: ObservedState, expected_head: str | None) -> Step | PublicationBlocked | None:
        step = next_step(self.desired, observed_state, expected_head)
        return None if isinstance(step, Step) and step.action == "Done" else step

    def kind(self, step: Step) -> str:
        return f"{step.action} {step.branch}".rstrip()

    def recover(self, error: Exception, failures: int) -> None:
        if not isinstance(error, transport_errors()):
            raise error
        if failures < _FAILURES and status_of(error) == 401 and self.access.discard_token():
            return  # The token expired during the step. The next step uses a new one, or says why there is none.
        if failures < _FAILURES and is_retryable(error):
            self.wait(min(2.0 ** (failures - 1), _MAX_WAIT))
        elif isinstance(error, NotStored):
            super().recover(error, failures)
        else:
            raise self._refusal(error) from None

    def observe(self) -> ObservedState:
        """Read the state of the repository: three small requests, and the listing of every new commit."""
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            facts = self.api.model_info(self.repo)
        except RepositoryNotFoundError:
            return ObservedState(exists=False)
        refs = self.api.list_repo_refs(self.repo)
        branches = {ref.name: ref.target_commit for ref in refs.branches}
        tags = {ref.name: ref.target_commit for ref in refs.tags}

        def head(commit: str | None) -> Head | None:
            return Head(commit, self.access.listing(self.repo, commit)) if commit else None

        return ObservedState(
            exists=True,
            private=bool(facts.private),
            gated=facts.gated or False,
            main=head(branches.get(MAIN)),
            staged=head(branches.get(self.desired.branch)),
            tagged=head(tags.get(self.desired.version)),
            tags=tags,
            leftovers=tuple(
                sorted(name for name in branches if name.startswith(STAGING) and name != self.desired.branch)
            ),
        )

    def execute(self, step: Step, observed_state: ObservedState) -> bool:
        from huggingface_hub import CommitOperationCopy, CommitOperationDelete

        version, branch = self.desired.version, self.desired.branch
        deletions = [CommitOperationDelete(name, is_folder=False) for name in step.stale]
        match step.action:
            case "CreateRepository":
                self.api.create_repo(self.repo, private=True)
            case "ChangeSettings":
                self.api.update_repo_settings(self.repo, private=False, gated=step.gated)
            case "CreateBranch":
                self.api.create_branch(self.repo, branch=branch, revision=step.commit)
            case "StageFiles":
                for name in step.missing:
                    # Compare the source with the gated file. The Hub's own hash is checked later.
                    file, source = self.files[name], self.files[name].source
                    if not isinstance(source, bytes):
                        actual = self.request.hashes.sha256(source, trust=False) if source.is_file() else ""
                        if actual != file.sha256:
                            raise file.alteration_error(actual)
                self.commit(branch, step.commit, f"Stage {version}", [*self.send(step.missing), *deletions])
            case "Promote":
                assert step.source
                # Copy a large file on the Hub. Send a small one again: copying would download and send it.
                additions = [
                    self.addition(name)
                    if step.source.files[name].sha256 is None
                    else CommitOperationCopy(name, name, src_revision=step.source.commit)
                    for name in step.missing
                ]
                self.commit(MAIN, step.commit, f"Release {version}", [*additions, *deletions])
            case "Tag":
                self.api.create_tag(self.repo, tag=version, tag_message=f"Release {version}", revision=step.commit)
            case "DeleteBranch":
                self.api.delete_branch(self.repo, branch=step.branch)
        return True

    def commit(self, branch: str, parent: str, message: str, operations: list[Operation]) -> None:
        with _without_progress_bars():
            self.api.create_commit(self.repo, operations, commit_message=message, revision=branch, parent_commit=parent)

    def send(self, names: Sequence[str]) -> list[CommitOperationAdd]:
        """Upload the content of large files, a few at a time, so that the commit only refers to them.

        Content that the Hub already has is not sent again, so an interrupted publication resumes. The card is validated
        first, to avoid uploading hundreds of gigabytes for a card that the Hub rejects.
        """
        from huggingface_hub import get_session, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented, not in the types

        if CARD in names:
            answer = get_session().post(
                f"{self.access.endpoint}/api/validate-yaml",
                json={"content": self.files[CARD].read().decode(errors="replace"), "repoType": "model"},
                headers=build_hf_headers(token=self.access.token or False, library_name="mergegate"),
            )
            if answer.status_code == 400:
                errors = answer.json().get("errors", [])
                raise Refused(
                    f"{self.repo} on the Hub: {CARD}",
                    found="; ".join(str(error.get("message")) for error in errors) or "metadata that the Hub rejects",
                    expected="a card that the Hub accepts",
                    remedy="correct the problem that the Hub reports, then run again; nothing was uploaded",
                )
            hf_raise_for_status(answer)
        additions = [self.addition(name) for name in names]
        report = self.request.progress(sum(self.files[name].size for name in names))
        report(0)
        group: list[CommitOperationAdd] = []
        group_bytes = 0
        for position, addition in enumerate(additions, 1):
            group.append(addition)
            group_bytes += self.files[addition.path_in_repo].size
            if group_bytes >= _GROUP_BYTES or len(group) >= _GROUP_FILES or position == len(additions):
                with _without_progress_bars():
                    self.api.preupload_lfs_files(self.repo, group, revision=self.desired.branch, free_memory=False)
                report(group_bytes)
                group, group_bytes = [], 0
        return additions

    def addition(self, name: str) -> CommitOperationAdd:
        from huggingface_hub import CommitOperationAdd

        source = self.files[name].source
        return CommitOperationAdd(name, source if isinstance(source, bytes) else str(source))

    def _refusal(self, error: Exception) -> Refused:
        found = describe_hub_error(error, self.access)
        expected = "a token with write access to the repository, and a card that the Hub accepts"
        remedy = "correct the problem that the Hub reports, then run again; mergegate resumes the publication"
        if is_retryable(error):
            found, expected = f"the Hub does not answer as expected: {found}", "a successful publication"
            remedy = "run again later; mergegate resumes the publication"
        return Refused(self.address, found=found, expected=expected, remedy=remedy)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
