"""Run model-generated programs one by one, each in its own, tightly confined process.

::

    limits = ProgramLimits()
    run_program("assert 1 + 1 == 2", limits)            # ProgramEnd.PASSED

A program passes if it runs to its end without an exception and in time. Two layers confine its process:

* ``confinement``, more tightly than for other third-party code. The process reads only the Python installation, writes
  only to a directory that is removed afterwards, and has no network and none of mergegate's environment variables.
* ``program_child``, which limits processor time, memory and file size, and blocks new processes and programs, sockets
  and signals.

If the system does not support one of these restrictions, mergegate refuses to run the program.
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
from mergegate.tasks.base.sandbox.confinement import Confinement
from mergegate.tasks.base.sandbox.supervision import NotStarted, ProcessOptions, SupervisedProcess

_CHILD = Path(__file__).with_name("program_child.py")
_START = 20.0  # seconds for the start of the interpreter on a busy machine, added to the program's own limit
_RESTRICTIONS = {"resources", "calls"}
_TIME_SIGNALS = {signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL}
# Directories of a Python installation and its system libraries: no home directory, and no /etc, /proc or /run.
_SYSTEM = ("/usr", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
# One thread, because processor time counts all threads; a fixed hash seed, so that sets of strings have a fixed order.
_ENVIRONMENT = {
    **{"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
    **{"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
}


class ProgramLimits(BaseModel):
    """Limits of one program. They are part of the key of every score, because other limits may change the result."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu: int = Field(default=3, ge=1)  # seconds of processor time, which does not depend on the load of the machine
    clock: float = Field(default=30.0, gt=0)  # seconds of wall time, for programs that wait
    memory: int = Field(default=2 << 30, ge=1 << 28)  # bytes of address space
    file: int = Field(default=16 << 20, ge=0)  # maximum size of a file in bytes
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"  # version of the interpreter


class ProgramEnd(StrEnum):
    """How a program ended."""

    PASSED = "passed"
    FAILED = "failed"  # an exception, an early exit or a crash
    OUT_OF_TIME = "out of time"


def run_program(program: str, limits: ProgramLimits) -> ProgramEnd:
    """Run a program, given as Python source text, until it ends or reaches a limit.

    Raises:
        Refused: The system does not support a required restriction. The program was not run.
    """
    token = secrets.token_hex(16)
    settings = limits.model_dump(include={"cpu", "clock", "memory", "file"})
    order = json.dumps({"program": program, "token": token, **settings}).encode() + b"\n"
    channel, child_end = socket.socketpair()
    with channel, Path(os.devnull).open("ab") as devnull:
        with child_end:
            process = _start(child_end.fileno(), limits, devnull)
        try:
            _require_restrictions(process.unconfined)
            applied, reply = None, b""
            with contextlib.suppress(ConnectionError), channel.makefile("rb") as answers:
                channel.sendall(order)
                applied = json.loads(answers.readline() or b"{}").get("holds")
                reply = answers.read()
        finally:
            end = process.end()
    if applied is None:  # the program did not start
        raise _refusal(f"the interpreter exited before it ran the program (exit code {end.returncode})")
    _require_restrictions(tuple(sorted(_RESTRICTIONS - set(applied))))
    if reply == token.encode():
        return ProgramEnd.PASSED
    if end.reason == "limit" or (end.returncode is not None and -end.returncode in _TIME_SIGNALS):
        return ProgramEnd.OUT_OF_TIME
    return ProgramEnd.FAILED


def _start(descriptor: int, limits: ProgramLimits, output: IO[bytes]) -> SupervisedProcess:
    installed = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    libraries = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    candidates = dict.fromkeys([*_SYSTEM, *_DEVICES, *sorted(installed), *libraries, str(_CHILD)])
    readable = tuple(path for path in candidates if os.path.lexists(path) and os.path.realpath(path) != "/")
    environment = dict(_ENVIRONMENT)
    if library_path := os.environ.get("LD_LIBRARY_PATH"):
        environment["LD_LIBRARY_PATH"] = library_path
    try:
        return SupervisedProcess(
            # -P, -s: import nothing from the working directory or the user's site-packages.
            [sys.executable, "-P", "-s", "-B", str(_CHILD), str(descriptor)],
            environment,
            output,
            ProcessOptions(
                name="program",
                limit=limits.clock + _START,
                pass_fds=(descriptor,),
                confinement=Confinement(read=readable, write=_DEVICES[:1], memory=limits.memory, bare=True),
            ),
        )
    except NotStarted as error:
        raise _refusal(str(error)) from error


def _require_restrictions(missing: tuple[str, ...]) -> None:
    if missing:
        raise _refusal(f"this system cannot restrict processes in: {', '.join(missing)}")


def _refusal(found: str) -> Refused:
    return Refused(
        "model-generated code",
        found=found,
        expected="Landlock, a network namespace and seccomp, to isolate the code",
        remedy="use Linux 6.7 or newer on x86-64 or arm64, and a container that allows these features, or remove "
        "'evaluate.allow_code' and the tasks that it lists",
    )
