"""Download the files of checkpoints on the Hub and verify each file against the hash that the Hub lists.

The Hub's client compares only sizes and trusts any cached file with the right name. This module therefore hashes every
file once (``HashMemo``), while other files are still being downloaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from threading import Lock
from typing import Any

from mergegate.merge_core.errors import MergegateError, Refused
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.checkpoints.hub.access import HubAccess, git_blob, hub_access, is_offline
from mergegate.tasks.checkpoints.hub.permissions import client_errors, combine_hub_errors, hub_refusal
from mergegate.tasks.checkpoints.hub.snapshot import Snapshot
from mergegate.tasks.http import retry_transient

_FILES_AT_ONCE = 4
_TRIES = 5  # The client itself retries only after a broken connection.

OnBytes = Callable[[int, int], None]


@dataclass(frozen=True)
class Downloaded:
    """Number of all files, number of newly downloaded files, and size of the new files in bytes."""

    files: int
    new_files: int
    bytes: int


def download_snapshots(
    snapshots: Sequence[Snapshot],
    hashes: HashMemo,
    on_progress: OnBytes = lambda done, total: None,
    wait: Callable[[float], None] = time.sleep,
) -> Downloaded:
    """Download the missing files of ``snapshots`` into the Hub's cache and verify all files.

    ``on_progress`` receives the downloaded bytes and the total bytes to download, in the caller's context. ``wait``
    waits for a number of seconds before a failed request is retried.

    Raises:
        InvalidInput: Files are missing and the environment forbids access to the Hub.
        Refused: The Hub is not reachable, does not serve a file, or a file differs from the Hub's listing.
    """
    unique = {(snapshot.repo, snapshot.commit): snapshot for snapshot in snapshots}.values()
    jobs = [(snapshot, name) for snapshot in unique for name in snapshot.files]
    missing = {(snapshot.repo, name): file.size for snapshot in unique for name, file in snapshot.missing().items()}
    repos = {snapshot.repo for snapshot in unique}
    accesses = {} if is_offline() else {repo: hub_access(writing=False, repo=repo) for repo in repos}
    progress = _progress_class(sum(missing.values()), on_progress)

    def fetch(job: tuple[Snapshot, str]) -> MergegateError | None:
        snapshot, name = job
        path, access = snapshot.directory / name, accesses.get(snapshot.repo)
        try:
            if not path.is_file():
                retry_transient(_TRIES, sleep=wait)(_download, snapshot, name, access, progress)
            file = snapshot.files[name]
            if file.sha256 is not None:
                kind, actual, listed = "sha256", hashes.sha256(path), file.sha256
            else:
                kind, actual, listed = "git's sha1", git_blob(path.read_bytes()), file.blob
            if actual == listed:
                return None
            return Refused(
                f"{snapshot.repo}@{snapshot.commit[:12]}: {name}",
                found=f"{kind} {actual[:16]}… in the Hub's cache",
                expected=f"{listed[:16]}…, as the Hub lists it",
                remedy=f"delete {path.resolve()} and run again."
                " The file was damaged during the download or on this disk",
            )
        except client_errors() as error:
            return hub_refusal(f"{snapshot.repo}: {name}", snapshot.repo, error, access)

    with ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
        try:
            problems = [problem for problem in threads.map(fetch, jobs) if problem]
        except BaseException:  # The run was interrupted, so stop now instead of after the current files.
            progress.halted = True
            raise
    if problems:
        raise combine_hub_errors(problems)
    return Downloaded(len(jobs), len(missing), sum(missing.values()))


def _download(snapshot: Snapshot, name: str, access: HubAccess | None, progress: Any) -> None:
    from huggingface_hub import hf_hub_download

    hf_hub_download(
        snapshot.repo,
        name,
        revision=snapshot.commit,
        endpoint=access.endpoint if access else None,
        token=(access.token or False) if access else None,
        local_files_only=access is None,
        tqdm_class=progress,
    )


def _progress_class(total: int, on_progress: OnBytes) -> Any:
    """Return a replacement for ``tqdm`` that sums the received bytes over all files of a download."""
    context, lock, done = copy_context(), Lock(), 0

    class FileProgress:
        """Progress of one file, with the part of the ``tqdm`` interface that the client uses."""

        total: float | None = None
        halted = False

        def __init__(self, *_: object, initial: float = 0, **__: object) -> None:
            self.update(initial)  # Bytes that a killed run had already downloaded.

        def update(self, count: float | None = 1) -> None:
            nonlocal done
            if FileProgress.halted:
                raise RuntimeError("the run was stopped")
            with lock:
                done += int(count or 0)
                context.run(on_progress, min(done, total), total)

        def update_transfer(self, count: float | None = 1) -> None:
            """Ignore the bytes sent over the network, because ``update`` already counts the bytes of the file.

            They can be fewer than the bytes of the file if parts are compressed or already cached.
            """

        def refresh(self, *_: object, **__: object) -> None: ...
        def close(self) -> None: ...
        def set_postfix_str(self, *_: object, **__: object) -> None: ...
        def set_transfer_postfix_str(self, *_: object, **__: object) -> None: ...
        def set_description_str(self, *_: object, **__: object) -> None: ...
        def __enter__(self) -> FileProgress:
            return self

        def __exit__(self, *_: object) -> None: ...

    return FileProgress
