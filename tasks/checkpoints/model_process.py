"""The process that holds models: what hangs there is killed at a time limit, what dies takes no flow with it.

One such process at a time. It is started when it is first needed, keeps models for the next question (perplexity, task
after task, look after look: each is loaded once), and dies with this process, however that ends (``tasks.processes``)::

    answer = ask_child(function, arguments, where="task gsm8k on merge", models=[merge], on_progress=advance)
    end_child()                                                         # the models' memory is free again

``function`` is a plain function of a module, called there as ``function(*arguments, on_progress)``. Questions and
answers are pickled: ``(function, arguments)`` goes there; ``("progress", done, total)`` any number of times and then
one of ``("done", value)``, ``("problem", error)``, ``("crash", traceback)`` come back.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar, cast

from merge_core.errors import InvalidInput, MergegateError, Refused
from merge_core.store import refusing_disk
from tasks.checkpoints.model import Model
from tasks.checkpoints.model_cache import SMALLER, ShortOfMemory, also_unload, hold_at_most, unload
from tasks.processes import SupervisedProcess

_LOOK_EVERY = 1.0  # seconds between looks whether the process is still there
_PROGRESS_EVERY = 0.1  # seconds: a tiny model answers thousands of requests in one
_START = "from tasks.checkpoints.model_process import answer_questions; answer_questions()"
_ALONE = "one at a time"

A = TypeVar("A")
TellProgress = Callable[[int, int], None]

_log = logging.getLogger(__name__)
_lock = threading.RLock()
_current: _ModelProcess | None = None
_alone = False  # whether memory was too short for several models once


def ask_child(
    function: Callable[..., A],
    arguments: Sequence[object],
    *,
    where: str,
    models: Sequence[Model] = (),
    own_process: bool = False,
    time_limit: float | None = None,
    on_progress: TellProgress = lambda done, total: None,
) -> A:
    """What ``function(*arguments, on_progress)`` returns in the process that holds models.

    Where memory runs short while it holds several, it is started anew for one at a time and asked once more: what
    ``function`` keeps in a journal is not done again.

    Args:
        where: What messages call the question.
        models: That ``function`` will load there; none: it is asked of whatever process there is.
        own_process: Only the death of the process frees the memory of these models.
        time_limit: Seconds.

    Raises:
        MergegateError: what ``function`` raises.
        ShortOfMemory: when the system ended the process, as it does when memory is full.
        InvalidInput: when it died in another way.
        Refused: when the time limit is over.
    """
    global _alone
    unload()  # models here and there need not fit side by side
    with _lock:
        only_for = "".join(model.digest for model in models) if own_process else ""
        deadline = time.monotonic() + time_limit if time_limit is not None else None
        while True:
            process = _current if not models and _current and _current.process.alive else _process_for(only_for)
            process.models |= {model.digest for model in models}
            try:
                return cast(A, _ask(process, (function, tuple(arguments)), where, time_limit, deadline, on_progress))
            except ShortOfMemory:
                if _alone or len(process.models) < 2:
                    raise
                _log.warning("%s: memory was short with several models in it; from now on one at a time", where)
                end_child()
                _alone = True


def end_child() -> None:
    """End the process, and everything it holds and has started."""
    global _current
    with _lock:
        if _current is not None:
            _current.end()
            _current = None


@atexit.register
def _end() -> None:
    """Without the lock: a thread that waits for an answer holds it, and must not hold up the end of this process."""
    if (holder := _current) is not None:
        holder.process.end()


also_unload(end_child)


class _ModelProcess:
    """The process that holds models, seen from here."""

    def __init__(self, only_for: str) -> None:
        self.only_for = only_for  # digests of the only models that it may hold; empty: it can change
        self.models: set[str] = set()  # digests of those that it was asked about
        self.connection, theirs = Pipe()
        path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed by ``end``
        try:
            self.process = SupervisedProcess(
                # -P: the directory that the run was started in is none to import from.
                [sys.executable, "-P", "-c", _START, str(theirs.fileno()), *([_ALONE] if _alone else [])],
                {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
                self._output,
                name="evaluation",
                pass_fds=[theirs.fileno()],
            )
        finally:
            theirs.close()

    def last_line(self) -> str:
        """The last line that it has printed, where libraries say what kills them."""
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")

    def end(self) -> None:
        """End it, and give back what it is connected by."""
        self.process.end()
        self.connection.close()
        self._output.close()


def _process_for(only_for: str) -> _ModelProcess:
    global _current
    if _current is None or not _current.process.alive or _current.only_for != only_for:
        end_child()
        _current = _ModelProcess(only_for)
    return _current


def _ask(
    holder: _ModelProcess,
    question: tuple[Any, ...],
    where: str,
    limit: float | None,
    deadline: float | None,
    on_progress: TellProgress,
) -> Any:
    answered = False
    try:
        holder.connection.send(question)
        while not answered:
            left = _LOOK_EVERY if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise Refused(
                    where,
                    found=f"not done after {limit:g} s, and stopped",
                    expected="an answer within evaluate.time_limit",
                    remedy="a higher evaluate.time_limit, or a larger batch_size if the device has room",
                )
            if not holder.connection.poll(min(left, _LOOK_EVERY)):
                if holder.process.alive or holder.connection.poll():
                    continue
                raise EOFError
            kind, *content = holder.connection.recv()
            if kind == "progress":
                on_progress(*content)
            else:
                answered = True
    except (EOFError, ConnectionError):
        raise _died(where, holder.process.end().returncode, holder.last_line()) from None
    finally:
        if not answered:  # an answer that comes after all would be taken for that to the next question
            end_child()
    if kind == "problem":
        raise cast(MergegateError, content[0])
    if kind == "crash":
        raise RuntimeError(f"{where}\n{content[0]}")
    return content[0]


def _died(where: str, code: int | None, last_line: str) -> InvalidInput:
    if code is None or code == -signal.SIGKILL:
        return ShortOfMemory(
            where,
            found="the process that scores was killed by signal 9, as the system does when memory is full",
            expected="memory for the model and a batch",
            remedy=SMALLER,
        )
    how = f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"
    return InvalidInput(
        where,
        found=f"the process that scores ended {how}" + (f": {last_line}" if last_line else ""),
        expected="an answer",
        remedy=SMALLER if code < 0 else "",
    )


def answer_questions() -> None:
    """In the process that holds models: answer until whoever asks is gone. Arguments of the command line: the
    descriptor of the connection, and whether to hold one model at a time."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # an own child that outlives us must not look like us
    if _ALONE in sys.argv[2:]:
        hold_at_most(1)
    asker = Connection(descriptor)
    while True:
        try:
            function, arguments = asker.recv()
        except EOFError:
            return
        asker.send(_answer(asker, function, arguments))


def _answer(asker: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, Any]:
    last_sent = 0.0

    def on_progress(done: int, total: int) -> None:
        nonlocal last_sent
        if done == total or time.monotonic() - last_sent >= _PROGRESS_EVERY:
            last_sent = time.monotonic()
            asker.send(("progress", done, total))

    try:
        with refusing_disk():
            return "done", function(*arguments, on_progress)
    except MergegateError as error:
        return "problem", error
    except Exception:
        return "crash", traceback.format_exc()
