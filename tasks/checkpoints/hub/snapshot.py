"""A commit of a model repository, as far as it must be known before its weights may come: what it lists, small files.

The name of a branch is asked for once and becomes a commit; everything after that speaks of the commit. Small files
(card, licences, configuration, tokenizer, index) come into the Hub's own cache, where the weights will find them. A
commit never changes: what is in the cache of it is not asked for again. A branch whose commit is whole in the cache
costs one question, and a pinned commit (``org/name@<40 hex digits>``) none: it needs no network.
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
from mergegate.tasks.checkpoints.hub.access import HubAccess, hub_access, is_offline
from mergegate.tasks.checkpoints.hub.cache import snapshots_directory
from mergegate.tasks.checkpoints.hub.errors import client_errors, hub_refusal, unreachable_offline
from mergegate.tasks.checkpoints.hub.file import RemoteFile
from mergegate.tasks.http import status_of

_COMMIT = re.compile(r"[0-9a-f]{40}")
# A file with the name of a small one that is larger than this comes with the weights.
_LARGEST_SMALL = 100_000_000


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint on the Hub at one commit, and where it lies, or will lie, in the cache.

    Args:
        repo: ``org/name``.
        commit: 40 hex digits.
        directory: Its place in the cache. The small files are there.
        weights: Names of the weight files that count.
        deciding: Those, and every other file that decides what the model does.
        files: All that belongs to it, card and licences too, by name.
        names: Names of all files of the repository.
    """

    repo: str
    commit: str
    directory: Path
    weights: tuple[str, ...]
    deciding: tuple[str, ...]
    files: Mapping[str, RemoteFile]
    names: tuple[str, ...] = ()

    def missing(self) -> dict[str, RemoteFile]:
        """What of it is not in the cache yet."""
        return {name: file for name, file in self.files.items() if not (self.directory / name).is_file()}

    @property
    def bytes_to_download(self) -> int:
        """Size of what is missing."""
        return sum(file.size for file in self.missing().values())


def find_snapshot(repo: str, revision: str | None, *, adapter: bool = False) -> Snapshot:
    """The commit that ``revision`` (a branch, a tag or a commit; None: ``main``) means now, and its small files.

    Args:
        repo: ``org/name``.
        revision: See above.
        adapter: Whether an adapter is looked for in it, not a model.

    Raises:
        InvalidInput: No such repository or revision, no model in it, or a revision that cannot be told without network.
        Refused: The Hub does not let us see it, or cannot be reached.
    """
    where = f"{repo}@{revision}" if revision else repo
    access = None if is_offline() else hub_access(writing=False)
    try:
        commit = _commit(repo, revision, access)
        detail("%s: %s is commit %s", access.endpoint if access else "the Hub's cache", where, commit)
        if whole := _whole_in_cache(repo, commit, adapter):
            return whole
        if access is None:
            raise unreachable_offline(where)
        listed = access.listing(repo, commit)
        if (config := _config(adapter)) not in listed:
            kind = "an adapter as PEFT saves it" if adapter else "a model in Hugging Face layout"
            raise InvalidInput(where, found=f"no {config}", expected=kind)
        beside = _beside(listed, adapter)
        small = [name for name in (*beside, *files_about(listed)) if listed[name].size <= _LARGEST_SMALL]
        snapshot = _snapshot(repo, commit, _download_small_files(repo, commit, small, access), listed, adapter)
        if snapshot.missing():
            _require_reading(repo, access)
        return snapshot
    except client_errors() as error:
        raise hub_refusal(where, repo, error, access) from error


def _config(adapter: bool) -> str:
    """The file without which a repository has no model, or no adapter, in it."""
    return CONFIG_FILE if adapter else "config.json"


def _snapshot(repo: str, commit: str, directory: Path, listed: Mapping[str, RemoteFile], adapter: bool) -> Snapshot:
    if adapter:
        deciding = adapter_files(tuple(listed))
        weights = tuple(name for name in deciding if name != CONFIG_FILE and not is_own_text(name))
    else:
        weights = weight_files(listed, directory)
        deciding = tuple(sorted({*weights, *files_beside(listed)}))
    files = {name: listed[name] for name in (*deciding, *files_about(listed))}
    return Snapshot(repo, commit, directory, weights, deciding, files, tuple(sorted(listed)))


def _beside(listed: Mapping[str, RemoteFile], adapter: bool) -> tuple[str, ...]:
    """Return the files other than weights that decide what a model, or an adapter, does."""
    if not adapter:
        return files_beside(listed)
    return tuple(name for name in listed if name == CONFIG_FILE or is_own_text(name))


def _commit(repo: str, revision: str | None, access: HubAccess | None) -> str:
    if revision and _COMMIT.fullmatch(revision):
        return revision
    if access is None:
        raise _not_offline(repo, revision)
    commit = access.api().model_info(repo, revision=revision).sha
    if commit is None:
        raise InvalidInput(repo, found="a repository without commits")
    return commit


def _require_reading(repo: str, access: HubAccess) -> None:
    """See that its files may be had: of a gated repository anybody may ask for the listing, and the cache may hold
    small files of a time when access was open."""
    try:
        access.api().auth_check(repo)
    except client_errors() as error:
        if status_of(error) != 404:  # a self-hosted Hub that does not know the question
            raise


def _whole_in_cache(repo: str, commit: str, adapter: bool) -> Snapshot | None:
    """The snapshot, if every file that belongs to it is in the cache; nobody is asked.

    The client keeps the names of a commit's files, but not their sha256. It calls a file in the cache by the hash that
    the Hub gave for it, though: sha256 of a large one, git's sha1 of a small one; the snapshot has links to those.
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
    if (
        not {
            *_beside(listed, adapter),  # the index is among them
            _config(adapter),
        }
        <= names.keys()
    ):
        return None
    snapshot = _snapshot(repo, commit, directory, listed, adapter)
    return snapshot if snapshot.weights and snapshot.files.keys() <= names.keys() else None


def _download_small_files(repo: str, commit: str, names: list[str], access: HubAccess) -> Path:
    """Have files of a commit in the cache, and their place there. Its listing is kept beside them."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # documented, not in the types

    disable_progress_bars()
    # Patterns, not names: what is special in them is taken out of a name.
    patterns = [re.sub(r"([*?[])", r"[\1]", name) for name in names]
    return Path(
        snapshot_download(
            repo,
            revision=commit,
            allow_patterns=patterns,
            endpoint=access.endpoint,
            token=access.token or False,
        )
    )


def _not_offline(repo: str, revision: str | None) -> InvalidInput:
    """What to say when only the Hub could tell which commit is meant."""
    newest = max(
        snapshots_directory(repo).glob("*"), key=lambda place: place.stat().st_mtime, default=Path("<40 hex digits>")
    )
    return InvalidInput(
        repo,
        found=f"no such directory here, and HF_HUB_OFFLINE forbids to ask the Hub which commit {revision or 'main'} is",
        expected="a directory, or a commit that is in the cache",
        remedy=f"write {repo}@{newest.name}, unset HF_HUB_OFFLINE, or correct the spelling",
    )
