"""Parsing a server's log: the cause rather than its consequences, and whether the model is to blame."""

from __future__ import annotations

import pytest

from mergegate.tasks.serve.server_log import PORT_TAKEN, assign_blame, root_cause

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
