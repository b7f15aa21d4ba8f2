"""Programs that a model wrote, run one by one, each in a process of its own that can do next to nothing.

::

    limits = ProgramLimits()
    run_program("assert 1 + 1 == 2", limits)            # ProgramEnd.PASSED

A program passes if the whole of its text is executed without an exception, in time. What it runs in is confined twice.
``confinement`` as for everything foreign, but tighter: it reads the Python installation and nothing else, writes to a
directory that is removed with it, and has no network. And it binds its own hands (``program_child``): processor time,
memory, size of a file, no process, no other program, no socket, no signal. Of our environment it sees nothing.

Here, unlike elsewhere, a promise that this system cannot keep is a refusal: nobody has to run code of a model.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
from enum import StrEnum
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core.errors import Refused
from mergegate.tasks.sandbox.confinement import Confinement
from mergegate.tasks.sandbox.supervision import NotStarted, SupervisedProcess

_CHILD = Path(__file__).with_name("program_child.py")
_START = 20.0  # seconds for the interpreter beyond the program's own, on a machine that is busy
_BOUND = {"resources", "calls"}
_OF_TIME = {signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL}
# Where a Python installation and the libraries under it lie. No directory of a person, and no /etc, /proc or /run.
_SYSTEM = ("/usr", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
# Threads of numpy would be counted together; sets of texts come in the same order each time.
_ENVIRONMENT = {
    **{"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
    **{"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
}


class ProgramLimits(BaseModel):
    """What one program may take; part of the key of every score, since another limit is another measurement."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu: int = Field(default=3, ge=1)  # seconds of processor time: a busy machine is no stricter than an idle one
    clock: float = Field(default=30.0, gt=0)  # seconds, for what only waits
    memory: int = Field(default=2 << 30, ge=1 << 28)  # bytes of addresses
    file: int = Field(default=16 << 20, ge=0)  # bytes that it may write to one file
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"  # that runs it


class ProgramEnd(StrEnum):
    """What came of a program."""

    PASSED = "passed"
    FAILED = "failed"  # an exception, an exit before the end, a death
    OUT_OF_TIME = "out of time"


def run_program(program: str, limits: ProgramLimits) -> ProgramEnd:
    """Run ``program``, text of Python, to its end or its limits.

    Raises:
        Refused: where this system cannot hold it as it must be held; then nothing was run.
    """
    token = secrets.token_hex(16)
    asked = limits.model_dump(include={"cpu", "clock", "memory", "file"})
    order = json.dumps({"program": program, "token": token, **asked}).encode() + b"\n"
    ours, theirs = socket.socketpair()
    with ours, Path(os.devnull).open("ab") as nowhere:
        with theirs:
            process = _start(theirs.fileno(), limits, nowhere)
        try:
            _require_held(process.unconfined)
            holds, said = None, b""
            with contextlib.suppress(ConnectionError), ours.makefile("rb") as answers:
                ours.sendall(order)
                holds = json.loads(answers.readline() or b"{}").get("holds")
                said = answers.read()
        finally:
            end = process.end()
    if holds is None:  # nothing of the program was run
        raise _refusal(f"an interpreter that ended before it began (exit code {end.returncode})")
    _require_held(tuple(sorted(_BOUND - set(holds))))
    if said == token.encode():
        return ProgramEnd.PASSED
    if end.why == "limit" or (end.returncode is not None and -end.returncode in _OF_TIME):
        return ProgramEnd.OUT_OF_TIME
    return ProgramEnd.FAILED


def _start(descriptor: int, limits: ProgramLimits, output: IO[bytes]) -> SupervisedProcess:
    confinement = Confinement(read=_readable(), write=_DEVICES[:1], memory=limits.memory)
    environment = dict(_ENVIRONMENT)
    if places := os.environ.get("LD_LIBRARY_PATH"):
        environment["LD_LIBRARY_PATH"] = places
    try:
        return SupervisedProcess(
            # -P, -s: nothing is imported from where it runs, or from a person's own packages.
            [sys.executable, "-P", "-s", "-B", str(_CHILD), str(descriptor)],
            environment,
            output,
            name="program",
            limit=limits.clock + _START,
            pass_fds=[descriptor],
            confinement=confinement,
        )
    except NotStarted as error:
        raise _refusal(str(error)) from error


def _readable() -> tuple[str, ...]:
    installed = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    libraries = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    every = [*_SYSTEM, *_DEVICES, *sorted(installed), *libraries, str(_CHILD)]
    return tuple(place for place in dict.fromkeys(every) if os.path.lexists(place) and os.path.realpath(place) != "/")


def _require_held(lacking: tuple[str, ...]) -> None:
    if lacking:
        raise _refusal(f"a system that does not bound processes in: {', '.join(lacking)}")


def _refusal(found: str) -> Refused:
    return Refused(
        "code that a model wrote",
        found=found,
        expected="Landlock, a network namespace and seccomp, so that it can harm nobody",
        remedy="run it where the kernel offers them (Linux 6.7 or newer on x86-64 or arm64, a container that allows "
        "them), or leave out 'evaluate.allow_code' and the tasks in it",
    )
