"""List the branches and tags of a repository, which hold the checkpoints of a training run, and open them by headers.

Without network access, the revisions that an earlier run opened, or that ``hf download --revision`` fetched, are
listed from the Hub's own cache, which stores the commit of each revision in ``refs/``.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from mergegate.merge_core import Checkpoint, open_checkpoint
from mergegate.merge_core.adapters import Adapter, open_adapter
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import read_plain, read_text
from mergegate.tasks.checkpoints.hub.access import HubAccess, hub_access, is_offline, snapshots_directory
from mergegate.tasks.checkpoints.hub.errors import client_errors, hub_refusal
from mergegate.tasks.checkpoints.hub.headers import read_snapshot
from mergegate.tasks.checkpoints.hub.snapshot import find_snapshot

_LARGEST_FILE = 256 << 20  # bytes
_LONGEST_NAME = 255  # characters of a revision that is remembered


@dataclass(frozen=True)
class RevisionList:
    """Branches and tags of a repository that match a pattern.

    Args:
        repo: Repository, as ``org/name``.
        commits: Commit of each revision, as 40 hex digits.
        access: Access to the Hub. None if the revisions are those in the local cache.
    """

    repo: str
    commits: dict[str, str]
    access: HubAccess | None = field(repr=False)

    def open(self, name: str, *, is_adapter: bool) -> Checkpoint | Adapter:
        """Return the checkpoint or the adapter of a revision, read from headers and small files.

        The revision is remembered in the Hub's cache, so that it can be listed without network access.

        Raises:
            InvalidInput: The revision does not contain a complete checkpoint, or it is not in the cache and the
                environment forbids network access.
            Refused: The Hub denies access or is not reachable.
        """
        commit = self.commits[name]
        snapshot = find_snapshot(self.repo, commit, adapter=is_adapter)
        opened = read_snapshot(snapshot, open_adapter) if is_adapter else read_snapshot(snapshot, open_checkpoint)
        if self.access and len(name) <= _LONGEST_NAME and ".." not in PurePosixPath(name).parts:
            with suppress(OSError):  # only a later run without network access needs it
                file = snapshots_directory(self.repo).parent / "refs" / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(commit)
        return opened

    def read(self, name: str, file: str) -> bytes | None:
        """Return the content of a small file of a revision, or None if there is no such file.

        Raises:
            InvalidInput: The revision does not exist, or the client cannot use the network.
            Refused: The Hub denies access or is not reachable.
        """
        from huggingface_hub import hf_hub_download

        cached = snapshots_directory(self.repo) / self.commits[name] / file
        if cached.is_file():
            return read_plain(cached, _LARGEST_FILE)
        if self.access is None:
            return None
        try:
            if file not in self.access.listing(self.repo, self.commits[name]):
                return None
            endpoint, token = self.access.endpoint, self.access.token or False
            path = hf_hub_download(self.repo, file, revision=self.commits[name], endpoint=endpoint, token=token)
        except client_errors() as error:
            raise hub_refusal(f"{self.repo}@{name}", self.repo, error, self.access) from error
        return read_plain(Path(path), _LARGEST_FILE)


def list_revisions(repo: str, pattern: str) -> RevisionList:
    """Return the branches and tags of ``org/name`` that match a shell pattern, such as ``step-*``.

    Raises:
        InvalidInput: The repository does not exist, or no revision matches.
        Refused: The Hub denies access or is not reachable.
    """
    location = f"{repo}@{pattern}"
    access = None if is_offline() else hub_access(writing=False, repo=repo)
    if access is None:
        refs = snapshots_directory(repo).parent / "refs"
        commits = {
            path.relative_to(refs).as_posix(): read_text(path, 64).strip() for path in refs.rglob("*") if path.is_file()
        }
    else:
        try:
            listed = access.api().list_repo_refs(repo)
        except client_errors() as error:
            raise hub_refusal(location, repo, error, access) from error
        commits = {ref.name: ref.target_commit for ref in (*listed.tags, *listed.branches)}
    matching = {name: commit for name, commit in sorted(commits.items()) if fnmatchcase(name, pattern)}
    if not matching:
        found = f"none of the {len(commits)} branches and tags matches {pattern!r}"
        if access is None:
            raise InvalidInput(
                location,
                found="no matching revision is in the Hub's cache, and HF_HUB_OFFLINE forbids access",
                expected="revisions that an earlier run has read",
                remedy="unset HF_HUB_OFFLINE for one run, which downloads them, or correct the pattern",
            )
        raise InvalidInput(
            location,
            found=found,
            expected="the revisions of a training run, such as step-1000",
            remedy=f"see {access.url(repo, 'main')}",
        )
    return RevisionList(repo, matching, access)
