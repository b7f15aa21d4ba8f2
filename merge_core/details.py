"""What happens while something works, in lines for a person who asked for them; nobody asks: it costs nothing.

::

    detail("process %d: %s", pid, command)      # wherever something begins that a person may wonder about
    with heard_by(print):                       # whoever asked for it
        ...

A line may hold what a stranger wrote, or a command: what looks like a secret is left out of it, and what no terminal
shows is spelt out.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from merge_core.errors import shown

# Of its own and not passed on: handlers of whole programs (Prefect's, a test's) would print it as well.
_log = logging.getLogger("mergegate.details")
_log.propagate = False
_log.setLevel(logging.CRITICAL + 1)

_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|(?:^|_)KEY(?:$|_)", re.IGNORECASE)
_SHORTEST = 6  # characters of a value that is looked for: shorter ones are words
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]+@")
_OPTION = re.compile(r"(--?[\w-]*(?:key|token|secret|password)[\w-]*[= ])(\S+)", re.IGNORECASE)


def detail(message: str, *arguments: object) -> None:
    """Say it, where somebody listens; ``arguments`` as of logging."""
    _log.debug(message, *arguments)


def wants_details() -> bool:
    """Whether anybody listens: for what costs something to find out."""
    return _log.isEnabledFor(logging.DEBUG)


@contextmanager
def heard_by(say: Callable[[str], None]) -> Iterator[None]:
    """Tell ``say`` each line while the block runs, in whatever thread it arises."""
    handler = _Listener(say)
    before = _log.level
    _log.addHandler(handler)
    _log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        _log.setLevel(before)
        _log.removeHandler(handler)


def without_secrets(text: str) -> str:
    """``text`` without values of the environment's variables that hold secrets, without names and passwords in
    addresses, and without values of options that are called so."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and _SECRET.search(name):
            text = text.replace(value, "***")
    return _OPTION.sub(r"\1***", _IN_ADDRESS.sub("***@", text))


class _Listener(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.DEBUG)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._say(shown(without_secrets(record.getMessage())))
        except Exception:
            self.handleError(record)
