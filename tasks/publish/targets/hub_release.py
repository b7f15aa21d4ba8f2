"""Read releases from the Hub: download the current or an earlier one, or open one by name to verify it.

Verification downloads nothing large: the Hub reports the sha256 of a file in large storage. Small files are read and
compared with their git blob id, which proves that the bytes match the listing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from mergegate.merge_core.errors import InvalidInput, MergegateError, Refused
from mergegate.tasks.checkpoints.hub import HubAccess, describe_hub_error, git_blob, hub_access, is_retryable
from mergegate.tasks.publish.content import is_content_version, sha256_of
from mergegate.tasks.publish.targets.contract import FIRST, CurrentRelease, no_such_anchor
from mergegate.tasks.publish.targets.hub_state import WRITTEN_BY_HUB

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[^@\s]+))?")
_SMALL = 1 << 22  # bytes


def download_main(repo: str, access: HubAccess) -> CurrentRelease | None:
    """Download the head of ``main``. Return None if the repository does not exist or is empty.

    Raises:
        Refused: The Hub is unavailable.
    """
    commit = _main_commit(access, repo)
    if commit is None or not set(access.listing(repo, commit)) - WRITTEN_BY_HUB:
        return None
    return CurrentRelease(_download(repo, commit, access), commit, commit[:12], access.url(repo, commit))


def download_earlier(repo: str, version: str, access: HubAccess) -> CurrentRelease | None:
    """Download a tagged version, or the oldest one (``first``). Return None if the repository or its tags do not exist.

    Raises:
        InvalidInput: There is no such tag.
        Refused: The Hub is unavailable.
    """
    if _main_commit(access, repo) is None:
        return None
    try:
        tags = {tag.name: tag.target_commit for tag in access.api().list_repo_refs(repo).tags}
        if version == FIRST and tags:
            history = [commit.commit_id for commit in access.api().list_repo_commits(repo)]  # newest first
            commit = max(tags.values(), key=lambda item: history.index(item) if item in history else -1)
            return CurrentRelease(_download(repo, commit, access), commit)
    except MergegateError:
        raise
    except Exception as error:
        raise _unreachable(repo, error, access) from None
    if not tags:
        return None
    if version in tags:
        return CurrentRelease(_download(repo, tags[version], access), tags[version])
    raise no_such_anchor(version, repo, list(tags))


def _download(repo: str, commit: str, access: HubAccess) -> Path:
    from huggingface_hub import snapshot_download

    try:
        directory = snapshot_download(repo, revision=commit, token=access.token or False, endpoint=access.endpoint)
    except Exception as error:
        raise _unreachable(repo, error, access) from None
    return Path(directory)


def _main_commit(access: HubAccess, repo: str) -> str | None:
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return access.api().model_info(repo).sha
    except RepositoryNotFoundError:
        return None
    except Exception as error:
        raise _unreachable(repo, error, access) from None


def _unreachable(repo: str, error: Exception, access: HubAccess) -> Refused:
    return Refused(
        f"{repo} on the Hub",
        found=f"the current release cannot be read: {describe_hub_error(error, access)}",
        expected="the release that the merge is compared with",
        remedy="run again later",
    )


@dataclass(frozen=True)
class HubRelease:
    """A commit on the Hub. ``version`` is the tag that names it by its content hash."""

    access: HubAccess
    repo: str
    commit: str
    version: str | None
    _small_files: dict[str, bytes] = field(default_factory=dict, repr=False, compare=False, hash=False)

    @property
    def reference(self) -> str:
        return f"{self.repo}@{self.version or self.commit[:12]}"

    def files(self) -> Mapping[str, tuple[int, str]]:
        """Return size and sha256 of every file. Small files are downloaded and hashed."""
        listing = self.access.listing(self.repo, self.commit)
        return {
            name: (file.size, file.sha256 if file.sha256 is not None else sha256_of(self.read(name)))
            for name, file in listing.items()
            if name not in WRITTEN_BY_HUB
        }

    def read(self, name: str) -> bytes:
        """Return the content of a file of the commit. Small files are downloaded once and cached.

        Raises:
            Refused: The Hub returns bytes that do not match its listing.
        """
        if name in self._small_files:
            return self._small_files[name]
        entry = self.access.listing(self.repo, self.commit)[name]
        with TemporaryDirectory(prefix="mergegate-verify-") as directory:
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


def open_on_hub(reference: str) -> HubRelease | None:
    """Open ``org/name[@revision]`` in its present state. Return None if the reference has another form.

    Raises:
        InvalidInput: There is no such repository or revision, or the Hub is unavailable.
    """
    match = _NAME.fullmatch(reference)
    if not match:
        return None
    access, repo = hub_access(writing=False), match["repo"]
    try:
        api = access.api()
        info = api.model_info(repo, revision=match["revision"])
        tags = [ref.name for ref in api.list_repo_refs(repo).tags if ref.target_commit == info.sha]
        problem = "" if info.sha else "a repository without commits"
    except Exception as error:
        problem = describe_hub_error(error, access)
        if is_retryable(error):
            problem = f"not a local directory, and unavailable from the Hub ({problem})"
    if problem:
        raise InvalidInput(
            reference,
            found=problem,
            expected="the directory of a release, or org/name@version on the Hub",
            remedy="check the spelling, the network, and HF_TOKEN for a private repository",
        )
    versions = [match["revision"]] if match["revision"] in tags else tags
    return HubRelease(access, repo, str(info.sha), next((tag for tag in versions if is_content_version(tag)), None))
