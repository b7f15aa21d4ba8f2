"""Download the weights of parents on the Hub, after the license and header checks have passed.

This step is not a cached stage, because the Hub's own cache holds the files, and mergegate remembers their hashes. If
all files are present, the step only checks that each file exists. If no parent is on the Hub, the step is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mergegate.merge_core import load_recipe, merge_weights, plan_merge
from mergegate.merge_core.engine import start_or_resume
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.methods import PASSTHROUGH
from mergegate.merge_core.wording import format_bytes, format_count
from mergegate.tasks.checkpoints.hub.download import Downloaded, download_snapshots
from mergegate.tasks.checkpoints.hub.snapshot import Snapshot
from mergegate.tasks.checkpoints.pin import PinnedCheckpoint, ResolvedCheckpoint
from mergegate.tasks.stage import StageValue, advance, stage, step, versions
from mergegate.tasks.store import Artifact, NotInKey


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
    plain = {
        "digest": artifact.digest,
        "directory": artifact.directory,
        "files": tuple(sorted(artifact.files.items())),
    }
    return parent.model_copy(update={**plain, "adapter": None})
