"""Declare stages: functions with a content key, an artifact in the store, a Prefect task and progress reports.

Declare a stage with a decorator on the function that does its work::

    @stage("merge", version=1)
    def merge(out: Path, recipe: Recipe, parents: Sequence[PinnedCheckpoint]) -> MergeSummary:
        ...                                    # writes its files into ``out`` and returns a summary of them

    @value_stage("gate", version=2)
    def gate(guards: tuple[Guard, ...], ...) -> GateVerdict:
        ...                                    # writes no files, only returns a value

    artifact = merge(recipe, parents)          # from the store or built now, as a task of the running flow
    future = merge.submit(recipe, parents)     # the same on the flow's task runner, in parallel with other stages
    record = merge.work(directory, recipe, parents)    # the plain function, without Prefect and without the store

The key of an artifact is computed from the stage's name, version and arguments (see ``store``). Increase
``version`` when the meaning of a stage changes, so that earlier artifacts are not used. The store is the only cache.
Prefect persists no results.

Prefect shows the state of each stage, with its summary: ``Made``, ``Cached``, ``Rebuilt`` (the stored artifact was
damaged), or the failures ``Refused`` and ``Invalid``. It also shows which stages depend on which, from the digests in
their inputs.

``stage.input_guard`` checks the input files of a stage, ``stage.limits`` limits its run time, and
``stage.dry_run_pass`` defines dry passes, in which a stage may not do any work.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, get_type_hints

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import MergegateError, state_name
from mergegate.merge_core.files import disk_errors_refused
from mergegate.merge_core.wording import detail, has_detail_listener
from mergegate.tasks.base.stage.dry_run_pass import WorkRequired, is_dry_pass, require_work_allowed
from mergegate.tasks.base.stage.input_guard import pinned_inputs, read_pinned, require_pinned
from mergegate.tasks.base.stage.limits import declare_stage, within_limit
from mergegate.tasks.base.stage.progress import StageStatus, report_stage
from mergegate.tasks.base.stage.project import (
    SHARED_STORE,
    home,
    record_stage,
    running_flow_id,
    runs_directory,
    shared_store,
)
from mergegate.tasks.base.store import (
    Artifact,
    BuildCallbacks,
    Store,
    StoredValue,
    StoreMiss,
    canonical,
    digest,
    directory_bytes,
    family_prefix,
    record_created,
    stage_key,
)

if TYPE_CHECKING:
    from prefect import Task
    from prefect.client.schemas.objects import State
    from prefect.futures import PrefectFuture

log = logging.getLogger(__name__)

P = ParamSpec("P")
V = TypeVar("V", bound="StageValue")
A = TypeVar("A", bound=StoredValue[Any])


class StageValue(BaseModel):
    """Result of a stage: a frozen, typed value, stored as JSON next to the artifact's files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def summary(self) -> str:
        """Return a one-line summary to display."""
        raise NotImplementedError

    def refusal(self) -> MergegateError | None:
        """Return an error if the flow must stop, else None. A cached value with an error stops the flow again."""
        return None

    def refuses(self) -> bool:
        """Return whether the stage refuses the release. The flow may still continue, to write a report."""
        return self.refusal() is not None


def store() -> Store:
    """Return the artifact store of the project."""
    root = home() / "store"
    return Store(root, shared_store(root), lambda path: require_work_allowed(f"read {path} for its hash"))


_is_separate: ContextVar[bool] = ContextVar("separate store", default=False)


@contextmanager
def separate_store(directory: Path) -> Iterator[None]:
    """Run the stages of the block with an empty store in ``directory``, in this process and without Prefect.

    This builds artifacts again that the project's store has, for example to compare them.
    """
    before = {name: os.environ.pop(name, None) for name in ("MERGEGATE_HOME", SHARED_STORE)}
    os.environ["MERGEGATE_HOME"] = str(directory)
    token = _is_separate.set(True)
    try:
        yield
    finally:
        _is_separate.reset(token)
        del os.environ["MERGEGATE_HOME"]
        os.environ.update({name: value for name, value in before.items() if value is not None})


class StageCall:
    """One call of a stage: its arguments and the key derived from them.

    Prefect gets this object instead of the arguments, which it would search for futures.
    """

    def __init__(self, name: str, subject: str, key: str, inputs: inspect.BoundArguments) -> None:
        self.name, self.subject, self.key, self.inputs = name, subject, key, inputs

    @property
    def label(self) -> str:
        """Name of the task run on Prefect's pages, for example ``perplexity reverser``."""
        return f"{self.name} {self.subject}".strip()


class DeclaredStage(Generic[P, V, A]):
    """Stage of the pipeline. A call runs it as a task of the running flow. ``work`` is the decorated function."""

    work: Callable[..., V]

    def __init__(self, work: Callable[..., V], first_input: int, name: str, version: int, subject: str | None) -> None:
        self.work, self.name, self.version, self._subject = work, name, version, subject
        declare_stage(name)
        signature = inspect.signature(work)
        self._signature = signature.replace(parameters=list(signature.parameters.values())[first_input:])
        self.value_type: type[V] = get_type_hints(work)["return"]
        functools.update_wrapper(self, work)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> A:
        """Return the artifact for these inputs, from the store or built now.

        Raises:
            Refused: The stage's value stops the flow.
            MergegateError: The stage's function rejected its input.
        """
        return self._call((), args, kwargs)

    def after(self, *earlier: StoredValue[Any]) -> Callable[P, A]:
        """Return a function that calls this stage, and shows it in Prefect's graph as dependent on ``earlier`` results.

        Use this if an earlier stage allowed this one to run, but its result is not among the inputs.
        """
        return lambda *args, **kwargs: self._call(earlier, args, kwargs)

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> StageFuture[A]:
        """Start the stage on the running flow's task runner, in parallel with other submitted stages."""
        call = self._bind(args, kwargs)
        require_work_allowed(f"submit {call.label}")
        return StageFuture(self.task.submit(call, wait_for=_upstream(call.inputs.arguments)))

    def build(self, *args: P.args, **kwargs: P.kwargs) -> A:
        """Return the artifact for these inputs without Prefect, for commands without a flow. Do not raise a refusal."""
        return self._record_and_run(self._bind(args, kwargs))[0]

    def find(self, *args: P.args, **kwargs: P.kwargs) -> A | None:
        """Return the artifact for these inputs if the store has an intact one, else None."""
        call = self._bind(args, kwargs)
        record_stage(call.name, call.key, call.subject, in_run_only=True)
        try:
            return self._open(call)
        except StoreMiss:
            return None

    def key(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Return the key of the artifact for these inputs, whether or not it is in the store."""
        return self._bind(args, kwargs).key

    @cached_property
    def task(self) -> Task[..., Any]:
        """Prefect task of the stage. It is created on first use, because importing Prefect takes long."""

        def run(call: StageCall) -> tuple[A, str, str]:
            artifact, status, summary = self._run_and_report(call)
            if status != "cached":
                _show(call, artifact, summary)
            return artifact, status.title(), summary

        return _prefect_task(
            run,
            name=self.name,
            description=inspect.getdoc(self.work),
            version=str(self.version),
            task_run_name="{call.label}",
        )

    def _call(self, earlier: Sequence[StoredValue[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> A:
        call = self._bind(args, kwargs)
        if is_dry_pass() or _is_separate.get():
            return self._run_and_report(call)[0]
        upstream = _upstream({**call.inputs.arguments, "": earlier})
        return cast(A, _result_of(self.task(call, return_state=True, wait_for=upstream or None)))

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StageCall:
        inputs = self._signature.bind(*args, **kwargs)
        inputs.apply_defaults()
        return StageCall(self.name, self._subject_of(inputs.arguments), self._key_of(inputs.arguments), inputs)

    def _subject_of(self, inputs: Mapping[str, object]) -> str:
        return str(getattr(inputs[self._subject], "name", "")) if self._subject else ""

    def _key_of(self, inputs: Mapping[str, object]) -> str:
        return stage_key(self.name, self.version, inputs)

    def _run_and_report(self, call: StageCall) -> tuple[A, StageStatus, str]:
        """Run the stage, report it to the watcher, and return the artifact, its status and its summary."""
        report_call = report_stage(self.name, call.subject, call.key)
        with report_call as report, disk_errors_refused(home()), within_limit(self.name):
            artifact, status = self._record_and_run(call)
            report.summary = artifact.value.summary()
            report.status = "refused" if artifact.value.refuses() else status
            if (refusal := artifact.value.refusal()) is not None:
                raise refusal
        return artifact, status, report.summary

    def _record_and_run(self, call: StageCall) -> tuple[A, StageStatus]:
        """Record the use of the artifact, and open or build it. In a dry pass, building it raises WorkRequired."""
        record_stage(call.name, call.key, call.subject)
        if has_detail_listener():  # Users can compare the digests of two runs to find the input that changed.
            inputs = " · ".join(f"{name} {digest(value)[:8]}" for name, value in call.inputs.arguments.items())
            detail("%s: key %s of version %d · %s", call.label, call.key[:16], self.version, inputs)
        status: StageStatus = "cached"
        if is_dry_pass():
            try:
                artifact = self._open(call)
            except StoreMiss as miss:
                raise WorkRequired(f"{call.label}: {miss}") from None
        else:
            artifact, status = self._build(call)
        if status != "cached" and isinstance(artifact, Artifact) and (run := running_flow_id()) is not None:
            record_created(runs_directory(), run, directory_bytes(artifact.directory))
        store().mark_used(call.name, call.key)
        return artifact, status

    def _open(self, call: StageCall) -> A:
        raise NotImplementedError

    def _build(self, call: StageCall) -> tuple[A, StageStatus]:
        damage: list[str] = []

        def on_damage(reason: str) -> None:
            log.warning("%s; the stage runs again", reason)
            damage.append(reason)

        def on_wait() -> None:
            log.info("another run is building %s; waiting for it", call.label)
            detail("another run is building %s; waiting for it", call.label)

        artifact, is_new = self._open_or_build(call, BuildCallbacks(on_wait, on_damage))
        return artifact, "cached" if not is_new else "rebuilt" if damage else "made"

    def _open_or_build(self, call: StageCall, callbacks: BuildCallbacks) -> tuple[A, bool]:
        raise NotImplementedError


class Stage(DeclaredStage[P, V, Artifact[V]]):
    """Stage that writes files."""

    def __init__(
        self,
        work: Callable[Concatenate[Path, P], V],
        *,
        hashes_of: Callable[[V], Mapping[str, str]],
        resumable: bool,
        apart: str | None,
        **declared: Any,
    ) -> None:
        super().__init__(work, 1, **declared)
        self._hashes_of, self._resumable, self._apart = hashes_of, resumable, apart

    def _open(self, call: StageCall) -> Artifact[V]:
        return store().open(self.name, call.key, self.value_type)

    def family(self, **inputs: object) -> tuple[Artifact[V], ...]:
        """Return the intact artifacts in the store that differ only in the input that ``apart`` names.

        ``inputs`` are all other inputs of the stage.
        """
        inputs = self._family_inputs(inputs)
        assert self._apart is not None  # Only a stage with this argument has families.
        subject = self._subject_of(inputs)

        candidates = store().family(
            self.name,
            self._prefix(inputs),
            self.value_type,
            about_to_read=lambda name: record_stage(self.name, name, subject, in_run_only=True),
        )
        # Another family may have the same prefix, so compare complete keys.
        members = [
            artifact
            for artifact in candidates
            if artifact.key == self._key_of({**inputs, self._apart: getattr(artifact.value, self._apart)})
        ]
        for artifact in members:
            store().mark_used(self.name, artifact.key)
        return tuple(members)

    def hold_family(self, **inputs: object) -> AbstractContextManager[None]:
        """Lock the family with these ``inputs`` (see :meth:`family`), so that no other run builds a member."""

        def on_wait() -> None:
            log.info("another run is building %s; waiting for it", self.name)

        return store().hold_family(self.name, self._prefix(self._family_inputs(inputs)), on_wait)

    def _family_inputs(self, inputs: Mapping[str, object]) -> dict[str, object]:
        return {name: inputs[name] for name in self._signature.parameters if name != self._apart}

    def _prefix(self, inputs: Mapping[str, object]) -> str:
        assert self._apart is not None, f"{self.name} declares no parameter that distinguishes the members of a family"
        return family_prefix(self.name, self.version, inputs, self._apart)

    def _key_of(self, inputs: Mapping[str, object]) -> str:
        return stage_key(self.name, self.version, inputs, self._apart)

    def _open_or_build(self, call: StageCall, callbacks: BuildCallbacks) -> tuple[Artifact[V], bool]:
        return store().build(
            self.name,
            call.key,
            self.value_type,
            lambda out: read_pinned(
                call.inputs.arguments,
                store().hashes,
                lambda: self.work(out, *call.inputs.args, **call.inputs.kwargs),
                discard_output=lambda: _empty(out),
            ),
            resumable=self._resumable,
            callbacks=replace(callbacks, hashes_of=self._hashes_of),
        )


class ValueStage(DeclaredStage[P, V, StoredValue[V]]):
    """Stage that writes no files and only returns a value."""

    def __init__(self, work: Callable[P, V], **declared: Any) -> None:
        super().__init__(work, 0, **declared)

    def _open_or_build(self, call: StageCall, callbacks: BuildCallbacks) -> tuple[StoredValue[V], bool]:
        def work() -> V:
            return self.work(*call.inputs.args, **call.inputs.kwargs)

        make = functools.partial(read_pinned, call.inputs.arguments, store().hashes, work)
        return store().build_value(self.name, call.key, self.value_type, make, callbacks)

    def _open(self, call: StageCall) -> StoredValue[V]:
        return store().open_value(self.name, call.key, self.value_type)


class StageFuture(Generic[A]):
    """Submitted stage, which runs in parallel with others."""

    def __init__(self, future: PrefectFuture[Any]) -> None:
        self._future = future

    def result(self) -> A:
        """Wait for the stage and return its artifact, or raise the same error as a direct call of the stage."""
        self._future.wait()
        return cast(A, _result_of(self._future.state))


def stage(
    name: str,
    *,
    version: int,
    subject: str | None = None,
    hashes_of: Callable[[Any], Mapping[str, str]] = lambda value: {},
    resumable: bool = False,
    apart: str | None = None,
) -> Callable[[Callable[Concatenate[Path, P], V]], Stage[P, V]]:
    """Declare a stage that writes files.

    Args:
        name: Name of the stage (see ``dev/architecture.md``) and of its directory in the store.
        version: Version of the stage, which is part of its keys. Increase it when the meaning of the stage changes.
        subject: Name of the parameter whose ``.name`` distinguishes the calls of this stage in logs and reports.
            Default: none.
        hashes_of: Function that returns the hashes that the stage computed while writing, by file name (see
            ``Store.build``). Default: the store hashes all files.
        resumable: Whether the stage can resume from the files of a killed run. Default: false.
        apart: Name of the one parameter in which the artifacts of a family differ (see ``Stage.family``). The stage's
            value must have a field of the same name. Default: none.
    """
    return lambda work: Stage(
        work,
        hashes_of=hashes_of,
        resumable=resumable,
        apart=apart,
        name=name,
        version=version,
        subject=subject,
    )


def value_stage(name: str, *, version: int, subject: str | None = None) -> Callable[[Callable[P, V]], ValueStage[P, V]]:
    """Declare a stage that writes no files and only returns a value. See :func:`stage` for the arguments."""
    return lambda work: ValueStage(work, name=name, version=version, subject=subject)


class StepValue(Protocol):
    """Value that a step returns."""

    @property
    def new(self) -> bool:
        """Whether the step changed anything."""

    def summary(self) -> str:
        """Return a one-line summary to display."""


S = TypeVar("S", bound=StepValue)


def step(name: str, *, is_done: Callable[P, bool] | None = None) -> Callable[[Callable[P, S]], Callable[P, S]]:
    """Declare a step: a task that is never cached, because it reads or changes something outside the store.

    A step must be idempotent. mergegate checks its pinned inputs only before the step, because effects cannot be undone
    if an input changes later. The step itself must verify the content that it uses.

    In a dry pass, ``is_done`` returns for the same arguments whether the step has nothing left to do. It must not do
    any work, and returns false when in doubt. Default: there is always work to do.
    """
    declare_stage(name)

    def declare(work: Callable[P, S]) -> Callable[P, S]:
        signature = inspect.signature(work)

        def run(call: StageCall) -> tuple[S, str, str]:
            value = run_and_report(call)
            return value, "Made" if value.new else "Unchanged", value.summary()

        def run_and_report(call: StageCall) -> S:
            with report_stage(name, "") as report, disk_errors_refused(home()), within_limit(name):
                require_pinned(tuple(pinned_inputs(call.inputs.arguments.values())), store().hashes)
                value = work(*call.inputs.args, **call.inputs.kwargs)
                report.status, report.summary = ("made" if value.new else "cached"), value.summary()
            return value

        task = functools.cache(lambda: _prefect_task(run, name=name))

        @functools.wraps(work)
        def call_step(*args: P.args, **kwargs: P.kwargs) -> S:
            call = StageCall(name, "", "", signature.bind(*args, **kwargs))
            if is_dry_pass():
                if is_done is None or not is_done(*args, **kwargs):
                    raise WorkRequired(name)
                return run_and_report(call)
            upstream = _upstream(call.inputs.arguments)
            state = task()(call, return_state=True, wait_for=upstream or None)
            return cast(S, _result_of(state))

        return call_step

    return declare


def _prefect_task(run: Callable[[StageCall], tuple[Any, str, str]], **settings: Any) -> Task[..., Any]:
    """Return a Prefect task for ``run``, which returns a value, the name of the final state and a message.

    Errors that a user can cause fail the task without a traceback.
    """
    from prefect import Task
    from prefect.cache_policies import NO_CACHE
    from prefect.states import Completed, Failed

    def run_task(call: StageCall) -> State[Any]:
        try:
            value, state, message = run(call)
        except MergegateError as error:
            return Failed(name=state_name(error.status), message=str(error), data=error)
        return Completed(name=state, message=message, data=value)

    return Task(fn=run_task, cache_policy=NO_CACHE, persist_result=False, **settings)


# ID of the running flow, and the Prefect states of its stages by the digest of each stage's result.
_states_of_run: ContextVar[tuple[object, dict[str, Any]]] = ContextVar("states of run", default=(None, {}))


def _states() -> dict[str, Any]:
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    run = context.flow_run.id if context and context.flow_run else None
    if _states_of_run.get()[0] != run:
        _states_of_run.set((run, {}))
    return _states_of_run.get()[1]


def _upstream(arguments: Mapping[str, object]) -> list[Any]:
    """Return the Prefect states of the running flow's stages whose results are in ``arguments``."""
    states = _states()
    upstream = {id(states[text]): states[text] for text in _digests(arguments) if text in states}
    return list(upstream.values())


def _digests(value: object) -> set[str]:
    """Return all strings of 64 characters in ``value``. Objects without a canonical form are skipped."""
    try:
        plain = canonical(value)
    except (TypeError, ValueError):
        if isinstance(value, Mapping):
            return set().union(*map(_digests, value.values()))
        if isinstance(value, (list, tuple)):
            return set().union(*map(_digests, value))
        parents = getattr(value, "parents", ())
        return _digests(parents) if isinstance(parents, tuple) else set()
    digests: set[str] = set()
    pending = [plain]
    while pending:
        match pending.pop():
            case str() as text if len(text) == 64:
                digests.add(text)
            case dict() as inner:
                pending += [*inner, *inner.values()]
            case list() as inner:
                pending += inner
    return digests


def _result_of(state: Any) -> Any:
    """Return the result of a task run, or raise its exception."""
    value = state.result(raise_on_failure=False)
    if isinstance(value, BaseException):
        raise value
    if isinstance(value, StoredValue):
        # Drop the data, because Prefect searches everything that a task waits for.
        _states()[value.digest] = state.model_copy(update={"data": True})
    return value


def _empty(directory: Path) -> None:
    """Remove everything from ``directory``, including the files from which a stage could resume."""
    shutil.rmtree(directory)
    directory.mkdir()


def _show(call: StageCall, artifact: StoredValue[Any], summary: str) -> None:
    """Show the result on the page of the task run."""
    from prefect.artifacts import create_markdown_artifact

    rows = [f"| {name} | `{sha256}` |" for name, sha256 in sorted(getattr(artifact, "files", {}).items())]
    table = "\n".join(["", "| file | sha256 |", "| --- | --- |", *rows]) if rows else ""
    text = f"{summary}\n\n* key `{artifact.key}`\n* content `{artifact.digest}`\n{table}\n"
    create_markdown_artifact(text, key=f"stage-{call.name}", description=f"{call.label}: {summary}")
