"""Run functions in the model process, a child process that loads models and runs untrusted code.

A call that hangs is killed at a time limit, and a crash of the process does not end the flow. Each worker slot
(``tasks.runners.slots``) has one model process, so there is a single one unless a runner has created several slots.
The process starts when it is first needed. It keeps models in memory for later calls, so perplexity, all tasks and
all interim looks load each model once. It ends with the parent process, however that ends (``tasks.sandbox``)::

    answer = call_model_process(function, arguments, where="task gsm8k on merge", models=[merge], on_progress=advance)
    end_model_process()  # Release the memory of the models.

``function`` is a module-level function, which the process calls as ``function(*arguments, on_progress)``. Requests and
responses are pickled. A request is ``(function, arguments)``. The responses are any number of
``("progress", done, total)``, followed by one of ``("done", value)``, ``("problem", error)``, ``("starved", error)``
and ``("crash", error, traceback)``.

Tasks, templates and tokenizers are third-party code and run only in this process. The process is confined
(``tasks.sandbox``). It has no access to the environment, the secrets and the other processes of mergegate. It has
network access only for calls that need it. The parent process accepts only data from it (``messages``).
"""

from __future__ import annotations

import atexit
import dataclasses
import importlib.util
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from mergegate.merge_core.engine import has_cuda_driver
from mergegate.merge_core.errors import InvalidInput, MergegateError, Refused
from mergegate.merge_core.files import disk_errors_refused, state_directory
from mergegate.merge_core.system import system_memory
from mergegate.merge_core.wording import detail
from mergegate.tasks.checkpoints.lean_imports import import_lean
from mergegate.tasks.checkpoints.messages import receive
from mergegate.tasks.checkpoints.model import Model
from mergegate.tasks.checkpoints.model_cache import SMALLER, OutOfModelMemory, hold_at_most, on_unload, unload_models
from mergegate.tasks.runners import Cancelled, WorkerSlot, current_slot, on_slot_end
from mergegate.tasks.sandbox import Confinement, SupervisedProcess, acquire_gpus, compile_imports, environment_of_child
from mergegate.tasks.stage import home, memory_of_child, on_input_change, store

# Messages of Python, torch and C++ if a memory limit, rather than the size of the memory, stops an allocation.
_NO_MEMORY = re.compile(
    r"MemoryError|can't allocate memory|bad_alloc|[Cc]annot allocate|can't start new thread|OutOfMemory"
    # Messages of the dynamic linker, which loads shared libraries during imports.
    r"|failed to map segment|cannot map zero-fill pages|cannot create (shared object|search path|cache for)"
    # Message of the interpreter if an extension runs out of memory during an import.
    r"|SystemError: .*without (setting an exception|exception set)"
)
_LOOK_EVERY = 1.0  # Seconds between checks that the process is alive.
_PROGRESS_EVERY = 0.1  # Minimum seconds between progress messages. A tiny model answers thousands of prompts a second.
_START = "from mergegate.tasks.checkpoints.model_process import answer_questions; answer_questions()"
_ALONE = "one at a time"
_IMPORTED = (
    "import datasets, lm_eval.tasks, torch, transformers; "
    "import mergegate.tasks.evaluation.harness, mergegate.tasks.perplexity.measurement; "
    "transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM; import lm_eval.models.huggingface"
)
# Maximum seconds without progress if the call has no time limit. The largest models load within this time.
_SILENCE = 3600.0
# Stages that write a journal in the model process and resume from it.
_JOURNALLED = ("evaluate", "perplexity", "ensemble", "statistics", "importance")
# Memory limit as a multiple of the machine's memory. Weights count twice: once when mapped and once when read.
_MAPPED_TOO = 2
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # Libraries then do not wait for a missing network.
# Torch threads that have finished their share of a layer sleep until the rest have finished. Spinning threads would
# occupy the cores that the rest need. On a busy machine, two spinning threads take twenty times as long.
_PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}
_TAIL = 1 << 16  # Bytes at the end of the output that are searched for the last line.

A = TypeVar("A")
TellProgress = Callable[[int, int], None]

_log = logging.getLogger(__name__)
_alone = False  # Whether memory was once too small for several models.


def call_model_process(
    function: Callable[..., A],
    arguments: Sequence[object],
    *,
    where: str,
    models: Sequence[Model] = (),
    own_process: bool = False,
    network: bool = False,
    passing: Sequence[str] = (),
    time_limit: float | None = None,
    on_progress: TellProgress = lambda done, total: None,
) -> A:
    """Run ``function(*arguments, on_progress)`` in the model process and return its result.

    If memory runs out while the process holds several models, it is restarted with one model at a time and the call is
    repeated. If other model processes were running at that time, the call is repeated after they have ended. A repeated
    call resumes from the journal of ``function``, if it writes one.

    Args:
        function: Module-level function to run.
        arguments: Positional arguments of the function. They must support pickling.
        where: Name of the call in messages.
        models: Models that ``function`` loads. If empty, the call can use a running process with any models.
        own_process: Whether the models need a process of their own, because only its end frees their memory.
        network: Whether the call needs network access.
        passing: Names of environment variables that the call needs. Third-party code in the process can read them.
        time_limit: Time limit in seconds, not counting the wait for other processes to end. Default: the process is
            killed after an hour without progress.
        on_progress: Called with the finished and the total amount of work.

    Raises:
        MergegateError: Any error that ``function`` raises.
        OutOfModelMemory: Memory ran out, or the system killed the process, as it does if memory is full.
        InvalidInput: The process ended in another way, or ``function`` failed with another exception.
        Refused: The time limit is exceeded.
        Cancelled: The result is no longer needed.
    """
    unload_models()  # The models of both processes may not fit into memory together.
    detail("asks the process that holds models: %s.%s for %s", function.__module__, function.__qualname__, where)
    slot = current_slot()
    place = _place_at(slot.number)

    def call() -> A:
        digests = {model.digest for model in models}
        only_for = "".join(model.digest for model in models) if own_process else ""
        kind = _Kind(only_for, network, tuple(passing), slot.environment)
        question = _Question((function, tuple(arguments)), where, time_limit, on_progress)
        return cast(A, place.ask(question, kind, digests, any_models=not models, slot=slot))

    with place.lock:
        try:
            return call()
        except OutOfModelMemory:
            if not _has_other_processes(place):
                raise
    _log.warning("%s: its process was killed while others were at work; once more, when they are gone", where)
    with ExitStack() as locks:
        for process_place in _places_in_order():
            locks.enter_context(process_place.lock)
            process_place.end()
        return call()


def end_model_process() -> None:
    """End all model processes and their child processes, and release the memory of their models."""
    for place in _places_in_order():
        place.end()


@atexit.register
def _end() -> None:
    """End all model processes without taking locks.

    A thread that waits for an answer holds a lock, and it must not delay the end of this process.
    """
    for place in _places_in_order():
        if (holder := place.current) is not None:
            holder.process.end()


def _forget() -> None:
    unload_models()
    end_model_process()


on_unload(end_model_process)
on_input_change(_forget)
on_slot_end(lambda number: _place_at(number).end())


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Properties of a process that determine whether a call can use it.

    Args:
        only_for: Concatenated digests of the only models that the process may hold. Empty: any models.
        network: Whether the process has network access.
        passing: Names of environment variables that the process receives in addition to the default ones.
        environment: Environment variables of the worker slot, as names and values.
    """

    only_for: str
    network: bool
    passing: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


class _Question(NamedTuple):
    """One call of ``call_model_process``."""

    content: tuple[Any, ...]
    where: str
    limit: float | None
    on_progress: TellProgress


class _Place:
    """The model process of one worker slot. One thread at a time uses it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = threading.RLock()
        self.current: _ModelProcess | None = None

    def ask(self, question: _Question, kind: _Kind, models: set[str], *, any_models: bool, slot: WorkerSlot) -> Any:
        """Return the answer of the process.

        Starts the process if necessary. If memory runs out with several models, restarts it with one model at a time.
        """
        global _alone
        deadline = time.monotonic() + question.limit if question.limit is not None else None
        with self.lock:
            while True:
                if slot.cancelled.is_set():
                    raise Cancelled
                process = self._process_for(kind, any_models=any_models)
                process.models |= models
                try:
                    return self._exchange(process, question, deadline, slot)
                except OutOfModelMemory:
                    if _alone or len(process.models) < 2:
                        raise
                    _log.warning("%s: memory was short with several models in it; now one at a time", question.where)
                    self.end()
                    _alone = True

    def end(self) -> None:
        """End the process and its child processes. Waits until a running call has finished."""
        with self.lock:
            if self.current is not None:
                self.current.end()
                self.current = None

    def _process_for(self, kind: _Kind, *, any_models: bool) -> _ModelProcess:
        if self.current is not None and self.current.process.alive:
            required = dataclasses.replace(kind, only_for=self.current.kind.only_for) if any_models else kind
            if self.current.kind == required:
                return self.current
        self.end()
        self.current = _ModelProcess(kind)
        return self.current

    def _exchange(self, holder: _ModelProcess, question: _Question, deadline: float | None, slot: WorkerSlot) -> Any:
        """Send the question to the process and return its answer."""
        is_answered = False
        last_message_at = time.monotonic()
        try:
            holder.connection.send(question.content)
            while not is_answered:
                remaining = (last_message_at + _SILENCE if deadline is None else deadline) - time.monotonic()
                if remaining <= 0:
                    raise Refused(
                        question.where,
                        found=f"not done after {question.limit:g} s, and stopped"
                        if question.limit
                        else f"silent for {_SILENCE:g} s, stopped",
                        expected="an answer within evaluate.time_limit" if question.limit else "progress, or an end",
                        remedy="a higher evaluate.time_limit, or a larger batch_size if the device has room",
                    )
                if slot.cancelled.is_set():
                    raise Cancelled
                if not holder.connection.poll(min(remaining, _LOOK_EVERY)):
                    if holder.process.alive or holder.connection.poll():
                        continue
                    raise EOFError
                kind, *content = receive(holder.connection, question.where)
                last_message_at = time.monotonic()
                if kind == "progress":
                    question.on_progress(*content)
                else:
                    is_answered = True
        except (EOFError, ConnectionError):
            raise _death_error(question.where, holder.process.end().returncode, holder.last_line()) from None
        finally:
            if not is_answered:  # A late answer would be mistaken for the answer to the next question.
                self.end()
        if kind == "problem":
            raise cast(MergegateError, content[0])
        if kind == "crash":
            self.end()  # The crash may have left the process in any state.
            error, trace = content
            _log.info("%s\n%s", question.where, trace)
            raise InvalidInput(question.where, found=error, expected="an answer")
        if kind == "starved":
            self.end()  # The process may contain half-imported modules, so it is not reused.
            raise _memory_error(question.where, content[0])
        return content[0]


_places: dict[int, _Place] = {}
_making = threading.Lock()


def _place_at(number: int) -> _Place:
    with _making:
        return _places.setdefault(number, _Place(number))


def _places_in_order() -> list[_Place]:
    """Return all places by slot number. The fixed order prevents deadlocks of threads that lock all places."""
    with _making:
        return [_places[number] for number in sorted(_places)]


def _has_other_processes(place: _Place) -> bool:
    return any(candidate.current is not None for candidate in _places_in_order() if candidate is not place)


class _ModelProcess:
    """Handle of a running model process, used by the process that started it."""

    def __init__(self, kind: _Kind) -> None:
        self.kind = kind
        self.models: set[str] = set()  # Digests of the models that the process was called for.
        self.connection, child_connection = Pipe()
        compile_libraries()
        passed_variables = {name: os.environ[name] for name in kind.passing if name in os.environ}
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed by ``end``
        self._gpus = acquire_gpus()
        try:
            self.process = SupervisedProcess(
                # -P keeps the working directory of the run out of the import path.
                [sys.executable, "-P", "-c", _START, str(child_connection.fileno()), *([_ALONE] if _alone else [])],
                _environment() | dict(kind.environment) | passed_variables | ({} if kind.network else _OFFLINE),
                self._output,
                name="evaluation",
                pass_fds=[child_connection.fileno()],
                confinement=_confinement(kind),
                inherited=self._gpus.descriptors,
            )
        except BaseException:
            self._gpus.release()
            raise
        finally:
            child_connection.close()

    def last_line(self) -> str:
        """Return the last line that the process printed. Libraries often print the cause of a crash there."""
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - _TAIL))
        lines = self._output.read().decode(errors="replace").split("\n")
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")

    def end(self) -> None:
        """End the process and release its GPUs, connection and output file."""
        self.process.end()
        self._gpus.release()
        self.connection.close()
        self._output.close()


def compile_libraries() -> None:
    """Compile the modules that the process imports, unless they are compiled already.

    The process itself may not write the bytecode.
    """
    package = importlib.util.find_spec("lm_eval.models")
    for directory in package.submodule_search_locations or () if package else ():
        compile_imports(sys.executable, _IMPORTED, Path(directory) / "huggingface.py", _environment())


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    return {**_PATIENT, **environment_of_child(), "PYTHONPATH": path.rstrip(os.pathsep)}


def _confinement(kind: _Kind) -> Confinement:
    root = state_directory(store().root, private=True)
    # Only existing directories can be allowed, so create them first.
    journal_directories = [state_directory(root / stage) for stage in _JOURNALLED]
    # With CUDA there is no default limit, because the driver also maps the memory of the GPU, of any size.
    memory = None if has_cuda_driver() else system_memory()
    return Confinement(
        write=tuple(map(str, journal_directories)),
        hide=(str(home() / "prefect"),),
        network=kind.network,
        memory=memory_of_child(_MAPPED_TOO * memory.total if memory else None),
    )


def _death_error(location: str, code: int | None, last_line: str) -> InvalidInput:
    if code is None or code == -signal.SIGKILL:
        return OutOfModelMemory(
            location,
            found="the process that scores was killed by signal 9, as the system does when memory is full",
            expected="memory for the model and a batch",
            remedy=SMALLER,
        )
    if _NO_MEMORY.search(last_line):
        return _memory_error(location, last_line)
    cause = f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"
    return InvalidInput(
        location,
        found=f"the process that scores ended {cause}" + (f": {last_line}" if last_line else ""),
        expected="an answer",
        remedy=SMALLER if code < 0 else "",
    )


def _memory_error(location: str, message: str) -> OutOfModelMemory:
    return OutOfModelMemory(
        location,
        found=f"the process that scores had no memory left: {message}",
        expected="memory for the data, the model and a batch, within limits.memory if the profile has that",
        remedy=f"a higher limits.memory if the profile has that; {SMALLER}",
    )


def _memory_message(error: BaseException) -> str:
    """Return the system's out-of-memory message in the causes of ``error``, or an empty text if there is none.

    Any import, load or parse step can fail if memory runs out. Code that catches such a failure often reports it as
    invalid input, so the whole chain of causes is searched.
    """
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        message = f"{type(cause).__name__}: {' '.join(str(cause).split())}".rstrip(": ")
        if isinstance(cause, MemoryError) or (not isinstance(cause, MergegateError) and _NO_MEMORY.search(message)):
            return message[:300]
        cause = cause.__cause__ or cause.__context__
    return ""


def answer_questions() -> None:
    """Answer questions in the model process until the parent process closes the connection.

    The command line contains the file descriptor of the connection and, optionally, the request to hold one model at a
    time.
    """
    descriptor = int(sys.argv[1])
    # A child that outlives this process must not keep the connection open, because the parent would wait for it.
    os.set_inheritable(descriptor, False)
    if _ALONE in sys.argv[2:]:
        hold_at_most(1)
    connection = Connection(descriptor)
    import_lean("portalocker", "requests")
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        connection.send(answer_question(connection, function, arguments))


def answer_question(
    connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Run ``function`` and return the final response. The module docstring lists its forms."""
    last_sent = 0.0

    def on_progress(done: int, total: int) -> None:
        nonlocal last_sent
        if done == total or time.monotonic() - last_sent >= _PROGRESS_EVERY:
            last_sent = time.monotonic()
            connection.send(("progress", done, total))

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
        message = " ".join(str(error).split())[:300] or _line_of(error)
        return "crash", f"{type(error).__name__}: {message}".rstrip(": "), traceback.format_exc()


def _line_of(error: BaseException) -> str:
    """Return the source line that raised ``error``, for errors without a message such as a library's bare assert."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].line} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
