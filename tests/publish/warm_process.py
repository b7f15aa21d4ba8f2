"""Fork a process for each publication from a warm process that has done the slow imports, so that tests can kill it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patience import HANG_S

PROJECT = Path(__file__).resolve().parents[2]

# This code runs after a script that defines ``work(job)``, which returns the outcome.
_FORKS = """
for line in sys.stdin:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.write(writing, json.dumps(work(json.loads(line))).encode())
        os._exit(0)
    os.close(writing)
    print(json.dumps({"pid": child}), flush=True)
    with os.fdopen(reading, "rb") as answer:
        text = answer.read()
    os.waitpid(child, 0)
    print(text.decode() or json.dumps({"killed": True}), flush=True)
"""


@dataclass(frozen=True)
class WarmProcess:
    """The warm process and the path of the hash cache that its forks share."""

    process: subprocess.Popen[str]
    memo: Path

    def ask(self, job: Mapping[str, Any], on_start: Callable[[int], None]) -> dict[str, Any]:
        """Run ``job`` in a forked process and return the result of ``work``, or that the process was killed.

        ``on_start`` is called with the process ID before the process sends anything.
        """
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps({**job, "memo": str(self.memo)}) + "\n")
        self.process.stdin.flush()
        on_start(json.loads(self.process.stdout.readline())["pid"])
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert "unexpected" not in answer, answer["unexpected"]
        return answer


@contextmanager
def warm_process(place: Path, script: str, *arguments: str, environment: Mapping[str, str]) -> Iterator[WarmProcess]:
    """Run a warm process.

    ``script`` is Python code that does the slow imports and defines ``work(job)``. ``environment`` is complete, except
    for the path to this project.
    """
    place.mkdir(parents=True, exist_ok=True)
    with (place / "errors").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", script + _FORKS, *arguments],
            env={**environment, "PYTHONPATH": str(PROJECT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            yield WarmProcess(process, place / "memo.sqlite")
        finally:
            assert process.stdin
            process.stdin.close()
            process.wait(timeout=HANG_S)


def listed_files(files: Mapping[str, Path], gated: Mapping[str, str] | None) -> list[tuple[str, str, str]]:
    """Return the name, path and sha256 of each file. A hash in ``gated`` overrides the one of the file on disk."""
    from mergegate.merge_core.files.hashing import sha256_file

    known = gated or {}
    return [(name, str(path), known.get(name) or sha256_file(path)) for name, path in files.items()]
