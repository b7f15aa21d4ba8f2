"""The command line on a terminal of its own, as a person sits before it: reads what it shows, types, presses Ctrl-C."""

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
    """A running command and all that it has shown."""

    process: subprocess.Popen[bytes]
    master: int
    shown: str = ""
    seen: int = 0  # characters of it that were waited for

    def see(self, text: str) -> None:
        """Wait until ``text`` is shown, after what was seen before."""
        while (at := self.shown.find(text, self.seen)) < 0:
            assert self._read(), f"it ended without showing {text!r}:\n{self.shown}"
        self.seen = at + len(text)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self) -> int:
        """Press Ctrl-C, and again whenever nothing happens for a while, as people do; the exit code.

        Python forgets one that comes between the question and the wait for its answer, until another key is pressed.
        One that comes while it ends would kill it on its way out, so what it shows is read before the next.
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
        """Read to the end; the exit code."""
        while self._read():
            pass
        return self.process.wait(HANG_S)

    def _read(self) -> bool:
        ready, _, _ = select.select([self.master], [], [], HANG_S)
        assert ready, f"it hangs:\n{self.shown}"
        try:
            more = os.read(self.master, 65536)
        except OSError:  # EIO: nobody has the other end any more
            return False
        self.shown += more.decode(errors="replace").replace("\r\n", "\n")
        return bool(more)


def _sit_down() -> None:
    """In the child: Ctrl-C comes from a controlling terminal, and is heard also where what runs the tests is deaf to
    it, as whatever a script has started in the background."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def terminal(root: Path, *arguments: str) -> Iterator[Terminal]:
    """``mergegate`` with ``arguments`` in ``root``, with a terminal that is its own; ended with the block."""
    master, slave = os.openpty()
    # Plain text and long lines, so that what is shown is what is looked for.
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
