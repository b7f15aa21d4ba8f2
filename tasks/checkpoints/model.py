"""A model as the stages see it: a name for people, a digest for keys, a directory for whoever reads the bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import MergegateError
from mergegate.merge_core.files import file_identity
from mergegate.tasks.checkpoints.files import deciding_files
from mergegate.tasks.store import MANIFEST, NotInKey, digest


class Model(BaseModel):
    """A checkpoint with known content.

    Two models with equal digests are the same model, whatever they are called and wherever they lie; so a parent is
    evaluated once, ever.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, NotInKey]  # unique in a run: 'reverser', 'merge'
    digest: str  # 64 hex digits over names, sizes and hashes of the files that matter
    directory: Annotated[Path, NotInKey]  # absolute
    # Name and sha256 of every file that is read in its place, as they were pinned. Empty: not pinned, for what is asked
    # once and kept nowhere.
    files: Annotated[tuple[tuple[str, str], ...], NotInKey] = ()
    # Whether Python files that lie in it are run where it is loaded: the profile names its repository at its commit.
    runs_code: bool = False

    def content_key(self) -> object:
        # A model whose own code computes is another one; what was measured before there was a choice keeps its key.
        return {"digest": self.digest} | ({"runs_code": True} if self.runs_code else {})

    @property
    def label(self) -> str:
        """What a person calls it."""
        return self.name

    def pinned(self) -> Mapping[Path, str]:
        """sha256 of each of its files, as they were pinned (see ``tasks.stage.input_guard``)."""
        return {self.directory / name: sha256 for name, sha256 in self.files}

    def present(self) -> Iterable[Path]:
        """The files that would be read in its place now: one that came later counts too."""
        try:
            names = deciding_files(self.directory)
        except (OSError, MergegateError):
            return ()  # Then a file that was pinned is another, or gone.
        return [self.directory / name for name in names if name != MANIFEST]


def files_fingerprint(models: Sequence[Model]) -> str:
    """A text that is other as soon as anything was done to a pinned file of ``models``, if only touched.

    It belongs to the identity of unfinished work: whether bytes that a killed run has read were the pinned ones, nobody
    has checked.
    """
    seen: list[object] = []
    for model in models:
        for path in sorted(model.pinned()):
            try:
                seen.append([path.name, *map(str, file_identity(path)[1:])])  # A device is another after a boot.
            except OSError:
                seen.append([path.name])
    return digest(seen)
