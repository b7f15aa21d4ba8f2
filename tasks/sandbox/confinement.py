"""Confine a process that runs third-party code: functions of tasks, templates, tokenizers, model servers.

A confined process

* sees only the environment variables on a list (``environment_of_child``), without tokens and keys;
* can neither read the usual locations of secrets (``_SECRETS``), nor inspect other processes, whose environment has
  secrets, nor signal them: Landlock, landlock(7);
* writes only to temporary files, caches and the paths that it was granted: Landlock;
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
import socket
import struct
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Variables that an interpreter and libraries need to behave as in the parent process.
_PASSED_ON = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX|XDG_\w+"
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

# Secrets below a home directory, and of the system. Paths that do not exist are ignored.
_SECRETS = (
    *(".ssh", ".aws", ".azure", ".config", ".docker", ".gnupg", ".kube", ".password-store", ".prefect", ".mozilla"),
    *(".netrc", ".git-credentials", ".npmrc", ".pypirc", ".pgpass", ".my.cnf", ".s3cfg", ".boto"),
    *(".Xauthority", ".env"),
    *(".bash_history", ".zsh_history", ".python_history"),
    *(".cache/huggingface/token", ".cache/huggingface/stored_tokens", ".huggingface"),
)
_SYSTEM_SECRETS = (
    *("/etc/shadow", "/etc/shadow-", "/etc/gshadow", "/etc/gshadow-", "/etc/sudoers", "/etc/sudoers.d", "/etc/ssh"),
    *("/etc/ssl/private", "/run/secrets", "/var/run/secrets", "/run/credentials"),
)
# Subdirectories of the Hub's cache, next to the token. They must exist first: a confined process cannot create them.
_CACHE_DIRECTORIES = ("assets", "datasets", "hub", "modules", "xet")
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "TORCH_HOME")

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
    """The resources that a process may use.

    Args:
        write: Directories that it may write to, in addition to temporary files, caches and devices.
        hide: Files and directories that it must not read, in addition to the usual locations of secrets.
        network: Whether it has network access.
        memory: Limit for its own memory, in bytes. None: no limit.
        read: The only paths that it may read. Such a process writes only to its temporary directory and to ``write``,
            not to caches. None: it reads everything that is not hidden.
    """

    write: tuple[str, ...] = ()
    hide: tuple[str, ...] = ()
    network: bool = False
    memory: int | None = None
    read: tuple[str, ...] | None = None


def environment_of_child(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the part of ``environment`` that a process with third-party code may see."""
    return {
        name: value
        for name, value in environment.items()
        if _PASSED_ON.fullmatch(name)
        and (name in _HARMLESS or not _NEVER.fullmatch(name))
        and not _CREDENTIALS.search(value)
    }


def confine(limits: Confinement) -> tuple[str, ...]:
    """Confine this process and all its future children, irreversibly.

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
        if _restrict(limits, version, tcp):
            applied.append("files")
            isolated = isolated or bool(tcp)
    if isolated or limits.network:
        applied.append("network")
    for privilege in range(_LAST_PRIVILEGE + 1):  # only root has any of these
        if privilege not in _KEPT_PRIVILEGES:
            _libc.prctl(_PR_CAPBSET_DROP, privilege, 0, 0, 0)
    return tuple(applied)


def _restrict(limits: Confinement, version: int, tcp: int) -> bool:
    """Apply Landlock rules: read all but secrets, write to the granted paths, and reach no other process."""
    if limits.read is None:
        hub = Path(os.environ.get("HF_HOME") or _home() / ".cache" / "huggingface")
        for name in _CACHE_DIRECTORIES:
            with contextlib.suppress(OSError):
                (hub / name).mkdir(parents=True, exist_ok=True)
    write = _WRITE | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    handled = struct.pack("QQQ", _READ_FILE | write, tcp, _SIGNALS if version >= 6 else 0)
    handled = handled[: 8 if version < 4 else 16 if version < 6 else 24]  # the size of the struct depends on the kernel
    ruleset = _libc.syscall(_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
    if ruleset < 0:
        return False
    try:
        # Existing locations of secrets, with links resolved.
        homes = {_home()}
        with contextlib.suppress(KeyError, ImportError):
            import pwd

            homes.add(Path(pwd.getpwuid(os.getuid()).pw_dir))
        secrets = [Path(path) for path in (*_SYSTEM_SECRETS, *limits.hide)]
        secrets += [home / name for home in homes for name in _SECRETS]
        if cache := os.environ.get("HF_HOME"):
            secrets += [Path(cache, name) for name in ("token", "stored_tokens")]
        if token := os.environ.get("HF_TOKEN_PATH"):
            secrets.append(Path(token))
        hidden = {os.path.realpath(path) for path in secrets if os.path.lexists(path)}

        for root in dict.fromkeys(map(os.path.realpath, ("/",) if limits.read is None else limits.read)):
            for path in _all_but(hidden, root):
                _allow(ruleset, path, _READ_FILE)
        if limits.read is not None:
            writable = [os.environ["TMPDIR"]]
        else:
            writable = [
                tempfile.gettempdir(),
                "/tmp",
                "/dev",
                "/proc",
                str(_home() / ".cache"),
                str(_home() / ".triton"),
            ]
            writable += [os.environ[name] for name in _CACHES if os.environ.get(name)]
        for root in dict.fromkeys(map(os.path.realpath, (*writable, *limits.write))):
            for path in _all_but(hidden, root):
                _allow(ruleset, path, write | _READ_FILE)
        if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            return False
        return bool(_libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    with contextlib.suppress(OSError):  # deleted or not accessible: it stays forbidden
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not Path(path).is_dir():
                access &= _FILE_RIGHTS
            rule = struct.pack("=Qi", access, descriptor)
            _libc.syscall(_ADD_RULE, ruleset, 1, rule, 0)
        finally:
            os.close(descriptor)


def _all_but(hidden_paths: set[str], root: str) -> Iterator[str]:
    """Yield the smallest set of paths that covers everything at or below ``root`` except ``hidden_paths``."""
    if root in hidden_paths:
        return
    prefix = root.rstrip("/") + "/"
    if not any(path.startswith(prefix) for path in hidden_paths):
        yield root
        return
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            if not entry.is_symlink():  # rules apply to the target, which is covered elsewhere
                yield from _all_but(hidden_paths, entry.path)


def _home() -> Path:
    return Path(os.environ.get("HOME") or "/")
