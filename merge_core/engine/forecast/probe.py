"""Measure the speed of this machine's disks, memory and cores in half a second, without leaving files.

Disk measurements start with few bytes and double them as long as time is left, so that slow and fast disks are both
measured well. Reads of input files bypass the page cache if the system allows it. So the cache does not make the disk
look faster, and the probe does not evict anything from it. The output file has no name.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mergegate.merge_core.engine.forecast.forecast import Rates
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import read_state, write_state
from mergegate.merge_core.system import forget_cached, open_uncached, read_at

# Time limits of the measurements. Together they stay below half a second, including the time to open files and to start
# threads.
_DISK_SECONDS = 0.14
_REPEAT_SECONDS, _MIN_REPEATS = 0.05, 3
_PASSES = 24
# Number of rows and columns of a 4 MB matrix. On a busy machine, smaller products end before all cores have started.
_PRODUCT_SIDE = 1024
# Number of parallel reads. It keeps a fast disk busy and is close to that of the engine.
_READERS = 4
_SMALLEST_READ, _LARGEST_READ = 1 << 18, 1 << 24
_SMALLEST_WRITE, _LARGEST_WRITE = 1 << 20, 1 << 26
# Uncached reads need offsets, sizes and addresses that are multiples of the disk's sectors.
_SECTOR = 4096
_TILE = 1 << 18
_STEP = 1 << 20


def measure_machine(inputs: Sequence[Path], output: Path, *, cores: int) -> Rates:
    """Measure how fast this machine reads, computes and writes during a merge, in less than half a second.

    Args:
        inputs: Weight files of the merge. If there are none, reads are measured on the disk of ``output``.
        output: Existing directory on the disk that the merge will write to.
        cores: Number of cores that the merge will use.
    """
    noise = memoryview(os.urandom(_SMALLEST_WRITE))  # File systems may not store zeros at all.
    busy = 0.0  # Processor time of all writes.
    try:
        with tempfile.TemporaryFile(dir=output, prefix=".mergegate-probe-", buffering=0) as file:
            fd = file.fileno()

            def step(size: int) -> None:
                nonlocal busy
                began = time.thread_time()
                for _ in range(size // len(noise)):
                    os.write(fd, noise)
                busy += time.thread_time() - began
                os.fsync(fd)

            write, written = _best_rate(step, (_SMALLEST_WRITE, _LARGEST_WRITE), _DISK_SECONDS)
            copy = written / max(busy, 1e-9)
            read = None if inputs else _read_rate([(fd, written)])
    except OSError as error:
        raise InvalidInput(
            str(output),
            found=f"cannot be written: {error.strerror}",
            expected="a directory that the result can be written to",
            remedy="choose another directory with --output, or use --no-probe",
        ) from None
    data = bytes(_STEP)
    with ThreadPoolExecutor(cores) as threads:
        # The median, because other programs interrupt some of the passes.
        seconds = list(threads.map(lambda _: median(reference_pass(_STEP) for _ in range(_PASSES)), range(cores)))
    matrix = np.full((_PRODUCT_SIDE, _PRODUCT_SIDE), 0.5, np.float32)
    product = matrix @ matrix  # This also starts the library's threads, as many as it uses.
    product_seconds = _shortest_seconds(lambda: np.matmul(matrix, matrix, out=product))
    return Rates(
        read=read if read is not None else _input_rate(inputs),
        write=write,
        copy=cores * copy,
        hash=_STEP / _shortest_seconds(lambda: hashlib.sha256(data)),
        units=sum(_STEP / spent for spent in seconds),
        same_disk=not inputs or inputs[0].stat().st_dev == output.stat().st_dev,
        measured_at=time.time(),
        products=2 * _PRODUCT_SIDE**3 / product_seconds,
    )


def measure_bus(device: str) -> float:
    """Measure the speed of copies from pinned main memory to the GPU ``device``, in bytes per second.

    Forecasts assume that copies in the other direction are equally fast.
    """
    import torch

    if int(device.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise InvalidInput(
            "device",
            found=f"{device}, which does not exist",
            expected="an existing CUDA device",
            remedy="use cpu, or --no-probe",
        )
    size = 1 << 26
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = pinned.to(device)  # This also creates the GPU's context, which takes a while and is not measured.
    torch.cuda.synchronize(device)

    def copy() -> None:
        target.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize(device)

    return size / _shortest_seconds(copy)


def reference_pass(elements: int) -> float:
    """Widen ``elements`` bfloat16 numbers to float32, multiply and sum them, and return the seconds that this took.

    The time per element is the unit of arithmetic in forecasts. The numbers stay in the cache of one core.
    """
    stored = np.full(_TILE, 0x3F80, np.uint16)
    patterns, total = np.empty(_TILE, np.uint32), np.zeros(_TILE, np.float32)
    numbers, factor = patterns.view(np.float32), np.float32(0.5)
    began = time.perf_counter()
    for _ in range(-(-elements // _TILE)):
        np.left_shift(stored, 16, out=patterns, dtype=np.uint32, casting="unsafe")
        np.multiply(numbers, factor, out=numbers)
        np.add(total, numbers, out=total)
    return time.perf_counter() - began


def measure_products_on(device: str) -> float:
    """Measure the speed of bfloat16 matrix products on the existing GPU ``device``, in operations per second."""
    import torch

    side = 4 * _PRODUCT_SIDE
    matrix = torch.rand(side, side, device=device, dtype=torch.bfloat16)
    torch.mm(matrix, matrix)
    torch.cuda.synchronize(device)

    def product() -> None:
        torch.mm(matrix, matrix)
        torch.cuda.synchronize(device)

    return 2 * side**3 / _shortest_seconds(product)


def _shortest_seconds(work: Callable[[], object]) -> float:
    """Return the shortest time of several runs of ``work``, in seconds."""
    began, spent = time.perf_counter(), list[float]()
    while len(spent) < _MIN_REPEATS or time.perf_counter() - began < _REPEAT_SECONDS:
        start = time.perf_counter()
        work()
        spent.append(time.perf_counter() - start)
    return max(min(spent), 1e-9)


def save_rates(file: Path, key: str, rates: Rates) -> None:
    """Store ``rates`` in ``file`` under ``key`` for :func:`load_rates`. Do nothing if the file cannot be written."""
    with suppress(OSError):  # Without stored rates, the next forecast only measures again.
        file.parent.mkdir(parents=True, exist_ok=True)
        write_state(file, json.dumps({**_read_rates_file(file), key: asdict(rates)}, indent=1).encode())


def load_rates(file: Path, key: str, *, max_age: float) -> Rates | None:
    """Return the rates stored under ``key``, or None if there are none or they are older than ``max_age`` seconds."""
    try:
        rates = Rates(**_read_rates_file(file)[key])
    except (KeyError, TypeError):
        return None
    return rates if 0 <= time.time() - rates.measured_at <= max_age else None


def machine_key(inputs: Sequence[Path], output: Path, *, cores: int, device: str) -> str:
    """Return the key under which rates are stored: the machine, disks, number of cores and device that they are for."""
    disks = sorted({path.stat().st_dev for path in inputs})
    return f"{platform.node()} {disks} {output.stat().st_dev} {cores} {device}"


def _read_rates_file(file: Path) -> dict[str, Any]:
    content = read_state(file, json.loads)
    return content if isinstance(content, dict) else {}


def _best_rate(step: Callable[[int], None], sizes: tuple[int, int], seconds: float) -> tuple[float, int]:
    """Call ``step`` with growing sizes in bytes until the time limit.

    Return the bytes per second of the fastest call, and the bytes of all calls.
    """
    size, largest = sizes
    began, total, best = time.perf_counter(), 0, 0.0
    while True:
        start = time.perf_counter()
        step(size)
        spent = max(time.perf_counter() - start, 1e-9)
        total += size
        best = max(best, size / spent)
        # Assume that a step of twice the size takes twice the time.
        if 2 * size > largest or time.perf_counter() - began + 2 * spent > seconds:
            return best, total
        size *= 2


def _input_rate(inputs: Sequence[Path]) -> float:
    largest = sorted(inputs, key=lambda path: path.stat().st_size)[-_READERS:]
    opened: list[tuple[int, int]] = []
    try:
        for path in largest:
            opened.append((open_uncached(path), path.stat().st_size))
        return _read_rate(opened)
    except OSError as error:
        raise InvalidInput(
            str(largest[-1]), found=f"cannot be read: {error.strerror}", remedy="check the disk and the permissions"
        ) from None
    finally:
        for fd, _ in opened:
            os.close(fd)


def _read_rate(files: Sequence[tuple[int, int]]) -> float:
    """Return the bytes per second of parallel reads from ``files``, given as pairs of descriptor and size."""
    for fd, _ in files if len(files) == 1 else ():
        forget_cached(fd)  # The written data is still cached.
    buffers = [mmap.mmap(-1, _LARGEST_READ) for _ in range(_READERS)]
    turns = 0
    try:
        with ThreadPoolExecutor(_READERS) as threads:

            def step(total: int) -> None:
                nonlocal turns
                turns += 1
                size = total // _READERS
                # Golden-ratio steps through a file never return the same offset twice.
                offsets = [(turns * _READERS + number) * 0.6180339887 % 1 for number in range(_READERS)]
                reads = [
                    threads.submit(_read, fd, buffer, size, int(offset * max(length - size, 0)) // _SECTOR * _SECTOR)
                    for buffer, (fd, length), offset in zip(buffers, cycle(files), offsets, strict=False)
                ]
                for read in reads:
                    read.result()

            sizes = (_READERS * _SMALLEST_READ, _READERS * _LARGEST_READ)
            return _best_rate(step, sizes, _DISK_SECONDS)[0]
    finally:
        for buffer in buffers:
            buffer.close()


def _read(fd: int, buffer: mmap.mmap, size: int, offset: int) -> None:
    with memoryview(buffer)[:size] as view:
        read_at(fd, view, offset)
