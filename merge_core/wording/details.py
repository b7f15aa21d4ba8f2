"""Report details of the work in progress to listeners, line by line. Without a listener, it costs nothing.

::

    detail("process %d: %s", pid, command)      # where something starts that a user may wonder about
    with detail_listener(print):                # where the user asked for details
        ...

A line may contain a command or untrusted text. Anything that looks like a secret is masked, and characters that a
terminal cannot print are escaped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from mergegate.merge_core.errors import to_printable

# The listeners are not a logger, because code that configures logging (Prefect, a test) would print the lines twice or
# lose them.
_listeners: list[Callable[[str], None]] = []

_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|(?:^|_)KEY(?:$|_)", re.IGNORECASE)
_SHORTEST = 6  # shortest value to mask; shorter ones may be ordinary words
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]+@")
_OPTION = re.compile(r"(--?[\w-]*(?:key|token|secret|password)[\w-]*[= ])(\S+)", re.IGNORECASE)


def detail(message: str, *arguments: object) -> None:
    """Send a line to all listeners. ``arguments`` are inserted with ``%``, as in logging. This never raises."""
    if not _listeners:
        return
    with suppress(Exception):
        line = message % arguments
        # Mask the values of environment variables that hold secrets, user names and passwords in URLs, and the values
        # of options whose names sound like secrets.
        for name, value in os.environ.items():
            if len(value) >= _SHORTEST and _SECRET.search(name):
                line = line.replace(value, "***")
        line = to_printable(_OPTION.sub(r"\1***", _IN_ADDRESS.sub("***@", line)))
        for listener in tuple(_listeners):
            listener(line)


def has_detail_listener() -> bool:
    """Return whether there is a listener. Use it before details that are expensive to compute."""
    return bool(_listeners)


@contextmanager
def detail_listener(listener: Callable[[str], None]) -> Iterator[None]:
    """Call ``listener`` with each line while the block runs, regardless of the thread that reports it."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
