"""Record the merges of ``mergegate merge``, so that the same merge is not repeated.

The record is in the project's home, under a digest of the output directory's path. It is valid only for the same
parents, seed and version of torch, and only while the result is unchanged. Without a valid record, mergegate refuses to
merge into the existing directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergegate.merge_core.files import FileIdentity, file_identity, read_state, state_directory, write_state
from mergegate.merge_core.parsing import MAX_YAML_BYTES, read_text
from mergegate.tasks.merge import MergeSettings, numerics
from mergegate.tasks.stage import home
from mergegate.tasks.store import digest

_SCHEMA = 1


class RecordedMerge:
    """The record of one merge into one directory.

    Args:
        out: Directory of the merge.
        recipe_file: Recipe of the merge. The record depends on its text, not on its path.
        identities: Identities of the parents' files, which must be local, and of the calibration texts.
        settings: Seed and device of the merge.
    """

    def __init__(
        self, out: Path, recipe_file: Path, identities: Mapping[Path, FileIdentity], settings: MergeSettings
    ) -> None:
        self._out = out
        # Digest of everything that determines the merge.
        self._key = digest(
            {
                "schema": _SCHEMA,
                "recipe": read_text(recipe_file, MAX_YAML_BYTES),
                "parents": {str(path): list(identity) for path, identity in identities.items()},
                "numerics": numerics(settings),
            }
        )
        # The name of the directory need not be valid text.
        self._file = home() / "merges" / f"{digest(os.fsencode(out.absolute()).hex())[:16]}.json"

    def find(self) -> dict[str, Any] | None:
        """Return the recorded result if the directory still contains this merge unchanged, otherwise None."""
        record = read_state(self._file, json.loads)
        if not isinstance(record, dict) or record.get("of") != self._key:
            return None
        result = record.get("told")
        return result if isinstance(result, dict) and record.get("files") == self._files() else None

    def store(self, result: Mapping[str, Any]) -> None:
        """Record the result, and that the files now in the directory are those of this merge."""
        state_directory(self._file.parent)
        record = {"of": self._key, "files": self._files(), "told": dict(result)}
        write_state(self._file, json.dumps(record).encode())

    def _files(self) -> dict[str, list[int]]:
        files = (path for path in sorted(self._out.rglob("*")) if path.is_file())
        return {path.relative_to(self._out).as_posix(): list(file_identity(path)) for path in files}
