"""What streams through leaves the page cache as it was found.

Reading a file has the system put every page of it into memory that was something else's, or nobody's; where the host
has to find that memory first, this is half of a merge's time (``docs/performance.md``). So a part of an input goes as
soon as all that is wanted of it has been read for the last time, and its memory is used again for what is read next.
What lay there before stays: it is somebody's.

Where the disk is slow, that memory costs little beside it, and the next merge of the same models would wait for the
disk again: then all stays. A small merge leaves little.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mergegate.merge_core.plan import MergePlan, TensorJob
from mergegate.merge_core.system import available_memory, cached_bytes, forget_cached, open_uncached, read_at

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mergegate.merge_core.checkpoint import StoredTensor

# Parts of files that go at once: large, because a call looks after all processors; whole pages of any system.
PART_BYTES = 16 << 20
# Below this much input, nothing is worth a look.
_WORTH_BYTES = 256 << 20
# Bytes a second of one reader. Finding memory takes up to 1 s a GB, half of what this disk takes to fill it.
_QUICK = 500e6
_LOOKS, _LOOK_BYTES = 4, 1 << 20
# Of the memory that there is, what one tensor may leave behind for its next pass.
_FOR_NEXT_PASS = 0.25


def input_pages(plans: Sequence[MergePlan]) -> InputPages | None:
    """The pages of what ``plans`` read; None where all of them stay: there is little to read, or the disk is slow."""
    if sum(plan.bytes_read for plan in plans) < _WORTH_BYTES:
        return None
    largest = max((tensor for plan in plans for job in plan.jobs for tensor in job.stored), key=lambda one: one.nbytes)
    return InputPages(plans) if _is_quick(largest) else None


class InputPages:
    """The pages of the files that a merge reads, which it leaves. Safe for its threads.

    Args:
        plans: All that is read, in any order: a part that several of them want goes after the last.
    """

    def __init__(self, plans: Sequence[MergePlan]) -> None:
        self._lock = threading.Lock()
        self._left = _bytes_wanted(plans)
        self._found: dict[Path, dict[int, bool]] = {path: {} for path in self._left}  # Whether a part lay there before.
        self._for_next_pass = int(available_memory() * _FOR_NEXT_PASS)

    def admit(self, job: TensorJob, files: Mapping[Path, int]) -> None:
        """Note what already lies there of the inputs of ``job``; before anything of it is read."""
        for tensor in job.stored:
            found, fd = self._found[tensor.file], files[tensor.file]
            size = os.fstat(fd).st_size
            for part in _parts(tensor.offset, tensor.nbytes):
                if part not in found:  # Half of it: reading before and behind this part takes some of it along.
                    count = min(PART_BYTES, size - part * PART_BYTES)
                    found[part] = 2 * (cached_bytes(fd, part * PART_BYTES, count) or 0) > count

    def read(self, job: TensorJob, files: Mapping[Path, int], first: int = 0, last: int | None = None) -> None:
        """The elements from ``first`` to ``last`` of each stored input are in memory, and none of them is read again.

        Args:
            job: Whose.
            files: Open descriptor of every input file.
            first: From 0.
            last: The one behind them; None: to the end of each.
        """
        for tensor in job.stored:
            size = tensor.dtype.size
            end = tensor.nbytes if last is None else min(last * size, tensor.nbytes)
            for part in self._finished(tensor.file, tensor.offset + first * size, end - first * size):
                forget_cached(files[tensor.file], part * PART_BYTES, PART_BYTES)

    def pass_over(self, job: TensorJob, files: Mapping[Path, int], first: int, last: int) -> None:
        """The same elements will be read again; where that is too much to lie in memory until then, they go now."""
        if last * sum(tensor.dtype.size for tensor in job.stored) > self._for_next_pass:
            for tensor in job.stored:
                start, count = tensor.offset + first * tensor.dtype.size, (last - first) * tensor.dtype.size
                if not any(self._found[tensor.file].get(part) for part in _parts(start, count)):
                    forget_cached(files[tensor.file], start, count)

    def _finished(self, path: Path, start: int, count: int) -> list[int]:
        """The parts of a file of which nothing is wanted any more after ``count`` bytes, and that shall go."""
        done = []
        with self._lock:
            left = self._left[path]
            for part in _parts(start, count):
                left[part] -= _overlap(part, start, count)
                if left[part] == 0 and not self._found[path].get(part):
                    done.append(part)
        return done


def _is_quick(tensor: StoredTensor) -> bool:
    """Whether the disk that it lies on is: the best of a few reads past the cache, over its length."""
    place, spent = mmap.mmap(-1, _LOOK_BYTES), []
    try:
        fd = open_uncached(tensor.file)
        try:
            for look in range(_LOOKS):
                at = (tensor.offset + look * tensor.nbytes // _LOOKS) // PART_BYTES * PART_BYTES
                began = time.perf_counter()
                count = read_at(fd, memoryview(place), at)
                spent.append((time.perf_counter() - began) / max(count, 1))
        finally:
            os.close(fd)
    except OSError:
        return False  # A file without a name, or one that reading will say more of.
    return 1 / min(spent) >= _QUICK


def _bytes_wanted(plans: Sequence[MergePlan]) -> dict[Path, NDArray[np.int64]]:
    """Of every file, how many bytes of each part are read for an output tensor, counted for each that wants them."""
    wanted: dict[Path, list[tuple[int, int]]] = {}
    for plan in plans:
        for job in plan.jobs:
            for tensor in job.stored:
                wanted.setdefault(tensor.file, []).append((tensor.offset, tensor.nbytes))
    return {path: _in_parts(np.array(ranges, np.int64)) for path, ranges in wanted.items()}


def _in_parts(ranges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes of each part of a file that ranges ``[ranges, (start, count)]`` cover, as often as they do."""
    starts, ends = np.sort(ranges[:, 0]), np.sort(ranges.sum(1))
    edges = np.arange(-(-ends[-1] // PART_BYTES) + 1) * PART_BYTES

    def beyond(places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of each edge, its distances from all sorted places before it, together."""
        before = np.searchsorted(places, edges)
        distances: NDArray[np.int64] = before * edges - np.concatenate(([0], np.cumsum(places)))[before]
        return distances

    covered: NDArray[np.int64] = np.diff(beyond(starts) - beyond(ends))
    return covered


def _parts(start: int, count: int) -> range:
    return range(start // PART_BYTES, -(-(start + count) // PART_BYTES)) if count else range(0)


def _overlap(part: int, start: int, count: int) -> int:
    """Bytes that a part has of ``count`` bytes from ``start``."""
    return min((part + 1) * PART_BYTES, start + count) - max(part * PART_BYTES, start)
