"""Open checkpoints on the Hub as tables of tensors, and read single elements, without downloading their weights.

For each weight file that is not in the cache, two ranged requests read only the header: first its length, then exactly
that number of bytes. ``HF_ENDPOINT``, tokens and proxies work as in the rest of ``huggingface_hub``. Pickled weights
must be in the cache, because their table of tensors is inside a zip archive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from mergegate.merge_core.checkpoint import ReadStored, StoredTensor, fetch_header, read_into
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.parsing import open_plain
from mergegate.tasks.checkpoints.hub.access import HubAccess, hub_access, is_offline
from mergegate.tasks.checkpoints.hub.errors import client_errors, hub_refusal
from mergegate.tasks.checkpoints.hub.snapshot import Snapshot

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TIMEOUT_S = 30.0
_CONNECTIONS = 8
T = TypeVar("T")


def read_snapshot(
    snapshot: Snapshot, opener: Callable[[Path, Mapping[Path, Sequence[StoredTensor]] | None, Collection[str]], T]
) -> T:
    """Return the checkpoint or the adapter in ``snapshot``, read from headers and small files.

    ``opener`` is ``open_checkpoint`` or ``open_adapter``.

    Raises:
        InvalidInput: The files do not form a checkpoint or an adapter, the server does not support ranged reads, or
            the environment forbids network access.
        Refused: The Hub does not serve the headers, or weights that are not in the cache are pickled.
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
