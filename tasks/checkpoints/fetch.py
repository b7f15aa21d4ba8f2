"""Download the weights of parents on the Hub, after the license and header checks have passed.

This step is not a cached stage, because the Hub's own cache holds the files, and mergegate remembers their hashes. If
all files are present, the step only checks that each file exists. If no parent is on the Hub, the step is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.wording import format_bytes, format_count
from mergegate.tasks.checkpoints.hub.download import Downloaded, download_snapshots
from mergegate.tasks.checkpoints.hub.snapshot import Snapshot
from mergegate.tasks.checkpoints.pin import ResolvedCheckpoint
from mergegate.tasks.stage import advance, step


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

    Raises:
        Refused: A file is not available, or differs from the Hub's listing.
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
