"""Handle standard streams that are closed, lose their reader, or cannot encode a character."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

READER_GONE = 128 + signal.SIGPIPE  # exit code that a shell reports for a program ended by SIGPIPE


class _Output(io.FileIO):
    """A standard stream whose reader may close it: ``mergegate methods | head -0``."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if self.fileno() == 1:
                raise SystemExit(READER_GONE) from None
            return len(data)


@contextmanager
def safe_streams() -> Iterator[None]:
    """Replace standard output and standard error in the block by streams whose errors never end in a traceback.

    Output to a closed stream is discarded. Without a replacement, the next opened file would get the number of the
    stream and our output.

    If Python does not decode file names as UTF-8, restart it in UTF-8 mode. In the C locale or one with another
    encoding, a valid UTF-8 name would otherwise not be valid text.
    """
    if sys.getfilesystemencoding().lower() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"  # for child processes
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  # open as long as the process
    sys.stdout = _safe_stream(sys.stdout, 1)
    sys.stderr = _safe_stream(sys.stderr, 2)
    try:
        yield
    finally:
        # Discard output that cannot be written, to avoid an interpreter message at exit.
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, SystemExit):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _safe_stream(stream: Any, number: int) -> io.TextIOWrapper:
    raw = _Output(number, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding if stream is not None else "utf-8",
        errors="backslashreplace",  # file names need not be text, and terminals may lack characters
        line_buffering=number == 2 or raw.isatty() or getattr(stream, "write_through", False),
    )
