"""Untrusted code in a confined process cannot read planted secrets."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confined_here import require_confinement
from hypothesis import given
from hypothesis import strategies as st

from mergegate.tasks.base.sandbox import Confinement, ProcessOptions, SupervisedProcess, environment_of_child

SECRET = "hf_planted_where_nobody_may_look"

# Each attempt is an expression. The child returns its value as text, or the name of the exception.
ATTEMPTS = """
import json, os, socket, subprocess, sys
def of(number, name):
    with open(f"/proc/{number}/{name}", "rb") as file: return file.read().decode(errors="replace")
def above(number): return int(of(number, "stat").rpartition(")")[2].split()[1])
def read(path):
    with open(path) as file: return file.read()
def write(path):
    with open(path, "a") as file: return file.write("x")
parent = os.getppid(); grandparent = above(parent)
answers = {}
for attempt in json.loads(sys.argv[1]):
    try: answers[attempt] = str(eval(attempt))
    except BaseException as error: answers[attempt] = type(error).__name__
print(json.dumps(answers))
"""
CONFINE = """
import json, os, sys, tempfile
from mergegate.tasks.base.sandbox import Confinement, ProcessOptions, SupervisedProcess, environment_of_child
command, confinement = json.loads(sys.argv[1])
with tempfile.TemporaryFile() as output:
    options = ProcessOptions("test", confinement=Confinement(**confinement))
    process = SupervisedProcess(command, environment_of_child(), output, options)
    assert process.unconfined == (), process.unconfined
    process.ends(600); process.end(); output.seek(0); sys.stdout.write(output.read().decode())
"""
PROJECT = Path(__file__).parents[2]
Try = Callable[..., dict[str, str]]


@pytest.fixture
def attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Try:
    """Return a function that evaluates expressions in a confined process; its user has a secret in the environment."""
    require_confinement()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", SECRET)

    def carry_out(*expressions: str, **confinement: Any) -> dict[str, str]:
        # An intermediate process starts with the secret in its environment; pytest fixes the environment of this one.
        arguments = json.dumps([[sys.executable, "-c", ATTEMPTS, json.dumps(expressions)], confinement])
        return json.loads(subprocess.check_output([sys.executable, "-c", CONFINE, arguments], cwd=PROJECT, text=True))

    return carry_out


ENVIRONMENTS = (
    "os.environ.get('HF_TOKEN')",
    "of('self', 'environ')",
    "of(parent, 'environ')",
    "of(grandparent, 'environ')",
    "of(grandparent, 'mem')",
    "os.listdir(f'/proc/{grandparent}/fd')",
    "subprocess.run(['env'], capture_output=True, text=True).stdout",
    "subprocess.run(['cat', f'/proc/{grandparent}/environ'], capture_output=True, text=True).stdout",
)


def test_a_confined_process_reads_no_secret_of_other_processes(attempts: Try) -> None:
    found = attempts(*ENVIRONMENTS, "write('/dev/null')", "write(os.environ['TMPDIR'] + '/own')")
    assert SECRET not in str(found)
    unreadable = ("of(parent, 'environ')", "of(grandparent, 'environ')", "of(grandparent, 'mem')")
    assert {found[attempt] for attempt in unreadable} == {"PermissionError"}
    assert list(found.values())[-2:] == ["1", "1"]


@pytest.mark.story
def test_a_confined_process_has_network_access_only_if_granted(attempts: Try) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = f"socket.create_connection({server.getsockname()!r}, timeout=5)"
        own = "(lambda s: socket.create_connection(s.getsockname(), timeout=5))(socket.create_server(('127.0.0.1', 0)))"
        alone = attempts(ours, own)
        assert alone[ours] == "ConnectionRefusedError"  # The child has a separate loopback.
        assert alone[own].startswith("<socket.socket")
        assert attempts(ours, network=True)[ours].startswith("<socket.socket")


@pytest.mark.story
def test_a_confined_process_cannot_signal_others_or_leave_its_limits_through_a_child(attempts: Try) -> None:
    again = (
        "subprocess.run([sys.executable, '-c', 'open(\"/etc/shadow\")'], capture_output=True, text=True).stderr[-300:]"
    )
    limits = ("len(bytearray(3 << 30))", "len(bytearray(1 << 20))")
    found = attempts("os.kill(grandparent, 0)", *limits, again, memory=1 << 30)
    assert "PermissionError" in found.pop(again)
    assert list(found.values()) == ["PermissionError", "MemoryError", str(1 << 20)]


def test_missing_restrictions_are_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without Landlock or namespaces, as in some containers, the process runs, and a warning is logged."""
    import mergegate.tasks.base.sandbox.supervision as supervised

    without = Path(tempfile.mkdtemp())
    for name in ("supervision.py", "confinement.py"):
        text = (Path(supervised.__file__).parent / name).read_text()
        (without / name).write_text(text.replace("_libc = ctypes.CDLL(None, use_errno=True)", _NO_SUCH_CALLS))
    monkeypatch.setattr(supervised, "__file__", str(without / "supervision.py"))
    with tempfile.TemporaryFile() as output:
        options = ProcessOptions("test", confinement=Confinement())
        process = SupervisedProcess([sys.executable, "-c", "print('ran')"], os.environ, output, options)
        assert process.unconfined == ("files", "network")
        process.ends(600)
        process.end()
        output.seek(0)
        assert output.read() == b"ran\n"
    assert "does not confine processes in: files, network" in caplog.text


_NO_SUCH_CALLS = """class _Without:
    def __getattr__(self, name): return lambda *_: -1
_libc = _Without()
"""


@given(st.sampled_from(["TOKEN", "SECRET", "PASSWORD", "API_KEY", "ACCESS_KEY", "AUTH", "AUTH_STRING", "CREDENTIALS"]))
def test_variables_with_secret_names_are_not_passed_on(kind: str) -> None:
    prefixed = [f"{prefix}_{kind}" for prefix in ("HF", "VLLM", "MERGEGATE", "PYTHON")]
    names = [kind, *prefixed, f"AWS_{kind}_ID", f"hf_{kind}".lower()]
    assert environment_of_child(dict.fromkeys(names, SECRET)) == {}


def test_variables_that_libraries_need_are_passed_on() -> None:
    needed = ("PATH", "HOME", "LANG", "LC_ALL", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HOME", "PYTHONPATH")
    given = dict.fromkeys((*needed, "DATABASE_URL", "PREFECT_API_URL"), "x")
    assert environment_of_child(given) == dict.fromkeys(needed, "x")


class _Command:
    """A malicious pickle that runs a shell command when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


@pytest.mark.parametrize(
    "sent",
    [
        pickle.dumps(("done", _Command())), pickle.dumps(("done", SupervisedProcess)),
        pickle.dumps(("done", subprocess.Popen)), b"\x80\x05c__builtin__\neval\n(X\x01\x00\x00\x001tR.",
        pickle.dumps("done"), pickle.dumps(("progress", "half", "all")), pickle.dumps(("hello", 1)),
        pickle.dumps(("done",)), pickle.dumps(("problem", "text")), b"", b"\x00garbage",
    ],
)  # fmt: skip
def test_messages_that_are_not_data_are_refused(sent: bytes) -> None:
    from multiprocessing import Pipe

    from mergegate.merge_core.errors import InvalidInput
    from mergegate.tasks.models.checkpoints.model_process import receive

    here, there = Pipe()
    there.send_bytes(sent)
    with pytest.raises(InvalidInput, match="sent an invalid message"):
        receive(here, "task trap")
