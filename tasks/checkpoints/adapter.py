"""Resolve, inspect and pin the adapter of a parent ``model+adapter``.

``mergegate.tasks.checkpoints.pin`` does the same for the model.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core import Checkpoint
from mergegate.merge_core.adapters import Adapter, adapter_files, apply_adapter, open_adapter
from mergegate.merge_core.checkpoint import nested_names
from mergegate.merge_core.errors import Finding
from mergegate.merge_core.recipe import name_in_path
from mergegate.tasks.checkpoints.hub.headers import read_snapshot
from mergegate.tasks.checkpoints.hub.snapshot import Snapshot


class ResolvedAdapter(BaseModel):
    """An adapter that has been located but not read. Its weights may still have to be downloaded from the Hub.

    Attributes:
        ref: Text after the ``+`` in the recipe.
        directory: Directory of the adapter. For the Hub, the directory of the commit in the Hub's cache.
        revision: Commit of the Hub repository, or None for a local directory.
        snapshot: Files of that commit, or None for a local directory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ref: str
    directory: Path
    revision: str | None = None
    snapshot: Snapshot | None = None

    @property
    def deciding(self) -> tuple[str, ...]:
        """Names of the files that determine the behavior of the adapter."""
        if self.snapshot:
            return self.snapshot.deciding
        return adapter_files(
            [*(path.name for path in self.directory.iterdir() if path.is_file()), *nested_names(self.directory)]
        )

    def open(self) -> Adapter:
        """Return the adapter, read from its configuration and its header.

        Raises:
            InvalidInput: The files do not form an adapter.
            Refused: The Hub does not serve the header.
        """
        return read_snapshot(self.snapshot, open_adapter) if self.snapshot else open_adapter(self.directory)

    def applied_to(self, base: Checkpoint) -> Checkpoint:
        """Return ``base`` with the adapter applied, reading only headers.

        Raises:
            InvalidInput: The files do not form an adapter, or the adapter belongs to another model.
            Refused: The Hub does not serve the header.
        """
        return apply_adapter(base, self.open())

    def findings(self, base: str) -> tuple[Finding, ...]:
        """Return a warning if the adapter names another base model than ``base``, the reference of its parent."""
        config = self.open().config
        if not config.base or name_in_path(config.base) == name_in_path(base.partition("@")[0]):
            return ()
        return (
            Finding(
                "warn",
                f"{config.location}: base_model_name_or_path",
                found=config.base,
                expected=f"{base}, to which the adapter is applied",
                remedy="make sure that the adapter was trained on these weights. mergegate can only compare shapes",
            ),
        )


class PinnedAdapter(BaseModel):
    """An adapter whose files are pinned by their hashes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ref: str
    directory: Path
    revision: str | None
    files: tuple[tuple[str, str], ...]  # name and sha256

    def pinned_files(self) -> dict[Path, str]:
        """Return the sha256 of each file of the adapter, by path."""
        return {self.directory / name: sha256 for name, sha256 in self.files}

    def applied_to(self, base: Checkpoint) -> Checkpoint:
        """Return ``base`` with the adapter applied, read from the local files.

        Raises:
            InvalidInput: The files do not form an adapter, or the adapter belongs to another model.
        """
        return apply_adapter(base, open_adapter(self.directory))
