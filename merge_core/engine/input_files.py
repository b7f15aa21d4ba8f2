"""Open input files when they are read, and release them and their cached pages after their last use.

A merge of many sharded checkpoints has more input files than a process may have open. The files that were used last
stay open. When a file is opened again, it must still be the same file with the same timestamps.

The system caches every page of a file that is read. Allocating memory for these pages can take half of a merge's time
(``dev/measurements/merge-speed.md``). Therefore each part of an input is released after its last use, and the system
reuses its memory for the next part. Pages that were cached before the merge stay cached, because another program may
need them.

All pages stay cached if the merge is small or the disk is slow. On a slow disk, allocating memory costs little in
comparison, and the next merge of the same models would have to wait for the disk again.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mergegate.merge_core.errors import InvalidInput, MergegateError
from mergegate.merge_core.files import FileIdentity, file_identity, require_unchanged
from mergegate.merge_core.plan import MergePlan, TensorJob
from mergegate.merge_core.system import (
    available_memory,
    cached_bytes,
    forget_cached,
    open_file_limit,
    open_uncached,
    read_at,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


# Number of input files that stay open, and the share of the process's limit that they may use.
_MOST_OPEN = 256
_SHARE_OF_LIMIT = 0.25


class InputFiles:
    """The input files of a merge. Instances are thread-safe context managers.

    At most 256 files stay open, and at most a quarter of the number that the process may have open. In addition, each
    thread keeps the file open that it is reading.

    Args:
        paths: Paths of the files.
        locate: Function that returns the actual path of a file, or its open descriptor. Default: the path itself.

    Raises:
        InvalidInput: A file cannot be read.
        ChangedInput: On exit: a file was changed or replaced since the start.
    """

    def __init__(self, paths: Iterable[Path], locate: Callable[[Path], Path | int] = lambda path: path) -> None:
        self._lock = threading.Lock()
        self._limit = max(1, min(_MOST_OPEN, int(open_file_limit() * _SHARE_OF_LIMIT)))
        self._given: dict[Path, int] = {}  # Descriptors from ``locate``, which stay open.
        self._sources: dict[Path, Path] = {}
        self._open: dict[Path, int] = {}  # Least recently used first.
        self._readers: dict[Path, int] = {}  # Number of readers of each file that is being read.
        self._identities: dict[Path, FileIdentity] = {}
        try:
            for path in dict.fromkeys(paths):
                source = locate(path)
                if isinstance(source, int):
                    self._given[path] = os.dup(source)
                    self._identities[path] = file_identity(self._given[path])
                    continue
                self._sources[path] = source
                with self.open(path) as fd:
                    self._identities[path] = file_identity(fd)
        except BaseException:
            self._close()
            raise

    @property
    def identities(self) -> Mapping[Path, FileIdentity]:
        """Identity that each file had when it was opened for the first time."""
        return self._identities

    @contextmanager
    def open(self, path: Path) -> Iterator[int]:
        """Yield an open descriptor of a file. It is valid until the end of the ``with`` statement.

        Raises:
            InvalidInput: The file cannot be read.
            ChangedInput: The file was changed or replaced since it was opened for the first time.
        """
        if path in self._given:
            yield self._given[path]
            return
        with self._lock:
            fd = self._open.pop(path, -1)
            if fd < 0:
                fd = self._open_again(path)
            self._open[path] = fd
            self._readers[path] = self._readers.get(path, 0) + 1
            self._close_unused(self._limit)
        try:
            yield fd
        finally:
            with self._lock:
                self._readers[path] -= 1

    def __enter__(self) -> InputFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            # A changed file may be the cause of the error.
            if error is None or isinstance(error, MergegateError):
                for path, source in self._sources.items():
                    require_unchanged(source, self._identities[path], self._open.get(path))
        finally:
            self._close()

    def _open_again(self, path: Path) -> int:
        source, identity = self._sources[path], self._identities.get(path)
        try:
            fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._close_unused(0):
                return self._open_again(path)
            if identity is not None:
                require_unchanged(source, identity)
            raise InvalidInput(str(path), found=f"cannot be read: {error.strerror}") from None
        if identity is not None:
            try:
                require_unchanged(source, identity, fd)
            except MergegateError:
                os.close(fd)
                raise
        return fd

    def _close_unused(self, limit: int) -> int:
        """Close files that no thread reads, until at most ``limit`` are open. Return the number of closed files."""
        excess = len(self._open) - limit
        unused = [path for path in self._open if not self._readers.get(path)][:excess] if excess > 0 else []
        for path in unused:
            os.close(self._open.pop(path))
        return len(unused)

    def _close(self) -> None:
        for fd in (*self._given.values(), *self._open.values()):
            os.close(fd)
        self._given.clear()
        self._open.clear()


# Size of the parts in which cached file data is released: whole pages on any system, and large, because each release
# interrupts all processors.
PART_BYTES = 16 << 20
# Input size below which releasing pages is not worthwhile.
_MIN_INPUT_BYTES = 256 << 20
# Bytes per second of one reader on a fast disk. Allocating memory takes up to 1 s per GB, half the time that such a
# disk needs to fill it.
_FAST_DISK = 500e6
_PROBES, _PROBE_BYTES = 4, 1 << 20
# Share of the available memory that one tensor may leave cached for its next pass.
_NEXT_PASS_SHARE = 0.25


def input_pages(plans: Sequence[MergePlan]) -> InputPages | None:
    """Return the page manager for ``plans``, or None if the merge is small or the disk is slow."""
    if sum(plan.bytes_read for plan in plans) < _MIN_INPUT_BYTES:
        return None
    largest = max(
        (tensor for plan in plans for job in plan.jobs for tensor in job.stored_tensors),
        key=lambda tensor: tensor.nbytes,
    )
    # The disk is fast if the best of a few uncached reads along the largest tensor is fast.
    buffer, seconds_per_byte = mmap.mmap(-1, _PROBE_BYTES), []
    try:
        fd = open_uncached(largest.file)
        try:
            for index in range(_PROBES):
                offset = (largest.offset + index * largest.nbytes // _PROBES) // PART_BYTES * PART_BYTES
                began = time.perf_counter()
                count = read_at(fd, memoryview(buffer), offset)
                seconds_per_byte.append((time.perf_counter() - began) / max(count, 1))
        finally:
            os.close(fd)
    except OSError:
        return None  # The file has no name, or the merge will report the problem when it reads the file.
    return InputPages(plans) if 1 / min(seconds_per_byte) >= _FAST_DISK else None


class InputPages:
    """Cached pages of the files that a merge reads, released after their last use. Instances are thread-safe.

    Args:
        plans: All plans that read the files, in any order.
    """

    def __init__(self, plans: Sequence[MergePlan]) -> None:
        self._lock = threading.Lock()
        ranges: dict[Path, list[tuple[int, int]]] = {}
        for plan in plans:
            for job in plan.jobs:
                for tensor in job.stored_tensors:
                    ranges.setdefault(tensor.file, []).append((tensor.offset, tensor.nbytes))
        # Number of bytes of each part that will still be read, counted once for each output tensor that needs them.
        self._remaining: dict[Path, NDArray[np.int64]] = {}
        for path, spans in ranges.items():
            table = np.array(spans, np.int64)  # [ranges, (start, count)]
            starts, ends = np.sort(table[:, 0]), np.sort(table.sum(1))
            edges = np.arange(-(-ends[-1] // PART_BYTES) + 1) * PART_BYTES
            # For each edge between parts: sum of its distances from all range starts before it, minus the sum of its
            # distances from all range ends before it.
            distances = np.zeros(len(edges), np.int64)
            for positions, sign in ((starts, 1), (ends, -1)):
                before = np.searchsorted(positions, edges)
                distances += sign * (before * edges - np.concatenate(([0], np.cumsum(positions)))[before])
            self._remaining[path] = np.diff(distances)
        # Whether each part was cached before the merge.
        self._was_cached: dict[Path, dict[int, bool]] = {path: {} for path in self._remaining}
        self._next_pass_bytes = int(available_memory() * _NEXT_PASS_SHARE)

    def admit(self, job: TensorJob, files: InputFiles) -> bool:
        """Record which parts of the inputs of ``job`` are cached already. Call this before the inputs are read.

        Returns:
            Whether no part is cached, and none is read for another tensor too.
        """
        is_alone = True
        for tensor in job.stored_tensors:
            was_cached, size = self._was_cached[tensor.file], files.identities[tensor.file].size
            with files.open(tensor.file) as fd:
                for part in _parts(tensor.offset, tensor.nbytes):
                    # A part counts as cached if more than half of it is, because reads next to it also cache some of
                    # it.
                    if part not in was_cached:
                        count = min(PART_BYTES, size - part * PART_BYTES)
                        was_cached[part] = 2 * (cached_bytes(fd, part * PART_BYTES, count) or 0) > count
                    if was_cached[part] or self._remaining[tensor.file][part] > PART_BYTES:
                        is_alone = False
        return is_alone

    def release(self, job: TensorJob, files: InputFiles, first: int = 0, last: int | None = None) -> None:
        """Release elements of each stored input of ``job`` that will not be read again.

        Args:
            job: Job that read the elements.
            files: All input files.
            first: Index of the first element to release.
            last: Index after the last element to release. None means the end of each input.
        """
        for tensor in job.stored_tensors:
            start = tensor.offset + first * tensor.dtype.size
            stop = tensor.offset + (tensor.nbytes if last is None else min(last * tensor.dtype.size, tensor.nbytes))
            finished = []
            with self._lock:
                remaining = self._remaining[tensor.file]
                for part in _parts(start, stop - start):
                    remaining[part] -= min((part + 1) * PART_BYTES, stop) - max(part * PART_BYTES, start)
                    if remaining[part] == 0 and not self._was_cached[tensor.file].get(part):
                        finished.append(part)
            if finished:
                with files.open(tensor.file) as fd:
                    for part in finished:
                        forget_cached(fd, part * PART_BYTES, PART_BYTES)

    def release_until_next_pass(self, job: TensorJob, files: InputFiles, first: int, last: int) -> None:
        """Release elements that will be read again if the inputs are too large to stay cached until then.

        The arguments are those of :meth:`release`.
        """
        if last * sum(tensor.dtype.size for tensor in job.stored_tensors) > self._next_pass_bytes:
            for tensor in job.stored_tensors:
                start, count = tensor.offset + first * tensor.dtype.size, (last - first) * tensor.dtype.size
                if not any(self._was_cached[tensor.file].get(part) for part in _parts(start, count)):
                    with files.open(tensor.file) as fd:
                        forget_cached(fd, start, count)


def _parts(start: int, count: int) -> range:
    return range(start // PART_BYTES, -(-(start + count) // PART_BYTES)) if count else range(0)
