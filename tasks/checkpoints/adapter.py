"""The adapter of a parent ``model+adapter``: found, looked into, pinned. Its model is found and pinned beside it."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core import Checkpoint
from mergegate.merge_core.adapters import Adapter, adapter_files, adapter_findings, apply_adapter, open_adapter
from mergegate.merge_core.checkpoint import nested_names
from mergegate.merge_core.errors import Finding
from mergegate.tasks.checkpoints.hub.headers import open_adapter_snapshot
from mergegate.tasks.checkpoints.hub.snapshot import Snapshot


class ResolvedAdapter(BaseModel):
    """An adapter, found but not yet read. Of one on the Hub the weights need not be here.

    Attributes:
        ref: As the recipe writes it after the ``+``.
        revision: Commit of a Hub repository; None for a local directory.
        snapshot: Of a Hub repository: what its commit lists.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ref: str
    directory: Path
    revision: str | None = None
    snapshot: Snapshot | None = None

    @property
    def deciding(self) -> tuple[str, ...]:
        """Names of the files that decide what it does."""
        if self.snapshot:
            return self.snapshot.deciding
        return adapter_files(
            [*(path.name for path in self.directory.iterdir() if path.is_file()), *nested_names(self.directory)]
        )

    def open(self) -> Adapter:
        """Its configuration and header.

        Raises:
            InvalidInput: for files that cannot be an adapter.
            Refused: for a header that the Hub does not give.
        """
        return open_adapter_snapshot(self.snapshot) if self.snapshot else open_adapter(self.directory)

    def applied_to(self, base: Checkpoint) -> Checkpoint:
        """``base`` with the adapter applied; nothing is read but headers.

        Raises:
            InvalidInput, Refused: as ``open``; for an adapter of another model.
        """
        return apply_adapter(base, self.open())

    def findings(self, base: str) -> tuple[Finding, ...]:
        """What is odd about applying it to the model that a recipe calls ``base``."""
        return tuple(adapter_findings(base, self.open()))


class PinnedAdapter(BaseModel):
    """An adapter whose files are pinned."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ref: str
    directory: Path
    revision: str | None
    files: tuple[tuple[str, str], ...]  # name and sha256

    def pinned(self) -> dict[Path, str]:
        """sha256 of each of its files."""
        return {self.directory / name: sha256 for name, sha256 in self.files}

    def applied_to(self, base: Checkpoint) -> Checkpoint:
        """As of ``ResolvedAdapter``; its files are here."""
        return apply_adapter(base, open_adapter(self.directory))
