"""Output files: preallocated, written in place from any thread in any order, hashed on the way, named at the end.

While a merge runs, a shard is called ``<name>.partial``. Only :meth:`ShardFiles.complete` gives the final names, after
everything has been written and flushed to the disk; ``config.json``, without which nothing loads the directory, is
written last of all by :mod:`merge_core.output`. So a directory of a failed merge never looks finished.

SHA-256 needs bytes in their order, blocks finish in any order: one thread follows the written front of each shard and
hashes what lies behind it. Those bytes were written a moment ago and come from the page cache, not from the disk.
"""

from __future__ import annotations

import errno
import hashlib
import heapq
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from merge_core.errors import Refused
from merge_core.layout import Shard

PARTIAL = ".partial"
_HASH_BYTES = 4 << 20


class ShardFiles:
    """The shards of one merge while it is written.

    Args:
        directory: Where they go; exists.
        shards: What they hold.
        written: Names of tensors that an interrupted merge has written already.
        digests: File name → sha256 of shards that it has completed.
        on_complete: Called with name and sha256 of a shard that is written, flushed to the disk and hashed.

    Raises:
        Refused: The disk is full or not writable.
    """

    def __init__(
        self,
        directory: Path,
        shards: Sequence[Shard],
        *,
        written: Collection[str] = (),
        digests: Mapping[str, str] | None = None,
        on_complete: Callable[[str, str], None] = lambda name, digest: None,
    ) -> None:
        self._directory, self._shards, self._on_complete = directory, list(shards), on_complete
        self._fds: list[int] = []
        self._condition = threading.Condition()
        self._fronts = [0] * len(shards)
        self._written: list[list[tuple[int, int]]] = [[] for _ in shards]
        self._digests = [(digests or {}).get(shard.name) for shard in shards]
        self._closing = False
        self._failure: BaseException | None = None
        try:
            for shard in self._shards:
                self._fds.append(self._create(shard))
        except BaseException:
            self._close_files()
            raise
        self._hasher = threading.Thread(target=self._hash_all, name="sha256", daemon=True)
        self._hasher.start()
        for index, shard in enumerate(self._shards):
            self.write(index, 0, memoryview(shard.header))
            with self._condition:
                ends = (*shard.offsets[1:], shard.size)
                for name, start, end in zip(shard.tensors, shard.offsets, ends, strict=True):
                    if name in written:
                        heapq.heappush(self._written[index], (start, end))
                self._condition.notify()

    def write(self, shard: int, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset`` of the shard number ``shard``; each byte is written exactly once.

        Raises:
            Refused: The disk is full or fails.
        """
        path = self._path(self._shards[shard])
        done = 0
        with refusing_disk_errors(path):
            while done < len(data):
                done += os.pwrite(self._fds[shard], data[done:], offset + done)
        with self._condition:
            heapq.heappush(self._written[shard], (offset, offset + len(data)))
            if self._written[shard][0][0] <= self._fronts[shard]:
                self._condition.notify()

    def complete(self) -> dict[str, str]:
        """Wait until every shard is on the disk and hashed, and give the files their names.

        Returns:
            File name → sha256.
        """
        self._hasher.join()
        if self._failure is not None:
            raise self._failure
        self._close_files()
        for shard in self._shards:
            self._path(shard).rename(self._directory / shard.name)
        return {shard.name: str(digest) for shard, digest in zip(self._shards, self._digests, strict=True)}

    def abandon(self) -> None:
        """Stop after a failure; the partial files stay for whoever looks into it or resumes."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._hasher.join()
        self._close_files()

    def _create(self, shard: Shard) -> int:
        path = self._path(shard)
        with refusing_disk_errors(path):
            final = self._directory / shard.name
            if final.exists():  # Killed between naming the files and the end: their content is as the journal says.
                final.rename(path)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.ftruncate(fd, shard.size)
                _allocate(fd, shard.size)
            except BaseException:
                os.close(fd)
                raise
        return fd

    def _path(self, shard: Shard) -> Path:
        return self._directory / f"{shard.name}{PARTIAL}"

    def _hash_all(self) -> None:
        try:
            buffer = bytearray(_HASH_BYTES)
            for index, shard in enumerate(self._shards):
                if self._digests[index] is not None:
                    continue
                digest, done = hashlib.sha256(), 0
                while done < shard.size:
                    front = self._wait_for(index, done)
                    if front is None:
                        return
                    while done < front:
                        count = os.preadv(
                            self._fds[index], [memoryview(buffer)[: min(front - done, _HASH_BYTES)]], done
                        )
                        digest.update(memoryview(buffer)[:count])
                        done += count
                with refusing_disk_errors(self._path(shard)):
                    os.fsync(self._fds[index])
                self._digests[index] = digest.hexdigest()
                self._on_complete(shard.name, digest.hexdigest())
        except BaseException as failure:
            self._failure = failure

    def _wait_for(self, index: int, done: int) -> int | None:
        """End of the written front of a shard, once it is beyond ``done``; None when the merge was abandoned."""
        with self._condition:
            while not self._closing:
                written = self._written[index]
                while written and written[0][0] <= self._fronts[index]:
                    self._fronts[index] = max(self._fronts[index], heapq.heappop(written)[1])
                if self._fronts[index] > done:
                    return self._fronts[index]
                self._condition.wait()
        return None

    def _close_files(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


class refusing_disk_errors:  # noqa: N801  # reads as the statement it is: `with refusing_disk_errors(path):`
    """Turn an OSError on ``path`` into a refusal that says what to do."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError):
            return
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise Refused(
            str(self._path),
            found="the disk is full" if full else f"cannot be written: {error.strerror}",
            expected="room for the whole result" if full else "a writable directory",
            remedy="free some space, or choose another place" if full else "check disk and rights",
        ) from None


def _allocate(fd: int, size: int) -> None:
    # Reserving the space now finds a full disk before any work is done. Systems without it find out while writing.
    allocate: Callable[[int, int, int], None] | None = getattr(os, "posix_fallocate", None)
    if allocate is None or size == 0:
        return
    try:
        allocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
