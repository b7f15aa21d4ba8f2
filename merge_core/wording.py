"""Format and parse quantities for users, and report details of the work in progress to listeners, line by line.

Bytes have decimal units, and durations a suitable unit. Reports of details without a listener cost nothing::

    with detail_listener(print):                # once, for a user who wants details
        detail("process %d: %s", pid, command)  # anywhere in the program

Lines may contain commands and untrusted text, so secrets are masked and unprintable characters are escaped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from mergegate.merge_core.errors import InvalidInput, to_printable

_SECONDS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}
_SPAN = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([a-z]+)\s*", re.ASCII)
_AMOUNT = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE | re.ASCII)

# The listeners are not a logger, because code that configures logging (Prefect, a test) would print the lines twice or
# lose them.
_listeners: list[Callable[[str], None]] = []

_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|(?:^|_)KEY(?:$|_)", re.IGNORECASE)
_SHORTEST = 6  # shortest value to mask; shorter ones may be ordinary words
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]+@")
_OPTION = re.compile(r"(--?[\w-]*(?:key|token|secret|password)[\w-]*[= ])(\S+)", re.IGNORECASE)


def format_bytes(count: float) -> str:
    """Format a number of bytes in decimal units with three significant digits: '913 kB', '2.47 GB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB" if count < 999.5 else f"{count:.0f} TB"


def parse_bytes(text: str, location: str) -> int:
    """Parse a number of bytes with a decimal unit ('50GB', '1.5 TB') or a power of 1024 ('50GiB').

    Raises:
        InvalidInput: The text is not a number with a unit. The message names ``location``, for example an option.
    """
    if (match := _AMOUNT.fullmatch(text)) is None:
        raise InvalidInput(location, found=repr(text), expected="a number of bytes with a unit, such as 50GB")
    number, unit, binary = match.groups()
    power = "kmgt".find(unit.lower()) + 1 if unit else 0
    factor: int = (1024 if binary else 1000) ** power
    return round(float(number) * factor)


def format_short_time(seconds: float) -> str:
    """Format a time of up to a few minutes with two or three digits: '12 ms', '1.4 s', '38 s'."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.{0 if seconds >= 0.00995 else 1}f} ms"
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:,.0f} s"


def format_count(number: float, thing: str) -> str:
    """Return a number with a noun: ``1 tensor``, ``1,200 tensors``. A float has three digits: ``1.5 runs``."""
    text = f"{number:,}" if isinstance(number, int) else f"{number:.3g}"
    return f"{text} {thing}" + ("" if text == "1" else "s")


def format_duration(seconds: float) -> str:
    """Format a measured duration: '0.4 s', '6 m 12 s', '2 h 05 m'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} m {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} m"


def format_roughly(seconds: float) -> str:
    """Format an estimated time with few digits: '< 3 s', '15 s', '40 min', '2.5 h', '3 days'."""
    if seconds < 3:
        return "< 3 s"
    if seconds < 90:
        return f"{max(5, 5 * round(seconds / 5))} s"
    if seconds < 90 * 60:
        minutes = seconds / 60
        return f"{round(minutes) if minutes < 10 else 5 * round(minutes / 5)} min"
    hours = seconds / 3600
    if hours < 48:
        return f"{round(2 * hours) / 2:g} h" if hours < 10 else f"{round(hours)} h"
    return f"{round(hours / 24)} days"


def parse_duration(text: str, location: str) -> float:
    """Parse a duration such as '20 s', '90 min', '6 h' or '3 d', and return it in seconds.

    Raises:
        InvalidInput: The text is not a positive number with a unit. The message names ``location``.
    """
    match = _SPAN.fullmatch(text)
    if match is None or match[2] not in _SECONDS or not float(match[1]):
        raise InvalidInput(
            location, found=repr(text), expected="a duration with a unit, such as 20 s, 90 min, 6 h or 3 d"
        )
    return float(match[1]) * _SECONDS[match[2]]


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
