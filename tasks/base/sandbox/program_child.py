"""Run a model-generated program in a child process: apply restrictions, run it, and report whether it passed.

::

    python -P -s program_child.py DESCRIPTOR            # of a socket; started, confined, by ``programs``

The child reads one line of JSON, ``{"program", "token", "cpu", "clock", "memory", "file"}``, restricts itself
irreversibly, answers ``{"holds": [...]}`` and runs the program, which is Python source text. It sends the token back
only if the program reaches its end without an exception. An early exit, even with code 0, counts as a failure, because
the program may have skipped its tests. To forge a pass, the program would have to find the token in the memory of its
interpreter.

A system call filter (``_FORBIDDEN``) blocks new processes and programs, sockets, signals, named shared memory,
inspection and slowdown of other processes, and all kernel interfaces that tests of a function never need. Threads are
allowed. A blocked call returns an error, as if a limit were reached, and the program may continue.

This file imports only the standard library, because the process cannot read mergegate.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import socket
import struct
import sys
import time

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
# linux/bpf_common.h: load a word; jump if equal, if at least, or if a bit is set; return.
_LOAD, _EQUAL, _AT_LEAST, _HAS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# linux/seccomp.h: offsets in struct seccomp_data of the call number, the architecture and the first argument.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _EAGAIN, _ENOSYS = 1, 11, 38
_CLONE_THREAD = 0x00010000
_OTHER_NUMBERS = 0x40000000  # call numbers of the x32 ABI, which an x86-64 kernel may support
_FILES = 64  # maximum number of open files

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column below, AUDIT_ARCH of linux/audit.h
_CLONE, _CLONE3, _PRLIMIT = (56, 220), 435, (302, 261)
# Blocked calls, grouped by purpose: numbers on x86-64 and on aarch64 (None: no such call).
_FORBIDDEN: tuple[tuple[str, int, int | None], ...] = (
    *(("fork", 57, None), ("vfork", 58, None), ("execve", 59, 221), ("execveat", 322, 281)),
    *(("socket", 41, 198), ("io_uring_setup", 425, 425), ("io_uring_enter", 426, 426), ("io_uring_register", 427, 427)),
    *(("kill", 62, 129), ("tkill", 200, 130), ("tgkill", 234, 131), ("rt_sigqueueinfo", 129, 138)),
    *(("rt_tgsigqueueinfo", 297, 240), ("pidfd_send_signal", 424, 424), ("pidfd_open", 434, 434)),
    *(("pidfd_getfd", 438, 438), ("ptrace", 101, 117), ("process_vm_readv", 310, 270)),
    *(("process_vm_writev", 311, 271), ("kcmp", 312, 272), ("perf_event_open", 298, 241)),
    *(("setpriority", 141, 140), ("ioprio_set", 251, 30), ("sched_setparam", 142, 118)),
    *(("sched_setscheduler", 144, 119), ("sched_setaffinity", 203, 122), ("sched_setattr", 314, 274)),
    *(("shmget", 29, 194), ("semget", 64, 190), ("msgget", 68, 186), ("mq_open", 240, 180)),
    *(("memfd_create", 319, 279), ("memfd_secret", 447, 447)),
    *(("unshare", 272, 97), ("setns", 308, 268), ("mount", 165, 40), ("umount2", 166, 39), ("chroot", 161, 51)),
    *(("pivot_root", 155, 41), ("bpf", 321, 280), ("userfaultfd", 323, 282), ("open_by_handle_at", 304, 265)),
    *(("add_key", 248, 217), ("request_key", 249, 218), ("keyctl", 250, 219)),
)


def call_filter(machine: str) -> list[tuple[int, int, int, int]]:
    """Return the system call filter for seccomp(2), as tuples of code, jump if true, jump if false, operand.

    Raises:
        KeyError: The system call numbers of ``machine`` are unknown.
    """
    column, architecture = _MACHINES[machine]
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _OTHER_NUMBERS),
        (_RETURN, 0, 0, _ERROR | _ENOSYS),
        # If clone3 does not exist, the C library uses clone, whose flags the filter can check.
        *((_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERROR | _ENOSYS)),
        (_EQUAL, 0, 4, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_HAS, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERROR | _EAGAIN),
        (_EQUAL, 0, 4, _PRLIMIT[column]),  # a process may read and lower its own limits
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERROR | _EPERM),
    ]
    for name, *numbers in _FORBIDDEN:
        if (number := numbers[column]) is not None:
            error = _EAGAIN if name in ("fork", "vfork") else _EPERM
            steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | error)]
    return [*steps, (_RETURN, 0, 0, _ALLOW)]


def main() -> None:
    """Receive a program on the socket, apply the restrictions, run the program and report the outcome."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    with channel.makefile("rb") as lines:
        order = json.loads(lines.readline())
    directory = os.environ["TMPDIR"]
    os.chdir(directory)
    os.environ["HOME"] = directory

    # Limit processor time in seconds, address space and file size in bytes, core dumps and open files.
    holds = []
    startup = -int(-time.process_time() // 1)  # processor time that the start of the interpreter took
    limits = {
        resource.RLIMIT_CPU: (startup + order["cpu"], startup + order["cpu"] + 1),  # a signal, a second later SIGKILL
        resource.RLIMIT_AS: (order["memory"], order["memory"]),
        resource.RLIMIT_FSIZE: (order["file"], order["file"]),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_NOFILE: (_FILES, _FILES),
    }
    with contextlib.suppress(OSError, ValueError):
        for kind, limit in limits.items():
            resource.setrlimit(kind, limit)
        holds.append("resources")

    # Install the system call filter, unless the kernel rejects it or the machine is unknown.
    with contextlib.suppress(KeyError, OSError, AttributeError):
        steps = call_filter(platform.machine())
        packed = b"".join(struct.pack("=HBBI", *step) for step in steps)
        buffer = ctypes.create_string_buffer(packed, len(packed))
        libc = ctypes.CDLL(None, use_errno=True)
        filter_program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(buffer)))
        if (
            libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            and libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, filter_program, 0, 0) == 0
        ):
            holds.append("calls")

    channel.sendall(json.dumps({"holds": holds}).encode() + b"\n")
    if len(holds) < 2:
        os._exit(1)
    program, token = order.pop("program"), order.pop("token")
    sys.argv, sys.stdin = [""], None  # reading raises an exception instead of blocking
    signal.setitimer(signal.ITIMER_REAL, order["clock"])
    try:
        exec(program, {})
    except BaseException:
        os._exit(1)
    channel.sendall(token.encode())
    os._exit(0)


if __name__ == "__main__":
    main()
