"""The server process: start, readiness and shutdown, without leftovers even when either side is killed."""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from patience import HANG_S
from traces import MARK, Traces, fake_server, flow, listens, pause

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.base.http import JsonClient
from mergegate.tasks.base.sandbox import GpuLease, Gpus
from mergegate.tasks.quality.serve import process
from mergegate.tasks.quality.serve.answers import parse_models
from mergegate.tasks.quality.serve.launch import Launch
from mergegate.tasks.quality.serve.process import PORT_TAKEN, ServerEnded, ServerProcess, assign_blame, root_cause
from mergegate.tasks.quality.serve.settings import ServeSettings

Start = Callable[..., ServerProcess]


def settings(**changes: float) -> ServeSettings:
    return ServeSettings.model_validate({"startup_timeout": HANG_S, "request_timeout": HANG_S, **changes})


@pytest.fixture
def start(tmp_path: Path, traces: Traces) -> Start:
    """Return a function that returns a process with a fake server. Its log is in ``tmp_path``."""

    def prepare(*arguments: str, grace: float = process.GRACE, **changes: float) -> ServerProcess:
        return ServerProcess(fake_server(traces, *arguments), tmp_path / "log", settings(**changes), grace=grace)

    return prepare


def test_a_server_is_awaited_answers_and_is_gone_afterwards(start: Start, traces: Traces) -> None:
    with start("--workers", "2") as server:
        server.await_ready()
        assert server.name in parse_models(JsonClient(server.url, 5).request("/v1/models"))
        assert len(traces.processes()) >= 3
        assert list(traces.temporary.rglob("worker-*")), "its temporary files go where they are removed"
    assert server.seconds_to_ready is not None
    assert (server.peak_memory or 0) > 5e6
    assert not listens(server.url)
    assert traces.processes() == []
    assert traces.files() == []


SHARING = """
import os, sys, time
pages = bytearray(b"x") * (64 << 20)
for _ in range(3):
    if os.fork() == 0:
        time.sleep(600)
print("allocated", flush=True)
time.sleep(600)
"""


def test_memory_that_processes_share_counts_once(tmp_path: Path, traces: Traces) -> None:
    called = Launch((sys.executable, "-c", SHARING), {"PATH": os.environ["PATH"], MARK: traces.mark})
    with ServerProcess(called, tmp_path / "log", settings(), grace=1) as server:
        while "allocated" not in (tmp_path / "log").read_text():
            pause(0.02)
    assert server.peak_memory is not None
    assert 64 << 20 < server.peak_memory < 2 * 64 << 20
    assert traces.processes() == []


def driver(*gpus: dict[int, int], used: list[int]) -> SimpleNamespace:
    """Return a fake NVML: `gpus` maps process ids to bytes for each GPU, and `used` is the total per GPU."""

    def count(found: Any) -> int:
        found._obj.value = len(used)
        return 0

    def handle(at: int, device: Any) -> int:
        device._obj.value = at + 1
        return 0

    def memory(device: Any, found: Any) -> int:
        found._obj[2] = used[device.value - 1]
        return 0

    def processes(device: Any, number: Any, found: Any) -> int:
        on_it = gpus[device.value - 1]
        number._obj.value = len(on_it)
        for at, (pid, size) in enumerate(on_it.items()):
            found[at].pid, found[at].size = pid, size
        return 0

    return SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlDeviceGetCount_v2=count,
        nvmlDeviceGetHandleByIndex_v2=handle,
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetComputeRunningProcesses_v3=processes,
    )


def test_memory_on_all_gpus_counts_and_that_of_others_does_not() -> None:
    gpus = Gpus(driver({7: 100, 8: 20, 99: 5000}, {8: 300}, used=[5120, 300]))
    assert gpus.used_by([7, 8]) == 420
    assert Gpus(driver(used=[])).used_by([7]) == 0, "without a GPU"


def test_where_the_driver_does_not_know_our_processes_what_was_added_counts() -> None:
    used = [1000, 50]
    gpus = Gpus(driver({}, {}, used=used))
    assert gpus.used_by([7]) == 0
    used[:] = [4000, 60]
    assert gpus.used_by([7]) == 3010


@pytest.mark.story
def test_a_server_that_does_not_listen_to_signals_is_ended_all_the_same(start: Start, traces: Traces) -> None:
    with start("--fault", "deaf", "--workers", "1", grace=0.2) as server:
        server.await_ready()
    assert traces.processes() == []
    assert traces.files() == []


@pytest.mark.story
@pytest.mark.parametrize(
    ("said", "blame"),
    [
        ("ValueError: There is no module or parameter named 'model.layers.2'", "model"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "machine"),
    ],
)
def test_a_server_that_dies_at_its_start_says_why_and_who_is_to_blame(start: Start, said: str, blame: str) -> None:
    with start("--fault", f"says {said}") as server, pytest.raises(ServerEnded) as end:
        server.await_ready()
    assert end.value.cause in said
    assert (end.value.blame, end.value.returncode) == (blame, 1)


def test_a_missing_command_is_blamed_on_the_machine(tmp_path: Path, traces: Traces) -> None:
    missing = ServerProcess(Launch(("/nowhere/vllm", "{port}"), {}), tmp_path / "log", settings())
    with missing as server, pytest.raises(ServerEnded, match="/nowhere/vllm: No such file") as end:
        server.await_ready()
    assert end.value.blame == "machine"
    assert traces.files() == []


@pytest.mark.parametrize("error", [OSError("Too many open files"), InvalidInput("serve", found="no Linux")])
def test_a_start_that_fails_for_any_reason_releases_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    released: list[str] = []

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(process, "acquire_gpus", lambda: GpuLease((), lambda: released.append("GPUs")))
    monkeypatch.setattr(process, "SupervisedProcess", fail)
    server = ServerProcess(Launch(("server", "{port}"), {}), tmp_path / "log", settings())
    with pytest.raises(type(error)), server:
        pass
    assert released == ["GPUs"]
    server.stop()
    assert released == ["GPUs"], "a lease is released once"


@pytest.mark.story
def test_a_server_that_is_never_ready_is_ended_in_time(tmp_path: Path, start: Start, traces: Traces) -> None:
    with start("--fault", "never ready", "--workers", "1", startup_timeout=1) as server:
        while "loading weights" not in (tmp_path / "log").read_text():
            pause(0.02)
        with pytest.raises(ServerEnded, match="not ready within 1 s; last log line: loading weights") as end:
            server.await_ready()
    assert end.value.blame == "machine"
    assert traces.processes() == []


@pytest.mark.story
def test_the_total_limit_ends_a_server_that_is_ready(start: Start, traces: Traces) -> None:
    with start() as server:
        server.await_ready()
        assert server.seconds_to_ready is not None
        limit = math.ceil(3 + 10 * server.seconds_to_ready)  # The limit includes the start.
    with start(timeout=limit) as server:
        server.await_ready()
        assert server.has_died(within=HANG_S)
        assert f"longer than {limit} s" in server.diagnose().cause


@pytest.mark.story
def test_sockets_of_a_server_have_short_paths(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    with start() as server:
        server.await_ready()
        assert server._process is not None
        assert len(str(server._process.scratch / str(uuid.uuid4()))) <= 107
        scratch = server._process.scratch
    assert not scratch.exists()


@pytest.mark.story
def test_a_killed_server_takes_its_workers_along(start: Start, traces: Traces) -> None:
    with start("--workers", "2") as server:
        server.await_ready()
        os.kill(server._process.pid, signal.SIGKILL)
        assert server.has_died(within=HANG_S)
        assert server.diagnose().blame == "machine"
    assert traces.processes() == []
    assert traces.files() == []


def test_a_killed_supervisor_leaves_no_server(start: Start, traces: Traces) -> None:
    with start() as server:
        server.await_ready()
        assert server._process is not None
        server._process._supervisor.kill()
    assert traces.wait_until_gone() == []
    assert traces.files() == []


@pytest.mark.story
def test_a_server_restarts_on_another_port_if_its_port_is_in_use(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = [taken.getsockname()[1]]
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            ports.append(closed.getsockname()[1])
        free = SimpleNamespace(getsockname=lambda: ("127.0.0.1", ports.pop(0)))
        monkeypatch.setattr("socket.create_server", lambda address: nullcontext(free))
        with start() as server:
            server.await_ready()
            assert JsonClient(server.url, 5).request("/health").status == 200
    assert ports == []


@pytest.mark.story
def test_nothing_survives_a_flow_that_is_killed(tmp_path: Path, traces: Traces) -> None:
    with flow(tmp_path / "log", traces, fake_server(traces, "--workers", "2")) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        assert parent.stdout.readline().strip() == "ready"
        assert len(traces.processes()) >= 3
        parent.kill()
        parent.wait()
        assert traces.wait_until_gone() == []
    assert not listens(url)
    assert traces.files() == []


# The log of a server: the cause rather than its consequences, and whether the model is to blame.

FAILED_START = """\
(APIServer pid=1) WARNING 11-20 11:16:04 [system_utils.py:255] error: OSError: [Errno 24] may come
(EngineCore pid=7) ERROR 11-20 11:16:41 [core.py:842] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-20 11:16:41 [core.py:842] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-20 11:16:41 [core.py:842]   File "loader.py", line 12, in load
(EngineCore pid=7) ERROR 11-20 11:16:41 [core.py:842] ValueError: Following weights were not initialized: {'a'}
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_the_cause_is_the_first_error_and_not_its_consequence() -> None:
    assert root_cause(FAILED_START) == "ValueError: Following weights were not initialized: {'a'}"


DEAD_WORKER = """\
(EngineCore pid=7) ERROR 11-22 04:51:12 [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly \
(exit code: -4), shutting down executor.
(EngineCore pid=7) ERROR 11-22 04:51:12 [core.py:1512] EngineCore encountered a fatal error.
(EngineCore pid=7) ERROR 11-22 04:51:12 [core.py:1512] RuntimeError: cancelled
(APIServer pid=1) ERROR 11-22 04:51:12 [async_llm.py:906] EngineDeadError: EngineCore encountered an issue.
"""


def test_a_worker_that_a_signal_ended_is_the_cause_and_not_what_waited_for_it() -> None:
    assert root_cause(DEAD_WORKER) == "Worker proc VllmWorker-0 died unexpectedly (exit code: -4)"


def test_without_an_error_the_last_line_is_the_cause() -> None:
    assert root_cause("loading\nkilled by somebody\n\n") == "killed by somebody"
    assert root_cause("") == "the log is empty"
    assert (
        root_cause("loading\n/lib/resource_tracker.py:254: UserWarning: 2 leaked\n  warnings.warn('leaked')\n")
        == "loading"
    )


@pytest.mark.parametrize(
    ("cause", "returncode", "had_answered", "guilty"),
    [
        ("ValueError: Following weights were not initialized: {'a'}", 1, False, "model"),
        ("ValueError: Free memory on device cuda:0 (1/80 GiB) is less than desired", 1, False, "machine"),
        ("ValueError: To serve one request, 3 GiB KV cache is needed, larger than available", 1, False, "machine"),
        ("RuntimeError: Failed to infer device type", 1, False, "machine"),
        ("ModuleNotFoundError: No module named 'vllm'", 1, False, "machine"),
        ("loading weights", -9, False, "machine"),
        ("api_server.py: error: argument --dtype: invalid choice: 'int3'", 2, False, "settings"),
        ("IndexError: index out of range in self", 1, True, "model"),
        ("torch.OutOfMemoryError: CUDA out of memory", 1, True, "machine"),
        ("RuntimeError: CUDA error: device-side assert triggered", 1, True, "model"),
        ("Worker proc VllmWorker-0 died unexpectedly (exit code: -4)", 0, True, "machine"),  # An illegal instruction.
        ("Worker proc VllmWorker-0 died unexpectedly (exit code: -9)", 0, True, "machine"),  # Usually out of memory.
        ("Worker proc VllmWorker-0 died unexpectedly (exit code: -11)", 0, True, "model"),
        ("RuntimeError: Unsupported CPU attention configuration: head_dim=24", 1, True, "machine"),
    ],
)
def test_the_machine_the_settings_or_the_model_is_blamed(
    cause: str, returncode: int, had_answered: bool, guilty: str
) -> None:
    assert assign_blame(cause, returncode, had_answered=had_answered) == guilty


def test_a_port_in_use_is_detected() -> None:
    assert PORT_TAKEN.search("OSError: [Errno 98] Address already in use")
    assert not PORT_TAKEN.search(FAILED_START)
