"""Write what a result has besides its weights: index, tokenizer, code and other files, and ``config.json`` last."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection
from pathlib import Path

from merge_core.checkpoint import INDEX_NAME
from merge_core.engine.writer import PARTIAL, refusing_disk_errors
from merge_core.errors import InvalidInput
from merge_core.parsing import parse_json_object
from merge_core.plan import MergePlan, config_bytes, index_text, needs_index
from merge_core.store import fsync

CONFIG = "config.json"

# No library reads them back: they name the directory of whoever saved the file.
_ORIGIN_FIELDS = ("_name_or_path", "name_or_path", "tokenizer_file", "special_tokens_map_file")

# Results of a recipe's steps, until the last one is done.
STEPS = f"steps{PARTIAL}"


def check_directory(out: Path, *, resuming: bool, expected: Collection[str] = ()) -> None:
    """Accept ``out`` when it is empty or holds nothing but the remains of an unfinished merge.

    Args:
        out: Output directory, exists.
        resuming: Whether a journal lies in it; then the files named in ``expected`` may lie there as well.
        expected: Names of the files that the merge writes.

    Raises:
        InvalidInput: Something else is there. Stale files beside new ones make checkpoints that load wrongly.
    """
    with refusing_disk_errors(out):
        ours = {Path(name).parts[0] for name in expected} if resuming else set()
        foreign = sorted(path.name for path in out.iterdir() if not _is_ours(path) and path.name not in ours)
        if foreign:
            raise InvalidInput(
                str(out),
                found=f"not empty: {foreign[0]}",
                expected="a new or empty directory",
                remedy="choose another one",
            )


def write_companions(plan: MergePlan, out: Path, when_read: Callable[[], None] = lambda: None) -> dict[str, str]:
    """Write the files next to the weights, ``config.json`` last; return file name → sha256.

    Args:
        plan: What was merged.
        out: Output directory.
        when_read: Called when the parents' files have been read, before anything is written.

    Raises:
        InvalidInput: A file is not a plain file inside its checkpoint anymore.
    """
    contents = {name: plan.companions.read(name) for name in plan.companions}
    if needs_index(plan.shards):
        contents[INDEX_NAME] = index_text(plan.shards).encode()
    contents[CONFIG] = config_bytes(dict(plan.config))
    contents |= {name: _without_local_paths(name, content) for name, content in contents.items()}
    when_read()
    for name, content in contents.items():  # The config is the last one.
        _write(out / name, content)
    with refusing_disk_errors(out):
        fsync(out)
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def _without_local_paths(name: str, content: bytes) -> bytes:
    """Return a configuration without the fields in which libraries note where a model was loaded from."""
    if not name.endswith("config.json") or not any(field.encode() in content for field in _ORIGIN_FIELDS):
        return content
    try:
        config = parse_json_object(content, name)
    except InvalidInput:  # a file that no library reads; it is copied as it is
        return content
    local = [field for field in _ORIGIN_FIELDS if str(config.get(field, "")).startswith(("/", "~", "file:"))]
    return config_bytes({key: value for key, value in config.items() if key not in local}) if local else content


def file_names(plan: MergePlan) -> set[str]:
    """Names of all files that a merge writes."""
    return {
        *(shard.name for shard in plan.shards),
        *plan.companions,
        *([INDEX_NAME] if needs_index(plan.shards) else []),
        CONFIG,
    }


def _write(path: Path, content: bytes) -> None:
    with refusing_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + PARTIAL)
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)


def _is_ours(path: Path) -> bool:
    return path.name.endswith(PARTIAL)
