"""Read releases on the Hub: download a commit, or read single files to verify it.

Verification downloads nothing large, because the Hub reports the sha256 of a file in large storage. Small files are
downloaded and compared with their git blob id, which proves that the bytes match the listing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from mergegate.merge_core.errors import MergegateError, Refused
from mergegate.merge_core.files import is_disk_error
from mergegate.tasks.checkpoints.hub import HubAccess, describe_hub_error, git_blob
from mergegate.tasks.publish.content import sha256_of
from mergegate.tasks.publish.targets.hub_state import WRITTEN_BY_HUB

_SMALL = 1 << 22  # bytes


@contextmanager
def explained_hub_errors(repo: str, access: HubAccess) -> Iterator[None]:
    """Raise Refused, which says that the release cannot be read, for an error of the Hub's client inside the block.

    Errors of mergegate and of the local disk pass.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, MergegateError) or is_disk_error(error):
            raise
        raise Refused(
            f"{repo} on the Hub",
            found=f"the release cannot be read: {describe_hub_error(error, access)}",
            expected="an answer from the Hub",
            remedy="run again later",
        ) from None


def download_commit(repo: str, commit: str, access: HubAccess) -> Path:
    """Download a commit. Raise Refused if the Hub is unavailable."""
    from huggingface_hub import snapshot_download

    with explained_hub_errors(repo, access):
        directory = snapshot_download(repo, revision=commit, token=access.token or False, endpoint=access.endpoint)
    return Path(directory)


def main_commit(access: HubAccess, repo: str) -> str | None:
    """Return the head of ``main``, or None without a repository. Raise Refused if the Hub is unavailable."""
    from huggingface_hub.errors import RepositoryNotFoundError

    with explained_hub_errors(repo, access):
        try:
            return access.api().model_info(repo).sha
        except RepositoryNotFoundError:
            return None


@dataclass(frozen=True)
class HubRelease:
    """A release on the Hub. ``version`` is the tag of its commit that is a content hash, or None."""

    access: HubAccess
    repo: str
    commit: str
    version: str | None
    _small_files: dict[str, bytes] = field(default_factory=dict, repr=False, compare=False, hash=False)

    @property
    def reference(self) -> str:
        return f"{self.repo}@{self.version or self.commit[:12]}"

    def files(self) -> Mapping[str, tuple[int, str]]:
        """Return size and sha256 of every file. Small files are downloaded and hashed.

        Raises:
            Refused: The Hub is unavailable, or sends other bytes than it lists.
        """
        with explained_hub_errors(self.repo, self.access):
            listing = self.access.listing(self.repo, self.commit)
        return {
            name: (file.size, file.sha256 if file.sha256 is not None else sha256_of(self.read(name)))
            for name, file in listing.items()
            if name not in WRITTEN_BY_HUB
        }

    def read(self, name: str) -> bytes:
        """Return the content of a file; small files are cached.

        Raises:
            Refused: The Hub is unavailable, or the content does not match its hash.
        """
        if name in self._small_files:
            return self._small_files[name]
        with explained_hub_errors(self.repo, self.access):
            listing = self.access.listing(self.repo, self.commit)
        entry = listing[name]
        with explained_hub_errors(self.repo, self.access), TemporaryDirectory(prefix="mergegate-verify-") as directory:
            file = self.access.api().hf_hub_download(self.repo, name, revision=self.commit, local_dir=directory)
            data = Path(file).read_bytes()
        if (sha256_of(data) if entry.sha256 else git_blob(data)) != (entry.sha256 or entry.blob):
            raise Refused(
                f"{self.reference}: {name}",
                found="bytes that do not match the Hub's own hash",
                expected="the bytes that the Hub lists",
            )
        if len(data) <= _SMALL:
            self._small_files[name] = data
        return data

    def download(self) -> Path:
        """Return the directory of the commit in the Hub's cache. Raise Refused if the Hub is unavailable."""
        return download_commit(self.repo, self.commit, self.access)
