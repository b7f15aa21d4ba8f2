"""Record the finished parts of each shard line by line, and mark with a lock which participant works on it.

Every output shard has a journal file next to it. The participant that holds its lock works on the shard. So several
processes divide a merge between them, even on several machines that share the file system. When a participant is
killed, its lock is free immediately, and the next holder resumes where the journal ends.

A line is appended when all blocks of a tensor have been written, and when the shard is complete, flushed to the disk
and hashed. After ``kill -9``, everything that was written still exists, so both kinds of lines are valid. After a crash
of the machine, or on another machine, only flushed data is certain. Therefore the journal records the boot it was
written in, and in another boot only a complete shard is valid.

The lines form a chain that starts from the merge: recipe, seed, inputs (path, size, times), device and layout. Lines
from the first mismatch on are ignored, so garbage only costs the work that it hides. In a journal of another merge no
line matches, and the shard starts from the beginning.
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
from mergegate.merge_core.engine.writer import PARTIAL, final_or_partial, refuse_disk_errors
from mergegate.merge_core.files import LineChain, has_mark, try_open_locked
from mergegate.merge_core.plan import MergePlan, Shard
from mergegate.merge_core.system import boot_id

# Increase this whenever the engine would write other bytes for the same plan, or other journal lines. A merge that an
# older engine started is not resumed.
ENGINE = 5
SUFFIX = f".journal{PARTIAL}"


class ShardJournal:
    """The journal of one shard that this participant has claimed.

    Args:
        shard: The shard.
        tensors: Statistics of the tensors that are already written, by name.
        digest: sha256 of the shard if it is complete.
    """

    def __init__(
        self, path: Path, fd: int, shard: Shard, entries: Sequence[Mapping[str, Any]], lines: LineChain
    ) -> None:
        self.shard, self._lines = shard, lines
        # The counterpart of ``TensorHealth.entry``.
        self.tensors = {
            e["tensor"]: TensorHealth(e["tensor"], e["non_finite"], e["zero"], e["rms"], tuple(e["parents"]))
            for e in entries
            if "tensor" in e
        }
        self.digest: str | None = next((e["sha256"] for e in entries if "sha256" in e), None)
        self._path, self._fd, self._lock = path, fd, Lock()
        self._missing = len(shard.tensors) - len(self.tensors)
        self._pending_digest: str | None = None
        if self.digest is not None:
            self.close()

    def record_tensor(self, health: TensorHealth) -> None:
        """Record that all bytes of a tensor have been written."""
        with self._lock:
            self._append(health.entry())
            self.tensors[health.name] = health
            self._missing -= 1
            self._finish()

    def record_digest(self, digest: str) -> None:
        """Record the sha256 of the shard, which has been flushed to the disk.

        Once all tensors are recorded too, the shard is complete and the claim ends.
        """
        with self._lock:
            self._pending_digest = digest
            self._finish()

    def close(self) -> None:
        """Give up the claim, so that another participant can take the shard."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _finish(self) -> None:
        if self._pending_digest is not None and self._missing == 0:
            self._append({"sha256": self._pending_digest})
            self.digest = self._pending_digest
            self.close()

    def _append(self, entry: Mapping[str, Any]) -> None:
        with refuse_disk_errors(self._path):
            _write(self._fd, self._lines.line(json.dumps(entry).encode()))


def claim(out: Path, shard: Shard, identity: str) -> ShardJournal | None:
    """Return the journal of ``shard`` in ``out`` for this participant alone; None if another one has it.

    A valid journal of this merge is truncated after its last valid entry and continued; any other is started again. If
    the journal shows that the shard is complete, the claim ends immediately.
    """
    path = out / f"{shard.name}{SUFFIX}"
    with refuse_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = try_open_locked(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, required=False)
        if fd is None:
            return None
        try:
            lines = LineChain(identity)
            with os.fdopen(os.dup(fd), "rb") as file:
                file.seek(0)
                believed = list(lines.read_verified(file, _is_entry))
            entries = [entry for entry, _ in believed]
            shard_file = final_or_partial(out, shard)
            boot = boot_id()
            same_boot = bool(boot and entries) and entries[0].get("boot") == boot
            complete = any("sha256" in entry for entry in entries)
            if entries and "boot" in entries[0] and shard_file is not None and (same_boot or complete):
                os.ftruncate(fd, believed[-1][1])
                return ShardJournal(path, fd, shard, entries[1:], lines)
            os.ftruncate(fd, 0)
            lines = LineChain(identity)
            _write(fd, lines.line(json.dumps({"boot": boot}).encode()))
            return ShardJournal(path, fd, shard, [], lines)
        except BaseException:
            os.close(fd)
            raise


def exists(out: Path) -> bool:
    """Return whether ``out`` has an unfinished merge: a journal with mergegate's mark."""
    return has_mark(out / NAME)


def merge_identity(plan: MergePlan, files: Mapping[Path, int], mode: str) -> str:
    """Return a digest of everything that decides the bytes of a merge.

    Args:
        plan: Plan of the merge.
        files: Open file descriptor of every input file.
        mode: Seed, device and kind of kernels.
    """
    inputs = {}
    for path, fd in files.items():
        status = os.fstat(fd)
        # Device and inode are omitted because they differ between machines for one shared file.
        inputs[str(path)] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    content = {
        "engine": ENGINE,
        "recipe": plan.recipe.canonical(),
        "inputs": inputs,
        "way": mode,
        "derived": [
            [item.model, item.tensor.name, item.tensor.identity()]
            for job in plan.jobs
            for item in job.inputs
            if isinstance(item.tensor, DerivedTensor)
        ],
        "headers": [hashlib.sha256(shard.header).hexdigest() for shard in plan.shards],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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
