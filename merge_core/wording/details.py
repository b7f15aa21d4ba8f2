"""Report details of the work in progress to listeners, line by line. Reports without a listener cost nothing.

::

    with detail_listener(print):                # once, for a user who wants details
        detail("process %d: %s", pid, command)  # anywhere in the program

Lines may contain commands and untrusted text, so secrets are masked and unprintable characters are escaped.
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
    """Send ``message % arguments`` to all listeners. This never raises."""
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
    """Return whether there is a listener, so that callers can skip details that are expensive to compute."""
    return bool(_listeners)


@contextmanager
def detail_listener(listener: Callable[[str], None]) -> Iterator[None]:
    """Call ``listener`` with each line that any thread reports while the ``with`` block runs."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
