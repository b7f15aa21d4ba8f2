"""Scoring in a process of its own: what hangs is killed at a time limit, what dies takes no flow with it.

One such process at a time. It is started when it is first needed, keeps the last model for the next part or task, and
dies with this process, however that ends::

    scored = score(model, task, scoring, part, "cuda", on_progress)
    release()                                                           # the model's memory is free again
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from merge_core.errors import InvalidInput, MergegateError, Refused
from tasks.checkpoints import SMALLER, Model, also_unload, unload
from tasks.evaluation.sampling import DocumentRange
from tasks.evaluation.scoring import Scoring
from tasks.evaluation.task_definition import EvalTask

if TYPE_CHECKING:
    from tasks.evaluation.harness import ScoredDocuments

_LOOK_EVERY = 1.0  # seconds between looks whether the process is still there

_lock = threading.RLock()
_held: _Process | None = None


def score_in_child(
    model: Model,
    task: EvalTask,
    scoring: Scoring,
    part: DocumentRange,
    device: str,
    on_progress: Callable[[int, int], None],
) -> ScoredDocuments:
    """As ``tasks.evaluation.harness.score``, in the process that scores, within ``scoring.time_limit``.

    Raises:
        InvalidInput: as ``tasks.evaluation.harness.score``; or when the process died.
        Refused: when the time limit is over.
    """
    with _lock:
        unload()  # two models need not fit side by side
        # Only death gives back all that an engine of vLLM holds.
        process = _process_for(model.digest if scoring.backend == "vllm" else "")
        where = f"task {task.name} on {model.name}: {part}"
        question = ("score", model, task, scoring, part, device)
        return cast("ScoredDocuments", _ask(process, question, where, scoring.time_limit, on_progress))


def count_in_child(task: EvalTask, time_limit: float | None = None) -> int:
    """``harness.count_documents`` in the process that scores: loading foreign data can hang and die just as well.

    Raises:
        InvalidInput: as ``tasks.evaluation.harness.count``; or when the process died.
        Refused: when ``time_limit`` seconds are over.
    """
    with _lock:
        process = _held if _held is not None and _held.is_alive else _process_for("")
        return cast(
            int, _ask(process, ("count", task), f"task {task.name}: its data", time_limit, lambda done, total: None)
        )


def end_child() -> None:
    """End the process, and everything it holds and has started."""
    global _held
    with _lock:
        if _held is not None:
            _held.kill()
            _held = None


@atexit.register
def _end() -> None:
    """Without the lock: a thread that waits for an answer holds it, and must not hold up the end of this process."""
    if (process := _held) is not None:
        process.kill_group()


also_unload(end_child)


class _Process:
    """The process that scores, seen from here."""

    def __init__(self, only_for: str) -> None:
        self.only_for = only_for  # digest of the one model that it may hold; empty: it can change
        self._scratch = tempfile.TemporaryDirectory(prefix="mergegate-evaluation-")
        self._said = Path(self._scratch.name) / "said"
        self.connection, theirs = Pipe()
        lifeline, self._lifeline = os.pipe()
        inherited = (theirs.fileno(), lifeline)
        path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
        try:
            with self._said.open("wb") as said:
                self._process = subprocess.Popen(
                    # -P: the directory that the run was started in is none to import from.
                    [
                        sys.executable,
                        "-P",
                        "-c",
                        "from tasks.evaluation.child import answer_questions; answer_questions()",
                        *map(str, inherited),
                        self._scratch.name,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), "TMPDIR": self._scratch.name},
                    pass_fds=inherited,
                    start_new_session=True,
                )
        finally:
            theirs.close()
            os.close(lifeline)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def last_words(self) -> str:
        """The last line that it has printed, where libraries say what kills them."""
        lines = self._said.read_text(errors="replace").split("\n")
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")

    def exit_code(self) -> int:
        """Of a process that is ending: negative for a signal, as in ``subprocess``."""
        return self._process.wait()

    def kill_group(self) -> None:
        """End it and all below it. The group outlives its leader as long as anyone is in it, so its number is safe."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """The same, and give back what it is connected by."""
        self.kill_group()
        self._process.wait()
        self.connection.close()
        os.close(self._lifeline)
        self._scratch.cleanup()


def _process_for(digest: str) -> _Process:
    global _held
    if _held is None or not _held.is_alive or _held.only_for != digest:
        end_child()
        _held = _Process(digest)
    return _held


def _ask(
    process: _Process,
    question: tuple[Any, ...],
    where: str,
    limit: float | None,
    on_progress: Callable[[int, int], None],
) -> Any:
    deadline = time.monotonic() + limit if limit is not None else None
    answered = False
    try:
        process.connection.send(question)
        while not answered:
            left = _LOOK_EVERY if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise Refused(
                    where,
                    found=f"not done after {limit:g} s, and stopped",
                    expected="an answer within evaluate.time_limit",
                    remedy="a higher evaluate.time_limit, or a larger batch_size if the device has room",
                )
            if not process.connection.poll(min(left, _LOOK_EVERY)):
                if process.is_alive or process.connection.poll():
                    continue
                raise EOFError
            kind, *said = process.connection.recv()
            if kind == "progress":
                on_progress(*said)
            else:
                answered = True
    except (EOFError, ConnectionError):
        raise _died(where, process.exit_code(), process.last_words()) from None
    finally:
        if not answered:  # an answer that comes after all would be taken for that to the next question
            end_child()
    if kind == "problem":
        raise cast(MergegateError, said[0])
    if kind == "crash":
        raise RuntimeError(f"{where}\n{said[0]}")
    return said[0]


def _died(where: str, code: int, words: str) -> InvalidInput:
    if code == -signal.SIGKILL:
        return InvalidInput(
            where,
            found="the process that scores was killed by signal 9, as the system does when memory is full",
            expected="memory for the model and a batch",
            remedy=SMALLER,
        )
    how = f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"
    return InvalidInput(
        where,
        found=f"the process that scores ended {how}" + (f": {words}" if words else ""),
        expected="an answer",
        remedy=SMALLER if code < 0 else "",
    )
