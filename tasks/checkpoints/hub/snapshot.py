"""Resolve a model repository to a commit, and read its file listing and its small files before any weights.

A branch name is resolved to a commit once, and all later steps use the commit. The small files (card, licenses,
configuration, tokenizer, index) are downloaded into the Hub's own cache, where the weights follow later. A commit
never changes, so cached files are not requested again. If the commit of a branch is completely cached, resolving the
branch takes one request. A pinned commit (``org/name@<40 hex digits>``) takes none and needs no network.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mergegate.merge_core.adapters import CONFIG_FILE, adapter_files, is_own_text
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.wording import detail
from mergegate.tasks.checkpoints.files import files_about, files_beside, weight_files
from mergegate.tasks.checkpoints.hub.access import HubAccess, RemoteFile, hub_access, is_offline, snapshots_directory
from mergegate.tasks.checkpoints.hub.errors import client_errors, hub_refusal, unreachable_offline
from mergegate.tasks.http import status_of

_COMMIT = re.compile(r"[0-9a-f]{40}")
# Largest size of a small file, in bytes. Larger files are downloaded with the weights, whatever their names.
_LARGEST_SMALL = 100_000_000


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint on the Hub at one commit, with its directory in the cache.

    Args:
        repo: Name of the repository, as ``org/name``.
        commit: Commit as 40 hex digits.
        directory: Directory of the commit in the cache. It already contains the small files.
        weights: Names of the weight files that belong to the checkpoint.
        deciding: Names of all files that determine the model's behavior, including ``weights``.
        files: Files of the checkpoint by name: ``deciding``, the card, the licenses and the notices.
        names: Names of all files in the repository.
    """

    repo: str
    commit: str
    directory: Path
    weights: tuple[str, ...]
    deciding: tuple[str, ...]
    files: Mapping[str, RemoteFile]
    names: tuple[str, ...] = ()

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
