"""What the tests of runners have done, by name of a module that workers find too."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from merge_core.errors import Refused
from tasks.outside import current_slot


def square(number: int) -> int:
    return number * number


def noted(order: tuple[Path, int]) -> int:
    """Leaves a line in a file of its own, so that it is seen how often it was done, and by whom."""
    place, number = order
    with (place / str(number)).open("a") as file:
        file.write(f"{os.getpid()}\n")
    return number * number


def last_first(order: tuple[Path, int, int]) -> int:
    """Ends only when the next one has: they finish in another order than they begin, if two are done at a time."""
    place, number, of = order
    deadline = time.monotonic() + 60
    while number % 2 == 0 and number + 1 < of and not (place / f"{number + 1}").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(number)
        time.sleep(0.005)
    (place / str(number)).write_text("done")
    return number * number


def refuse_odd(number: int) -> int:
    if number % 2:
        raise Refused(f"item {number}", found="odd", expected="even")
    return number


def slot_number(_: int) -> tuple[int, dict[str, str]]:
    return current_slot().number, dict(current_slot().environment)


def killed_once(order: tuple[Path, int, int]) -> int:
    """The one that is meant kills its worker the first time."""
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
    """Of the worker, with its process, its parent and the API that its tasks speak to."""
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    return {
        **os.environ,
        "pid": str(os.getpid()),
        "api": settings.api.url or "",
        "prefect home": str(settings.home),
    }
