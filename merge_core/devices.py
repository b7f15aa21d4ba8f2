"""Where a merge computes: the CPU, one CUDA GPU, or all of them; and what each thread needs there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from merge_core.errors import InvalidInput

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)
_streams = threading.local()


@dataclass(frozen=True)
class Devices:
    """The devices that share a merge, all of one kind: each tensor is computed on one of them.

    Args:
        all: At least one.
        note: Why it is not what ``auto`` would rather have; empty when it is.
    """

    all: tuple[torch.device, ...]
    note: str = ""

    @property
    def kind(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.all[0].type

    def __str__(self) -> str:
        return ", ".join(str(device) for device in self.all)


def choose_devices(name: str) -> Devices:
    """The devices that ``name`` means: ``cpu``, ``cuda`` (every GPU), ``cuda:1``, or ``auto`` (GPUs if there are any).

    Raises:
        InvalidInput: Another name, or a GPU that is not there.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = tuple(torch.device("cuda", index) for index in range(count))
    if name == "auto" and not gpus:
        reason = "this PyTorch is built without CUDA" if torch.version.cuda is None else "no CUDA GPU was found"
        note = f"device auto: {reason}; computing on the CPU"
        _log.info(note)
        return Devices((torch.device("cpu"),), note)
    if name in ("auto", "cuda") and gpus:
        return Devices(gpus)
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise InvalidInput("device", found=f"{name!r}", expected="auto, cpu, cuda, or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise InvalidInput("device", found=f"{name}, which is not there", expected="a CUDA device", remedy="use cpu")
    return Devices((device,))


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU each thread has a stream of its own, so copies of one overlap computations of another.

    At the end everything on the stream is done: host buffers are used again after this.
    """
    if device.type != "cuda":
        yield
        return
    import torch

    streams: dict[torch.device, torch.cuda.Stream] = _streams.__dict__.setdefault("of", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types for it
    with torch.cuda.stream(streams[device]):
        yield
        streams[device].synchronize()


@contextmanager
def single_threaded_torch() -> Iterator[None]:
    """Parallel over blocks, not inside operations: less waiting, and reductions keep one order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
