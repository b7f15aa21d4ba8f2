"""Where a merge computes: the CPU, one CUDA GPU, or all of them; and what each thread needs there.

A device is a name, as torch writes it: ``cpu``, ``cuda:0``. Importing torch takes longer than merging a small model,
and the fused kernels do without: here it is imported only when there may be a GPU, or when a block is computed with it.
"""

from __future__ import annotations

import ctypes
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mergegate.merge_core.errors import InvalidInput

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)
_streams = threading.local()


@dataclass(frozen=True)
class Devices:
    """The devices that share a merge, all of one kind: each tensor is computed on one of them.

    Args:
        all: At least one name.
        note: Why it is not what ``auto`` would rather have; empty when it is.
    """

    all: tuple[str, ...]
    note: str = ""

    @property
    def kind(self) -> str:
        """``cpu`` or ``cuda``."""
        return device_type(self.all[0])

    def __str__(self) -> str:
        return ", ".join(self.all)


def device_type(device: str) -> str:
    """``cuda`` of ``cuda:1``."""
    return device.partition(":")[0]


def choose_devices(name: str) -> Devices:
    """The devices that ``name`` means: ``cpu``, ``cuda`` (every GPU), ``cuda:1``, or ``auto`` (GPUs if there are any).

    Raises:
        InvalidInput: Another name, or a GPU that is not there.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise InvalidInput("device", found=f"{name!r}", expected="auto, cpu, cuda, or cuda:N")
    if name == "cpu":
        return Devices(("cpu",))
    gpus, reason = _gpus()
    if name == "auto" and not gpus:
        note = f"device auto: {reason}; computing on the CPU"
        _log.info(note)
        return Devices(("cpu",), note)
    if name in ("auto", "cuda") and gpus:
        return Devices(gpus)
    if name not in gpus:
        raise InvalidInput("device", found=f"{name}, which is not there", expected="a CUDA device", remedy="use cpu")
    return Devices((name,))


def has_cuda_driver() -> bool:
    """Whether the driver's library is on this machine; without it there is no need to ask torch."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _gpus() -> tuple[tuple[str, ...], str]:
    """Names of the GPUs that torch can use; and why there are none."""
    if not has_cuda_driver():
        return (), "this machine has no CUDA driver"
    import torch

    if torch.version.cuda is None:
        return (), "this PyTorch is built without CUDA"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(f"cuda:{index}" for index in range(count)), "no CUDA GPU was found"


@contextmanager
def own_stream(device: str) -> Iterator[None]:
    """On a GPU each thread has a stream of its own, so copies of one overlap computations of another.

    At the end everything on the stream is done: host buffers are used again after this.
    """
    if device_type(device) != "cuda":
        yield
        return
    import torch

    streams: dict[str, torch.cuda.Stream] = _streams.__dict__.setdefault("of", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types for it
    with torch.cuda.stream(streams[device]):
        yield
        streams[device].synchronize()


class SingleThreadedTorch:
    """A merge's torch, from the first block that needs it on: parallel over blocks, not inside operations.

    So there is less waiting, and reductions keep one order. ``use`` it before computing; what was set before is set
    again at the end of ``with``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: int | None = None
        self._coming: threading.Thread | None = None

    def __enter__(self) -> SingleThreadedTorch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._coming is not None:
            self._coming.join()
        if self._before is not None:
            import torch

            torch.set_num_threads(self._before)

    def expect(self) -> None:
        """Import it beside what is done first: that takes a second or two, in which other blocks can stream."""
        self._coming = threading.Thread(target=self.use, name="torch")
        self._coming.start()

    def use(self) -> None:
        """Make sure that torch computes on one thread."""
        if self._before is not None:
            return
        with self._lock:
            if self._before is None:
                import torch

                before = torch.get_num_threads()
                torch.set_num_threads(1)
                self._before = before
