"""The process in which models are scored: answers questions until whoever asks is gone, then dies with all below it.

Started by ``tasks.evaluation.process`` as the leader of a process group of its own. Questions and answers are pickled
tuples: ``("count", task)`` and ``("score", model, task, scoring, part, device)`` come in; ``("progress", done, total)``
any number of times and then one of ``("done", value)``, ``("problem", error)``, ``("crash", traceback)`` go out.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from merge_core.errors import MergegateError

_TELL_EVERY = 0.1  # seconds: a tiny model answers thousands of requests in one


def answer_questions() -> None:
    """Answer questions. Arguments of the command line: the connection's descriptor, the lifeline's, and the directory
    for temporary files."""
    connection, lifeline, scratch = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    _die_with(lifeline, scratch)
    os.close(lifeline)
    os.set_inheritable(connection, False)  # an own child that outlives us must not look like us
    asker = Connection(connection)
    while True:
        try:
            question = asker.recv()
        except EOFError:
            return
        asker.send(_answer(asker, question))


def _answer(asker: Connection, question: tuple[Any, ...]) -> tuple[str, Any]:
    from tasks.evaluation import harness

    told = 0.0

    def tell(done: int, total: int) -> None:
        nonlocal told
        if done == total or time.monotonic() - told >= _TELL_EVERY:
            told = time.monotonic()
            asker.send(("progress", done, total))

    what, *arguments = question
    try:
        if what == "count":
            return "done", harness.count_documents(*arguments)
        model, task, scoring, part, device = arguments
        return "done", harness.score_documents(model, task, scoring, part, device, tell)
    except MergegateError as error:
        return "problem", error
    except Exception:
        return "crash", traceback.format_exc()


def _die_with(lifeline: int, scratch: str) -> None:
    """Fork a guard that kills the whole group as soon as the other end of ``lifeline`` is closed, by a process that is
    done or by one that is dead, and leaves no temporary files. It works where a thread of this process could not: in
    code that never lets go of the interpreter. Called before anything starts threads or opens files."""
    if os.fork():
        return
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    os.dup2(lifeline, 0)
    os.closerange(1, 65536)
    while os.read(0, 1):
        pass
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
