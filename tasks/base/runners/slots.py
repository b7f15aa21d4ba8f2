"""Divide a machine into worker slots. Each slot has its own model process and a share of the cores and GPUs.

A thread uses one slot for as long as it works on an item. By default it uses the first slot::

    with use_slot(slots_for(workers=2)[1]):
        call_model_process(...)              # runs in the process of the second slot, with half of the cores

``slots_for`` is the only place that assigns resources: one GPU per slot, and as many threads as keep all cores busy
without oversubscribing them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # variables that torch reads
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Cancelled(Exception):
    """A runner no longer needs the result of a thread. Raised inside that thread only; callers never see it."""


@dataclass(frozen=True)
class WorkerSlot:
    """A share of this machine for one worker."""

    number: int = 0  # Index of the slot, from 0.
    # Additional environment variables (name, value) for processes of this slot.
    environment: tuple[tuple[str, str], ...] = ()
    # Event that is set when the results of this slot are no longer needed.
    cancelled: threading.Event = field(default_factory=threading.Event, compare=False)
    scheduled: bool = False  # Whether the scheduler of a cluster assigned the GPU.


_FIRST = WorkerSlot()
_slot: ContextVar[WorkerSlot] = ContextVar("slot", default=_FIRST)
_on_end: list[Callable[[int], None]] = []


def current_slot() -> WorkerSlot:
    return _slot.get()


@contextmanager
def use_slot(slot: WorkerSlot) -> Iterator[None]:
    token = _slot.set(slot)
    try:
        yield
    finally:
        _slot.reset(token)


def on_slot_end(end: Callable[[int], None]) -> None:
    """Register ``end(number)``, which releases the resources of a slot when the slot is no longer needed."""
    _on_end.append(end)


def end_slot(number: int) -> None:
    """Call all functions registered with ``on_slot_end`` for the slot."""
    for end in _on_end:
        end(number)


def slots_for(workers: int, cores: int, gpus: tuple[str, ...] | None = None) -> tuple[WorkerSlot, ...]:
    """Divide this machine's cores and GPUs into slots. A single slot gets all resources, as without a runner.

    ``gpus`` are names as in CUDA_VISIBLE_DEVICES. Default: the GPUs that this process may see.
    """
    if workers == 1:
        return (_FIRST,)
    devices = visible_gpus() if gpus is None else gpus
    threads = threads_of_worker(workers, cores)
    environments = ({**threads, **gpu_of_worker(number, devices)} for number in range(workers))
    return tuple(WorkerSlot(number, tuple(environment.items())) for number, environment in enumerate(environments))


def threads_of_worker(workers: int, cores: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that set the number of threads of each worker.

    Each worker gets an equal share of the cores: at least one thread, and at most the number in ``environment``.
    """
    share = max(1, cores // workers)
    limits = {name: environment.get(name, "") for name in _THREADS}
    return {
        name: str(min(share, int(text)) if text.isdigit() and int(text) else share) for name, text in limits.items()
    }


def gpu_of_worker(number: int, gpus: tuple[str, ...]) -> dict[str, str]:
    """Return the environment variable that selects a worker's GPU, in turns if there are fewer GPUs than workers."""
    return {_VISIBLE: gpus[number % len(gpus)]} if gpus else {}


def visible_gpus(devices: Path = Path("/dev"), environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the names of the GPUs that this process may use, without loading a driver."""
    if _VISIBLE in environment:
        return tuple(name.strip() for name in environment[_VISIBLE].split(",") if name.strip())
    numbers = (path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*"))
    return tuple(sorted((number for number in numbers if number.isdigit()), key=int))
