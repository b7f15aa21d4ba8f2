"""Systems other than Linux: Linux calls are in few files, and unsupported functions report an error."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
FLOORS = ("merge_core", "tasks", "flows")

# Files that may use Linux-only features, and why.
LINUX = {
    "merge_core/system.py": "what merging takes of it, each with what stands in for it; what its kernel says",
    "tasks/base/sandbox/supervision.py": "run by path with a bare interpreter; refused elsewhere before it is started",
    "tasks/base/sandbox/confinement.py": "loaded by path, by that",
    "tasks/base/sandbox/program_child.py": "run by path in a confined process",
    "tasks/base/sandbox/programs.py": "what such a process may read",
    "tasks/base/sandbox/gpu_lock.py": "NVIDIA's driver, which names its devices under /proc",
}
# Features that every POSIX system has and Windows lacks, per file, so that a new use is reviewed.
POSIX = {
    "flows/cli/streams.py": {"signal.SIGPIPE"},
    "merge_core/files/locks.py": {"fcntl", "os.geteuid"},
    "merge_core/files/state.py": {"os.geteuid"},
    "tasks/base/stage/limits.py": {"signal.ITIMER_REAL", "signal.SIGALRM", "signal.setitimer"},
    "tasks/models/checkpoints/model_process.py": {"pass_fds", "signal.SIGKILL"},
    "tasks/models/llama_cpp/client.py": {"pass_fds", "signal.SIGKILL"},
    "tasks/quality/variants/compressed_tensors.py": {"signal.SIGKILL"},
}
LINUX_MODULES = {"resource", "ctypes", "pty", "syslog", "spwd"}  # The limits of `resource` differ on other systems.
POSIX_MODULES = {"fcntl", "pwd", "grp", "termios", "tty"}
POSIX_NAMES = {"os.geteuid", "os.getuid", "os.getegid", "os.getgid", "os.killpg", "os.setsid", "os.fork", "os.fchown"}
POSIX_NAMES |= {"os.chown", "os.mkfifo", "os.nice", "os.setpriority", "os.statvfs", "os.sysconf", "os.uname"}
POSIX_NAMES |= {"os.getloadavg", "os.waitid", "os.WNOHANG", "os.getppid"}
POSIX_KEYWORDS = {"preexec_fn", "pass_fds", "start_new_session", "process_group", "dir_fd"}
SIGNALS = {"SIGINT", "SIGTERM", "SIG_DFL", "SIG_IGN", "signal", "Signals", "getsignal"}  # Available on every system.
# torch, GPUs and llama.cpp are queried through C libraries that any system may have.
CTYPES_TOO = {"merge_core/engine/devices.py": {"ctypes"}, "tasks/models/llama_cpp/child.py": {"ctypes"}}

# Functions that Python offers on Linux but not on macOS.
ABSENT = (
    *("posix_fadvise", "posix_fallocate", "POSIX_FADV_WILLNEED", "POSIX_FADV_DONTNEED", "sched_getaffinity"),
    *("sched_setaffinity", "memfd_create", "MFD_CLOEXEC", "O_DIRECT", "O_PATH", "fdatasync", "preadv"),
    *("pwritev", "preadv2", "pidfd_open", "eventfd", "unshare", "setns", "splice", "copy_file_range", "getrandom"),
)
LINUX_NAMES = {f"os.{name}" for name in ABSENT} | {f"os.{name}" for name in ("sendfile", "getxattr", "setxattr")}
LINUX_NAMES |= {"os.sched_getscheduler", "os.sched_setscheduler", "os.prlimit", "mmap.MADV_HUGEPAGE", "os.cachestat"}
ADDRESSES = {"/runs/flow-run/"}  # URLs of Prefect's pages, not paths on a disk.
LINUX_PLACES = ("/proc", "/sys/", "/dev/shm", "/run/")


def asked_for(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the features in a file that not every system has, as (``linux`` or ``posix``, name)."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
            for name in (module.partition(".")[0] for module in modules):
                if name in LINUX_MODULES | POSIX_MODULES:
                    yield ("linux" if name in LINUX_MODULES else "posix"), name
                assert name != "os" or isinstance(node, ast.Import), f"{file}: os is asked by its name"
        elif isinstance(node, ast.Attribute) and node.attr == "prctl":
            yield "linux", node.attr
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name in LINUX_NAMES:
                yield "linux", name
            elif name in POSIX_NAMES or (node.value.id == "signal" and node.attr not in SIGNALS):
                yield "posix", name
        elif isinstance(node, ast.keyword) and node.arg in POSIX_KEYWORDS:
            yield "posix", node.arg
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            named = [one.value for one in node.args[1:2] if isinstance(one, ast.Constant)]
            yield from (("linux", f"os.{name}") for name in named if f"os.{name}" in LINUX_NAMES)
        elif isinstance(node, ast.Constant) and str(node.value).startswith(LINUX_PLACES) and " " not in str(node.value):
            yield "linux", str(node.value)


@cache
def found() -> dict[str, set[tuple[str, str]]]:
    files = [file for floor in FLOORS for file in sorted((PROJECT / floor).rglob("*.py"))]
    every = {str(file.relative_to(PROJECT)): set(asked_for(file)) for file in files}
    return {file: asked for file, asked in every.items() if asked}


@pytest.mark.story
def test_what_only_linux_has_is_asked_for_in_few_files() -> None:
    stray = {
        file: names
        for file, asked in found().items()
        if file not in LINUX
        and (names := {name for kind, name in asked if kind == "linux"} - CTYPES_TOO.get(file, set()) - ADDRESSES)
    }
    assert stray == {}, "move it to merge_core/system.py, with a fallback for other systems"


@pytest.mark.story
def test_what_windows_has_not_is_asked_for_where_it_is_known() -> None:
    known = {file: {name for kind, name in asked if kind == "posix"} for file, asked in found().items()}
    assert {file: names for file, names in known.items() if names and file not in LINUX} == POSIX
    assert LINUX.keys() <= found().keys(), "every place on the list still needs it"


def test_a_new_call_would_be_seen(tmp_path: Path) -> None:
    new = tmp_path / "new.py"
    new.write_text(
        "import os, fcntl, resource\nos.posix_fadvise(1, 0, 0, 0)\ngetattr(os, 'O_DIRECT', 0)\nopen('/proc/stat')\n"
        "libc.prctl(1)\nsignal.SIGUSR1\n"
    )
    linux = ("resource", "os.posix_fadvise", "os.O_DIRECT", "/proc/stat", "prctl")
    posix = ("fcntl", "signal.SIGUSR1")
    assert set(asked_for(new)) == {*(("linux", name) for name in linux), *(("posix", name) for name in posix)}


# Other systems install their own builds of the libraries. Here, the Linux builds are loaded before the emulation
# starts.
ELSEWHERE = """
import importlib, importlib.util, urllib.request
for name in {libraries}:
    importlib.import_module(name)
import ctypes, mmap, os, pathlib, sys
import asyncio, multiprocessing, platform, shutil, socket, subprocess, sysconfig, tempfile, uuid  # as here
sysconfig.get_config_vars()
for name in {absent}:
    if hasattr(os, name):
        delattr(os, name)
for name in [name for name in vars(mmap) if name.startswith("MADV_")]:
    delattr(mmap, name)
read = pathlib.Path.read_text
def no_kernel(path, *more, **named):
    if str(path).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "No such file or directory", str(path))
    return read(path, *more, **named)
pathlib.Path.read_text = no_kernel
sys.platform = "darwin"
"""


def on_a_mac(
    script: str, place: Path, *arguments: str, libraries: Sequence[str] = (), really: bool = True
) -> subprocess.CompletedProcess[str]:
    environment = {
        **{name: os.environ[name] for name in ("PATH", "PREFECT_HOME", "OMP_NUM_THREADS") if name in os.environ},
        **{"PYTHONPATH": str(PROJECT), "HOME": str(place), "MERGEGATE_HOME": str(place / "state")},
        "HF_HUB_OFFLINE": "1",
    }
    elsewhere = ELSEWHERE.format(libraries=list(libraries), absent=ABSENT)
    command = [sys.executable, "-c", (elsewhere if really else "import sys\n") + script, *arguments]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)


SERVER = ("prefect", "prefect.server.api.server", "uvicorn", "torch", "numba", "transformers", "huggingface_hub")
COMMAND = "from mergegate.flows.cli import main\nmain()\n"


@pytest.mark.proof
def test_merging_works_elsewhere_with_the_same_bytes(tmp_path: Path) -> None:
    script = """
import importlib, json
from pathlib import Path
import mergegate.merge_core
for name in json.loads(sys.argv[2]):
    importlib.import_module(name)
from mergegate.merge_core import load_recipe, merge_weights, open_checkpoint, plan_with_findings, resolve_local
from hashlib import sha256
recipe = load_recipe(Path(sys.argv[1]))
checkpoints = {str(ref): open_checkpoint(resolve_local(ref, recipe.directory)) for ref in recipe.references()}
merge_weights(plan_with_findings(recipe, checkpoints).plan, Path("out"))
print(sha256(Path("out/model.safetensors").read_bytes()).hexdigest())
"""
    recipe = PROJECT / "profiles" / "demo" / "recipes" / "ties.yaml"
    floor = [str(file.parent.relative_to(PROJECT)) for file in PROJECT.glob("merge_core/**/__init__.py")]
    every = json.dumps(["mergegate." + name.replace("/", ".") for name in floor])
    said = []
    for name in ("here", "elsewhere"):
        (place := tmp_path / name).mkdir()
        done = on_a_mac(script, place, str(recipe), every, libraries=["numba", "torch"], really=name == "elsewhere")
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1]


def test_the_help_answers_elsewhere(tmp_path: Path) -> None:
    done = on_a_mac(COMMAND, tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "check" in done.stdout


def test_on_windows_every_command_says_where_it_runs(tmp_path: Path) -> None:
    windows = "import os\nfrom mergegate.flows.cli import main\nos.name = 'nt'\nmain()\n"
    done = on_a_mac(windows, tmp_path, "methods", really=False)
    assert (done.returncode, done.stdout) == (3, "")
    assert "WSL" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.proof
def test_a_check_says_elsewhere_what_it_cannot_do_there(tmp_path: Path) -> None:
    shutil.copytree(PROJECT / "profiles", tmp_path / "profiles")
    done = on_a_mac(COMMAND, tmp_path, "check", "profiles/demo.yaml", libraries=SERVER)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "darwin" in done.stdout + done.stderr
    assert "container" in done.stdout + done.stderr
