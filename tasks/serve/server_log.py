"""Find out from a log why a server ended, and whether the model, the machine or the settings are to blame."""

from __future__ import annotations

import re
from typing import Literal

Blame = Literal["model", "machine", "settings"]


# Prefixes that loggers put before a message: '(EngineCore pid=7) ERROR 11-20 11:01:16 [core.py:842] '.
_PREFIX = re.compile(r"^(?:\([^)]*\)\s*)?(?:[A-Z]+\s+\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?\s+)?(?:\[[^\]]*\]\s*)?")
_NOT_ERROR = re.compile(r"\b(?:WARNING|INFO|DEBUG)\b")
_RAISED = re.compile(
    r"(?:^|\s)((?:(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)|error|fatal error): .+)$|"
    r"^(\w.* died unexpectedly \(exit code: -\d+\))"
)
# Messages about an end whose cause is elsewhere in the log.
_CONSEQUENCE = re.compile(
    r"Engine core initialization failed|Engine core proc|EngineDeadError|EngineCore encountered|"
    r"WorkerProc initialization failed|See root cause above|Failed core proc|CancelledError|RuntimeError: cancelled$"
)
# Messages that interpreters print at exit.
_PRINTED_AT_EXIT = re.compile(r"resource_tracker|warnings\.warn\(|nanobind|^ - (?:leaked|\.\.\.)")
_LONGEST = 400

# Limits of the machine. A server can reach them even after it has answered.
_LIMITS = re.compile(
    r"out of memory|OutOfMemory|MemoryError|Cannot allocate memory|bad_alloc|ENOMEM|No space left on device|"
    r"Free memory on device|No available memory for the cache|KV cache is needed|VLLM_CPU_KVCACHE_SPACE|"
    r"not enough memory|Available (?:CPU )?memory|Unsupported CPU attention configuration|"
    r"died unexpectedly \(exit code: -(?:4|9)\)"
)
_MACHINE = re.compile(
    r"No CUDA|CUDA driver|CUDA[- ]capable device|CUDA error|cudaError|libcuda|NVML|NCCL|Failed to infer device type|"
    r"Too many open files|Resource temporarily unavailable|No such file or directory|Permission denied|not enough GPUs|"
    r"ModuleNotFoundError|ImportError|cannot open shared object|Exec format error|[Aa]ddress already in use|"
    r"World size .* larger than"
)
_SETTINGS = re.compile(
    r"unrecognized arguments|invalid choice|expected one argument|the following arguments are required|"
    r"argument --?[\w-]+: |Extra inputs are not permitted|greater than the derived max_model_len"
)
# Another process listens on the port.
PORT_TAKEN = re.compile(r"[Aa]ddress already in use|EADDRINUSE")


def root_cause(log: str) -> str:
    """Return the line of a log that says why a server ended.

    This is the first error that is not the consequence of another one, or the last line of a log without errors.
    """
    errors = []
    for line in log.splitlines():
        if _NOT_ERROR.search(line[:80]):
            continue
        if match := _RAISED.search(_PREFIX.sub("", line.strip())):
            errors.append((match[1] or match[2]).strip())
    causes = [error for error in errors if not _CONSEQUENCE.search(error)]
    if causes or errors:
        return (causes or errors)[0][:_LONGEST]
    lines = [line.strip() for line in log.splitlines() if line.strip() and not _PRINTED_AT_EXIT.search(line)]
    return _PREFIX.sub("", lines[-1])[:_LONGEST] if lines else "the log is empty"


def assign_blame(cause: str, returncode: int | None, *, had_answered: bool) -> Blame:
    """Decide whether the model, the machine or the settings are to blame for the end of a server.

    The machine is to blame if it lacks memory, a GPU or the server itself, and after SIGKILL, which the kernel sends
    when memory is short. The settings are to blame if the server does not know its arguments. Otherwise the model is.

    After the server has answered, only two ends are not the model's fault: SIGKILL, and a limit of the machine, such as
    memory (also of a worker), a kernel that this build of the server has only for GPUs, or an instruction that the
    processor lacks (SIGILL).

    ``cause`` is the result of ``root_cause``. ``returncode`` is negative for a signal.
    """
    if _LIMITS.search(cause) or returncode == -9:
        return "machine"
    if had_answered:
        return "model"
    if _SETTINGS.search(cause):
        return "settings"
    return "machine" if _MACHINE.search(cause) else "model"
