"""Functions that the runner tests execute, in a module that workers can import."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from prefect import flow

from mergegate.merge_core.errors import Refused
from mergegate.tasks.base.runners import current_slot

pending_calls: list[Callable[[], list[tuple[int, Any]]]] = []


@flow
def run_in_flow() -> list[tuple[int, Any]]:
    """A serialized flow includes everything that it references, so this one references nothing."""
    from worker_functions import run_pending_call

    return run_pending_call()


def run_pending_call() -> list[tuple[int, Any]]:
    return pending_calls[0]()


def square(number: int) -> int:
    return number * number


def record_run(order: tuple[Path, int]) -> int:
    """Append a line to a file per item, which records how often and by which process the item ran."""
    directory, number = order
    with (directory / str(number)).open("a") as file:
        file.write(f"{os.getpid()}\n")
    return number * number


def finish_in_reverse(order: tuple[Path, int, int]) -> int:
    """Finish even items only after the next item reached `record_arrivals`, so two items must run at a time."""
    directory, number, of = order
    while number % 2 == 0 and number + 1 < of and not (directory / f"heard-{number + 1}").exists():
        time.sleep(0.005)
    return number * number


def record_arrivals(
    results: Iterable[tuple[int, int | Exception]], directory: Path
) -> list[tuple[int, int | Exception]]:
    """Return all results in order of arrival, and leave a note about each."""
    arrivals = []
    for at, result in results:
        (directory / f"heard-{at}").touch()
        arrivals.append((at, result))
    return arrivals


def refuse_odd(number: int) -> int:
    if number % 2:
        raise Refused(f"item {number}", found="odd", expected="even")
    return number


def kill_first_worker(order: tuple[Path, int, int]) -> int:
    """Kill the worker the first time that the item `killer` runs."""
    directory, number, killer = order
    first = not (directory / str(number)).exists()
    record_run((directory, number))
    if number == killer and first:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def kill_every_worker(order: tuple[Path, int, int]) -> int:
    directory, number, killer = order
    record_run((directory, number))
    if number == killer:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def worker_environment(_: int) -> dict[str, str]:
    """Return the worker's environment, with its process id, executable and Prefect API."""
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    return {
        **os.environ,
        "pid": str(os.getpid()),
        "executable": sys.executable,
        "api": settings.api.url or "",
        "prefect home": str(settings.home),
    }


# The following functions run in a model process.


def process_identity(on_progress: object) -> tuple[int, dict[str, str]]:
    return os.getpid(), dict(os.environ)


def wait_for_peer(directory: Path, number: int, on_progress: object) -> str:
    (directory / f"here-{number}").touch()
    while not (directory / f"here-{1 - number}").exists():
        time.sleep(0.005)
    return "met"


def die(on_progress: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_on_first_call(directory: Path, on_progress: object) -> str:
    if not (directory / "died").exists():
        (directory / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "second time"


def wait_forever(directory: Path, on_progress: object) -> None:
    (directory / "pid").write_text(str(os.getpid()))
    time.sleep(3600)


def gpu_with_both_running(order: tuple[Path, int, int]) -> str:
    """Return the GPU that a model process would see."""
    slot_with_both_running(order)
    return dict(current_slot().environment).get("CUDA_VISIBLE_DEVICES", "none of its own")


def slot_with_both_running(order: tuple[Path, int, int]) -> int:
    """Return the slot number once as many items have started as there are slots."""
    directory, number, of = order
    (directory / f"begun-{number}").touch()
    while len(list(directory.glob("begun-*"))) < of:
        time.sleep(0.005)
    return current_slot().number


class OddError(Exception):
    """An exception that pickle cannot restore.

    A constructor with other arguments than the stored ones does not suffice: once a worker has imported Dask, the
    pickles of all exceptions that exist by then keep the attributes and call no constructor.
    """

    def __init__(self, left: str, right: str) -> None:
        super().__init__(f"{left} and {right}")

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return refuse_to_restore, ()


def refuse_to_restore() -> Exception:
    raise TypeError("this exception cannot be restored")


def fail_oddly(_: int) -> None:
    raise OddError("left", "right")


def run_stage(number: int) -> None:
    from mergegate.tasks.base.stage.progress import report_stage

    with report_stage("evaluate", str(number)) as report:
        report.status, report.summary = "made", "done"
