"""The process that holds models: what hangs there is killed at a time limit, what dies takes no flow with it.

One such process at each place where something is done (``tasks.runners.slots``): a single one, unless a runner has made
several. It is started when it is first needed, keeps models for the next question (perplexity, task after task, look
after look: each is loaded once), and dies with this process, however that ends (``tasks.sandbox``)::

    answer = ask_child(function, arguments, where="task gsm8k on merge", models=[merge], on_progress=advance)
    end_model_process()                                                  # the models' memory is free again

``function`` is a plain function of a module, called there as ``function(*arguments, on_progress)``. Questions and
answers are pickled: ``(function, arguments)`` goes there; ``("progress", done, total)`` any number of times and then
one of ``("done", value)``, ``("problem", error)``, ``("starved", error)``, ``("crash", error, traceback)`` come back.

Tasks, templates and tokenizers are what strangers wrote, and run there only. So it is confined (``tasks.sandbox``):
our environment, our secrets, our other processes and, unless a question needs it, the network are out of its reach. An
answer is believed to be data, and nothing else (``messages``).
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

# As Python, torch and C++ say it where a limit, not the system, is in the way.
_NO_MEMORY = re.compile(
    r"MemoryError|can't allocate memory|bad_alloc|[Cc]annot allocate|can't start new thread|OutOfMemory"
    # The linker, which loads the libraries of what is imported.
    r"|failed to map segment|cannot map zero-fill pages|cannot create (shared object|search path|cache for)"
    # The interpreter itself, where what it calls found none while an import was under way.
    r"|SystemError: .*without (setting an exception|exception set)"
)
_LOOK_EVERY = 1.0  # seconds between looks whether the process is still there
_PROGRESS_EVERY = 0.1  # seconds: a tiny model answers thousands of requests in one
_START = "from mergegate.tasks.checkpoints.model_process import answer_questions; answer_questions()"
_ALONE = "one at a time"
_IMPORTED = (
    "import datasets, lm_eval.tasks, torch, transformers, tasks.evaluation.harness, tasks.perplexity.measuring; "
    "transformers.AutoModelForCausalLM, transformers.LlamaForCausalLM; import lm_eval.models.huggingface"
)
_SILENCE = 3600.0  # seconds without any progress, where nobody has set a limit: the largest model is loaded in that
# Stages that go on, there, from what they have kept in the store.
_JOURNALLED = ("evaluate", "perplexity", "ensemble", "statistics", "importance")
_MAPPED_TOO = 2  # times the memory of the machine: weights count when they are mapped, and again when they are read
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # nothing waits for a network that is not there
# Threads of torch that have done their share of a layer sleep until the others have: where they spin instead, they take
# the cores from those that they wait for, and on a busy machine two of them take twenty times as long.
_PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}
_TAIL = 1 << 16  # bytes of what it printed

A = TypeVar("A")
TellProgress = Callable[[int, int], None]

_log = logging.getLogger(__name__)
_alone = False  # whether memory was too short for several models once


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
    """What ``function(*arguments, on_progress)`` returns in the process that holds models.

    Where memory runs short while it holds several, it is started anew for one at a time and asked once more; where
    others like it were at work beside it, it is asked once more when they are gone. What ``function`` keeps in a
    journal is not done again.

    Args:
        where: What messages call the question.
        models: That ``function`` will load there; none: it is asked of whatever process there is.
        own_process: Only the death of the process frees the memory of these models.
        network: The question cannot be answered without.
        passing: Variables of our environment that it cannot be answered without, and a stranger's code may thus see.
        time_limit: Seconds for all of it, but for waiting until others are gone; None: it is ended when nothing is
            heard from it for an hour.

    Raises:
        MergegateError: what ``function`` raises.
        OutOfModelMemory: when the system ended the process, as it does when memory is full.
        InvalidInput: when it died in another way, or what it was to do failed.
        Refused: when the time limit is over.
        Cancelled: when nobody waits for the answer any more.
    """
    unload_models()  # models here and there need not fit side by side
    detail("asks the process that holds models: %s.%s for %s", function.__module__, function.__qualname__, where)
    slot = current_slot()
    place = _place(slot.number)

    def asked() -> A:
        digests = {model.digest for model in models}
        only_for = "".join(model.digest for model in models) if own_process else ""
        kind = _Kind(only_for, network, tuple(passing), slot.environment)
        question = _Question((function, tuple(arguments)), where, time_limit, on_progress)
        return cast(A, place.ask(question, kind, digests, any_models=not models, slot=slot))

    with place.lock:
        try:
            return asked()
        except OutOfModelMemory:
            if not _anybody_beside(place):
                raise
    _log.warning("%s: its process was killed while others were at work; once more, when they are gone", where)
    with ExitStack() as held:
        for other in _places_in_order():
            held.enter_context(other.lock)
            other.end()
        return asked()


def end_model_process() -> None:
    """End the process, and everything it holds and has started; where there are several, all of them."""
    for place in _places_in_order():
        place.end()


@atexit.register
def _end() -> None:
    """Without the lock: a thread that waits for an answer holds it, and must not hold up the end of this process."""
    for place in _places_in_order():
        if (holder := place.current) is not None:
            holder.process.end()


def _forget() -> None:
    unload_models()
    end_model_process()


on_unload(end_model_process)
on_input_change(_forget)
on_slot_end(lambda number: _place(number).end())


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What decides whether a process can be asked.

    Args:
        only_for: Digests of the only models that it may hold; empty: it can change.
        network: Whether it has one.
        passing: What it sees of our environment beside what everybody sees.
        environment: What those at its place see beside that: name and value.
    """

    only_for: str
    network: bool
    passing: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


class _Question(NamedTuple):
    """What is asked, as ``call_model_process`` is told."""

    content: tuple[Any, ...]
    where: str
    limit: float | None
    on_progress: TellProgress


class _Place:
    """A place, and the process there; one thread at a time asks it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = threading.RLock()
        self.current: _ModelProcess | None = None

    def ask(self, question: _Question, kind: _Kind, models: set[str], *, any_models: bool, slot: WorkerSlot) -> Any:
        """The answer of the process, which is started if need be, and started anew for one model at a time."""
        global _alone
        deadline = time.monotonic() + question.limit if question.limit is not None else None
        with self.lock:
            while True:
                if slot.cancelled.is_set():
                    raise Cancelled
                process = self._process_for(kind, any_models=any_models)
                process.models |= models
                try:
                    return self._asked(process, question, deadline, slot)
                except OutOfModelMemory:
                    if _alone or len(process.models) < 2:
                        raise
                    _log.warning("%s: memory was short with several models in it; now one at a time", question.where)
                    self.end()
                    _alone = True

    def end(self) -> None:
        """End the process, and everything it holds and has started, when nobody asks it."""
        with self.lock:
            if self.current is not None:
                self.current.end()
                self.current = None

    def _process_for(self, kind: _Kind, *, any_models: bool) -> _ModelProcess:
        if self.current is not None and self.current.process.alive:
            like = dataclasses.replace(kind, only_for=self.current.kind.only_for) if any_models else kind
            if self.current.kind == like:
                return self.current
        self.end()
        self.current = _ModelProcess(kind)
        return self.current

    def _asked(self, holder: _ModelProcess, question: _Question, deadline: float | None, slot: WorkerSlot) -> Any:
        answered = False
        heard = time.monotonic()
        try:
            holder.connection.send(question.content)
            while not answered:
                left = (heard + _SILENCE if deadline is None else deadline) - time.monotonic()
                if left <= 0:
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
                if not holder.connection.poll(min(left, _LOOK_EVERY)):
                    if holder.process.alive or holder.connection.poll():
                        continue
                    raise EOFError
                kind, *content = receive(holder.connection, question.where)
                heard = time.monotonic()
                if kind == "progress":
                    question.on_progress(*content)
                else:
                    answered = True
        except (EOFError, ConnectionError):
            raise _died(question.where, holder.process.end().returncode, holder.last_line()) from None
        finally:
            if not answered:  # an answer that comes after all would be taken for that to the next question
                self.end()
        if kind == "problem":
            raise cast(MergegateError, content[0])
        if kind == "crash":
            self.end()  # whatever state it is in
            error, trace = content
            _log.info("%s\n%s", question.where, trace)
            raise InvalidInput(question.where, found=error, expected="an answer")
        if kind == "starved":
            self.end()  # what failed halfway is not asked again
            raise _no_memory_left(question.where, content[0])
        return content[0]


_places: dict[int, _Place] = {}
_making = threading.Lock()


def _place(number: int) -> _Place:
    with _making:
        return _places.setdefault(number, _Place(number))


def _places_in_order() -> list[_Place]:
    """Always the same order: two threads that want all of them do not wait for each other."""
    with _making:
        return [_places[number] for number in sorted(_places)]


def _anybody_beside(place: _Place) -> bool:
    return any(other.current is not None for other in _places_in_order() if other is not place)


class _ModelProcess:
    """The process that holds models, seen from here."""

    def __init__(self, kind: _Kind) -> None:
        self.kind = kind
        self.models: set[str] = set()  # digests of those that it was asked about
        self.connection, theirs = Pipe()
        compile_libraries()
        given = {name: os.environ[name] for name in kind.passing if name in os.environ}
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed by ``end``
        self._gpus = acquire_gpus()
        try:
            self.process = SupervisedProcess(
                # -P: the directory that the run was started in is none to import from.
                [sys.executable, "-P", "-c", _START, str(theirs.fileno()), *([_ALONE] if _alone else [])],
                _environment() | dict(kind.environment) | given | ({} if kind.network else _OFFLINE),
                self._output,
                name="evaluation",
                pass_fds=[theirs.fileno()],
                confinement=_confinement(kind),
                inherited=self._gpus.descriptors,
            )
        except BaseException:
            self._gpus.release()
            raise
        finally:
            theirs.close()

    def last_line(self) -> str:
        """The last line that it has printed, where libraries say what kills them."""
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - _TAIL))
        lines = self._output.read().decode(errors="replace").split("\n")
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")

    def end(self) -> None:
        """End it, and give back what it is connected by."""
        self.process.end()
        self._gpus.release()
        self.connection.close()
        self._output.close()


def compile_libraries() -> None:
    """Compile, once, what the process will import, where an installer has not: it may not keep it itself."""
    found = importlib.util.find_spec("lm_eval.models")
    for directory in found.submodule_search_locations or () if found else ():
        compile_imports(sys.executable, _IMPORTED, Path(directory) / "huggingface.py", _environment())


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    return {**_PATIENT, **environment_of_child(), "PYTHONPATH": path.rstrip(os.pathsep)}


def _confinement(kind: _Kind) -> Confinement:
    root = state_directory(store().root, private=True)
    places = [state_directory(root / stage) for stage in _JOURNALLED]  # what is not there yet cannot be allowed
    memory = None if has_cuda_driver() else system_memory()  # a GPU's is mapped as well, however much there is
    return Confinement(
        write=tuple(map(str, places)),
        hide=(str(home() / "prefect"),),
        network=kind.network,
        memory=memory_of_child(_MAPPED_TOO * memory.total if memory else None),
    )


def _died(where: str, code: int | None, last_line: str) -> InvalidInput:
    if code is None or code == -signal.SIGKILL:
        return OutOfModelMemory(
            where,
            found="the process that scores was killed by signal 9, as the system does when memory is full",
            expected="memory for the model and a batch",
            remedy=SMALLER,
        )
    if _NO_MEMORY.search(last_line):
        return _no_memory_left(where, last_line)
    how = f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"
    return InvalidInput(
        where,
        found=f"the process that scores ended {how}" + (f": {last_line}" if last_line else ""),
        expected="an answer",
        remedy=SMALLER if code < 0 else "",
    )


def _no_memory_left(where: str, said: str) -> OutOfModelMemory:
    return OutOfModelMemory(
        where,
        found=f"the process that scores had no memory left: {said}",
        expected="memory for the data, the model and a batch, within limits.memory if the profile has that",
        remedy=f"a higher limits.memory if the profile has that; {SMALLER}",
    )


def _starved(error: BaseException) -> str:
    """What the system said when it had no memory to give, if that is what ``error`` was made of; else empty.

    Whatever is imported, loaded or parsed when memory ends can fail for it, and whoever catches that takes it for a
    fault of the input.
    """
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        said = f"{type(cause).__name__}: {' '.join(str(cause).split())}".rstrip(": ")
        if isinstance(cause, MemoryError) or (not isinstance(cause, MergegateError) and _NO_MEMORY.search(said)):
            return said[:300]
        cause = cause.__cause__ or cause.__context__
    return ""


def answer_questions() -> None:
    """In the process that holds models: answer until whoever asks is gone. Arguments of the command line: the
    descriptor of the connection, and whether to hold one model at a time."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # an own child that outlives us must not look like us
    if _ALONE in sys.argv[2:]:
        hold_at_most(1)
    asker = Connection(descriptor)
    import_lean("portalocker", "requests")
    while True:
        try:
            function, arguments = asker.recv()
        except EOFError:
            return
        asker.send(answer_question(asker, function, arguments))


def answer_question(asker: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The last message about one question: what came of it, see the top of this file."""
    last_sent = 0.0

    def on_progress(done: int, total: int) -> None:
        nonlocal last_sent
        if done == total or time.monotonic() - last_sent >= _PROGRESS_EVERY:
            last_sent = time.monotonic()
            asker.send(("progress", done, total))

    try:
        with disk_errors_refused():
            return "done", function(*arguments, on_progress)
    except OutOfModelMemory as error:
        return "problem", error
    except BaseException as error:  # Rust's panics, and whoever calls exit() in a task
        if said := _starved(error):
            return "starved", said
        if isinstance(error, MergegateError):
            return "problem", error
        message = " ".join(str(error).split())[:300] or _line_of(error)
        return "crash", f"{type(error).__name__}: {message}".rstrip(": "), traceback.format_exc()


def _line_of(error: BaseException) -> str:
    """Where it was raised, for what says nothing of itself: a library's bare ``assert`` tells what it wanted."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].line} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
