"""What happens while something works, in lines for a person who asked for them; nobody asks: it costs nothing.

::

    detail("process %d: %s", pid, command)      # wherever something begins that a person may wonder about
    with heard_by(print):                       # whoever asked for it
        ...

A line may hold what a stranger wrote, or a command: what looks like a secret is left out of it, and what no terminal
shows is spelt out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from mergegate.merge_core.errors import shown

# Who listens. Not a logger: whoever configures logging (Prefect, a test) would print the lines as well, or lose them.
_listeners: list[Callable[[str], None]] = []

_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|(?:^|_)KEY(?:$|_)", re.IGNORECASE)
_SHORTEST = 6  # characters of a value that is looked for: shorter ones are words
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]+@")
_OPTION = re.compile(r"(--?[\w-]*(?:key|token|secret|password)[\w-]*[= ])(\S+)", re.IGNORECASE)


def detail(message: str, *arguments: object) -> None:
    """Say it, where somebody listens; ``arguments`` are put in by ``%``, as of logging. Never an error."""
    if not _listeners:
        return
    with suppress(Exception):
        line = shown(without_secrets(message % arguments))
        for say in tuple(_listeners):
            say(line)


def has_detail_listener() -> bool:
    """Whether anybody listens: for what costs something to find out."""
    return bool(_listeners)


@contextmanager
def detail_listener(say: Callable[[str], None]) -> Iterator[None]:
    """Tell ``say`` each line while the block runs, in whatever thread it arises."""
    _listeners.append(say)
    try:
        yield
    finally:
        _listeners.remove(say)


def without_secrets(text: str) -> str:
    """``text`` without values of the environment's variables that hold secrets, without names and passwords in
    addresses, and without values of options that are called so."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and _SECRET.search(name):
            text = text.replace(value, "***")
    return _OPTION.sub(r"\1***", _IN_ADDRESS.sub("***@", text))
