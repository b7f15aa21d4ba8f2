"""Resolve a model repository to a commit, and read its file listing and its small files before any weights.

A branch name is resolved to a commit once, and all later steps use the commit. The small files (card, licenses,
configuration, tokenizer, index) are downloaded into the Hub's own cache, where the weights follow later. A commit
never changes, so cached files are not requested again. If the commit of a branch is completely cached, resolving the
branch takes one request. A pinned commit (``org/name@<40 hex digits>``) takes none and needs no network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from mergegate.merge_core import Checkpoint, open_checkpoint
from mergegate.merge_core.adapters import CONFIG_FILE, Adapter, adapter_files, is_own_text, open_adapter
from mergegate.merge_core.checkpoint import ReadStored, StoredTensor, fetch_header, read_into
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.parsing import open_plain, read_plain, read_text
from mergegate.merge_core.wording import detail
from mergegate.tasks.base.http import status_of
from mergegate.tasks.models.checkpoints.hub.access import (
    HubAccess,
    RemoteFile,
    hub_access,
    is_offline,
    snapshots_directory,
)
from mergegate.tasks.models.checkpoints.hub.permissions import client_errors, hub_refusal, unreachable_offline
from mergegate.tasks.models.checkpoints.model import files_about, files_beside, weight_files

if TYPE_CHECKING:
    from numpy.typing import NDArray

_COMMIT = re.compile(r"[0-9a-f]{40}")
# Largest size of a small file, in bytes. Larger files are downloaded with the weights, whatever their names.
_LARGEST_SMALL = 100_000_000


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint on the Hub at one commit, with its directory in the cache."""

    repo: str  # Name of the repository, as ``org/name``.
    commit: str  # Commit as 40 hex digits.
    directory: Path  # Directory of the commit in the cache. It already contains the small files.
    weights: tuple[str, ...]  # Names of the weight files that belong to the checkpoint.
    deciding: tuple[str, ...]  # Names of all files that determine the model's behavior, including ``weights``.
    # Files of the checkpoint by name: ``deciding``, the card, the licenses and the notices.
    files: Mapping[str, RemoteFile]
    names: tuple[str, ...] = ()  # Names of all files in the repository.

    def missing(self) -> dict[str, RemoteFile]:
        """Return the files of the checkpoint that are not in the cache yet, by name."""
        return {name: file for name, file in self.files.items() if not (self.directory / name).is_file()}

    @property
    def bytes_to_download(self) -> int:
        """Total size of the missing files, in bytes."""
        return sum(file.size for file in self.missing().values())


def find_snapshot(repo: str, revision: str | None, *, adapter: bool = False) -> Snapshot:
    """Return the snapshot of the commit that ``revision`` currently refers to, and download its small files.

    ``revision`` is a branch, tag or commit of ``org/name``, by default ``main``. ``adapter`` states whether the
    repository contains an adapter instead of a model.

    Raises:
        InvalidInput: The repository or revision does not exist, contains no model, or cannot be resolved without
            network access.
        Refused: The Hub denies access or is not reachable.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # documented, not in the types

    location = f"{repo}@{revision}" if revision else repo
    access = None if is_offline() else hub_access(writing=False, repo=repo)
    try:
        commit = _resolve_commit(repo, revision, access)
        detail("%s: %s is commit %s", access.endpoint if access else "the Hub's cache", location, commit)
        if cached := _find_complete_in_cache(repo, commit, adapter):
            return cached
        if access is None:
            raise unreachable_offline(location)
        listed = access.listing(repo, commit)
        if (config := _config_file(adapter)) not in listed:
            kind = "an adapter as PEFT saves it" if adapter else "a model in Hugging Face layout"
            raise InvalidInput(location, found=f"the repository has no {config}", expected=kind)
        without_weights = _deciding_without_weights(listed, adapter)
        small = [name for name in (*without_weights, *files_about(listed)) if listed[name].size <= _LARGEST_SMALL]
        disable_progress_bars()
        directory = snapshot_download(  # The client also caches the listing.
            repo,
            revision=commit,
            # The client expects patterns, so special characters in the names are escaped.
            allow_patterns=[re.sub(r"([*?[])", r"[\1]", name) for name in small],
            endpoint=access.endpoint,
            token=access.token or False,
        )
        snapshot = _build_snapshot(repo, commit, Path(directory), listed, adapter)
        if snapshot.missing():
            # The listing does not prove read access, because the Hub returns it for gated repositories too. The small
            # files do not either, because they may have been cached while access was open.
            try:
                access.api().auth_check(repo)
            except client_errors() as error:
                if status_of(error) != 404:  # A self-hosted Hub may lack this endpoint.
                    raise
        return snapshot
    except client_errors() as error:
        raise hub_refusal(location, repo, error, access) from error


def _config_file(adapter: bool) -> str:
    """Return the name of the file that every repository with a model, or with an adapter, must have."""
    return CONFIG_FILE if adapter else "config.json"


def _build_snapshot(
    repo: str, commit: str, directory: Path, listed_files: Mapping[str, RemoteFile], adapter: bool
) -> Snapshot:
    if adapter:
        deciding = adapter_files(tuple(listed_files))
        weights = tuple(name for name in deciding if name != CONFIG_FILE and not is_own_text(name))
    else:
        weights = weight_files(listed_files, directory)
        deciding = tuple(sorted({*weights, *files_beside(listed_files)}))
    files = {name: listed_files[name] for name in (*deciding, *files_about(listed_files))}
    return Snapshot(repo, commit, directory, weights, deciding, files, tuple(sorted(listed_files)))


def _deciding_without_weights(listed_files: Mapping[str, RemoteFile], adapter: bool) -> tuple[str, ...]:
    """Return the files, other than weights, that determine the behavior of a model or an adapter."""
    if not adapter:
        return files_beside(listed_files)
    return tuple(name for name in listed_files if name == CONFIG_FILE or is_own_text(name))


def _resolve_commit(repo: str, revision: str | None, access: HubAccess | None) -> str:
    if revision and _COMMIT.fullmatch(revision):
        return revision
    if access is None:
        commits = snapshots_directory(repo).glob("*")
        newest = max(commits, key=lambda path: path.stat().st_mtime, default=Path("<40 hex digits>"))
        raise InvalidInput(
            repo,
            found=f"it is not a local directory, and HF_HUB_OFFLINE forbids resolving {revision or 'main'} on the Hub",
            expected="a directory, or a commit that is in the cache",
            remedy=f"write {repo}@{newest.name}, unset HF_HUB_OFFLINE, or correct the spelling",
        )
    commit = access.api().model_info(repo, revision=revision).sha
    if commit is None:
        raise InvalidInput(repo, found="the repository has no commits")
    return commit


def _find_complete_in_cache(repo: str, commit: str, adapter: bool) -> Snapshot | None:
    """Return the snapshot if all of its files are in the cache, without any request.

    The client stores the names of a commit's files but not their sha256. However, it names each cached file after the
    hash that the Hub reported, which is the sha256 of a large file and git's sha1 of a small file. The directory of
    the commit contains links to those files.
    """
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    directory = snapshots_directory(repo) / commit
    try:
        tree = get_cached_repo_tree(repo, revision=commit)
    except CachedRepoTreeNotFoundError:
        return None
    links = {file.path: directory / file.path for file in tree}
    names = {name: link.readlink().name for name, link in links.items() if link.is_symlink() and link.exists()}
    listed = {
        file.path: RemoteFile(file.size, file.blob_id, name if len(name := names.get(file.path, "")) == 64 else None)
        for file in tree
    }
    # These files include the weight index, from which the snapshot is built.
    if not {*_deciding_without_weights(listed, adapter), _config_file(adapter)} <= names.keys():
        return None
    snapshot = _build_snapshot(repo, commit, directory, listed, adapter)
    return snapshot if snapshot.weights and snapshot.files.keys() <= names.keys() else None


_TIMEOUT_S = 30.0
_CONNECTIONS = 8
T = TypeVar("T")


def read_snapshot(
    snapshot: Snapshot, opener: Callable[[Path, Mapping[Path, Sequence[StoredTensor]] | None, Collection[str]], T]
) -> T:
    """Return the checkpoint or the adapter in ``snapshot``, read from headers and small files.

    ``opener`` is ``open_checkpoint`` or ``open_adapter``.
    """
    try:
        return opener(snapshot.directory, _missing_headers(snapshot) or None, snapshot.names)
    except InvalidInput as error:  # Replace the cache path by the repository, which the user recognizes.
        location = error.where.replace(str(snapshot.directory), f"{snapshot.repo}@{snapshot.commit[:12]}")
        raise InvalidInput(location, found=error.found, expected=error.expected, remedy=error.remedy) from None


def _missing_headers(snapshot: Snapshot) -> Mapping[Path, Sequence[StoredTensor]]:
    """Return the headers of the weight files that are not in the cache, read from the Hub."""
    missing = [name for name in snapshot.weights if not (snapshot.directory / name).is_file()]
    if not missing:
        return {}
    if not missing[0].endswith(".safetensors"):
        raise Refused(
            f"{snapshot.repo}: {missing[0]}",
            found="all its weights are pickled, so mergegate cannot read their headers before the download",
            expected="safetensors",
            remedy="select a revision with safetensors, or download the model with"
            f" hf download {snapshot.repo} --revision {snapshot.commit}",
        )
    if is_offline():
        raise InvalidInput(
            f"{snapshot.repo}: {missing[0]}",
            found="the file is not in the Hub's cache, and HF_HUB_OFFLINE forbids access to the Hub",
            remedy="unset HF_HUB_OFFLINE for one run, which downloads the file",
        )
    sizes = tuple((name, snapshot.files[name].size) for name in missing)
    return _fetch_headers(snapshot.repo, snapshot.commit, snapshot.directory, sizes)


def element_reader(snapshot: Snapshot | None) -> ReadStored:
    """Return a reader of elements of stored tensors, which requests a range from the Hub if the file is not local.

    ``snapshot`` is None for a local directory. Several threads may call the reader.

    The reader raises:
        InvalidInput: The file cannot be read, or the server does not support ranged reads.
        Refused: The Hub does not serve the range.
    """

    def read(tensor: StoredTensor, first: int, into: NDArray[np.uint8]) -> None:
        start = tensor.offset + first * tensor.dtype.size
        if snapshot is None or tensor.file.is_file():
            try:
                with open_plain(tensor.file) as file:
                    read_into(file.fileno(), into.data, start, tensor.file)
            except FileNotFoundError:
                raise InvalidInput(str(tensor.file), found="the file does not exist") from None
            return
        from huggingface_hub import hf_hub_url

        access = hub_access(writing=False)
        name = tensor.file.relative_to(snapshot.directory).as_posix()
        url = hf_hub_url(snapshot.repo, name, revision=snapshot.commit, endpoint=access.endpoint)
        try:
            into[:] = np.frombuffer(_read_range(url, start, len(into), access), np.uint8)
        except client_errors() as error:
            raise hub_refusal(f"{snapshot.repo}@{snapshot.commit[:12]}", snapshot.repo, error, access) from error

    return read


@lru_cache(maxsize=64)  # A commit never changes, and a recipe and its remedies have the same parents.
def _fetch_headers(
    repo: str, commit: str, directory: Path, sizes: tuple[tuple[str, int], ...]
) -> Mapping[Path, Sequence[StoredTensor]]:
    from huggingface_hub import hf_hub_url

    access = hub_access(writing=False)

    def fetch(file: tuple[str, int]) -> tuple[StoredTensor, ...]:
        name, size = file
        url = hf_hub_url(repo, name, revision=commit, endpoint=access.endpoint)
        return fetch_header(lambda start, count: _read_range(url, start, count, access), size, directory / name)

    try:
        with ThreadPoolExecutor(_CONNECTIONS) as threads:
            headers = list(threads.map(fetch, sizes))
    except client_errors() as error:
        raise hub_refusal(f"{repo}@{commit[:12]}", repo, error, access) from error
    return {directory / name: tensors for (name, _), tensors in zip(sizes, headers, strict=True)}


def _read_range(url: str, start: int, count: int, access: HubAccess) -> bytes:
    """Return ``count`` bytes of the file at ``url``, from offset ``start``.

    Raises:
        InvalidInput: The server does not respond with exactly this range. There is no fallback to reading the whole
            file, which may be many gigabytes in size.
    """
    from huggingface_hub import get_session, hf_raise_for_status
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented, not in the types

    common = build_hf_headers(token=access.token or False)
    headers = {**common, "Range": f"bytes={start}-{start + count - 1}", "Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True) as response:
        hf_raise_for_status(response)
        if response.status_code != 206 or int(response.headers.get("Content-Length", count)) != count:
            raise InvalidInput(
                url,
                found=f"the server answered a ranged read with status {response.status_code}",
                expected="exactly the requested range",
                remedy="use another HF_ENDPOINT, or download the model first",
            )
        data = response.read()
    if len(data) != count:
        raise InvalidInput(url, found=f"{len(data)} bytes", expected=f"{count} bytes", remedy="try again")
    return data


_LARGEST_FILE = 256 << 20  # bytes
_LONGEST_NAME = 255  # characters of a revision that is remembered


@dataclass(frozen=True)
class RevisionList:
    """Branches and tags of a repository that match a pattern."""

    repo: str  # Repository, as ``org/name``.
    commits: dict[str, str]  # Commit of each revision, as 40 hex digits.
    # Access to the Hub. None if the revisions are those in the local cache.
    access: HubAccess | None = field(repr=False)

    def open(self, name: str, *, is_adapter: bool) -> Checkpoint | Adapter:
        """Return the checkpoint or the adapter of a revision, read from headers and small files.

        The revision is remembered in the Hub's cache, so that it can be listed without network access.
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
        """Return the content of a small file of a revision, or None if there is no such file."""
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
    """Return the branches and tags of ``org/name`` that match a shell pattern, such as ``step-*``."""
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
