"""What a process can reach that runs what strangers wrote: functions of tasks, templates, tokenizers, model servers.

It is none of their business who we are. A process that is confined

* sees of our environment what stands in a list (``environment_of_child``): no token, no key;
* cannot read where people keep secrets (``_SECRETS``), nor look into other processes, whose environment is ours, nor
  signal them: Landlock, landlock(7);
* writes only temporary files, caches and what it was given: Landlock;
* has no network: a network namespace of its own with nothing but its loopback, else Landlock's rules for TCP;
* keeps no privilege of root but those over files: a task that runs as root could look into us all the same;
* has so much memory and no more (RLIMIT_DATA), and is the first to go when the system runs out of it.

Each holds where the system allows it; ``confine`` tells which do. Nothing here needs privileges, and nothing can be
taken back: it holds for all that the process will start.

The supervisor loads this file by its path, with a bare interpreter: the standard library only.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# What a library or an interpreter needs to run as it runs here.
_PASSED_ON = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX|XDG_\w+"
    r"|PYTHON\w*|OMP_\w+|MKL_\w+|KMP_\w+|OPENBLAS_\w+|GOMP_\w+|NUMBA_\w+|MALLOC_\w+|ATEN_\w+|TORCH\w*|PYTORCH_\w+|TRITON_\w+"
    r"|NLTK_DATA|CUDA_\w+|NVIDIA_\w+|NCCL_\w+|HIP_\w+|ROCR?_\w+|VLLM_\w+|TOKENIZERS_PARALLELISM|TRANSFORMERS_\w+|MERGEGATE_\w+"
    r"|HF_(HOME|HUB_CACHE|DATASETS_CACHE|MODULES_CACHE|ASSETS_CACHE|ENDPOINT|HUB_OFFLINE|DATASETS_OFFLINE)"
    r"|HF_(HUB_DISABLE|HUB_ENABLE|UPDATE|DATASETS_DISABLE|DATASETS_TRUST|XET)\w*|DO_NOT_TRACK"
    r"|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|(https?|all|no)_proxy|(HTTPS?|ALL|NO)_PROXY"
)
# Whatever it may begin with: VLLM_API_KEY, HF_HUB_TOKEN.
_NEVER = re.compile(r".*(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|AUTH)S?(_.*|$)", re.IGNORECASE)
_CREDENTIALS = re.compile(r"\w+://[^/\s]*@")  # in an address: of a proxy, mostly
_HARMLESS = {"TOKENIZERS_PARALLELISM"}

# Below a home directory, and on the system. A place that is no more, or not yet, hides nothing.
_SECRETS = (
    *(".ssh", ".aws", ".azure", ".config", ".docker", ".gnupg", ".kube", ".password-store", ".prefect", ".mozilla"),
    *(
        ".netrc",
        ".git-credentials",
        ".npmrc",
        ".pypirc",
        ".pgpass",
        ".my.cnf",
        ".s3cfg",
        ".boto",
        ".Xauthority",
        ".env",
    ),
    *(".bash_history", ".zsh_history", ".python_history"),
    *(".cache/huggingface/token", ".cache/huggingface/stored_tokens", ".huggingface"),
)
_SECRETS_OF_THE_SYSTEM = (
    *("/etc/shadow", "/etc/shadow-", "/etc/gshadow", "/etc/gshadow-", "/etc/sudoers", "/etc/sudoers.d", "/etc/ssh"),
    *("/etc/ssl/private", "/run/secrets", "/var/run/secrets", "/run/credentials"),
)
# Below the Hub's cache, beside the token: what is not there when a process is confined can never be made by it.
_MADE_BEFOREHAND = ("assets", "datasets", "hub", "modules", "xet")
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "TORCH_HOME")

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
# linux/capability.h: CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, IPC_LOCK (memory that a GPU reads), SYS_NICE.
_KEPT_PRIVILEGES = {0, 1, 2, 3, 14, 23}
_LAST_PRIVILEGE = 63
_FIRST_TO_GO = 500  # oom_score_adj: 1000 would be chosen even where somebody else is to blame

# linux/landlock.h
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_FILE = 1 << 2
_WRITE = 1 << 1 | sum(1 << bit for bit in range(4, 13))  # write, remove, make
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_OF_A_FILE = _READ_FILE | 1 << 1 | _TRUNCATE
_TCP = 1 << 0 | 1 << 1
_SIGNALS = 1 << 1

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Confinement:
    """What a process may reach.

    Args:
        write: Directories that it may write to, beside temporary files, caches and devices.
        hide: Files and directories that it must not read, beside where people keep secrets.
        network: Whether it may speak to anybody.
        memory: Bytes of memory of its own; None: what there is.
        read: All that it may read, for a process that needs little; then it writes to its own temporary directory and
            to ``write`` only, not to caches. None: all but what is hidden.
    """

    write: tuple[str, ...] = ()
    hide: tuple[str, ...] = ()
    network: bool = False
    memory: int | None = None
    read: tuple[str, ...] | None = None


def environment_of_child(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a process that runs what strangers wrote gets to see of ``environment``."""
    return {
        name: value
        for name, value in environment.items()
        if _PASSED_ON.fullmatch(name)
        and (name in _HARMLESS or not _NEVER.fullmatch(name))
        and not _CREDENTIALS.search(value)
    }


def confine(wanted: Confinement) -> tuple[str, ...]:
    """Confine this process and all that it will start, for ever.

    Returns:
        What holds, of ``memory``, ``network``, ``files``: what is not among them, this system does not offer.
    """
    holds = []
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_FIRST_TO_GO))
    if wanted.memory is not None:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (wanted.memory, wanted.memory))
            holds.append("memory")
    alone = not wanted.network and _leave_the_network()
    version = max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))
    if version:
        tcp = 0 if wanted.network or alone or version < 4 else _TCP
        if _restrict(wanted, version, tcp):
            holds.append("files")
            alone = alone or bool(tcp)
    if alone or wanted.network:
        holds.append("network")
    for privilege in range(_LAST_PRIVILEGE + 1):  # what nobody but root has anyway
        if privilege not in _KEPT_PRIVILEGES:
            _libc.prctl(_PR_CAPBSET_DROP, privilege, 0, 0, 0)
    return tuple(holds)


def _leave_the_network() -> bool:
    """Move to a network of our own, in which only its loopback is up. False where that is not allowed."""
    user, group = os.geteuid(), os.getegid()
    if _libc.unshare(_CLONE_NEWNET) != 0:
        if _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
            return False
        with contextlib.suppress(OSError):  # we stay who we are
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        import fcntl

        get_flags, set_flags, up = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, get_flags, request))[1]
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sH14x", b"lo", flags | up))
    return True


def _restrict(wanted: Confinement, version: int, tcp: int) -> bool:
    """Landlock: read all but secrets, write where it may, see and signal no other process."""
    if wanted.read is None:
        hub = Path(os.environ.get("HF_HOME") or _home() / ".cache" / "huggingface")
        for name in _MADE_BEFOREHAND:
            with contextlib.suppress(OSError):
                (hub / name).mkdir(parents=True, exist_ok=True)
    write = _WRITE | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    handled = struct.pack("QQQ", _READ_FILE | write, tcp, _SIGNALS if version >= 6 else 0)
    handled = handled[: 8 if version < 4 else 16 if version < 6 else 24]  # as long as this kernel knows it
    ruleset = _libc.syscall(_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
    if ruleset < 0:
        return False
    try:
        hidden = set(_hidden(wanted.hide))
        for root in dict.fromkeys(map(os.path.realpath, ("/",) if wanted.read is None else wanted.read)):
            for place in _all_but(hidden, root):
                _allow(ruleset, place, _READ_FILE)
        own = (os.environ["TMPDIR"], *wanted.write) if wanted.read is not None else _writable(wanted.write)
        for root in dict.fromkeys(map(os.path.realpath, own)):
            for place in _all_but(hidden, root):
                _allow(ruleset, place, write | _READ_FILE)
        if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            return False
        return bool(_libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, place: str, access: int) -> None:
    with contextlib.suppress(OSError):  # gone meanwhile, or not ours to open: then it stays forbidden
        descriptor = os.open(place, os.O_PATH | os.O_CLOEXEC)
        try:
            if not Path(place).is_dir():
                access &= _OF_A_FILE
            rule = struct.pack("=Qi", access, descriptor)
            _libc.syscall(_ADD_RULE, ruleset, 1, rule, 0)
        finally:
            os.close(descriptor)


def _all_but(hidden: set[str], place: str) -> Iterator[str]:
    """The fewest places that together hold everything at or below ``place``, and nothing of ``hidden``."""
    if place in hidden:
        return
    below = place.rstrip("/") + "/"
    if not any(path.startswith(below) for path in hidden):
        yield place
        return
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if not entry.is_symlink():  # what it points to is somewhere else, and allowed or hidden there
                yield from _all_but(hidden, entry.path)


def _hidden(more: Sequence[str]) -> Iterator[str]:
    places = [Path(place) for place in (*_SECRETS_OF_THE_SYSTEM, *more)]
    places += [home / name for home in {_home(), *_home_of_this_user()} for name in _SECRETS]
    if cache := os.environ.get("HF_HOME"):
        places += [Path(cache, name) for name in ("token", "stored_tokens")]
    if token := os.environ.get("HF_TOKEN_PATH"):
        places.append(Path(token))
    for place in places:
        if os.path.lexists(place):
            yield os.path.realpath(place)


def _home() -> Path:
    return Path(os.environ.get("HOME") or "/")


def _home_of_this_user() -> Iterator[Path]:
    with contextlib.suppress(KeyError, ImportError):
        import pwd

        yield Path(pwd.getpwuid(os.getuid()).pw_dir)


def _writable(more: Sequence[str]) -> Iterator[str]:
    yield from (tempfile.gettempdir(), "/tmp", "/dev", "/proc")
    yield from (str(_home() / cache) for cache in (".cache", ".triton"))
    yield from (os.environ[name] for name in _CACHES if os.environ.get(name))
    yield from more
