"""Tasks with documents that hang, raise or kill the process when a prompt is built from them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patience import HANG_S
from tiny_models import words, write_choices

from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask, pin_task
from mergegate.tasks.quality.evaluation.document_order import order_documents

PROJECT = Path(__file__).resolve().parents[1]


def write_trap(directory: Path, deed: str, *, at: int, n: int = 40) -> EvalTask:
    """Write the task of ``write_choices``, with a ``deed`` before the document at position ``at`` of the task's order.

    ``deed`` contains Python statements. Every document that becomes a prompt adds a line ``pid word`` to
    ``directory/asked``.
    """
    write_choices(directory, n)
    word = words(n)[order_documents({"trap": n}, 0)[at][1]]
    body = "\n        ".join(deed.splitlines())
    (directory / "prompts.py").write_text(
        f"""import ctypes, os, signal, subprocess, sys
from pathlib import Path
HERE = Path({str(directory)!r})

def prompt(doc):
    with open(HERE / "asked", "a") as file:
        file.write(f"{{os.getpid()}} {{doc['word']}}\\n")
    if doc["word"] == {word!r}:
        {body}
    return doc["word"]
"""
    )
    path = directory / "trap.yaml"
    path.write_text("include: letters.yaml\ntask: trap\ndoc_to_text: !function prompts.prompt\n")
    return pin_task(path.name, directory, HashMemo(directory / "hashes.db"))


def asked(task: EvalTask) -> list[tuple[int, str]]:
    """Return (process, word) of every document that became a prompt so far."""
    lines = (task.definition.parent / "asked").read_text().splitlines()
    return [(int(line.split()[0]), line.split()[1]) for line in lines]


def ends(process: int, within: float = HANG_S) -> bool:
    """Return whether a process ends within ``within`` seconds; it need not be a child of this one."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], within)[0])
    finally:
        os.close(descriptor)


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@contextmanager
def in_another_process(script: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """Run ``script`` in a new session with a Python process that can import the project and its tests."""
    paths = (str(PROJECT), str(Path(__file__).parent))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, cwd=cwd, env=environment, start_new_session=True, **streams)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
