"""Record the merges of ``mergegate merge``, so that the same merge is not repeated.

The record is in the project's home, under the name of the output directory. It no longer applies if a parent or the
result changed, or with another seed or another version of torch. The existing directory then blocks the merge like any
other.
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


def merge_key(recipe_file: Path, identities: Mapping[Path, FileIdentity], seed: int, device: str) -> str:
    """Return a digest of everything that determines a merge: recipe text, files of the parents, numerics.

    ``identities`` covers the files of the parents, which must be local, and of the texts that the merge reads.
    """
    return digest(
        {
            "schema": _SCHEMA,
            "recipe": read_text(recipe_file, MAX_YAML_BYTES),
            "parents": {str(path): list(identity) for path, identity in identities.items()},
            "numerics": numerics(MergeSettings(seed=seed, device=device)),
        }
    )


def record_merge(out: Path, key: str, result: Mapping[str, Any]) -> None:
    """Record that ``out``, in its present state, is the merge with the digest ``key``, and store its result with it."""
    record = {
        "of": key,
        "files": {name: list(identity) for name, identity in _files(out).items()},
        "told": dict(result),
    }
    file = _record_file(out)
    state_directory(file.parent)
    write_state(file, json.dumps(record).encode())


def find_merge(out: Path, key: str) -> dict[str, Any] | None:
    """Return the recorded result of ``out`` if it is this merge and unchanged, otherwise None."""
    record = read_state(_record_file(out), json.loads)
    if not isinstance(record, dict) or record.get("of") != key or not isinstance(result := record.get("told"), dict):
        return None
    is_unchanged = record.get("files") == {name: list(identity) for name, identity in _files(out).items()}
    return result if is_unchanged else None


def _files(out: Path) -> dict[str, FileIdentity]:
    return {path.relative_to(out).as_posix(): file_identity(path) for path in sorted(out.rglob("*")) if path.is_file()}


def _record_file(out: Path) -> Path:
    # the name need not be valid text
    return home() / "merges" / f"{digest(os.fsencode(out.absolute()).hex())[:16]}.json"
