"""What a merge has finished of a shard, line by line; and, by its lock, who works on it.

Every output shard has a journal file beside it. Whoever holds its lock works on it: so several processes, also on
several machines that share the file system, divide a merge between them. The lock of a killed one is free at once, and
whoever takes it resumes where the journal ends.

A line is appended when all blocks of a tensor have been written, and when the shard is complete, flushed to the disk
and hashed. After ``kill -9`` everything that was written is still there, so both kinds count. After a crash of the
machine, or on another one, only what was flushed is certain: the journal remembers the boot it was written in, and in
another boot only a complete shard counts.

Lines vouch for each other and for the merge: recipe, seed, inputs (path, size, times), device and layout. The first
that does not fit ends the belief: garbage costs what it hides, and of a journal of another merge nothing is believed,
its shard starts from the beginning.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from mergegate.merge_core.checkpoint import DerivedTensor
from mergegate.merge_core.engine.coordination import NAME
from mergegate.merge_core.engine.health import TensorHealth
from mergegate.merge_core.engine.writer import PARTIAL, final_or_partial, shard_disk_errors_refused
from mergegate.merge_core.files import ASIDE, LineChain, has_mark, remove_any, try_open_locked
from mergegate.merge_core.plan import MergePlan, Shard
from mergegate.merge_core.system import boot_id

# To be raised whenever the engine would write other bytes for the same plan, or other lines into a journal: what an
# older engine left is not continued.
ENGINE = 5
_SUFFIX = f".journal{PARTIAL}"


class ShardJournal:
    """The journal of one shard, claimed by this participant.

    Args:
        shard: Which shard.
        tensors: What was seen of the tensors that are written already, by name.
        digest: sha256 of the shard if it is complete.
    """

    def __init__(
        self, path: Path, fd: int, shard: Shard, entries: Sequence[Mapping[str, Any]], lines: LineChain
    ) -> None:
        self.shard, self._lines = shard, lines
        self.tensors = {e["tensor"]: TensorHealth.from_entry(e) for e in entries if "tensor" in e}
        self.digest: str | None = next((e["sha256"] for e in entries if "sha256" in e), None)
        self._path, self._fd, self._lock = path, fd, Lock()
        self._missing = len(shard.tensors) - len(self.tensors)
        self._hashed: str | None = None
        if self.digest is not None:
            self.close()

    def tensor(self, health: TensorHealth) -> None:
        """All bytes of a tensor have been written."""
        with self._lock:
            self._append(health.entry())
            self.tensors[health.name] = health
            self._missing -= 1
            self._finish()

    def hashed(self, digest: str) -> None:
        """The shard is on the disk, and this is its sha256. With the last tensor's line it is complete, and free."""
        with self._lock:
            self._hashed = digest
            self._finish()

    def close(self) -> None:
        """Give the shard up, so that another participant can claim it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _finish(self) -> None:
        if self._hashed is not None and self._missing == 0:
            self._append({"sha256": self._hashed})
            self.digest = self._hashed
            self.close()

    def _append(self, entry: Mapping[str, Any]) -> None:
        with shard_disk_errors_refused(self._path):
            _write(self._fd, self._lines.line(json.dumps(entry).encode()))


def claim(out: Path, shard: Shard, identity: str) -> ShardJournal | None:
    """The journal of ``shard`` in ``out``, for this participant alone; None while another one has it.

    It is continued when it is of this merge and can be believed, else started again. When it says that the shard is
    complete, the claim is given back at once.
    """
    path = out / f"{shard.name}{_SUFFIX}"
    with shard_disk_errors_refused(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = try_open_locked(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, required=False)
        if fd is None:
            return None
        try:
            entries, lines = _valid_entries(fd, out, shard, identity)
            return ShardJournal(path, fd, shard, entries, lines)
        except BaseException:
            os.close(fd)
            raise


def exists(out: Path) -> bool:
    """Return whether ``out`` holds an unfinished merge: a journal that carries mergegate's mark."""
    return has_mark(out / NAME)


def remove_journals(out: Path) -> None:
    """Remove the journals of a finished merge."""
    for path in (*out.glob(f"**/*{_SUFFIX}"), *out.glob(f"**/*{PARTIAL}{ASIDE}*")):
        remove_any(path)


def merge_identity(plan: MergePlan, files: Mapping[Path, int], way: str) -> str:
    """A digest of everything that decides the bytes of a merge.

    Args:
        plan: What is merged.
        files: Open file descriptor of every input file.
        way: Seed, device and kind of kernels.
    """
    inputs = {}
    for path, fd in files.items():
        status = os.fstat(fd)
        # Not device and inode: of one shared file they differ between machines.
        inputs[str(path)] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    content = {
        "engine": ENGINE,
        "recipe": plan.recipe.canonical(),
        "inputs": inputs,
        "way": way,
        "derived": [
            [item.model, item.tensor.name, item.tensor.identity()]
            for job in plan.jobs
            for item in job.inputs
            if isinstance(item.tensor, DerivedTensor)
        ],
        "headers": [hashlib.sha256(shard.header).hexdigest() for shard in plan.shards],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _valid_entries(fd: int, out: Path, shard: Shard, identity: str) -> tuple[list[dict[str, Any]], LineChain]:
    """Entries that still hold, and the lines that go on from them; the file is cut there, or started again."""
    lines = LineChain(identity)
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        found = list(lines.whole(file, _is_entry))
    entries = [entry for entry, _ in found]
    there = final_or_partial(out, shard)
    boot = boot_id()
    same_boot = bool(boot and entries) and entries[0].get("boot") == boot
    complete = any("sha256" in entry for entry in entries)
    if entries and "boot" in entries[0] and there is not None and (same_boot or complete):
        os.ftruncate(fd, found[-1][1])
        return entries[1:], lines
    os.ftruncate(fd, 0)
    lines = LineChain(identity)
    _write(fd, lines.line(json.dumps({"boot": boot}).encode()))
    return [], lines


def _is_entry(entry: Any) -> bool:
    match entry:
        case {"boot": str()} | {"sha256": str()}:
            return True
        case {"tensor": str(), "non_finite": int(), "zero": bool(), "rms": float() | int(), "parents": list()}:
            return True
    return False


def _write(fd: int, line: bytes) -> None:
    if os.write(fd, line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
