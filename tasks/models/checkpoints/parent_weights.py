"""Bring the weights of parents onto this disk: download those on the Hub, and apply adapters.

**Downloads** follow the license and header checks. The Hub's client compares only sizes and trusts any cached file with
the right name. So mergegate hashes every file once (``HashMemo``) and compares it with the hash that the Hub lists,
while other files are still being downloaded. This is not a cached stage, because the Hub's own cache holds the files.
If all files are present, it only checks that each file exists.

**A parent with an adapter** is written once as a plain model directory that evaluation, perplexity and servers can
load. The merge itself applies the adapter while it streams the weights, so it does not need the directory. Both ways
produce the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

from mergegate.merge_core import load_recipe, merge_weights, plan_merge
from mergegate.merge_core.engine import start_or_resume
from mergegate.merge_core.errors import MergegateError, Refused
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.methods import PASSTHROUGH
from mergegate.merge_core.wording import format_bytes, format_count
from mergegate.tasks.base.http import retry_transient
from mergegate.tasks.base.stage import StageValue, advance, stage, step, versions
from mergegate.tasks.base.store import Artifact, NotInKey
from mergegate.tasks.models.checkpoints.hub.access import HubAccess, git_blob, hub_access, is_offline
from mergegate.tasks.models.checkpoints.hub.permissions import client_errors, combine_hub_errors, hub_refusal
from mergegate.tasks.models.checkpoints.hub.snapshot import Snapshot
from mergegate.tasks.models.checkpoints.pin import PinnedCheckpoint, ResolvedCheckpoint

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


@dataclass(frozen=True)
class FetchedWeights:
    """Downloaded files and the commits that they belong to."""

    downloaded: Downloaded
    commits: tuple[str, ...]  # Each as name@commit.

    @property
    def new(self) -> bool:
        """Whether at least one file had to be downloaded."""
        return self.downloaded.new_files > 0

    def summary(self) -> str:
        """Return a line such as ``base@3f1c09a2, math@77a0b1ce · 2.5 GB in 4 files``."""
        downloaded = self.downloaded
        amount = (
            f"{format_bytes(downloaded.bytes)} in {format_count(downloaded.new_files, 'file')}"
            if self.new
            else f"{format_count(downloaded.files, 'file')} already cached"
        )
        return f"{', '.join(self.commits)} · {amount}"


def fetch_weights(parents: Sequence[ResolvedCheckpoint], hashes: HashMemo) -> FetchedWeights | None:
    """Download the missing weights of ``parents`` and check every file against the Hub's listing.

    Return None if no parent is on the Hub.
    """
    # A model that several adapters are applied to is fetched once.
    remote = list(
        {
            # The name of a parent with an adapter includes the adapter, so show the repository instead.
            snapshot.directory: (snapshot.repo.rpartition("/")[2] if parent.adapter else parent.name, snapshot)
            for parent in parents
            for snapshot in parent.snapshots
        }.values()
    )
    if not remote:
        return None
    names = tuple(f"{name}@{snapshot.commit[:8]}" for name, snapshot in remote)
    return _fetch(names, [snapshot for _, snapshot in remote], hashes)


@step("fetch", is_done=lambda names, snapshots, hashes: not any(snapshot.missing() for snapshot in snapshots))
def _fetch(names: tuple[str, ...], snapshots: Sequence[Snapshot], hashes: HashMemo) -> FetchedWeights:
    return FetchedWeights(download_snapshots(snapshots, hashes, lambda done, total: advance(done, total, "B")), names)


_MODEL = "model"


class AppliedAdapter(StageValue):
    """Summary of applying an adapter. The artifact is the model with its adapter applied, in Hugging Face layout."""

    tensors: int
    bytes_written: int
    seconds: Annotated[float, NotInKey]
    weights: dict[str, str]  # File name to sha256, for each file that was hashed during writing.

    def summary(self) -> str:
        rate = self.bytes_written / max(self.seconds, 1e-6)
        return f"{format_bytes(self.bytes_written)} · {format_bytes(rate)}/s · {self.tensors} tensors"


@stage("apply", version=2, subject="parent", hashes_of=lambda value: value.weights, resumable=True)
def apply_to_directory(out: Path, parent: PinnedCheckpoint, libraries: dict[str, str]) -> AppliedAdapter:
    """Write ``parent`` with its adapter applied, resuming from the journal of a killed run.

    ``libraries`` holds the versions of the libraries that affect the last digit of the results.

    Raises:
        InvalidInput: The model or the adapter contains NaN or infinity, or they do not fit together.
    """
    recipe = load_recipe({"merge_method": PASSTHROUGH.name, "models": [{"model": _MODEL}]}, location=parent.name)
    plan = plan_merge(recipe, {_MODEL: parent.open()})
    start_or_resume(out, plan)
    record = merge_weights(plan, out, device="cpu", on_progress=lambda done, total: advance(done, total, "B"))
    return AppliedAdapter(
        tensors=record.tensors,
        bytes_written=record.bytes_written,
        seconds=record.seconds,
        weights=dict(record.files),
    )


def apply_adapters(parents: Sequence[PinnedCheckpoint]) -> tuple[PinnedCheckpoint, ...]:
    """Return the parents under the same names, as directories that any library can load. Call this inside a flow."""
    return _apply_all(parents, apply_to_directory)


def apply_adapters_outside_flow(parents: Sequence[PinnedCheckpoint]) -> tuple[PinnedCheckpoint, ...]:
    """Do the same as :func:`apply_adapters`, without Prefect."""
    return _apply_all(parents, apply_to_directory.build)


def find_applied_adapters(parents: Sequence[PinnedCheckpoint]) -> tuple[PinnedCheckpoint, ...]:
    """Return the parents that can be loaded without writing anything first.

    A parent with an adapter is included only if the store has its model with the adapter applied.
    """
    loadable = []
    for parent in parents:
        if not parent.adapter:
            loadable.append(parent)
        elif artifact := apply_to_directory.find(parent, versions("torch")):
            loadable.append(_as_plain_model(parent, artifact))
    return tuple(loadable)


def _apply_all(
    parents: Sequence[PinnedCheckpoint], build: Callable[[PinnedCheckpoint, dict[str, str]], Artifact[AppliedAdapter]]
) -> tuple[PinnedCheckpoint, ...]:
    return tuple(
        _as_plain_model(parent, build(parent, versions("torch"))) if parent.adapter else parent for parent in parents
    )


def _as_plain_model(parent: PinnedCheckpoint, artifact: Artifact[AppliedAdapter]) -> PinnedCheckpoint:
    files = tuple(sorted(artifact.files.items()))
    plain = {"digest": artifact.digest, "directory": artifact.directory, "files": files, "adapter": None}
    return parent.model_copy(update=plain)
