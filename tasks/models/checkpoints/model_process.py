"""Run functions in the model process, a child process that loads models and runs untrusted code.

A call that hangs is killed at a time limit, and a crash of the process does not end the flow. Each worker slot
(``runners.slots``) has one model process, so there is only one unless a runner has created several slots. The
process starts when it is first needed. It keeps models in memory for later calls, so perplexity, all tasks and all
interim looks load each model once. It ends with the parent process, however that ends (``sandbox``)::

    start_model_process()  # Optional: import its libraries while this process does other work.
    answer = call_model_process(function, arguments, location="task gsm8k on merge", models=[merge])
    end_model_process()  # Release the memory of the models.

``function`` is a module-level function, which the process calls as ``function(*arguments, on_progress)``. Requests and
responses are pickled. A request is ``(function, arguments)``. The responses are any number of
``("progress", done, total)``, followed by one of ``("done", value)``, ``("problem", error)``, ``("starved", error)``
and ``("crash", error, traceback)``.

Tasks, templates and tokenizers are third-party code and run only in this process, which is confined
(``sandbox``): it has no access to the environment, the secrets and the other processes of mergegate, and it has
network access only for calls that need it. The parent process accepts only data from it (``receive``).
"""

from __future__ import annotations

import atexit
import dataclasses
import enum
import importlib
import importlib.util
import io
import logging
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from pydantic import BaseModel

from mergegate.merge_core.engine import has_cuda_driver
from mergegate.merge_core.errors import InvalidInput, MergegateError, Refused
from mergegate.merge_core.files import JOURNAL, disk_errors_refused, open_journal_file, opened_journals
from mergegate.merge_core.wording import detail
from mergegate.tasks.base.runners import Cancelled, WorkerSlot, current_slot, on_slot_end
from mergegate.tasks.base.sandbox import (
    GpuLease,
    NotStarted,
    ProcessOptions,
    SupervisedProcess,
    acquire_gpus,
    compile_imports,
    output_tail,
)
from mergegate.tasks.base.stage import memory_of_child, memory_of_mapping_child, on_input_change, store
from mergegate.tasks.models.checkpoints.model import Model
from mergegate.tasks.models.checkpoints.model_cache import (
    SMALLER,
    OutOfModelMemory,
    hold_at_most,
    import_lean,
    on_unload,
    unload_models,
)
from mergegate.tasks.models.checkpoints.project_access import (
    child_environment,
    confinement,
    expected_files,
    imported_packages,
    named_files,
    sandbox_directory,
)

# Messages of Python, torch and C++ if a memory limit, rather than the size of the memory, stops an allocation.
_NO_MEMORY = re.compile(
    r"MemoryError|can't allocate memory|bad_alloc|[Cc]annot allocate|can't start new thread|OutOfMemory"
    # Messages of the dynamic linker, which loads shared libraries during imports.
    r"|failed to map segment|cannot map zero-fill pages|cannot create (shared object|search path|cache for)"
    # Message of the interpreter if an extension runs out of memory during an import.
    r"|SystemError: .*without (setting an exception|exception set)"
)
_POLL_S = 1.0  # Seconds between checks that the process is alive.
# Minimum seconds between progress messages. A tiny model answers thousands of prompts a second.
_PROGRESS_EVERY_S = 0.1
_START = "from mergegate.tasks.models.checkpoints.model_process import answer_questions; answer_questions()"
_ALONE = "one at a time"
EARLY_START = "early start of the model process"  # Name of its thread, and of its call in details.
_IMPORT = "from mergegate.tasks.models.checkpoints.model_process import import_libraries; import_libraries()"
# Modules that most calls import, in order. The last one shows whether all of them are compiled.
_LIBRARIES = (
    "datasets",
    "lm_eval.tasks",
    "mergegate.tasks.quality.evaluation.scoring.harness",
    "mergegate.tasks.quality.perplexity.measurement",
    "accelerate",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "lm_eval.models.huggingface",
)
# Maximum time without progress if the call has no time limit. The largest models load within this time.
_SILENCE_S = 3600.0
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # Libraries then do not wait for a missing network.
# Torch threads that have finished their share of a layer spin for some microseconds while they wait for the others, and
# then sleep. Without spinning, waking a thread takes a fifth of a layer's time. Threads that spin until the others have
# finished occupy the cores that those need. GNU's OpenMP reads the count, others only the policy.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}

A = TypeVar("A")
TellProgress = Callable[[int, int], None]

_log = logging.getLogger(__name__)
_alone = False  # Whether memory was once too small for several models.


@dataclasses.dataclass(frozen=True)
class CallNeeds:
    """Special requirements of a call to the model process."""

    # Whether the models need a process of their own, because only its end frees their memory.
    own_process: bool = False
    network: bool = False  # Whether the call needs network access.
    gpu: bool = True  # Whether the call computes. Others do not wait until the GPUs are free.
    # Names of environment variables that the call needs. Third-party code in the process can read them.
    variables: tuple[str, ...] = ()
    # Time limit in seconds, not counting the wait for other processes to end. Default: the process is killed after an
    # hour without progress.
    time_limit: float | None = None


def call_model_process(
    function: Callable[..., A],
    arguments: Sequence[object],
    *,
    location: str,
    models: Sequence[Model] = (),
    needs: CallNeeds = CallNeeds(),
    on_progress: TellProgress = lambda done, total: None,
) -> A:
    """Run ``function(*arguments, on_progress)`` in the model process and return its result.

    If memory runs out while the process holds several models, it is restarted with one model at a time and the call is
    repeated. If memory still runs out while other model processes are running, they are ended and the call is repeated.
    A repeated call resumes from the journal of ``function``, if it writes one.

    Args:
        function: Module-level function to run.
        arguments: Positional arguments of the function. They must support pickling.
        location: Name of the call in messages.
        models: Models that ``function`` loads. If empty, the call can use a running process with any models.
        needs: Network access, environment variables and the time limit of the call.
        on_progress: Called with the finished and the total amount of work.

    Raises:
        MergegateError: Any error that ``function`` raises.
        OutOfModelMemory: Memory ran out, or the system killed the process, as it does if memory is full.
        InvalidInput: The process ended in another way, or ``function`` failed with another exception.
        Refused: The time limit is exceeded.
        Cancelled: The result is no longer needed.
    """
    unload_models()  # The models of both processes may not fit into memory together.
    detail("call the model process: %s.%s for %s", function.__module__, function.__qualname__, location)
    slot = current_slot()
    with _creation_lock:
        slot_process = _slot_processes.setdefault(slot.number, _SlotProcess(slot.number))
    digests = tuple(model.digest for model in models)
    kind = _Kind(
        "".join(digests) if needs.own_process else "",
        needs.network,
        needs.gpu and has_cuda_driver(),
        needs.variables,
        slot.environment,
        sandbox_directory(),
    )
    request = _Request((function, tuple(arguments)), location, needs.time_limit, on_progress)
    with slot_process.lock:
        try:
            return cast(A, slot_process.call(request, kind, set(digests), slot))
        except OutOfModelMemory:
            if not any(process.current is not None for process in _processes_in_order() if process is not slot_process):
                raise
    _log.warning("%s: its process was killed while others were running; repeating the call without them", location)
    with ExitStack() as locks:
        for process in _processes_in_order():
            locks.enter_context(process.lock)
            process.end()
        return cast(A, slot_process.call(request, kind, set(digests), slot))


def start_model_process() -> None:
    """Start the model process in a background thread, and let it import its libraries.

    Nothing starts if a GPU would be reserved before it is needed. A failure is ignored here, because the first call
    then starts the process again and reports the reason.
    """

    def start() -> None:
        with suppress(MergegateError, NotStarted, OSError):
            call_model_process(import_libraries, (), location=EARLY_START)

    if not has_cuda_driver():
        # A daemon, so that a run that is refused or interrupted does not wait for the imports.
        threading.Thread(target=start, name=EARLY_START, daemon=True).start()


def import_libraries(on_progress: TellProgress = lambda done, total: None) -> None:
    """Import what most calls need. Called in the model process."""
    import_lean(*_LIBRARIES)


def end_model_process() -> None:
    """End all model processes and their child processes, and release the memory of their models."""
    for process in _processes_in_order():
        process.end()


@atexit.register
def _end() -> None:
    """End all model processes without taking locks.

    A thread that waits for an answer holds a lock, and it must not delay the end of this process.
    """
    for process in _processes_in_order():
        if (running := process.current) is not None:
            running.child.end()


on_unload(end_model_process)
on_input_change(unload_models)
on_input_change(end_model_process)
on_slot_end(lambda number: _slot_processes[number].end() if number in _slot_processes else None)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Properties of a process that determine whether a call can use it.

    ``only_for`` holds the concatenated digests of the only models that the process may load; if empty, it may load any.
    ``gpu`` states that it may use the GPUs. ``variables`` names the additional environment variables, and
    ``environment`` has those of the worker slot. ``sandbox`` is the directory that it writes to.
    """

    only_for: str
    network: bool
    gpu: bool
    variables: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    sandbox: Path


class _Request(NamedTuple):
    """One call of ``call_model_process``."""

    content: tuple[Any, ...]
    location: str
    time_limit: float | None
    on_progress: TellProgress


class _SlotProcess:
    """The model process of one worker slot, used by one thread at a time."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = threading.RLock()
        self.current: _ModelProcess | None = None

    def call(self, request: _Request, kind: _Kind, models: set[str], slot: WorkerSlot) -> Any:
        """Return the answer of the process, which is started if necessary.

        If memory runs out with several models, the process is restarted with one model at a time. ``models`` holds the
        digests of the models that the call loads. If it is empty, a running process with any models is used.
        """
        global _alone
        deadline = time.monotonic() + request.time_limit if request.time_limit is not None else None
        with self.lock:
            while True:
                if slot.cancelled.is_set():
                    raise Cancelled
                process = self.current
                # A call without models accepts a process with any models.
                accepted = kind
                if process is not None and not models:
                    accepted = dataclasses.replace(
                        kind, only_for=process.kind.only_for, gpu=kind.gpu or process.kind.gpu
                    )
                named = {str(path) for path in named_files(request.content[1])}
                if process is None or not process.child.alive or process.kind != accepted or not process.reads(named):
                    readable = named | expected_files | (process.readable if process else set())
                    self.end()
                    process = self.current = _ModelProcess(kind, readable)
                process.models |= models
                try:
                    return self._exchange(process, request, deadline, slot)
                except OutOfModelMemory:
                    if _alone or len(process.models) < 2:
                        raise
                    _log.warning(
                        "%s: memory ran out with several models loaded; continuing with one at a time", request.location
                    )
                    self.end()
                    _alone = True

    def end(self) -> None:
        """End the process and its child processes. Waits until a running call has finished."""
        with self.lock:
            if self.current is not None:
                self.current.end()
                self.current = None

    def _exchange(self, process: _ModelProcess, request: _Request, deadline: float | None, slot: WorkerSlot) -> Any:
        is_answered = False
        last_message_at = time.monotonic()
        try:
            process.send(request.content)
            while not is_answered:
                remaining = (last_message_at + _SILENCE_S if deadline is None else deadline) - time.monotonic()
                if remaining <= 0:
                    raise Refused(
                        request.location,
                        found=f"not finished after {request.time_limit:g} s, so mergegate stopped it"
                        if request.time_limit
                        else f"no progress for {_SILENCE_S:g} s, so mergegate stopped it",
                        expected="an answer within evaluate.time_limit" if request.time_limit else "progress",
                        remedy="increase evaluate.time_limit, or batch_size if the device has enough memory",
                    )
                if slot.cancelled.is_set():
                    raise Cancelled
                if not process.connection.poll(min(remaining, _POLL_S)):
                    if process.child.alive or process.connection.poll():
                        continue
                    raise EOFError
                kind, *content = receive(process.connection, request.location)
                last_message_at = time.monotonic()
                if kind == "progress":
                    request.on_progress(*content)
                else:
                    is_answered = True
        except (EOFError, ConnectionError):
            raise _death_error(request.location, process.child.end().returncode, process.last_line()) from None
        finally:
            if not is_answered:  # A late answer would be mistaken for the answer to the next request.
                self.end()
        if kind == "problem":
            raise cast(MergegateError, content[0])
        if kind == "crash":
            self.end()  # The crash may have left the process in any state.
            error, trace = content
            _log.info("%s\n%s", request.location, trace)
            raise InvalidInput(request.location, found=error, expected="an answer")
        if kind == "starved":
            self.end()  # The process may contain half-imported modules, so it is not reused.
            raise _memory_error(request.location, content[0])
        return content[0]


_slot_processes: dict[int, _SlotProcess] = {}
_creation_lock = threading.Lock()


def _processes_in_order() -> list[_SlotProcess]:
    """Return the processes by slot number. The fixed order prevents deadlocks of threads that lock all of them."""
    with _creation_lock:
        return [_slot_processes[number] for number in sorted(_slot_processes)]


class _ModelProcess:
    """Handle of a running model process, used by the process that started it."""

    def __init__(self, kind: _Kind, readable: set[str]) -> None:
        self.kind = kind
        # Real paths that it may read. Permissions follow links.
        self.readable = {str(path.resolve()) for path in (*map(Path, readable), store().root)}
        self.models: set[str] = set()  # Digests of the models that the process was called for.
        self.connection, child_connection = Pipe()
        compile_libraries()
        variables = {name: os.environ[name] for name in kind.variables if name in os.environ}
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed by ``end``
        # With CUDA there is no default limit, because the driver also maps the memory of the GPU, of any size.
        memory = memory_of_child(None) if has_cuda_driver() else memory_of_mapping_child()
        self._gpus = acquire_gpus() if kind.gpu else GpuLease((), lambda: None)
        without_gpus = {"CUDA_VISIBLE_DEVICES": ""} if has_cuda_driver() and not kind.gpu else {}
        try:
            self.child = SupervisedProcess(
                # -P keeps the working directory of the run out of the import path.
                [sys.executable, "-P", "-c", _START, str(child_connection.fileno()), *([_ALONE] if _alone else [])],
                _environment() | dict(kind.environment) | variables | without_gpus | ({} if kind.network else _OFFLINE),
                self._output,
                ProcessOptions(
                    "evaluation",
                    pass_fds=(child_connection.fileno(),),
                    confinement=confinement(
                        read=(*readable, *imported_packages()), network=kind.network, memory=memory
                    ),
                    inherited=self._gpus.descriptors,
                ),
            )
        except BaseException:
            self._gpus.release()
            raise
        finally:
            child_connection.close()

    def reads(self, paths: set[str]) -> bool:
        """Return whether the process may read all ``paths``."""
        resolved = (Path(path).resolve() for path in paths)
        return all(not self.readable.isdisjoint(map(str, (path, *path.parents))) for path in resolved)

    def send(self, content: tuple[Any, ...]) -> None:
        """Send a request, with the open files of its journals, because the process cannot write to the store."""
        files: dict[Path, int] = {}
        try:
            for path in {path for path in named_files(content[1]) if path.name == JOURNAL}:
                with suppress(OSError):  # The process then says that there is no journal.
                    files[path] = open_journal_file(path)
            self.connection.send((*content, tuple(files)))
            for descriptor in files.values():
                send_handle(self.connection, descriptor, None)
        finally:
            for descriptor in files.values():
                os.close(descriptor)

    def last_line(self) -> str:
        """Return the last line that the process printed. Libraries often print the cause of a crash there."""
        lines = output_tail(self._output).split("\n")
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")

    def end(self) -> None:
        self.child.end()
        self._gpus.release()
        self.connection.close()
        self._output.close()


def compile_libraries() -> None:
    """Compile the modules that the model process imports, because it may not write the bytecode itself."""
    package = importlib.util.find_spec("lm_eval.models")
    for directory in package.submodule_search_locations or () if package else ():
        compile_imports(sys.executable, _IMPORT, Path(directory) / "huggingface.py", _environment())


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    passed_on = child_environment()
    waiting = {} if WAITING.keys() & passed_on.keys() else WAITING
    return {**waiting, **passed_on, "PYTHONPATH": path.rstrip(os.pathsep)}


def _death_error(location: str, code: int | None, last_line: str) -> InvalidInput:
    if code is None or code == -signal.SIGKILL:
        return OutOfModelMemory(
            location,
            found="the model process was killed by signal 9, which the system sends when memory is full",
            expected="enough memory for the model and a batch",
            remedy=SMALLER,
        )
    if _NO_MEMORY.search(last_line):
        return _memory_error(location, last_line)
    cause = f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"
    return InvalidInput(
        location,
        found=f"the model process ended {cause}" + (f": {last_line}" if last_line else ""),
        expected="an answer",
        remedy=SMALLER if code < 0 else "",
    )


def _memory_error(location: str, message: str) -> OutOfModelMemory:
    return OutOfModelMemory(
        location,
        found=f"the model process ran out of memory: {message}",
        expected="enough memory for the data, the model and a batch, within limits.memory if the profile sets it",
        remedy=f"increase limits.memory if the profile sets it, or {SMALLER}",
    )


def _memory_message(error: BaseException) -> str:
    """Return the system's out-of-memory message in the causes of ``error``, or an empty text if there is none.

    Any import, load or parse step can fail if memory runs out. Code that catches such a failure often reports it as
    invalid input, so the whole chain of causes is searched.
    """
    visited: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in visited:
        visited.append(cause)
        message = f"{type(cause).__name__}: {' '.join(str(cause).split())}".rstrip(": ")
        if isinstance(cause, MemoryError) or (not isinstance(cause, MergegateError) and _NO_MEMORY.search(message)):
            return message[:300]
        cause = cause.__cause__ or cause.__context__
    return ""


def answer_questions() -> None:
    """Answer requests in the model process until the parent process closes the connection.

    The command line contains the connection's file descriptor and, optionally, an option to hold one model at a time.
    """
    os.chdir(Path.home())  # Libraries look for configuration in the working directory, where they may not read it.
    descriptor = int(sys.argv[1])
    # A child that outlives this process must not keep the connection open, because the parent would wait for it.
    os.set_inheritable(descriptor, False)
    if _ALONE in sys.argv[2:]:
        hold_at_most(1)
    connection = Connection(descriptor)
    import_lean("portalocker", "requests")
    while True:
        try:
            function, arguments, journals = connection.recv()
            opened_journals.update({path: recv_handle(connection) for path in journals})
        except EOFError:
            return
        connection.send(answer_question(connection, function, arguments))


def answer_question(
    connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Run ``function`` and return the final response, in one of the forms that the module docstring lists."""
    last_sent = 0.0

    def on_progress(count: int, total: int) -> None:
        nonlocal last_sent
        if count == total or time.monotonic() - last_sent >= _PROGRESS_EVERY_S:
            last_sent = time.monotonic()
            connection.send(("progress", count, total))

    try:
        with disk_errors_refused():
            return "done", function(*arguments, on_progress)
    except OutOfModelMemory as error:
        return "problem", error
    except BaseException as error:  # Panics of Rust libraries and calls of exit() in a task are not Exceptions.
        if memory_message := _memory_message(error):
            return "starved", memory_message
        if isinstance(error, MergegateError):
            return "problem", error
        message = " ".join(str(error).split())[:300]
        if not message and (frames := traceback.extract_tb(error.__traceback__)):
            # Show the source line of an error without a message, such as a library's bare assert.
            message = f"{frames[-1].line} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
        return "crash", f"{type(error).__name__}: {message}".rstrip(": "), traceback.format_exc()


_LONGEST = 1 << 31  # bytes
_FIELDS: dict[str, tuple[type, ...]] = {
    "progress": (int, int),
    "done": (object,),
    "problem": (MergegateError,),
    "starved": (str,),
    "crash": (str, str),
}
_VALUES = (BaseModel, MergegateError, tuple, enum.Enum)
_PLAIN = {
    ("pathlib", "PosixPath"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("mergegate.merge_core.errors", "_rebuild"),  # Rebuilds a mergegate exception from its type and its texts.
}


def receive(connection: Connection, location: str) -> tuple[Any, ...]:
    """Return the next message, in one of the forms of the module docstring. A forged one can only make this raise.

    Raises:
        EOFError, ConnectionError: The process will not send another message, or the message is longer than 2 GiB.
        InvalidInput: The message has another form. The error names the call at ``location``.
    """
    try:
        message = connection.recv_bytes(_LONGEST)
    except OSError:  # The message is longer than the limit.
        raise EOFError from None
    try:
        kind, *content = _Answers(io.BytesIO(message)).load()
        fields = zip(content, _FIELDS[kind], strict=True)
        if not all(isinstance(field, field_type) for field, field_type in fields):
            raise ValueError(f"{kind} with {content!r:.100}")
    except Exception as error:
        raise InvalidInput(
            location, found=f"the model process sent an invalid message: {error}", expected="numbers and texts"
        ) from None
    return (kind, *content)


class _Answers(pickle.Unpickler):
    """Unpickler that accepts plain value classes and rejects every function and all other classes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module.startswith(("mergegate.merge_core.", "mergegate.tasks.")):
            value = getattr(importlib.import_module(module), name, None)
            if isinstance(value, type) and (issubclass(value, _VALUES) or dataclasses.is_dataclass(value)):
                return value
        raise pickle.UnpicklingError(f"{module}.{name}")
