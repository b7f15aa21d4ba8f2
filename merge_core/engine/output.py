"""Write the files of a merge other than its weights: index, tokenizer, code, and ``config.json`` last."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection
from pathlib import Path

from mergegate.merge_core.checkpoint import INDEX_NAME
from mergegate.merge_core.engine.journal import NAME
from mergegate.merge_core.engine.writer import PARTIAL, refuse_disk_errors
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import fsync, has_mark
from mergegate.merge_core.parsing import parse_json_object
from mergegate.merge_core.plan import MergePlan, network_shards, requires_index, serialize_config

CONFIG = "config.json"

# Libraries write these fields but do not read them. They contain the directory of the user who saved the file.
_ORIGIN_FIELDS = ("_name_or_path", "name_or_path", "tokenizer_file", "special_tokens_map_file")

# Directory for the results of a recipe's steps until the merge is finished.
STEPS = f"steps{PARTIAL}"


def check_directory(out: Path, *, expected: Collection[str] = ()) -> None:
    """Raise InvalidInput unless ``out`` is empty or has only the files of an unfinished merge.

    Otherwise the merge could overwrite or delete files of the user. ``out`` must exist, and ``expected`` are the names
    of the files that the merge writes.
    """
    with refuse_disk_errors(out):
        names = {path.name for path in out.iterdir()}
        # List the directory before checking the mark. Another participant may create its journal in between, and then
        # all files belong to mergegate.
        if has_mark(out / NAME):
            own_names = {name for name in names if name.endswith(PARTIAL)} | {Path(name).parts[0] for name in expected}
        else:
            # A participant that was killed before it wrote the mark, or is writing it now, leaves one empty file.
            try:
                is_empty = (out / NAME).is_file() and (out / NAME).stat().st_size == 0
            except FileNotFoundError:
                is_empty = False
            own_names = {NAME} if names <= {NAME} and is_empty else set()
        foreign = sorted(names - own_names)
        if foreign:
            raise InvalidInput(
                str(out),
                found=f"not empty: {foreign[0]}",
                expected="a new or empty directory",
                remedy="choose another directory",
            )


def write_companions(plan: MergePlan, out: Path, when_read: Callable[[], None] = lambda: None) -> dict[str, str]:
    """Write all files of a merge other than its weights, ``config.json`` last, and return their sha256 by name.

    ``when_read`` is called after the parents' files have been read and before any file is written.

    Raises:
        InvalidInput: A file of a parent is no longer a plain file inside its checkpoint.
    """
    contents = {name: plan.companions.read(name) for name in plan.companions}
    if requires_index(plan.shards):
        shards = network_shards(plan.shards)
        weight_map = {tensor.name: shard.name for shard in shards for tensor in shard.stored}
        total = sum(shard.size - len(shard.header) for shard in shards)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        contents[INDEX_NAME] = f"{json.dumps(index, indent=2)}\n".encode()
    contents[CONFIG] = serialize_config(dict(plan.config))
    # Remove the fields in which libraries record the path of the loaded model.
    for name, content in contents.items():
        if name.endswith("config.json") and any(field.encode() in content for field in _ORIGIN_FIELDS):
            try:
                config = parse_json_object(content, name)
            except InvalidInput:  # No library can read this file, so it is copied unchanged.
                continue
            local = {field for field in _ORIGIN_FIELDS if str(config.get(field, "")).startswith(("/", "~", "file:"))}
            if local:
                contents[name] = serialize_config({key: value for key, value in config.items() if key not in local})
    when_read()
    for name, content in contents.items():  # The config comes last.
        _write(out / name, content)
    with refuse_disk_errors(out):
        fsync(out)
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def file_names(plan: MergePlan) -> set[str]:
    """Return the names of all files that a merge writes."""
    return {
        *(shard.name for shard in plan.shards),
        *plan.companions,
        *([INDEX_NAME] if requires_index(plan.shards) else []),
        CONFIG,
    }


def _write(path: Path, content: bytes) -> None:
    with refuse_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + PARTIAL)
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
