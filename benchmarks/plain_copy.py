"""Measure the physical limit: read every input once, write as many bytes as the result has, and flush them.

    python plain_copy.py OUT INPUT...

The script computes and hashes nothing. It writes the bytes of the first inputs. Several threads read large blocks into
reused buffers, as fast as this machine allows. The script uses only the standard library, so that startup is cheap.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_BLOCK = 8 << 20
_THREADS = 4
_local = threading.local()


def main(out: str, checkpoints: list[str]) -> None:
    """Read all shards of ``checkpoints``, and write those of the first to ``out``."""
    target = Path(out)
    target.mkdir()
    jobs: list[tuple[int, int, int, int]] = []
    sources: list[int] = []
    copies: list[int] = []
    for checkpoint in checkpoints:
        for file in sorted(Path(checkpoint).glob("*.safetensors")):
            source, copy = os.open(file, os.O_RDONLY), -1
            sources.append(source)
            size = os.fstat(source).st_size
            if checkpoint == checkpoints[0]:
                copy = os.open(target / file.name, os.O_WRONLY | os.O_CREAT, 0o644)
                os.posix_fallocate(copy, 0, size)
                copies.append(copy)
            jobs += [(source, copy, offset, min(_BLOCK, size - offset)) for offset in range(0, size, _BLOCK)]
    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(_move, jobs))
    for copy in copies:
        os.fsync(copy)


def _move(job: tuple[int, int, int, int]) -> None:
    source, copy, offset, length = job
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(_BLOCK))
    view = _local.buffer[:length]
    done = 0
    while done < length:
        done += os.preadv(source, [view[done:]], offset + done)
    done = 0
    while copy >= 0 and done < length:
        done += os.pwrite(copy, view[done:], offset + done)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
