"""What a merge has finished, line by line, so that a killed one goes on where it was.

A line is appended when all blocks of a tensor have been written, and when a shard is complete, flushed to the disk and
hashed. After ``kill -9`` everything that was written is still there, so both kinds count. After a crash of the machine
only what was flushed is certain: the journal remembers the boot it was written in, and in another boot only complete
shards count.

The first line identifies the merge: recipe, seed, inputs (path, size, time of change), device and layout. A journal of
another merge is not continued; the merge starts from the beginning.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from merge_core.health import TensorHealth
from merge_core.plan import MergePlan
from merge_core.writer import PARTIAL, refusing_disk_errors

NAME = f"journal{PARTIAL}"
# To be raised whenever the engine would write other bytes for the same plan.
ENGINE = 1


@dataclass(frozen=True)
class Finished:
    """What an interrupted merge had done.

    Args:
        tensors: Output tensor name → what was seen of it.
        shards: File name → sha256 of complete shards.
    """

    tensors: Mapping[str, TensorHealth] = field(default_factory=dict)
    shards: Mapping[str, str] = field(default_factory=dict)


class Journal:
    """The journal of one merge, open for appending."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path, self._fd, self._lock = path, fd, Lock()

    def tensor(self, health: TensorHealth) -> None:
        """All bytes of a tensor have been written."""
        self._append({"tensor": health.name, "broken": health.broken, "zero": health.zero})

    def shard(self, name: str, digest: str) -> None:
        """A shard is complete and on the disk."""
        self._append({"shard": name, "sha256": digest})

    def close(self) -> None:
        """Close the file; it stays until :func:`forget`."""
        os.close(self._fd)

    def _append(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps(entry).encode() + b"\n"
        with self._lock, refusing_disk_errors(self._path):
            os.write(self._fd, line)


def open_journal(out: Path, identity: str, plan: MergePlan) -> tuple[Journal, Finished]:
    """Continue the journal in ``out`` when it is of this merge and on this boot; else begin a new one."""
    path = out / NAME
    finished = _read(path, identity, plan)
    with refusing_disk_errors(path):
        # Written anew, without a line that was cut off, then renamed: a kill in between loses nothing.
        fresh = path.with_name(f"{NAME}{PARTIAL}")
        lines: list[dict[str, Any]] = [{"merge": identity, "boot": _boot()}]
        lines += [{"tensor": t.name, "broken": t.broken, "zero": t.zero} for t in finished.tensors.values()]
        lines += [{"shard": name, "sha256": digest} for name, digest in finished.shards.items()]
        fresh.write_text("".join(json.dumps(line) + "\n" for line in lines))
        fresh.rename(path)
        return Journal(path, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)), finished


def forget(out: Path) -> None:
    """Remove the journal of a finished merge."""
    (out / NAME).unlink(missing_ok=True)


def exists(out: Path) -> bool:
    """Whether ``out`` holds an unfinished merge."""
    return (out / NAME).is_file()


def identity_of(plan: MergePlan, files: Mapping[Path, int], way: str) -> str:
    """A digest of everything that decides the bytes of a merge.

    Args:
        plan: What is merged.
        files: Open file descriptor of every input file.
        way: Seed, device and kind of kernels.
    """
    inputs = {}
    for path, fd in files.items():
        status = os.fstat(fd)
        inputs[str(path)] = [status.st_size, status.st_mtime_ns]
    content = {
        "engine": ENGINE,
        "recipe": plan.recipe.canonical(),
        "inputs": inputs,
        "way": way,
        "headers": [hashlib.sha256(shard.header).hexdigest() for shard in plan.shards],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read(path: Path, identity: str, plan: MergePlan) -> Finished:
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return Finished()
    entries = [json.loads(line) for line in lines if line.endswith(b"\n")]
    if not entries or entries[0].get("merge") != identity:
        return Finished()
    there = {
        shard.name
        for shard in plan.shards
        if any(p.is_file() and p.stat().st_size == shard.size for p in _places(path.parent, shard.name))
    }
    shards = {e["shard"]: e["sha256"] for e in entries if e.get("shard") in there}
    home = {name: shard.name for shard in plan.shards for name in shard.tensors}
    trusted = there if entries[0].get("boot") == _boot() else set(shards)
    tensors = {
        e["tensor"]: TensorHealth(e["tensor"], e["broken"], e["zero"])
        for e in entries
        if "tensor" in e and home.get(e["tensor"]) in trusted
    }
    return Finished(tensors, shards)


def _places(out: Path, shard: str) -> tuple[Path, Path]:
    return out / shard, out / f"{shard}{PARTIAL}"


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
