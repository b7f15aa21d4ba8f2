"""Write and hash output shards. Any thread may write any part at any time.

During a merge, a shard is named ``<name>.partial``. ``merge_weights`` renames the shards after all of them have been
flushed to the disk, and then writes ``config.json``, without which no library loads the directory. So the directory of
a failed merge never looks finished.

SHA-256 needs bytes in order, but blocks finish in any order. Therefore one thread hashes each shard as far as it has
been written without gaps. Blocks stay in memory until they are hashed, up to a limit. Beyond it, the thread reads them
again from the page cache.
"""

from __future__ import annotations

import errno
import hashlib
import heapq
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mergegate.merge_core.files import disk_refusal
from mergegate.merge_core.plan import Shard
from mergegate.merge_core.system import forget_cached, read_at, reserve_space, write_soon

PARTIAL = ".partial"
_HASH_BYTES = 4 << 20
# Limit of the memory for written blocks that wait to be hashed.
WAITING_BYTES = 32 << 20
# Size of the parts of a shard that the system is asked to write to the disk. Each stays cached during the next few.
_FLUSH_BYTES, _FLUSHING_PARTS = 16 << 20, 4


@dataclass(order=True)
class _WrittenRange:
    """A written range of bytes, with the data while it is in memory."""

    start: int
    end: int = field(compare=False)
    data: memoryview | None = field(compare=False, default=None)
    release: Callable[[], None] = field(compare=False, default=lambda: None)


@dataclass(eq=False)
class _OpenShard:
    """A shard during writing: its file, and the ranges of bytes that are written but not yet hashed."""

    shard: Shard
    fd: int
    on_complete: Callable[[str], None]
    hashed: int = 0
    written: list[_WrittenRange] = field(default_factory=list)


class ShardFiles:
    """The shards that this process writes into ``directory``, which must exist.

    ``keep_pages`` sets whether data stays in the page cache after it has been flushed to the disk and hashed.
    """

    def __init__(self, directory: Path, *, keep_pages: bool = True) -> None:
        self._directory, self._keep_pages = directory, keep_pages
        self._condition = threading.Condition()
        self._open: dict[str, _OpenShard] = {}
        self._queue: deque[_OpenShard] = deque()
        self._waiting = 0  # Bytes in memory that wait to be hashed.
        self._closing: Literal["when done", "now"] | None = None
        self._failure: BaseException | None = None
        self._hasher = threading.Thread(target=self._hash_all, name="sha256", daemon=True)
        self._hasher.start()

    def open(self, shard: Shard, *, finished_names: Collection[str], on_complete: Callable[[str], None]) -> None:
        """Start or continue a shard.

        Args:
            shard: Layout of the shard.
            finished_names: Names of the tensors that an interrupted merge has already written.
            on_complete: Function called in another thread with the shard's sha256, after the shard was flushed to disk.
        """
        path = self._directory / f"{shard.name}{PARTIAL}"
        with refuse_disk_errors(path):
            final = self._directory / shard.name
            if final.exists():  # A merge was killed after it renamed the shard. The content matches the journal.
                final.rename(path)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.ftruncate(fd, shard.size)
                reserve_space(fd, shard.size)
            except BaseException:
                os.close(fd)
                raise
        open_shard = _OpenShard(shard, fd, on_complete)
        ends = (*shard.offsets[1:], shard.size)
        for name, start, end in zip(shard.tensors, shard.offsets, ends, strict=True):
            if name in finished_names and start < end:
                heapq.heappush(open_shard.written, _WrittenRange(start, end))
        with self._condition:
            self._open[shard.name] = open_shard
            self._queue.append(open_shard)
        self.write(shard.name, 0, memoryview(shard.header))

    def write(self, shard: str, offset: int, data: memoryview, release: Callable[[], None] | None = None) -> None:
        """Write ``data`` to the shard with this name, at ``offset`` in bytes. Write each byte exactly once.

        ``data`` must stay valid until ``release`` is called, now or later in another thread. Without ``release``, it is
        not used after this call.
        """
        open_shard = self._open[shard]
        written_bytes = 0
        with refuse_disk_errors(self._directory / f"{shard}{PARTIAL}"):
            while written_bytes < len(data):
                written_bytes += os.pwrite(open_shard.fd, data[written_bytes:], offset + written_bytes)
        run = _WrittenRange(offset, offset + len(data))
        with self._condition:
            if release is not None and self._waiting + len(data) <= WAITING_BYTES:
                self._waiting += len(data)
                run.data, run.release, release = data, release, None
            heapq.heappush(open_shard.written, run)
            if run.start == open_shard.hashed:
                self._condition.notify()
        if release is not None:
            release()

    def check(self) -> None:
        """Raise the exception that stopped the hashing thread. If it is running, do nothing."""
        if self._failure is not None:
            raise self._failure

    def close(self, *, abandon: bool = False) -> None:
        """Wait until every shard is hashed, and close the files. With ``abandon``, do not wait.

        The partial files of an abandoned merge stay, so that it can be resumed.
        """
        with self._condition:
            self._closing = "now" if abandon else "when done"
            self._condition.notify_all()
        self._hasher.join()
        while self._open:
            os.close(self._open.popitem()[1].fd)

    def _hash_all(self) -> None:
        buffer = memoryview(bytearray(_HASH_BYTES))
        try:
            while True:
                with self._condition:
                    self._condition.wait_for(lambda: self._queue or self._closing is not None)
                    if not self._queue or self._closing == "now":
                        return
                    open_shard = self._queue.popleft()
                if not self._hash(open_shard, buffer):
                    return
        except BaseException as failure:
            self._failure = failure

    def _hash(self, open_shard: _OpenShard, buffer: memoryview) -> bool:
        """Hash a shard to its end. Return False if the merge was abandoned."""
        digest, written, flushed = hashlib.sha256(), open_shard.written, 0
        path = self._directory / f"{open_shard.shard.name}{PARTIAL}"
        while open_shard.hashed < open_shard.shard.size:
            with self._condition:
                self._condition.wait_for(
                    lambda: self._closing == "now" or (written and written[0].start == open_shard.hashed)
                )
                if self._closing == "now":
                    return False
                run = heapq.heappop(written)
            if run.data is not None:
                digest.update(run.data)
                run.release()
                with self._condition:
                    self._waiting -= len(run.data)
            else:
                start = run.start
                with refuse_disk_errors(path):
                    while start < run.end:
                        count = read_at(open_shard.fd, buffer[: min(run.end - start, _HASH_BYTES)], start)
                        if count == 0:
                            raise OSError(errno.EIO, "the file was truncated while it was written")
                        digest.update(buffer[:count])
                        start += count
            with self._condition:
                open_shard.hashed = run.end
            # Keep the disk busy, so that the flush at the end is short.
            while open_shard.hashed - flushed >= _FLUSH_BYTES:
                write_soon(open_shard.fd, flushed, _FLUSH_BYTES)
                flushed += _FLUSH_BYTES
                if not self._keep_pages and (written_end := flushed - _FLUSHING_PARTS * _FLUSH_BYTES) > 0:
                    forget_cached(open_shard.fd, written_end - _FLUSH_BYTES, _FLUSH_BYTES)
        with refuse_disk_errors(path):
            os.fsync(open_shard.fd)
        if not self._keep_pages:
            forget_cached(open_shard.fd)
        with self._condition:
            os.close(self._open.pop(open_shard.shard.name).fd)
        open_shard.on_complete(digest.hexdigest())
        return True


def final_or_partial(directory: Path, shard: Shard) -> Path | None:
    """Return the path of a shard, with its final or partial name, or None if no file has the right size."""
    # Check the final name last, because another participant may rename the file between the two checks.
    for path in (directory / f"{shard.name}{PARTIAL}", directory / shard.name):
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if stat.S_ISREG(status.st_mode) and status.st_size == shard.size:
            return path
    return None


@contextmanager
def refuse_disk_errors(path: Path) -> Iterator[None]:
    """Turn any OSError of the block into DiskUnavailable, whose message names ``path`` and the remedy."""
    try:
        yield
    except OSError as error:
        raise disk_refusal(error, path) from None
