"""Run what a command and the function of the Python API have in common, and print its results.

Each file is one operation. A command imports only the file that it needs, so that it starts fast.
"""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path

from mergegate.merge_core.errors import DiskUnavailable, MergegateError

command_line: ContextVar[str] = ContextVar("command_line", default="mergegate")
"""The running command as a user types it, for messages that propose to run it again."""


def convert_os_error(error: OSError) -> MergegateError:
    """Convert an error of the operating system into a refusal that tells the user what to do."""
    from mergegate.merge_core.files import disk_refusal

    if isinstance(error, FileNotFoundError):
        try:
            Path.cwd()
        except OSError:
            return DiskUnavailable(
                "the working directory",
                found="it has been deleted",
                expected="an existing directory",
                remedy="change to an existing directory, then run the command again",
            )
    return disk_refusal(error)
