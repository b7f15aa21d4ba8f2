"""A short look at what this machine can do: its disk, its memory, its cores. Bounded in time; leaves nothing behind.

Every measurement grows its step as long as the next one fits into its share of the time, so a slow disk is asked for
little and a fast one for enough. Real input files are read past the page cache where the system allows it, so neither a
warm cache flatters the disk nor does the probe push anything out of it. What is written is unlinked before the first
byte.
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
from mergegate.merge_core.system import forget_cached, open_uncached, read_at

# Shares of the time limit of half a second; the rest is for opening, threads and the last step's error.
_DISK_SECONDS = 0.14
_MEMORY_SECONDS = 0.03
_PRODUCT_SECONDS, _FEWEST_TURNS = 0.05, 3
# A matrix of 4 MB: products of smaller ones are over before all cores have begun, where other programs run too.
_PRODUCT_SIDE = 1024
# Parallel requests: what it takes to keep a fast disk busy, and about what the engine has in flight.
_READERS = 4
_SMALLEST_READ, _LARGEST_READ = 1 << 18, 1 << 24
_SMALLEST_WRITE, _LARGEST_WRITE = 1 << 20, 1 << 26
# Reads past the cache want offsets, sizes and addresses that are multiples of the disk's sectors.
_SECTOR = 4096
_TILE = 1 << 18
_STEP = 1 << 20


def measure_machine(inputs: Sequence[Path], output: Path, *, cores: int) -> Rates:
    """Measure this machine for a merge of ``inputs`` into the directory ``output``; takes less than half a second.

    Args:
        inputs: Weight files; without any, the disk that holds ``output`` is read too.
        output: Directory that exists.
        cores: How many threads compute.

    Raises:
        InvalidInput: Inputs that cannot be read, or a directory that cannot be written.
    """
    try:
        with tempfile.TemporaryFile(dir=output, prefix=".mergegate-probe-", buffering=0) as file:
            write, copy, written = _write_rate(file.fileno())
            read = None if inputs else _read_rate([(file.fileno(), written)])
    except OSError as error:
        raise InvalidInput(
            str(output),
            found=f"cannot be written: {error.strerror}",
            expected="the directory that the result goes to",
            remedy="name another with --out, or plan with --no-probe",
        ) from None
    return Rates(
        read=read if read is not None else _input_rate(inputs),
        write=write,
        copy=cores * copy,
        hash=_rate_on(1, _hashing),
        units=_rate_on(cores, lambda: reference_pass),
        same_disk=not inputs or inputs[0].stat().st_dev == output.stat().st_dev,
        measured_at=time.time(),
        products=_product_rate(),
    )


def measure_bus(device: str) -> float:
    """Bytes per second from pinned memory to the GPU ``device``, back alike.

    Raises:
        InvalidInput: There is no such GPU.
    """
    import torch

    if int(device.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise InvalidInput(
            "device", found=f"{device}, which is not there", expected="a CUDA device", remedy="use cpu, or --no-probe"
        )
    size = 1 << 26
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = pinned.to(device)  # Also starts the GPU's context, which takes a while and is not measured.
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(4):
        there.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize(device)
    return 4 * size / (time.perf_counter() - began)


def reference_pass(elements: int) -> float:
    """Seconds for widening ``elements`` bfloat16 numbers, multiplying them and adding them up: the unit of arithmetic.

    Works on memory that stays in a core's cache, in one thread.
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
    """Operations per second of a product of bfloat16 matrices on the GPU ``device``, which is there.

    Starting the GPU's context takes a while and is not measured.
    """
    import torch

    side = 4 * _PRODUCT_SIDE
    matrix = torch.rand(side, side, device=device, dtype=torch.bfloat16)
    torch.mm(matrix, matrix)
    torch.cuda.synchronize(device)

    def product() -> None:
        torch.mm(matrix, matrix)
        torch.cuda.synchronize(device)

    return 2 * side**3 / _shortest(product)


def _product_rate() -> float:
    """Operations per second of a matrix product, on as many cores as the library takes."""
    matrix = np.full((_PRODUCT_SIDE, _PRODUCT_SIDE), 0.5, np.float32)
    out = matrix @ matrix  # Also starts the library's threads.
    return 2 * _PRODUCT_SIDE**3 / _shortest(lambda: np.matmul(matrix, matrix, out=out))


def _shortest(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes when nothing interrupts it: other programs lengthen some of its turns."""
    began, spent = time.perf_counter(), list[float]()
    while len(spent) < _FEWEST_TURNS or time.perf_counter() - began < _PRODUCT_SECONDS:
        start = time.perf_counter()
        work()
        spent.append(time.perf_counter() - start)
    return max(min(spent), 1e-9)


def save_rates(file: Path, key: str, rates: Rates) -> None:
    """Keep ``rates`` for :func:`load_rates`, if ``file`` can be written."""
    known = {**_known(file), key: asdict(rates)}
    partial = file.with_suffix(f".{os.getpid()}.partial")
    with suppress(OSError):  # Losing it costs only time.
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(known, indent=1))
        partial.replace(file)


def load_rates(file: Path, key: str, *, max_age: float) -> Rates | None:
    """What :func:`save_rates` kept for ``key`` at most ``max_age`` seconds ago; None otherwise."""
    try:
        rates = Rates(**_known(file)[key])
    except (KeyError, TypeError):
        return None
    return rates if 0 <= time.time() - rates.measured_at <= max_age else None


def machine_key(inputs: Sequence[Path], output: Path, *, cores: int, device: str) -> str:
    """What rates depend on, as text: the machine, the disks, the cores, the device."""
    disks = sorted({path.stat().st_dev for path in inputs})
    return f"{platform.node()} {disks} {output.stat().st_dev} {cores} {device}"


def _known(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _growing(step: Callable[[int], None], sizes: tuple[int, int], seconds: float) -> tuple[float, int]:
    """Bytes per second of the best ``step(size)`` that the time allowed, and the bytes of all steps."""
    size, largest = sizes
    began, total, best = time.perf_counter(), 0, 0.0
    while True:
        start = time.perf_counter()
        step(size)
        spent = max(time.perf_counter() - start, 1e-9)
        total += size
        best = max(best, size / spent)
        # A step of twice the size takes about twice the time.
        if 2 * size > largest or time.perf_counter() - began + 2 * spent > seconds:
            return best, total
        size *= 2


def _write_rate(fd: int) -> tuple[float, float, int]:
    """Bytes per second until they are safe, bytes per second of a core's own time, and bytes written."""
    noise = memoryview(os.urandom(_SMALLEST_WRITE))  # File systems may store zeros as nothing.
    busy = 0.0

    def step(size: int) -> None:
        nonlocal busy
        began = time.thread_time()
        for _ in range(size // len(noise)):
            os.write(fd, noise)
        busy += time.thread_time() - began
        os.fsync(fd)

    rate, written = _growing(step, (_SMALLEST_WRITE, _LARGEST_WRITE), _DISK_SECONDS)
    return rate, written / max(busy, 1e-9), written


def _input_rate(inputs: Sequence[Path]) -> float:
    largest = sorted(inputs, key=lambda path: path.stat().st_size)[-_READERS:]
    opened: list[tuple[int, int]] = []
    try:
        for path in largest:
            opened.append((open_uncached(path), path.stat().st_size))
        return _read_rate(opened)
    except OSError as error:
        raise InvalidInput(
            str(largest[-1]), found=f"cannot be read: {error.strerror}", remedy="check disk and rights"
        ) from None
    finally:
        for fd, _ in opened:
            os.close(fd)


def _read_rate(files: Sequence[tuple[int, int]]) -> float:
    """Bytes per second of parallel reads at places spread over ``files`` (open, size)."""
    for fd, _ in files if len(files) == 1 else ():
        forget_cached(fd)  # What was just written lies there.
    buffers = [mmap.mmap(-1, _LARGEST_READ) for _ in range(_READERS)]
    turns = 0
    try:
        with ThreadPoolExecutor(_READERS) as threads:

            def step(total: int) -> None:
                nonlocal turns
                turns += 1
                size = total // _READERS
                places = zip(buffers, cycle(files), range(_READERS), strict=False)
                reads = [
                    threads.submit(_read, fd, buffer, size, _place(length, size, turns * _READERS + number))
                    for buffer, (fd, length), number in places
                ]
                for read in reads:
                    read.result()

            sizes = (_READERS * _SMALLEST_READ, _READERS * _LARGEST_READ)
            return _growing(step, sizes, _DISK_SECONDS)[0]
    finally:
        for buffer in buffers:
            buffer.close()


def _read(fd: int, buffer: mmap.mmap, size: int, offset: int) -> None:
    with memoryview(buffer)[:size] as view:
        read_at(fd, view, offset)


def _place(length: int, size: int, number: int) -> int:
    """A sector to read ``size`` bytes from, never the same twice: golden-ratio steps through the file."""
    room = max(length - size, 0)
    return int(number * 0.6180339887 % 1 * room) // _SECTOR * _SECTOR


def _rate_on(threads: int, make: Callable[[], Callable[[int], float]]) -> float:
    """Units per second of ``make()(units) -> seconds`` on ``threads`` threads at once."""

    def busy(_: int) -> float:
        work = make()
        spent: list[float] = []
        began = time.perf_counter()
        while not spent or time.perf_counter() - began < _MEMORY_SECONDS:
            spent.append(work(_STEP))
        return _STEP / median(spent)  # Not the mean: other programs interrupt some of the steps.

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(busy, range(threads)))


def _hashing() -> Callable[[int], float]:
    data = bytes(_STEP)

    def work(size: int) -> float:
        began = time.perf_counter()
        hashlib.sha256(data[:size])
        return time.perf_counter() - began

    return work
