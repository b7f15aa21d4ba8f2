"""Scoring in a process of its own: what hangs is killed at a time limit, what dies takes no flow with it.

One such process at a time. It is started when it is first needed, keeps the last model for the next part or task, and
dies with this process, however that ends (``tasks.processes``)::

    scored = score_in_child(model, task, scoring, part, "cuda", on_progress)
    end_child()                                                         # the model's memory is free again

The other side is ``answer_questions``. Questions and answers are pickled tuples: ``("look", task)`` and
``("score", model, task, scoring, part, device)`` go there; ``("progress", done, total)`` any number of times and then
one of ``("done", value)``, ``("problem", error)``, ``("crash", traceback)`` come back.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from merge_core.errors import InvalidInput, MergegateError, Refused
from tasks.checkpoints import SMALLER, Model, also_unload, unload
from tasks.evaluation.backends import find_backend
from tasks.evaluation.scoring import DocumentRange, Scoring
from tasks.evaluation.task_data import LoadedData
from tasks.evaluation.task_definition import EvalTask
from tasks.processes import SupervisedProcess

if TYPE_CHECKING:
    from tasks.evaluation.harness import ScoredDocuments

_LOOK_EVERY = 1.0  # seconds between looks whether the process is still there
_PROGRESS_EVERY = 0.1  # seconds: a tiny model answers thousands of requests in one
_START = "from tasks.evaluation.process import answer_questions; answer_questions()"

_lock = threading.RLock()
_current: _ScoringProcess | None = None


def score_in_child(
    model: Model,
    task: EvalTask,
    scoring: Scoring,
    part: DocumentRange,
    device: str,
    on_progress: Callable[[int, int], None],
) -> ScoredDocuments:
    """As ``harness.score_documents``, in the process that scores, within ``scoring.time_limit``.

    Raises:
        InvalidInput: as ``harness.score_documents``; or when the process died.
        Refused: when the time limit is over.
    """
    with _lock:
        unload()  # two models need not fit side by side
        process = _process_for("" if find_backend(scoring.backend).frees_memory else model.digest)
        where = f"task {task.name} on {model.name}: {part}"
        question = ("score", model, task, scoring, part, device)
        return cast("ScoredDocuments", _ask(process, question, where, scoring.time_limit, on_progress))


def look_in_child(task: EvalTask, time_limit: float | None = None) -> LoadedData:
    """``harness.look_at_data`` in the process that scores: loading foreign data can hang and die just as well.

    Raises:
        InvalidInput: as ``harness.look_at_data``; or when the process died.
        Refused: when ``time_limit`` seconds are over.
    """
    with _lock:
        process = _current if _current is not None and _current.process.alive else _process_for("")
        where = f"task {task.name}: its data"
        return cast("LoadedData", _ask(process, ("look", task), where, time_limit, lambda done, total: None))


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
    if (scoring := _current) is not None:
        scoring.process.end()


also_unload(end_child)


class _ScoringProcess:
    """The process that scores, seen from here."""

    def __init__(self, only_for: str) -> None:
        self.only_for = only_for  # digest of the one model that it may hold; empty: it can change
        self.connection, theirs = Pipe()
        path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed by ``end``
        try:
            self.process = SupervisedProcess(
                # -P: the directory that the run was started in is none to import from.
                [sys.executable, "-P", "-c", _START, str(theirs.fileno())],
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


def _process_for(digest: str) -> _ScoringProcess:
    global _current
    if _current is None or not _current.process.alive or _current.only_for != digest:
        end_child()
        _current = _ScoringProcess(digest)
    return _current


def _ask(
    scoring: _ScoringProcess,
    question: tuple[Any, ...],
    where: str,
    limit: float | None,
    on_progress: Callable[[int, int], None],
) -> Any:
    deadline = time.monotonic() + limit if limit is not None else None
    answered = False
    try:
        scoring.connection.send(question)
        while not answered:
            left = _LOOK_EVERY if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise Refused(
                    where,
                    found=f"not done after {limit:g} s, and stopped",
                    expected="an answer within evaluate.time_limit",
                    remedy="a higher evaluate.time_limit, or a larger batch_size if the device has room",
                )
            if not scoring.connection.poll(min(left, _LOOK_EVERY)):
                if scoring.process.alive or scoring.connection.poll():
                    continue
                raise EOFError
            kind, *content = scoring.connection.recv()
            if kind == "progress":
                on_progress(*content)
            else:
                answered = True
    except (EOFError, ConnectionError):
        raise _died(where, scoring.process.end().returncode, scoring.last_line()) from None
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
        return InvalidInput(
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
    """In the process that scores: answer until whoever asks is gone. Argument of the command line: the descriptor of
    the connection."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # an own child that outlives us must not look like us
    asker = Connection(descriptor)
    while True:
        try:
            question = asker.recv()
        except EOFError:
            return
        asker.send(_answer(asker, question))


def _answer(asker: Connection, question: tuple[Any, ...]) -> tuple[str, Any]:
    from tasks.evaluation import harness

    last_sent = 0.0

    def on_progress(done: int, total: int) -> None:
        nonlocal last_sent
        if done == total or time.monotonic() - last_sent >= _PROGRESS_EVERY:
            last_sent = time.monotonic()
            asker.send(("progress", done, total))

    what, *arguments = question
    try:
        if what == "look":
            return "done", harness.look_at_data(*arguments)
        model, task, scoring, part, device = arguments
        return "done", harness.score_documents(model, task, scoring, part, device, on_progress)
    except MergegateError as error:
        return "problem", error
    except Exception:
        return "crash", traceback.format_exc()
