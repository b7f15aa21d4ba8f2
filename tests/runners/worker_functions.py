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
from mergegate.tasks.runners import current_slot

asked: list[Callable[[], list[tuple[int, Any]]]] = []


@flow
def one_of_several() -> list[tuple[int, Any]]:
    """A serialized flow includes everything that it references, so this one references nothing."""
    from worker_functions import do_asked

    return do_asked()


def do_asked() -> list[tuple[int, Any]]:
    return asked[0]()


def square(number: int) -> int:
    return number * number


def noted(order: tuple[Path, int]) -> int:
    """Append a line to a file per item, which records how often and by which process the item ran."""
    place, number = order
    with (place / str(number)).open("a") as file:
        file.write(f"{os.getpid()}\n")
    return number * number


def last_first(order: tuple[Path, int, int]) -> int:
    """Finish even items only after the next item was reported to `heard`, so two items have to run at a time."""
    place, number, of = order
    while number % 2 == 0 and number + 1 < of and not (place / f"heard-{number + 1}").exists():
        time.sleep(0.005)
    return number * number


def heard(results: Iterable[tuple[int, int | Exception]], place: Path) -> list[tuple[int, int | Exception]]:
    """Return all results in order of arrival, and leave a note about each."""
    found = []
    for at, result in results:
        (place / f"heard-{at}").touch()
        found.append((at, result))
    return found


def refuse_odd(number: int) -> int:
    if number % 2:
        raise Refused(f"item {number}", found="odd", expected="even")
    return number


def slot_number(_: int) -> tuple[int, dict[str, str]]:
    return current_slot().number, dict(current_slot().environment)


def killed_once(order: tuple[Path, int, int]) -> int:
    """Kill the worker the first time that the item `killer` runs."""
    place, number, killer = order
    first = not (place / str(number)).exists()
    noted((place, number))
    if number == killer and first:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def always_kills(order: tuple[Path, int, int]) -> int:
    place, number, killer = order
    noted((place, number))
    if number == killer:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def environment_there(_: int) -> dict[str, str]:
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


def who_am_i(on_progress: object) -> tuple[int, dict[str, str]]:
    return os.getpid(), dict(os.environ)


def meet(place: Path, number: int, on_progress: object) -> str:
    (place / f"here-{number}").touch()
    while not (place / f"here-{1 - number}").exists():
        time.sleep(0.005)
    return "met"


def die(on_progress: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_the_first_time(place: Path, on_progress: object) -> str:
    if not (place / "died").exists():
        (place / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "second time"


def wait_for_ever(place: Path, on_progress: object) -> None:
    (place / "pid").write_text(str(os.getpid()))
    time.sleep(3600)


def gpu_when_both_are_there(order: tuple[Path, int, int]) -> str:
    """Return the GPU that a model process would see."""
    slot_when_both_are_there(order)
    return dict(current_slot().environment).get("CUDA_VISIBLE_DEVICES", "none of its own")


def slot_when_both_are_there(order: tuple[Path, int, int]) -> int:
    """Return the slot number once as many items have started as there are slots."""
    place, number, of = order
    (place / f"begun-{number}").touch()
    while len(list(place.glob("begun-*"))) < of:
        time.sleep(0.005)
    return current_slot().number


class OddError(Exception):
    """An exception that pickle cannot restore, because it takes two arguments and stores one."""

    def __init__(self, left: str, right: str) -> None:
        super().__init__(f"{left} and {right}")


def fail_oddly(_: int) -> None:
    raise OddError("left", "right")


def run_a_stage(number: int) -> None:
    from mergegate.tasks.stage.progress import report_stage

    with report_stage("evaluate", str(number)) as report:
        report.status, report.summary = "made", "done"
