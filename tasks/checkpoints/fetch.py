"""The fetch step: the weights of parents on the Hub, when licences and headers have let them through.

Not cached as a stage: the Hub's own cache holds the files, and their hashes are remembered. With everything there it
costs a look at each file; without parents on the Hub it does not happen at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.wording import format_bytes
from mergegate.tasks.checkpoints.hub.download import Downloaded, download_snapshots
from mergegate.tasks.checkpoints.hub.snapshot import Snapshot
from mergegate.tasks.checkpoints.pin import ResolvedCheckpoint
from mergegate.tasks.stage import advance, step


@dataclass(frozen=True)
class FetchedWeights:
    """What came from the Hub, and from which commits."""

    downloaded: Downloaded
    commits: tuple[str, ...]  # name@commit

    @property
    def new(self) -> bool:
        """Whether anything had to be downloaded."""
        return self.downloaded.new_files > 0

    def summary(self) -> str:
        """``base@3f1c09a2, math@77a0b1ce · 2.5 GB in 4 files``."""
        come = self.downloaded
        said = (
            f"{format_bytes(come.bytes)} in {come.new_files} files"
            if self.new
            else f"all {come.files} files were there"
        )
        return f"{', '.join(self.commits)} · {said}"


def fetch_weights(found: Sequence[ResolvedCheckpoint], hashes: HashMemo) -> FetchedWeights | None:
    """Have the weights of ``found`` here, every file as the Hub lists it; None when no parent lies on the Hub.

    Raises:
        Refused: a file cannot be had, or is not what the Hub lists.
    """
    # A model that several adapters are applied to is fetched once.
    remote = list({one.directory: (_called(parent, one), one) for parent in found for one in parent.snapshots}.values())
    if not remote:
        return None
    names = tuple(f"{name}@{snapshot.commit[:8]}" for name, snapshot in remote)
    return _fetch(names, [snapshot for _, snapshot in remote], hashes)


def _called(parent: ResolvedCheckpoint, snapshot: Snapshot) -> str:
    """The name of a parent; of one with an adapter, that of the repository."""
    return snapshot.repo.rpartition("/")[2] if parent.adapter else parent.name


def _are_here(names: tuple[str, ...], snapshots: Sequence[Snapshot], hashes: HashMemo) -> bool:
    return not any(one.missing() for one in snapshots)


@step("fetch", is_done=_are_here)
def _fetch(names: tuple[str, ...], snapshots: Sequence[Snapshot], hashes: HashMemo) -> FetchedWeights:
    return FetchedWeights(download_snapshots(snapshots, hashes, lambda done, total: advance(done, total, "B")), names)
