"""Record in a journal which tensors of a shard are finished, and let several processes share a merge by its locks.

Every output shard has a journal file. The participant that holds the lock of the journal writes the shard. So several
processes can divide a merge, even on several machines that share the file system. When a participant is killed, its
lock ends, and the next holder resumes where the journal ends.

The journal gets a line when a tensor has been written, and a last line when the shard has been hashed and flushed to
the disk. If a participant is killed, the system still has everything that it wrote, so all lines are valid. After a
crash of the machine, or on another machine, only flushed data is certain. Therefore the first line identifies the boot
of the machine, and after another boot the journal is valid only if the shard is complete.

The lines form a hash chain that starts with the identity of the merge: recipe, seed, inputs (path, size, times), device
and layout. Lines from the first mismatch on are ignored. In the journal of another merge, no line matches, and the
shard is started again.

Every participant also holds a shared lock on one file in the directory (:func:`join_merge`). A participant that gets an
exclusive lock knows that it is the only one: the first prepares the directory, and the last cleans up. A lock ends with
its process.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from mergegate.merge_core.checkpoint import DerivedTensor
from mergegate.merge_core.engine.health import TensorHealth
from mergegate.merge_core.engine.writer import PARTIAL, final_or_partial, refuse_disk_errors
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import (
    ASIDE,
    MARK_CONTENT,
    FileIdentity,
    LineChain,
    has_mark,
    lock_file,
    remove_any,
    try_open_locked,
    unlock_file,
)
from mergegate.merge_core.plan import MergePlan, Shard
from mergegate.merge_core.system import boot_id

# Increase this number when the engine writes other bytes for the same plan, or other journal lines. Then merges that an
# older engine started are not resumed.
ENGINE = 5
SUFFIX = f".journal{PARTIAL}"
NAME = f"merge{PARTIAL}"
FINISHING = f"finishing{PARTIAL}"
# Directory for the results of a recipe's steps until the merge is finished.
STEPS = f"steps{PARTIAL}"
CONFIG = "config.json"


class ShardJournal:
    """The journal of a shard that this participant has claimed.

    Attributes:
        shard: Layout of the shard.
        tensors: Statistics of the finished tensors, by name.
        digest: sha256 of the shard. None until the shard is complete.
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
        with self._lock:
            self._append(health.entry())
            self.tensors[health.name] = health
            self._missing -= 1
            self._finish()

    def record_digest(self, digest: str) -> None:
        """Record the sha256 of the shard after it was flushed to the disk.

        When all tensors are recorded too, the shard is complete and the claim ends.
        """
        with self._lock:
            self._pending_digest = digest
            self._finish()

    def close(self) -> None:
        """Give up the claim, so that another participant can claim the shard."""
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
            self._lines.append(self._fd, json.dumps(entry).encode())


def claim(out: Path, shard: Shard, identity: str) -> ShardJournal | None:
    """Claim ``shard`` for this participant. Return its journal, or None if another participant has claimed it.

    A journal of the merge ``identity`` is continued after its last valid line. Any other journal is started again. If
    the shard is complete, the claim ends immediately.
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
            lines.append(fd, json.dumps({"boot": boot}).encode())
            return ShardJournal(path, fd, shard, [], lines)
        except BaseException:
            os.close(fd)
            raise


def merge_identity(plan: MergePlan, files: Mapping[Path, FileIdentity], mode: str) -> str:
    """Return a digest of everything that the bytes of a merge depend on.

    ``files`` has the identity of each input file. ``mode`` is a text with the seed and the device. The bytes do not
    depend on the kind of kernels.
    """
    inputs = {}
    for path, identity in files.items():
        # Device and inode are omitted because they differ between machines for one shared file.
        inputs[str(path)] = [identity.size, identity.mtime_ns, identity.ctime_ns]
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


def _check_directory(out: Path, expected: Collection[str]) -> None:
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


@contextmanager
def join_merge(out: Path, expected: Collection[str]) -> Iterator[None]:
    """Take part in the merge into ``out`` while the ``with`` block runs, then wait for the other participants.

    If the block raises, do not wait. The last participant removes the files that only an unfinished merge needs, unless
    it failed, because the merge can be resumed from them.

    Args:
        out: Output directory. It must exist.
        expected: Names of the files that the merge writes.

    Raises:
        InvalidInput: ``out`` is neither empty nor has an unfinished merge.
    """
    path = out / NAME
    while True:
        exists = path.exists()
        _check_directory(out, expected)
        with refuse_disk_errors(path):
            try:
                # If the file existed and is gone now, the others have finished. Do not recreate it: their result stays.
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (0 if exists else os.O_CREAT), 0o644)
            except FileNotFoundError:
                continue
        try:
            # Write the mark before any other file, because it shows that later files belong to mergegate. It does not
            # matter that all participants write it: they write the same bytes at the same offset.
            with refuse_disk_errors(path):
                os.write(fd, MARK_CONTENT)
            if lock_file(fd, path, wait=False, required=False):  # There is no other participant.
                with refuse_disk_errors(out):
                    (out / CONFIG).unlink(missing_ok=True)  # It is written again when the merge finishes.
            if lock_file(fd, path, shared=True, required=False):
                break
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)

    try:
        yield
        # Other participants still need the files that are removed here, so all wait until the last one is done.
        unlock_file(fd)
        if lock_file(fd, path, required=False):
            shutil.rmtree(out / STEPS, ignore_errors=True)
            for leftover in (*out.glob(f"**/*{SUFFIX}"), *out.glob(f"**/*{PARTIAL}{ASIDE}*")):
                remove_any(leftover)
            (out / FINISHING).unlink(missing_ok=True)
            path.unlink()
    finally:
        os.close(fd)
