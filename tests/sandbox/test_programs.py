"""Programs that a model wrote: which ones pass, and that none can leave its sandbox."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from confined_here import directory_of_nobody, require_confinement

from mergegate.merge_core.errors import Refused
from mergegate.tasks.base.sandbox import ProgramEnd, ProgramLimits, program_child, programs, run_program

QUICK = ProgramLimits(cpu=1, clock=20, memory=1 << 29)
IGNORES_ITS_LIMIT = "import signal, time\nsignal.signal(signal.SIGXCPU, lambda *_: None)\nwhile True: pass"
USES_ITS_RIGHTS = """open('own', 'w').write('1')
assert open('own').read() == '1'
import threading
t = threading.Thread(target=print)
t.start()
t.join()
"""
SECRET = "hf_planted_where_no_program_may_look"


@pytest.fixture(autouse=True)
def confined(monkeypatch: pytest.MonkeyPatch) -> None:
    require_confinement()
    monkeypatch.setenv("HF_TOKEN", SECRET)


@pytest.mark.parametrize(
    ("program", "end"),
    [
        ("def add(a, b): return a + b\nassert add(2, 3) == 5", "passed"),
        (f"{USES_ITS_RIGHTS}import numpy\nassert numpy.arange(4).sum() == 6", "passed"),
        ("def add(a, b): return a * b\nassert add(2, 3) == 5", "failed"),
        ("import os\nos._exit(0)\nassert False", "failed"),  # The program exits before its tests.
        ("print('passed')\ninput()", "failed"),
        ("kept = bytearray(1 << 30)", "failed"),
        pytest.param("import os\nwhile True: os.fork()", "failed", marks=pytest.mark.story),
        pytest.param("while True: pass", "out of time", marks=pytest.mark.story),
        pytest.param(IGNORES_ITS_LIMIT, "out of time", marks=pytest.mark.story),
    ],
)
def test_a_program_passes_if_it_reaches_its_end(program: str, end: str) -> None:
    assert run_program(program, QUICK) == end


@pytest.mark.story
def test_a_waiting_program_runs_out_of_time() -> None:
    waits = "import time\ntime.sleep(1000)"
    assert run_program(waits, QUICK.model_copy(update={"clock": 0.5})) is ProgramEnd.OUT_OF_TIME


DENIED = """
try:
    {attempt}
except (OSError, KeyError):
    pass
else:
    raise AssertionError("it got out")
"""


ATTEMPTS = (
    "import os; os.fork()", "import os; os.execv('/bin/sh', ['sh'])",
    "import subprocess; subprocess.run(['/bin/true'])", "import os; os.kill(os.getppid(), 0)",
    "import socket; socket.create_connection(('127.0.0.1', {port}))", "import socket; socket.socket(socket.AF_UNIX)",
    "import os; os.environ['HF_TOKEN']", "import os; open('/proc/{pid}/environ')",
    "import os; open('/proc/%d/environ' % os.getppid())", "open('/proc/self/mem')", "open('{outside}/secret')",
    "open('{outside}/taken', 'w')", "import os; os.unlink('{outside}/secret')",
    "import os; os.mkdir('/tmp/taken-by-a-program')",
    "import pwd, os; open(pwd.getpwuid(os.getuid()).pw_dir + '/taken-by-a-program', 'w')",
    "import os; os.memfd_create('hidden')", "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "import resource; resource.prlimit({pid}, resource.RLIMIT_CPU, (1, 1))",
    "open('large', 'wb').write(bytes(1 << 26))",
)  # fmt: skip


def test_a_program_cannot_leave_its_confinement() -> None:
    outside = directory_of_nobody()
    with socket.create_server(("127.0.0.1", 0)) as server:
        try:
            (outside / "secret").write_text(SECRET)
            places = {"port": server.getsockname()[1], "pid": os.getpid(), "outside": outside}
            programs = {each: DENIED.format(attempt=each.format(**places)) for each in ATTEMPTS}
            # All attempts of one program are denied. Only if one is not, programs of their own show which.
            if run_program("".join(programs.values()), QUICK) is not ProgramEnd.PASSED:
                ends = {each: run_program(program, QUICK) for each, program in programs.items()}
                pytest.fail(str([each for each, end in ends.items() if end is not ProgramEnd.PASSED]))
            assert [file.name for file in outside.iterdir()] == ["secret"]
        finally:
            (outside / "secret").unlink(missing_ok=True)
            outside.rmdir()


def test_a_permitted_attempt_is_detected() -> None:
    assert run_program(DENIED.format(attempt="open('own', 'w')"), QUICK) is ProgramEnd.FAILED


def test_no_program_runs_if_a_restriction_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    silent = tmp_path / "child.py"
    silent.write_text("raise SystemExit('no such call')")
    monkeypatch.setattr(programs, "_CHILD", silent)
    with pytest.raises(Refused, match="exited before it ran the program"):
        run_program("", QUICK)
    silent.write_text(
        "import socket, sys\nchannel = socket.socket(fileno=int(sys.argv[1]))\nchannel.recv(1)\n"
        """channel.sendall(b'{"holds": ["resources"]}\\n')"""
    )
    with pytest.raises(Refused, match="in: calls"):
        run_program("", QUICK)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_call_filter_blocks_exactly_the_listed_calls(machine: str) -> None:
    """The filter is interpreted as bpf(4) defines it, for every call number, on the right machine and another."""
    column, architecture = program_child._MACHINES[machine]
    steps = program_child.call_filter(machine)

    def answer(number: int, argument: int = 0, where: int = architecture) -> int:
        words, held, at = {0: number, 4: where, 16: argument}, 0, 0
        while True:
            code, yes, no, operand = steps[at]
            if code == 0x06:
                return operand
            if code == 0x20:
                held, at = words[operand], at + 1
                continue
            holds = {0x15: held == operand, 0x35: held >= operand, 0x45: bool(held & operand)}[code]
            at += 1 + (yes if holds else no)

    forbidden = {row[1 + column] for row in program_child._FORBIDDEN} - {None}
    special = {program_child._CLONE[column], program_child._CLONE3, program_child._PRLIMIT[column]}
    assert not special & forbidden
    for number in range(480):
        if number not in special:
            assert (answer(number) == 0x7FFF0000) == (number not in forbidden), number
    assert answer(program_child._CLONE[column], 0x00010000) == 0x7FFF0000
    assert answer(program_child._CLONE[column]) == 0x0005000B
    assert answer(program_child._PRLIMIT[column], 0) == 0x7FFF0000
    assert answer(program_child._PRLIMIT[column], 1) == 0x00050001
    assert answer(0, where=0) == 0x80000000
    assert answer(0x40000000 | 41) == 0x00050026
