"""Places beside each other in one process: each has a process of its own that holds models, and a share of the machine.

A thread is at one place for as long as it works on something; where nobody says so, it is the first::

    with at_slot(slots_for(workers=2)[1]):
        ask_child(...)                       # asks the process of the second place, which computes with half the cores

What a place gets is said in ``slots_for`` and nowhere else: so many threads that all places together keep all cores
busy and no more, and one GPU.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # what torch goes by
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Cancelled(Exception):
    """Nobody waits for the answer any more. For the threads of a runner, which nobody hears of it."""


@dataclass(frozen=True)
class WorkerSlot:
    """A place.

    Args:
        number: From 0.
        environment: Name and value of what the processes of this place see beside what all see.
        given_up: Set when nobody waits for what is done here.
        scheduled: Whether the GPU is one that a cluster has given out.
    """

    number: int = 0
    environment: tuple[tuple[str, str], ...] = ()
    given_up: threading.Event = field(default_factory=threading.Event, compare=False)
    scheduled: bool = False


_FIRST = WorkerSlot()
_slot: ContextVar[WorkerSlot] = ContextVar("slot", default=_FIRST)
_on_end: list[Callable[[int], None]] = []


def current_slot() -> WorkerSlot:
    """Where this thread is."""
    return _slot.get()


@contextmanager
def use_slot(slot: WorkerSlot) -> Iterator[None]:
    """What is called inside is at ``slot``."""
    token = _slot.set(slot)
    try:
        yield
    finally:
        _slot.reset(token)


def on_slot_end(end: Callable[[int], None]) -> None:
    """Have ``end(number)`` called when a place is no longer needed: by whoever keeps something there."""
    _on_end.append(end)


def end_slot(number: int) -> None:
    """Let go of everything that is kept at a place."""
    for end in _on_end:
        end(number)


def slots_for(workers: int, cores: int, gpus: tuple[str, ...] | None = None) -> tuple[WorkerSlot, ...]:
    """So many places on this machine.

    Args:
        workers: At least 1. A single one gets what the process has: the place that is there without a runner.
        cores: Of this machine that we may use.
        gpus: As CUDA_VISIBLE_DEVICES names them; None: looked up.
    """
    if workers == 1:
        return (_FIRST,)
    found = visible_gpus() if gpus is None else gpus
    threads = threads_of_worker(workers, cores)
    seen = ({**threads, **gpu_of_worker(number, found)} for number in range(workers))
    return tuple(WorkerSlot(number, tuple(each.items())) for number, each in enumerate(seen))


def threads_of_worker(workers: int, cores: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """With how many threads each of so many workers computes: its share of the cores, at least one, and never more than
    ``environment`` says."""
    share = max(1, cores // workers)
    said = {name: environment.get(name, "") for name in _THREADS}
    return {name: str(min(share, int(text)) if text.isdigit() and int(text) else share) for name, text in said.items()}


def gpu_of_worker(number: int, gpus: tuple[str, ...]) -> dict[str, str]:
    """The one GPU that a worker sees; more workers than GPUs share them in turn. Nothing where there is none."""
    return {_VISIBLE: gpus[number % len(gpus)]} if gpus else {}


def visible_gpus(devices: Path = Path("/dev"), environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Names of the GPUs that this process may use, found without loading a driver."""
    if _VISIBLE in environment:
        return tuple(name.strip() for name in environment[_VISIBLE].split(",") if name.strip())
    numbers = (path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*"))
    return tuple(sorted((number for number in numbers if number.isdigit()), key=int))
