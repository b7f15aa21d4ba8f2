"""What a child process does that runs a program which a model wrote: bind its own hands, run it, say whether it passed.

::

    python -P -s program_child.py DESCRIPTOR            # of a socket; see ``programs``, which starts it, confined

It reads one line of JSON, ``{"program", "token", "cpu", "clock", "memory", "file"}``, binds itself for ever, answers
``{"holds": [...]}`` and runs the program: text of Python, executed whole. Only when the program has come to its end
without an exception is the token sent back. An exit, however friendly, is none: a program that leaves before its tests
has not passed them. The text has no way to the token but by searching this interpreter for it.

What the kernel is told (``_FORBIDDEN``): no other process and no other program, no socket, no signal, no memory shared
by name, nothing that looks into or slows down others, and no door to the kernel that tests of a function never need.
Threads may be started. Whoever tries gets an error, as from a system where a limit is reached, and may go on.

Standard library only, and nothing of this project: the process may not read it.
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
# linux/bpf_common.h: load a word, jump if equal, at least, or if a bit is set, return.
_LOAD, _EQUAL, _AT_LEAST, _HAS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# linux/seccomp.h: struct seccomp_data has the number, the architecture, the instruction, the arguments.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _EAGAIN, _ENOSYS = 1, 11, 38
_CLONE_THREAD = 0x00010000
_OTHER_NUMBERS = 0x40000000  # of x32, which an x86-64 kernel may serve as well
_FILES = 64  # open ones

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column below, AUDIT_ARCH of linux/audit.h
_CLONE, _CLONE3, _PRLIMIT = (56, 220), 435, (302, 261)
# By purpose: numbers on x86-64 and on aarch64 (None: it has none of that name).
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
    """The filter of system calls for seccomp(2), an instruction each: code, jumps if so and if not, operand.

    Raises:
        KeyError: for a machine whose numbers are not known.
    """
    column, architecture = _MACHINES[machine]
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _OTHER_NUMBERS),
        (_RETURN, 0, 0, _ERROR | _ENOSYS),
        # The C library then takes clone, whose flags can be seen.
        *((_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERROR | _ENOSYS)),
        (_EQUAL, 0, 4, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_HAS, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERROR | _EAGAIN),
        (_EQUAL, 0, 4, _PRLIMIT[column]),  # limits of its own may be read, and lowered
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


def _bind_calls() -> bool:
    """Give the kernel the filter; False where it takes none, or the machine is not known."""
    with contextlib.suppress(KeyError, OSError, AttributeError):
        steps = call_filter(platform.machine())
        packed = b"".join(struct.pack("=HBBI", *step) for step in steps)
        held = ctypes.create_string_buffer(packed, len(packed))
        libc = ctypes.CDLL(None, use_errno=True)
        program = struct.pack("@HP", len(steps), ctypes.addressof(held))
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            return False
        return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.create_string_buffer(program), 0, 0) == 0)
    return False


def _bind_resources(cpu: int, memory: int, file: int) -> bool:
    """Seconds of processor time, bytes of addresses, bytes of a file; no core dumps, few open files."""
    used = -int(-time.process_time() // 1)  # by starting the interpreter
    limits = {
        resource.RLIMIT_CPU: (used + cpu, used + cpu + 1),  # a signal, and a second later the end
        resource.RLIMIT_AS: (memory, memory),
        resource.RLIMIT_FSIZE: (file, file),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_NOFILE: (_FILES, _FILES),
    }
    try:
        for kind, limit in limits.items():
            resource.setrlimit(kind, limit)
    except (OSError, ValueError):
        return False
    return True


def main() -> None:
    """Of the child process."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    with channel.makefile("rb") as lines:
        order = json.loads(lines.readline())
    place = os.environ["TMPDIR"]
    os.chdir(place)
    os.environ["HOME"] = place
    holds = ["resources"] if _bind_resources(order["cpu"], order["memory"], order["file"]) else []
    holds += ["calls"] if _bind_calls() else []
    channel.sendall(json.dumps({"holds": holds}).encode() + b"\n")
    if len(holds) < 2:
        os._exit(1)
    program, token = order.pop("program"), order.pop("token")
    sys.argv, sys.stdin = [""], None  # whoever reads gets an exception, and does not wait
    signal.setitimer(signal.ITIMER_REAL, order["clock"])
    try:
        exec(program, {})  # what all of this is for
    except BaseException:
        os._exit(1)
    channel.sendall(token.encode())
    os._exit(0)


if __name__ == "__main__":
    main()
