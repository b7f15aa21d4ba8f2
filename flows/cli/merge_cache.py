"""What ``mergegate merge`` made before, of which recipe and which files, so that the same merge is not made again.

It is remembered in the project's home by the name of the directory that was made. A parent that was touched, a byte of
the result that was written since, another seed or another torch: then it is not the same, and the directory is in the
way as any other would be.
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


def made_of(recipe_file: Path, looked: Mapping[Path, FileIdentity], seed: int, device: str) -> str:
    """A digest of all that decides a merge: the recipe's text, the parents' files as they lie there, numerics.

    Args:
        looked: The files of the parents, which are here, and of the texts that they read.
    """
    return digest(
        {
            "schema": _SCHEMA,
            "recipe": read_text(recipe_file, MAX_YAML_BYTES),
            "parents": {str(path): list(identity) for path, identity in looked.items()},
            "numerics": numerics(MergeSettings(seed=seed, device=device)),
        }
    )


def remember(out: Path, of: str, told: Mapping[str, Any]) -> None:
    """Note that ``out``, as it is now, was made of what has the digest ``of``.

    Args:
        told: What was said of it, as plain data.
    """
    record = {"of": of, "files": {name: list(one) for name, one in _files(out).items()}, "told": dict(told)}
    place = _place(out)
    state_directory(place.parent)
    write_state(place, json.dumps(record).encode())


def recall(out: Path, of: str) -> dict[str, Any] | None:
    """What was said of ``out`` when it was made, if it was made of just this and is as it was; else None."""
    record = read_state(_place(out), json.loads)
    if not isinstance(record, dict) or record.get("of") != of or not isinstance(told := record.get("told"), dict):
        return None
    as_it_was = record.get("files") == {name: list(one) for name, one in _files(out).items()}
    return told if as_it_was else None


def _files(out: Path) -> dict[str, FileIdentity]:
    return {path.relative_to(out).as_posix(): file_identity(path) for path in sorted(out.rglob("*")) if path.is_file()}


def _place(out: Path) -> Path:
    return home() / "merges" / f"{digest(os.fsencode(out.absolute()).hex())[:16]}.json"  # a name need not be text
