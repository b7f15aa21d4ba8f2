"""Checkpoints on the Hub as tables of tensors, without their weights.

Small files (configs, tokenizer, index) come into the Hub's own cache, where a later download finds them. Of each weight
file only the header is asked for, in two ranged reads: its length, then exactly so many bytes. ``HF_ENDPOINT``, tokens
and proxies work as everywhere in ``huggingface_hub``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from merge_core import Checkpoint, CheckpointRef, Recipe, open_checkpoint, resolve_local
from merge_core.checkpoint import INDEX_NAME, read_json
from merge_core.errors import InvalidInput
from merge_core.safetensors_file import StoredTensor, fetch_header

# Read in full: everything about a model that is neither weights nor documentation. See MATTERS in tasks/pin.py.
_SMALL = (".json", ".model", ".txt", ".jinja", ".py", ".tiktoken")
# A file with such a name that is larger is something else.
_LARGEST_SMALL_FILE = 100_000_000
_TIMEOUT_S = 30.0
_CONNECTIONS = 8


@dataclass(frozen=True)
class Headers:
    """The checkpoints of a recipe, as far as headers tell.

    Args:
        checkpoints: By ``str(ref)``.
        revisions: Commit of those that lie on the Hub.
        bytes_to_download: What a merge has to fetch first.
    """

    checkpoints: Mapping[str, Checkpoint]
    revisions: Mapping[str, str]
    bytes_to_download: int


def open_headers(recipe: Recipe) -> Headers:
    """Open every checkpoint that ``recipe`` names, local or on the Hub; no weights are read.

    Raises:
        InvalidInput: A reference that is neither a local directory nor a repository that can be reached, or a
            checkpoint that cannot be one.
    """
    checkpoints, revisions, missing = {}, {}, 0
    for reference in recipe.references():
        directory = resolve_local(reference, recipe.directory)
        if directory is not None:
            checkpoints[str(reference)] = open_checkpoint(directory)
            continue
        remote = _open_remote(reference)
        checkpoints[str(reference)], revisions[str(reference)] = remote.checkpoint, remote.revision
        missing += remote.bytes_to_download
    return Headers(checkpoints, revisions, missing)


@dataclass(frozen=True)
class _Remote:
    checkpoint: Checkpoint
    revision: str
    bytes_to_download: int


def _open_remote(reference: CheckpointRef) -> _Remote:
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # httpx or httpx2, as the library's version has it
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        OfflineModeIsEnabled,
    )

    try:
        return _fetch(reference)
    except OfflineModeIsEnabled as error:
        raise InvalidInput(
            str(reference),
            found="no such directory here, and HF_HUB_OFFLINE forbids to ask the Hub",
            expected="a path relative to the recipe, or org/name on the Hub",
            remedy="check the spelling, or unset HF_HUB_OFFLINE",
        ) from error
    except (HfHubHTTPError, HFValidationError, HTTPError, OSError) as error:
        raise InvalidInput(
            str(reference),
            found=f"neither a directory here nor a repository that can be reached ({type(error).__name__})",
            expected="a path relative to the recipe, or org/name on the Hub",
            remedy="check the spelling, the network, and HF_TOKEN for a private or gated repository",
        ) from error


def _fetch(reference: CheckpointRef) -> _Remote:
    from huggingface_hub import HfApi, RepoFile, snapshot_download, try_to_load_from_cache
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # documented, not in the types

    api = HfApi()
    commit = api.model_info(reference.path, revision=reference.revision).sha
    if commit is None:
        raise InvalidInput(str(reference), found="a repository without commits")
    tree = api.list_repo_tree(reference.path, recursive=True, revision=commit)
    sizes = {file.path: file.size for file in tree if isinstance(file, RepoFile)}
    missing = {
        name for name in sizes if not isinstance(try_to_load_from_cache(reference.path, name, revision=commit), str)
    }
    small = [name for name, size in sizes.items() if name.endswith(_SMALL) and size <= _LARGEST_SMALL_FILE]
    if "config.json" not in small:
        raise InvalidInput(str(reference), found="no config.json", expected="a model in Hugging Face layout")
    disable_progress_bars()
    directory = Path(snapshot_download(reference.path, revision=commit, allow_patterns=small))
    headers = _read_headers(reference.path, commit, _weights(directory, sizes), directory)
    return _Remote(open_checkpoint(directory, headers), commit, sum(sizes[name] for name in missing))


def _weights(directory: Path, sizes: Mapping[str, int]) -> dict[str, int]:
    """The weight files of a repository that count: those of its index, else all that lie beside its config."""
    index = directory / INDEX_NAME
    weight_map = read_json(index).get("weight_map") if index.exists() else None
    named = list(weight_map.values()) if isinstance(weight_map, dict) else None
    return {
        name: size
        for name, size in sizes.items()
        if name.endswith(".safetensors") and (name in named if named is not None else "/" not in name)
    }


def _read_headers(
    repository: str, commit: str, sizes: Mapping[str, int], directory: Path
) -> dict[Path, Sequence[StoredTensor]]:
    from huggingface_hub import hf_hub_url

    def header(name: str) -> tuple[StoredTensor, ...]:
        url = hf_hub_url(repository, name, revision=commit)
        return fetch_header(lambda start, count: _ranged(url, start, count), sizes[name], directory / name)

    with ThreadPoolExecutor(_CONNECTIONS) as threads:
        return {directory / name: tensors for name, tensors in zip(sizes, threads.map(header, sizes), strict=True)}


def _ranged(url: str, start: int, count: int) -> bytes:
    """Bytes ``start`` to ``start + count`` of what lies at ``url``.

    Raises:
        InvalidInput: The server does not answer with this part: the whole may be many gigabytes.
    """
    from huggingface_hub import get_session, hf_raise_for_status
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented, not in the types

    wanted = {**build_hf_headers(), "Range": f"bytes={start}-{start + count - 1}", "Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=wanted, timeout=_TIMEOUT_S, follow_redirects=True) as response:
        hf_raise_for_status(response)
        if response.status_code != 206 or int(response.headers.get("Content-Length", count)) != count:
            raise InvalidInput(
                url,
                found=f"status {response.status_code} to a ranged read",
                expected="the part that was asked for",
                remedy="use another HF_ENDPOINT, or download the model first",
            )
        data = response.read()
    if len(data) != count:
        raise InvalidInput(url, found=f"{len(data)} bytes", expected=f"{count} bytes", remedy="try again")
    return data
