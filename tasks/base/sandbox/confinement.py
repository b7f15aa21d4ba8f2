"""Confine a process that runs third-party code: functions of tasks, templates, tokenizers, model servers.

A confined process

* sees only the environment variables on a list (``environment_of_child``), without tokens and keys;
* reads only its installation, what the system's libraries need (``_SYSTEM``) and the paths that it was granted. Keys,
  ``.env`` files and credentials are unreadable wherever they are: Landlock, landlock(7);
* can neither inspect other processes, whose environment has secrets, nor signal them: Landlock;
* writes only to devices, its own temporary directory and the directories that it was granted: Landlock;
* has no network: its network namespace contains only its own loopback, or else Landlock's rules forbid TCP;
* loses all root privileges except those for files, because a task that runs as root could inspect other processes;
* has limited memory (RLIMIT_DATA), and is the first to be killed when the system runs out of memory.

Each restriction applies if the system supports it; ``confine`` returns the ones that apply. None of them needs
privileges, none can be reverted, and child processes inherit all of them.

The supervisor loads this file by its path with a bare interpreter, so it uses the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import shutil
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Variables that an interpreter and libraries need to behave as in the parent process.
_PASSED_ON = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX"
    r"|PYTHON\w*|OMP_\w+|MKL_\w+|KMP_\w+|OPENBLAS_\w+|GOMP_\w+|NUMBA_\w+|MALLOC_\w+|ATEN_\w+|TORCH\w*|PYTORCH_\w+|TRITON_\w+"
    r"|NLTK_DATA|CUDA_\w+|NVIDIA_\w+|NCCL_\w+|HIP_\w+|ROCR?_\w+|VLLM_\w+|TOKENIZERS_PARALLELISM|TRANSFORMERS_\w+|MERGEGATE_\w+"
    r"|HF_(HOME|HUB_CACHE|DATASETS_CACHE|MODULES_CACHE|ASSETS_CACHE|ENDPOINT|HUB_OFFLINE|DATASETS_OFFLINE)"
    r"|HF_(HUB_DISABLE|HUB_ENABLE|UPDATE|DATASETS_DISABLE|DATASETS_TRUST|XET)\w*|DO_NOT_TRACK"
    r"|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|(https?|all|no)_proxy|(HTTPS?|ALL|NO)_PROXY"
)
# Names of secrets, with any prefix: VLLM_API_KEY, HF_HUB_TOKEN.
_NEVER = re.compile(r".*(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|AUTH)S?(_.*|$)", re.IGNORECASE)
_CREDENTIALS = re.compile(r"\w+://[^/\s]*@")  # credentials in a URL, usually of a proxy
_HARMLESS = {"TOKENIZERS_PARALLELISM"}

# Parts of an installation. Others, such as ``/usr/src`` and ``~/.local/share``, may hold projects and keys.
_PARTS = ("bin", "sbin", "lib", "lib32", "lib64", "libexec", "include", "ssl", "pyvenv.cfg")
# What interpreters, libraries and servers read of a system. Paths that do not exist are ignored.
_SYSTEM = (
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/proc", "/sys", "/dev"),
    *(f"{prefix}/{part}" for prefix in ("/usr", "/usr/local") for part in (*_PARTS, "share")),
    *(
        "/usr/local/cuda",
        "/usr/local/nvidia",
        "/opt/rocm",
        "/opt/nvidia",
        "/run/nvidia-persistenced",
        "/run/opengl-driver",
    ),
    *(
        f"/etc/{name}"
        for name in ("alternatives", "ca-certificates", "fonts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d")
    ),
    *(f"/etc/{name}" for name in ("group", "host.conf", "hosts", "localtime", "nsswitch.conf", "passwd", "protocols")),
    *(f"/etc/{name}" for name in ("OpenCL", "mime.types", "nvidia", "os-release", "pki/ca-trust", "pki/tls/cert.pem")),
    *(f"/etc/{name}" for name in ("pki/tls/certs", "resolv.conf", "services", "ssl/cert.pem", "ssl/certs", "vulkan")),
    *("/etc/ssl/openssl.cnf", "/etc/timezone", "/etc/gai.conf", "/run/systemd/resolve", "/run/resolvconf"),
)
# Devices that it may write to. Shared memory is the memory of processes, and Landlock keeps other processes out.
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/pts", "/dev/shm", "/dev/dri", "/dev/kfd", "/proc")

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
# linux/capability.h: CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, IPC_LOCK (memory that a GPU reads), SYS_NICE.
_KEPT_PRIVILEGES = {0, 1, 2, 3, 14, 23}
_LAST_PRIVILEGE = 63
_OOM_SCORE = 500  # oom_score_adj: with 1000, this process would be killed even if another one is to blame

# linux/landlock.h
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_FILE = 1 << 2
_WRITE = 1 << 1 | sum(1 << bit for bit in range(4, 13))  # write, remove, make
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_FILE_RIGHTS = _READ_FILE | 1 << 1 | _TRUNCATE
_TCP = 1 << 0 | 1 << 1
_SIGNALS = 1 << 1

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Confinement:
    """The resources that a process may use."""

    # Files and directories that it may read, in addition to its installation and the system's libraries.
    read: tuple[str, ...] = ()
    # Directories that it may read and write, in addition to devices and its own temporary directory.
    write: tuple[str, ...] = ()
    network: bool = False  # Whether it has network access.
    memory: int | None = None  # Limit for its own memory, in bytes. None: no limit.
    bare: bool = False  # Whether ``read`` and ``write`` are all that it may use, except for its own temporary directory


def environment_of_child(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the part of ``environment`` that a process with third-party code may see."""
    return {
        name: value
        for name, value in environment.items()
        if _PASSED_ON.fullmatch(name)
        and (name in _HARMLESS or not _NEVER.fullmatch(name))
        and not _CREDENTIALS.search(value)
    }


def confine(limits: Confinement, command: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Confine this process, which will run ``command``, and all its future children, irreversibly.

    Returns:
        The restrictions among ``memory``, ``network`` and ``files`` that the system supports and that now apply.
    """
    applied = []
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    if limits.memory is not None:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (limits.memory, limits.memory))
            applied.append("memory")

    # Move to a new network namespace with only a loopback interface, if that is allowed.
    isolated = False
    if not limits.network:
        user, group = os.geteuid(), os.getegid()
        isolated = _libc.unshare(_CLONE_NEWNET) == 0
        if not isolated and _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0:
            isolated = True
            with contextlib.suppress(OSError):  # keep the user and group ids
                Path("/proc/self/setgroups").write_text("deny")
                Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
                Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    if isolated:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            import fcntl

            get_flags, set_flags, up = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
            request = struct.pack("16sH14x", b"lo", 0)
            flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, get_flags, request))[1]
            fcntl.ioctl(any_socket, set_flags, struct.pack("16sH14x", b"lo", flags | up))

    version = max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))
    if version:
        tcp = 0 if limits.network or isolated or version < 4 else _TCP
        if _restrict(_readable(limits, command, environment), _writable(limits, environment), version, tcp):
            applied.append("files")
            isolated = isolated or bool(tcp)
    if isolated or limits.network:
        applied.append("network")
    for privilege in range(_LAST_PRIVILEGE + 1):  # only root has any of these
        if privilege not in _KEPT_PRIVILEGES:
            _libc.prctl(_PR_CAPBSET_DROP, privilege, 0, 0, 0)
    return tuple(applied)


def _readable(limits: Confinement, command: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Yield what the process may read: among others, the files that its command line names."""
    yield from limits.read
    if limits.bare:
        return
    yield from (*_SYSTEM, *filter(_is_file, command))
    program = Path(shutil.which(command[0], path=environment.get("PATH")) or command[0])
    programs = [program]
    if _is_file(str(program)) and (line := _read(program).partition(b"\n")[0]).startswith(b"#!"):
        programs += [Path(os.fsdecode(line[2:].split()[0]))]  # of the interpreter that runs a script
    for path in programs:
        yield from map(str, (*_installation(path), *_installation(path.resolve())))
    for name in ("LD_LIBRARY_PATH", "NLTK_DATA"):
        yield from _entries(environment, name)
    for base in _entries(environment, "PYTHONUSERBASE"):
        yield from (f"{base}/bin", f"{base}/lib")
    for entry in _entries(environment, "PYTHONPATH"):
        yield from _modules_in(entry)


def _writable(limits: Confinement, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield what the process may read and write."""
    yield from (environment["TMPDIR"], *limits.write)
    if not limits.bare:
        yield from _DEVICES
        with contextlib.suppress(OSError), os.scandir("/dev") as entries:
            yield from (entry.path for entry in entries if entry.name.startswith(("nvidia", "infiniband")))


def _installation(program: Path) -> Iterator[Path]:
    """Yield the program and the installation around it, which a virtual environment shares with its base."""
    yield program
    prefix = program.parent.parent
    if program.parent.name == "bin":
        yield from (prefix / part for part in _PARTS)
        if _is_file(str(settings := prefix / "pyvenv.cfg")):
            for line in os.fsdecode(_read(settings)).splitlines():
                key, _, base = line.partition("=")
                if key.strip() == "home" and Path(base.strip()) != program.parent:
                    yield from _installation(Path(base.strip()) / program.name)


def _modules_in(directory: str) -> Iterator[str]:
    """Yield the modules and packages in an entry of Python's import path, which may be the directory of a project."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith((".py", ".so", "-info")) or Path(entry.path, "__init__.py").exists():
                yield entry.path


def _read(file: Path) -> bytes:
    """Return the first 4 KiB of a file; nothing if it cannot be read."""
    with contextlib.suppress(OSError):
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, 4096)
        finally:
            os.close(descriptor)
    return b""


def _is_file(word: str) -> bool:
    with contextlib.suppress(OSError):  # a word may be too long for a path
        return Path(word).is_file()
    return False


def _entries(environment: Mapping[str, str], name: str) -> list[str]:
    return [entry for entry in environment.get(name, "").split(os.pathsep) if entry]


def _restrict(readable: Iterator[str], writable: Iterator[str], version: int, tcp: int) -> bool:
    """Apply Landlock rules: read and write only what is given, and reach no other process."""
    write = _WRITE | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    handled = struct.pack("QQQ", _READ_FILE | write, tcp, _SIGNALS if version >= 6 else 0)
    handled = handled[: 8 if version < 4 else 16 if version < 6 else 24]  # the size of the struct depends on the kernel
    ruleset = _libc.syscall(_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
    if ruleset < 0:
        return False
    try:
        for path in dict.fromkeys(readable):
            _allow(ruleset, path, _READ_FILE)
        for path in dict.fromkeys(writable):
            _allow(ruleset, path, write | _READ_FILE)
        if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            return False
        return bool(_libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    with contextlib.suppress(OSError):  # missing or not accessible: it stays forbidden
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not Path(path).is_dir():
                access &= _FILE_RIGHTS
            rule = struct.pack("=Qi", access, descriptor)
            _libc.syscall(_ADD_RULE, ruleset, 1, rule, 0)
        finally:
            os.close(descriptor)
