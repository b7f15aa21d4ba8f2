"""Drive the command line on a pseudo-terminal: read its output, type, and press Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from patience import HANG_S

CTRL_C = "\x03"
_A_WHILE_S = 5.0


@dataclass
class Terminal:
    """A running command and its output so far."""

    process: subprocess.Popen[bytes]
    master: int
    shown: str = ""
    seen: int = 0  # number of characters of ``shown`` already matched

    def see(self, text: str) -> None:
        """Wait until ``text`` appears after the last match."""
        while (at := self.shown.find(text, self.seen)) < 0:
            assert self._read(), f"it ended without showing {text!r}:\n{self.shown}"
        self.seen = at + len(text)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self) -> int:
        """Press Ctrl-C, repeat it while nothing happens, and return the exit code.

        Python ignores a Ctrl-C that arrives between the prompt and the wait for an answer until another key is
        pressed. A Ctrl-C during shutdown would kill the process, so the output is read before the next key press.
        """
        self.type(CTRL_C)
        pressed = 1
        while True:
            if select.select([self.master], [], [], _A_WHILE_S)[0]:
                if not self._read():
                    return self.process.wait(HANG_S)
            else:
                assert pressed * _A_WHILE_S < HANG_S, f"Ctrl-C does not end it:\n{self.shown}"
                self.type(CTRL_C)
                pressed += 1

    def end(self) -> int:
        """Read all output and return the exit code."""
        while self._read():
            pass
        return self.process.wait(HANG_S)

    def _read(self) -> bool:
        ready, _, _ = select.select([self.master], [], [], HANG_S)
        assert ready, f"it hangs:\n{self.shown}"
        try:
            more = os.read(self.master, 65536)
        except OSError:  # EIO: the other end is closed
            return False
        self.shown += more.decode(errors="replace").replace("\r\n", "\n")
        return bool(more)


def _sit_down() -> None:
    """Give the child a controlling terminal and the default SIGINT handler.

    Ctrl-C needs a controlling terminal. Test runners that a script starts in the background ignore SIGINT, and the
    child would inherit that.
    """
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def terminal(root: Path, *arguments: str) -> Iterator[Terminal]:
    """Run ``mergegate`` in ``root`` on its own terminal, and kill it when the block ends."""
    master, slave = os.openpty()
    # Plain text and long lines make the output match the expected text.
    environment = {**os.environ, "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "250"}
    environment["MERGEGATE_HOME"] = str(root / ".mergegate")
    command = [sys.executable, "-c", "from mergegate.flows.cli import main; main()", *arguments]
    process = subprocess.Popen(
        command,
        cwd=root,
        env={**environment, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=_sit_down,
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)
