"""Choose the devices, threads and kernels of a merge.

A device is a name in torch's notation, such as ``cpu`` or ``cuda:0``. Importing torch takes longer than merging a small
model. Therefore torch is imported only if there may be a GPU, or if a block is computed without fused kernels.
"""

from __future__ import annotations

import ctypes
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.system import cores_of_process

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)
_streams = threading.local()


@dataclass(frozen=True)
class EngineSettings:
    """Settings of the engine. They do not influence the result.

    Args:
        threads: Number of worker threads. Default: number of cores plus 2, because some threads wait for the disk.
        block_elements: Number of elements in a block.
        tile_elements: Number of elements that torch processes at a time on a CPU, so that they stay in the cache.
        keep_output: Whether the result stays in the page cache for the next reader.
        kernels: ``fused``, ``torch``, or ``auto``: fused on a CPU if the input is large or the kernels
            are compiled.
    """

    threads: int | None = None
    block_elements: int = 1 << 20
    tile_elements: int = 1 << 15
    keep_output: bool = True
    kernels: Literal["auto", "fused", "torch"] = "auto"

    @property
    def workers(self) -> int:
        return self.workers_on(cores_of_process())

    def workers_on(self, cores: int) -> int:
        """Return the number of worker threads on a machine with ``cores`` usable cores."""
        return self.threads or cores + 2


@dataclass(frozen=True)
class Devices:
    """Devices of one kind that share a merge. Each tensor is computed on one of them.

    Args:
        all: Device names, at least one.
        note: Reason why ``auto`` did not choose a GPU. Empty if it did.
    """

    all: tuple[str, ...]
    note: str = ""

    @property
    def kind(self) -> str:
        """Kind of the devices: ``cpu`` or ``cuda``."""
        return device_type(self.all[0])

    def __str__(self) -> str:
        return ", ".join(self.all)


def device_type(device: str) -> str:
    """Return the type of a device: ``cuda`` for ``cuda:1``."""
    return device.partition(":")[0]


def choose_devices(name: str) -> Devices:
    """Return the devices for ``cpu``, ``cuda`` (all GPUs), ``cuda:1``, or ``auto`` (GPUs, or else the CPU)."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise InvalidInput("device", found=f"{name!r}", expected="auto, cpu, cuda, or cuda:N")
    if name == "cpu":
        return Devices(("cpu",))
    gpus, reason = _gpus()
    if name == "auto" and not gpus:
        note = f"device auto: {reason}, so the CPU computes"
        _log.info(note)
        return Devices(("cpu",), note)
    if name in ("auto", "cuda") and gpus:
        return Devices(gpus)
    if name not in gpus:
        raise InvalidInput(
            "device", found=f"{name}, which does not exist", expected="an existing CUDA device", remedy="use cpu"
        )
    return Devices((name,))


def has_cuda_driver() -> bool:
    """Return whether this machine has the CUDA driver library. Without it, there is no GPU to ask torch about."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _gpus() -> tuple[tuple[str, ...], str]:
    """Return the names of the GPUs that torch can use, and the reason if there are none."""
    if not has_cuda_driver():
        return (), "this machine has no CUDA driver"
    import torch

    if torch.version.cuda is None:
        return (), "this PyTorch is built without CUDA"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(f"cuda:{index}" for index in range(count)), "no CUDA GPU was found"


@contextmanager
def own_stream(device: str) -> Iterator[None]:
    """Let the calling thread use its own CUDA stream, so that its copies overlap with other threads' computations.

    On exit, wait for all work on the stream, because host buffers are reused afterward. On a CPU, do nothing.
    """
    if device_type(device) != "cuda":
        yield
        return
    import torch

    streams: dict[str, torch.cuda.Stream] = _streams.__dict__.setdefault("of", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch does not type it.
    with torch.cuda.stream(streams[device]):
        yield
        streams[device].synchronize()


class SingleThreadedTorch:
    """A context in which each torch operation runs on one thread, because the engine computes blocks in parallel.

    This reduces waiting and keeps the order of reductions. Call :meth:`use` before torch computes a block. The exit
    restores the previous number of threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._previous_threads: int | None = None
        self._import_thread: threading.Thread | None = None

    def __enter__(self) -> SingleThreadedTorch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._import_thread is not None:
            self._import_thread.join()
        if self._previous_threads is not None:
            import torch

            torch.set_num_threads(self._previous_threads)

    def import_early(self) -> None:
        """Import torch in the background, which takes a second or two. Meanwhile, fused kernels can compute blocks."""
        self._import_thread = threading.Thread(target=self.use, name="torch")
        self._import_thread.start()

    def use(self) -> None:
        """Import torch, and limit it to one thread."""
        if self._previous_threads is not None:
            return
        with self._lock:
            if self._previous_threads is None:
                import torch

                previous = torch.get_num_threads()
                torch.set_num_threads(1)
                self._previous_threads = previous
