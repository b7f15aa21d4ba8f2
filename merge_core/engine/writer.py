"""Output files: preallocated, written in place from any thread in any order, hashed on the way, named at the end.

While a merge runs, a shard is called ``<name>.partial``. Only :func:`name_shards` gives the final names, after all of
them have been written and flushed to the disk; ``config.json``, without which nothing loads the directory, is written
last of all by :mod:`merge_core.engine.output`. So a directory of a failed merge never looks finished.

SHA-256 needs bytes in their order, blocks finish in any order: one thread follows the written front of each shard and
hashes what lies behind it. A few blocks stay in memory until then; when it falls far behind, it reads again what was
written a moment ago, from the page cache.
"""

from __future__ import annotations

import hashlib
import heapq
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mergegate.merge_core.files import disk_refusal
from mergegate.merge_core.plan import Shard
from mergegate.merge_core.system import forget_cached, read_at, reserve_space

PARTIAL = ".partial"
_HASH_BYTES = 4 << 20
# Written blocks that wait in memory for being hashed.
WAITING_BYTES = 32 << 20


@dataclass(order=True)
class _Run:
    """Bytes that have been written: where, and the bytes themselves while they are in memory."""

    start: int
    end: int = field(compare=False)
    data: memoryview | None = field(compare=False, default=None)
    release: Callable[[], None] = field(compare=False, default=lambda: None)


class _OpenShard:
    """A shard while it is written: its file, and which runs of bytes are there but not yet hashed."""

    def __init__(self, shard: Shard, fd: int, on_complete: Callable[[str], None]) -> None:
        self.shard, self.fd, self.on_complete = shard, fd, on_complete
        self.hashed = 0
        self.written: list[_Run] = []

    def next(self) -> _Run | None:
        """The run of bytes that is to be hashed next, if it is there."""
        if self.written and self.written[0].start == self.hashed:
            return heapq.heappop(self.written)
        return None


class ShardFiles:
    """The shards that this process writes, one after the other or several at once.

    Args:
        directory: Where they go; exists.
        keep_pages: Whether what was written stays in the page cache when it is on the disk and hashed.
    """

    def __init__(self, directory: Path, *, keep_pages: bool = True) -> None:
        self._directory, self._keep_pages = directory, keep_pages
        self._condition = threading.Condition()
        self._open: dict[str, _OpenShard] = {}
        self._queue: deque[_OpenShard] = deque()
        self._waiting = 0  # Bytes in memory that are to be hashed.
        self._closing: Literal["when done", "now"] | None = None
        self._failure: BaseException | None = None
        self._hasher = threading.Thread(target=self._hash_all, name="sha256", daemon=True)
        self._hasher.start()

    def open(self, shard: Shard, *, written: Collection[str], on_complete: Callable[[str], None]) -> None:
        """Begin or continue a shard.

        Args:
            shard: What it holds.
            written: Names of its tensors that an interrupted merge has written already.
            on_complete: Called with its sha256, from another thread, once it is written, flushed and hashed.

        Raises:
            Refused: The disk is full or not writable.
        """
        opened = _OpenShard(shard, self._create(shard), on_complete)
        ends = (*shard.offsets[1:], shard.size)
        for name, start, end in zip(shard.tensors, shard.offsets, ends, strict=True):
            if name in written and start < end:
                heapq.heappush(opened.written, _Run(start, end))
        with self._condition:
            self._open[shard.name] = opened
            self._queue.append(opened)
        self.write(shard.name, 0, memoryview(shard.header))

    def write(self, shard: str, offset: int, data: memoryview, release: Callable[[], None] | None = None) -> None:
        """Write ``data`` at ``offset`` of a shard; each byte is written exactly once.

        Args:
            shard: Its name.
            offset: In the file.
            data: May be used until ``release`` is called.
            release: Called, here or later and in another thread, when ``data`` is no longer needed; None: it is not
                needed after this call.

        Raises:
            Refused: The disk is full or fails.
        """
        opened = self._open[shard]
        done = 0
        with shard_disk_errors_refused(self._directory / f"{shard}{PARTIAL}"):
            while done < len(data):
                done += os.pwrite(opened.fd, data[done:], offset + done)
        run = _Run(offset, offset + len(data))
        with self._condition:
            if release is not None and self._waiting + len(data) <= WAITING_BYTES:
                self._waiting += len(data)
                run.data, run.release, release = data, release, None
            heapq.heappush(opened.written, run)
            if run.start == opened.hashed:
                self._condition.notify()
        if release is not None:
            release()

    def complete(self) -> None:
        """Wait until every shard is on the disk and hashed, and close the files.

        Raises:
            Refused: The disk failed.
        """
        self._close("when done")
        self.check()

    def check(self) -> None:
        """Raise what has gone wrong in the thread that hashes."""
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """Stop after a failure; the partial files stay for a look at the cause, or to be resumed."""
        self._close("now")

    def _close(self, how: Literal["when done", "now"]) -> None:
        with self._condition:
            self._closing = how
            self._condition.notify_all()
        self._hasher.join()
        while self._open:
            os.close(self._open.popitem()[1].fd)

    def _create(self, shard: Shard) -> int:
        path = self._directory / f"{shard.name}{PARTIAL}"
        with shard_disk_errors_refused(path):
            final = self._directory / shard.name
            if final.exists():  # Killed between naming the files and the end: their content is as the journal says.
                final.rename(path)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.ftruncate(fd, shard.size)
                reserve_space(fd, shard.size)
            except BaseException:
                os.close(fd)
                raise
        return fd

    def _hash_all(self) -> None:
        try:
            buffer = bytearray(_HASH_BYTES)
            while (opened := self._next()) is not None:
                if not self._hash(opened, memoryview(buffer)):
                    return
        except BaseException as failure:
            self._failure = failure

    def _next(self) -> _OpenShard | None:
        with self._condition:
            while self._closing != "now":
                if self._queue:
                    return self._queue.popleft()
                if self._closing is not None:
                    return None
                self._condition.wait()
        return None

    def _hash(self, opened: _OpenShard, buffer: memoryview) -> bool:
        """Follow a shard to its end; False when it was abandoned."""
        digest = hashlib.sha256()
        while opened.hashed < opened.shard.size:
            with self._condition:
                while (run := opened.next()) is None and self._closing != "now":
                    self._condition.wait()
            if run is None or self._closing == "now":
                return False
            if run.data is not None:
                digest.update(run.data)
                run.release()
                with self._condition:
                    self._waiting -= len(run.data)
            else:
                self._hash_file(opened.fd, run, digest, buffer)
            with self._condition:
                opened.hashed = run.end
        with shard_disk_errors_refused(self._directory / f"{opened.shard.name}{PARTIAL}"):
            os.fsync(opened.fd)
        if not self._keep_pages:
            forget_cached(opened.fd)
        opened.on_complete(digest.hexdigest())
        return True

    @staticmethod
    def _hash_file(fd: int, run: _Run, digest: hashlib._Hash, buffer: memoryview) -> None:
        done = run.start
        while done < run.end:
            count = read_at(fd, buffer[: min(run.end - done, _HASH_BYTES)], done)
            digest.update(buffer[:count])
            done += count


def name_shards(directory: Path, shards: Sequence[Shard]) -> None:
    """Give the complete files their names, those that do not have them yet."""
    for shard in shards:
        path = directory / f"{shard.name}{PARTIAL}"
        with shard_disk_errors_refused(path):
            if path.exists():
                path.rename(directory / shard.name)


def final_or_partial(directory: Path, shard: Shard) -> Path | None:
    """The file of a shard, under whichever name, if it has its size.

    The final name is looked at last: another participant may give it between the two looks.
    """
    for path in (directory / f"{shard.name}{PARTIAL}", directory / shard.name):
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if stat.S_ISREG(status.st_mode) and status.st_size == shard.size:
            return path
    return None


class shard_disk_errors_refused:  # noqa: N801  # reads as the statement it is: `with refusing_disk_errors(path):`
    """Turn an OSError on ``path`` into a refusal that says what to do."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError):
            return
        raise disk_refusal(error, self._path) from None
