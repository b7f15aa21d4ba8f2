"""The weights of checkpoints on the Hub: into its cache, each compared with the hash that the Hub lists for it.

The client compares only sizes, and believes whatever lies in the cache under a file's name; so every file is hashed
here, once (``HashMemo``), while the others are still coming.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from mergegate.merge_core.errors import MergegateError, Refused
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.checkpoints.hub.access import HubAccess, hub_access, is_offline
from mergegate.tasks.checkpoints.hub.errors import client_errors, combine_hub_errors, hub_refusal
from mergegate.tasks.checkpoints.hub.file import RemoteFile, git_blob
from mergegate.tasks.checkpoints.hub.snapshot import Snapshot
from mergegate.tasks.http import retry_transient

_FILES_AT_ONCE = 4
_TRIES = 5  # where the client gives up at once: it asks again itself only when a connection breaks

OnBytes = Callable[[int, int], None]


@dataclass(frozen=True)
class Downloaded:
    """What came, and what was there: files, and bytes that were downloaded now."""

    files: int
    new_files: int
    bytes: int


def download_snapshots(
    snapshots: Sequence[Snapshot],
    hashes: HashMemo,
    on_progress: OnBytes = lambda done, total: None,
    wait: Callable[[float], None] = time.sleep,
) -> Downloaded:
    """Have every file of ``snapshots`` in the Hub's cache, as the Hub lists it.

    Args:
        on_progress: Called with bytes that have come and bytes that are to come; in the caller's context.
        wait: Called with seconds before a sick Hub is asked for a file again.

    Raises:
        InvalidInput: Files are missing, and the environment forbids the Hub.
        Refused: The Hub does not give a file or cannot be reached, or a file is not what the Hub lists.
    """
    unique = {(one.repo, one.commit): one for one in snapshots}.values()
    wanted = [(one, name, file) for one in unique for name, file in one.files.items()]
    missing = {(one.repo, name): file.size for one in unique for name, file in one.missing().items()}
    access = None if is_offline() else hub_access(writing=False)
    progress = _progress_class(sum(missing.values()), on_progress)

    def bring(job: tuple[Snapshot, str, RemoteFile]) -> MergegateError | None:
        snapshot, name, file = job
        path = snapshot.directory / name
        try:
            if not path.is_file():
                retry_transient(_TRIES, sleep=wait)(_download, snapshot, name, access, progress)
            return _mismatch(snapshot, path, name, file, hashes)
        except client_errors() as error:
            return hub_refusal(f"{snapshot.repo}: {name}", snapshot.repo, error, access)

    with ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
        try:
            problems = [problem for problem in threads.map(bring, wanted) if problem]
        except BaseException:  # somebody wants us to end: not only when these files are here
            progress.halted = True
            raise
    if problems:
        raise combine_hub_errors(problems)
    return Downloaded(len(wanted), len(missing), sum(missing.values()))


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


def _mismatch(snapshot: Snapshot, path: Path, name: str, file: RemoteFile, hashes: HashMemo) -> Refused | None:
    """Why the file is not the one that the Hub lists, or None."""
    if file.sha256 is not None:
        kind, seen, listed = "sha256", hashes.sha256(path), file.sha256
    else:
        kind, seen, listed = "git's sha1", git_blob(path.read_bytes()), file.blob
    if seen == listed:
        return None
    return Refused(
        f"{snapshot.repo}@{snapshot.commit[:12]}: {name}",
        found=f"{kind} {seen[:16]}… in the Hub's cache",
        expected=f"{listed[:16]}…, as the Hub lists it",
        remedy=f"it was damaged on its way or on this disk: delete {path.resolve()} and run again",
    )


def _progress_class(total: int, on_progress: OnBytes) -> Any:
    """A class in the place of ``tqdm`` that adds up what all files of a download have received."""
    context, lock, done = copy_context(), Lock(), 0

    class FileProgress:
        """One file's share; what the client calls of ``tqdm``."""

        total: float | None = None
        halted = False

        def __init__(self, *_: object, initial: float = 0, **__: object) -> None:
            self.update(initial)  # of a file that a killed run began

        def update(self, count: float | None = 1) -> None:
            nonlocal done
            if FileProgress.halted:
                raise RuntimeError("the run was ended")
            with lock:
                done += int(count or 0)
                context.run(on_progress, min(done, total), total)

        def update_transfer(self, count: float | None = 1) -> None:
            """Bytes on the wire: of compressed or known parts there are fewer. Not counted twice."""

        def refresh(self, *_: object, **__: object) -> None: ...
        def close(self) -> None: ...
        def set_postfix_str(self, *_: object, **__: object) -> None: ...
        def set_transfer_postfix_str(self, *_: object, **__: object) -> None: ...
        def set_description_str(self, *_: object, **__: object) -> None: ...
        def __enter__(self) -> FileProgress:
            return self

        def __exit__(self, *_: object) -> None: ...

    return FileProgress
