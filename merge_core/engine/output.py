"""Everything of a result beside its weights: index, tokenizer and code files from the donor, and config.json last."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection
from pathlib import Path

from merge_core.checkpoint import FILE, INDEX_NAME
from merge_core.engine.coordination import NAME
from merge_core.engine.writer import PARTIAL, refusing_disk_errors
from merge_core.errors import InvalidInput
from merge_core.parsing import parse_json_object, read_plain
from merge_core.plan import MergePlan, config_bytes, index_text, needs_index
from merge_core.store import MARK, fsync, has_mark

CONFIG = "config.json"
# The largest tokenizers have 33 MB.
_MAX_COMPANION_BYTES = 256 << 20

# Results of a recipe's steps, until the last one is done.
STEPS = f"steps{PARTIAL}"


def check_directory(out: Path, *, expected: Collection[str] = ()) -> None:
    """Accept ``out`` if it is empty or holds only what an unfinished merge left.

    Args:
        out: Output directory. It exists.
        expected: Names of the files that the merge writes.

    Raises:
        InvalidInput: The directory holds anything else. mergegate would delete or mix up files of the user.
    """
    with refusing_disk_errors(out):
        names = {path.name for path in out.iterdir()}
        # Listed first: another participant may create its journal now, which makes everything here ours.
        if has_mark(out / NAME):
            ours = {name for name in names if name.endswith(PARTIAL)} | {Path(name).parts[0] for name in expected}
        else:
            # A participant that was killed, or is writing the mark now, leaves an empty journal and nothing else.
            ours = {NAME} if names <= {NAME, MARK} and _is_empty(out / NAME) else set()
            ours |= {MARK} if has_mark(out / MARK) else set()
        foreign = sorted(names - ours)
        if foreign:
            raise InvalidInput(
                str(out),
                found=f"not empty: {foreign[0]}",
                expected="a new or empty directory",
                remedy="choose another one",
            )


def write_companions(plan: MergePlan, out: Path, when_read: Callable[[], None] = lambda: None) -> dict[str, str]:
    """Index and donor files, then ``config.json``; returns file name → sha256.

    Args:
        plan: What was merged.
        out: Output directory.
        when_read: Called when the donor's files have been read, before anything is written.

    Raises:
        InvalidInput: A companion that is no plain file inside its checkpoint any more.
    """
    contents: dict[str, bytes] = {}
    if needs_index(plan.shards):
        contents[INDEX_NAME] = index_text(plan.shards).encode()
    for name in plan.donor.companions:
        if name in plan.rewritten:
            continue
        if plan.tokenizer is plan.donor or not _is_about_tokens(name):
            contents[name] = _companion(plan.donor.directory, name)
    for name in plan.tokenizer.companions:
        if name in plan.rewritten:
            continue
        if plan.tokenizer is not plan.donor and _is_about_tokens(name):
            contents[name] = _companion(plan.tokenizer.directory, name)
    for name, content in plan.rewritten.items():
        if content is None:
            contents.pop(name, None)
        else:
            contents[name] = content
    if plan.chat_template is not None:
        _set_chat_template(contents, plan.chat_template)
    contents[CONFIG] = config_bytes(dict(plan.config))
    when_read()
    for name, content in contents.items():  # The config is the last one.
        _write(out / name, content)
    with refusing_disk_errors(out):
        fsync(out)
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def _companion(directory: Path, name: str) -> bytes:
    """The bytes of a plain file inside the directory: what a link leads to elsewhere does not travel with a result."""
    return read_plain(directory / name, _MAX_COMPANION_BYTES, within=directory, expected="a file of the checkpoint")


def _is_about_tokens(name: str) -> bool:
    """Whether a file goes with the tokenizer (also token ids in the generation config) rather than with the network."""
    return not (name.endswith("processor_config.json") or name.endswith(".py"))


def _set_chat_template(contents: dict[str, bytes], template: str) -> None:
    """Put the template everywhere a reader may look, so that no stale one is found."""
    contents.pop("chat_template.json", None)
    contents[FILE] = template.encode()
    if "tokenizer_config.json" not in contents:
        return
    config = parse_json_object(contents["tokenizer_config.json"], "tokenizer_config.json")
    config["chat_template"] = template
    contents["tokenizer_config.json"] = config_bytes(config)


def file_names(plan: MergePlan) -> set[str]:
    """Names of all files that a merge writes."""
    return {
        *(shard.name for shard in plan.shards),
        *plan.donor.companions,
        *plan.tokenizer.companions,
        *(name for name, content in plan.rewritten.items() if content is not None),
        *([INDEX_NAME] if needs_index(plan.shards) else []),
        CONFIG,
        FILE,
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


def _is_empty(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size == 0
    except FileNotFoundError:
        return False
