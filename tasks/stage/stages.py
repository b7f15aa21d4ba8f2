"""What makes a function a stage: a content key, an artifact in the store, a Prefect task, and somebody who is told.

A stage is declared once, next to the function that does the work::

    @stage("merge", version=1)
    def merge(out: Path, recipe: Recipe, parents: Sequence[PinnedCheckpoint]) -> Merged:
        ...                                    # writes its files into ``out``, returns what is to be said about them

    @value_stage("gate", version=2)
    def gate(guards: tuple[Guard, ...], ...) -> GateVerdict:
        ...                                    # makes nothing but its value

    artifact = merge(recipe, parents)          # from the store, or made now, as a task of the running flow
    future = merge.submit(recipe, parents)     # the same on the flow's task runner, beside others
    record = merge.work(directory, recipe, parents)    # the plain function, without Prefect and without the store

The key is made of the stage's name, its version and its arguments (see ``tasks.store``). Bump ``version`` when the
meaning of a stage changes: what it made before is then rebuilt. The store is the only cache: Prefect keeps no result.
It shows each run as ``Made``, ``Cached`` or ``Rebuilt`` (there was an artifact, and it was damaged), or as a failed
``Refused`` or ``Invalid``, with what the stage says of it; and which stage waited for which, found by the digests that
stand in its inputs. What a stage reads is looked at before and after (``tasks.stage.reading``); how long it may take
is in ``tasks.stage.limits``; what all of it comes to where nothing may be done, in ``tasks.stage.looking``.
"""

from __future__ import annotations

import functools
import inspect
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, get_type_hints

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import MergegateError, state_name
from mergegate.merge_core.files import disk_errors_refused
from mergegate.merge_core.wording import detail, has_detail_listener
from mergegate.tasks.stage.dry_run_pass import WorkRequired, is_looking, require_work_allowed
from mergegate.tasks.stage.input_guard import pinned_inputs, read_pinned, require_pinned
from mergegate.tasks.stage.limits import declare_stage, within_limit
from mergegate.tasks.stage.progress import StageStatus, report_stage
from mergegate.tasks.stage.project import home
from mergegate.tasks.stage.shared_store import shared_store
from mergegate.tasks.stage.usage import note_artifact, record_stage
from mergegate.tasks.store import (
    Artifact,
    Store,
    StoredValue,
    StoreMiss,
    canonical,
    digest,
    directory_bytes,
    family_prefix,
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
    """What a stage has to say about its artifact: frozen, typed, stored as JSON beside the files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def summary(self) -> str:
        """One line for a person who watches."""
        raise NotImplementedError

    def refusal(self) -> MergegateError | None:
        """Why the flow must not go on, or None. A cached refusal refuses again."""
        return None

    def refuses(self) -> bool:
        """Whether this is a no, also where the flow still goes on to report it."""
        return self.refusal() is not None


def store() -> Store:
    """The artifact store of this project."""
    root = home() / "store"
    return Store(root, shared_store(root), lambda path: require_work_allowed(f"read {path} for its hash"))


class StageCall:
    """One call of a stage: its arguments, and the key that follows from them. Opaque to Prefect, which would look
    through everything that it can."""

    def __init__(self, name: str, subject: str, key: str, inputs: inspect.BoundArguments) -> None:
        self.name, self.subject, self.key, self.inputs = name, subject, key, inputs

    @property
    def label(self) -> str:
        """``perplexity reverser``: what Prefect's pages call the run."""
        return f"{self.name} {self.subject}".strip()


class DeclaredStage(Generic[P, V, A]):
    """A stage of the pipeline. Calling it runs it as a task of the running flow; ``work`` is the plain function."""

    work: Callable[..., V]

    def __init__(
        self, work: Callable[..., V], skipped: int, name: str, version: int, subject: str | None, **options: Any
    ) -> None:
        self.work, self.name, self.version, self._subject, self._options = work, name, version, subject, options
        declare_stage(name)
        signature = inspect.signature(work)
        self._signature = signature.replace(parameters=list(signature.parameters.values())[skipped:])
        self.value_type: type[V] = get_type_hints(work)["return"]
        functools.update_wrapper(self, work)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> A:
        """The artifact of these inputs, from the store or made now.

        Raises:
            Refused: when the value says that the flow must not go on.
            MergegateError: what the work raised about its input.
        """
        return self._called((), args, kwargs)

    def after(self, *earlier: StoredValue[Any]) -> Callable[P, A]:
        """The same stage, shown as waiting for ``earlier`` too: what allowed it, rather than what goes into it."""
        return lambda *args, **kwargs: self._called(earlier, args, kwargs)

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> StageFuture[A]:
        """Begin on the flow's task runner, beside what was submitted before. Call inside a flow."""
        call = self._bind(args, kwargs)
        require_work_allowed(f"submit {call.label}")
        return StageFuture(self.task.submit(call, wait_for=_upstream(call.inputs.arguments)))

    def build(self, *args: P.args, **kwargs: P.kwargs) -> A:
        """From the store or made now, without Prefect: for commands that run no flow. A refusal is not raised."""
        return self._noted(self._bind(args, kwargs))[0]

    def find(self, *args: P.args, **kwargs: P.kwargs) -> A | None:
        """What the store has of these inputs, if that can be believed. Makes nothing."""
        call = self._bind(args, kwargs)
        record_stage(call.name, call.key, call.subject, in_run_only=True)
        try:
            return self._open(call)
        except StoreMiss:
            return None

    def key(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Under which the store has, or would have, the artifact of these inputs."""
        return self._bind(args, kwargs).key

    @cached_property
    def task(self) -> Task[..., Any]:
        """The Prefect task, made when it is first run: importing a stage does not import Prefect."""
        from prefect import Task
        from prefect.cache_policies import NO_CACHE

        def run(call: StageCall) -> State[A]:
            return self._run(call)

        return Task(
            fn=run,
            name=self.name,
            description=inspect.getdoc(self.work),
            version=str(self.version),
            task_run_name="{call.label}",
            cache_policy=NO_CACHE,
            persist_result=False,
            retry_condition_fn=_may_help,
            **self._options,
        )

    def _called(self, earlier: Sequence[StoredValue[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> A:
        call = self._bind(args, kwargs)
        if is_looking():
            return self._reported(call)[0]
        waited = _upstream({**call.inputs.arguments, "": earlier})
        return cast(A, _settled(self.task(call, return_state=True, wait_for=waited or None)))

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StageCall:
        inputs = self._signature.bind(*args, **kwargs)
        inputs.apply_defaults()
        return StageCall(self.name, self._subject_of(inputs.arguments), self._key_of(inputs.arguments), inputs)

    def _subject_of(self, inputs: Mapping[str, object]) -> str:
        return str(getattr(inputs[self._subject], "name", "")) if self._subject else ""

    def _key_of(self, inputs: Mapping[str, object]) -> str:
        return stage_key(self.name, self.version, inputs)

    def _run(self, call: StageCall) -> State[A]:
        """The body of the Prefect task. What a user can cause fails it without a traceback."""
        from prefect.states import Completed, Failed

        try:
            artifact, status, summary = self._reported(call)
        except MergegateError as error:
            return Failed(name=state_name(error.status), message=str(error), data=error)
        if status != "cached":
            _show(call, artifact, summary)
        return Completed(name=status.title(), message=summary, data=artifact)

    def _reported(self, call: StageCall) -> tuple[A, StageStatus, str]:
        """The artifact, how we came by it, and what it says of itself; whoever watches is told.

        Raises:
            Refused: when the value says that the flow must not go on.
        """
        report_here = report_stage(self.name, call.subject, call.key)
        with report_here as report, disk_errors_refused(home()), within_limit(self.name):
            artifact, status = self._noted(call)
            report.summary = artifact.value.summary()
            report.status = "refused" if artifact.value.refuses() else status
            if (refusal := artifact.value.refusal()) is not None:
                raise refusal
        return artifact, status, report.summary

    def _noted(self, call: StageCall) -> tuple[A, StageStatus]:
        """From the store or made now, and noted as used: by a note before, by its time after."""
        record_stage(call.name, call.key, call.subject)
        _tell_key(call, self.version)
        artifact, status = self._found(call) if is_looking() else self._build(call)
        if status != "cached" and isinstance(artifact, Artifact):
            note_artifact(directory_bytes(artifact.directory))
        store().mark_used(call.name, call.key)
        return artifact, status

    def _found(self, call: StageCall) -> tuple[A, StageStatus]:
        """What the store has, where nothing may be made.

        Raises:
            WorkRequired: when that is nothing, or cannot be believed.
        """
        try:
            return self._open(call), "cached"
        except StoreMiss as miss:
            raise WorkRequired(f"{call.label}: {miss}") from None

    def _open(self, call: StageCall) -> A:
        raise NotImplementedError

    def _build(self, call: StageCall) -> tuple[A, StageStatus]:
        raise NotImplementedError

    def _watch(self, call: StageCall) -> tuple[dict[str, Callable[..., None]], list[str]]:
        """What the store tells while it looks or waits; damage that it found is collected."""
        damage: list[str] = []

        def damaged(why: str) -> None:
            log.warning("%s; the stage is run again", why)
            damage.append(why)

        def waiting() -> None:
            log.info("%s is being made by another run; waiting for it", call.label)
            detail("%s is being made by another run; waiting for it", call.label)

        return {"on_damage": damaged, "on_wait": waiting}, damage


class Stage(DeclaredStage[P, V, Artifact[V]]):
    """A stage that makes files."""

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

    def family(self, **others: object) -> tuple[Artifact[V], ...]:
        """What the store has of this stage with these inputs, whatever ``apart`` is: artifacts that can be believed.

        Args:
            others: Every input but ``apart``, by name.
        """
        inputs = self._others(others)
        assert self._apart is not None  # or there was no prefix
        subject = self._subject_of(inputs)

        def about_to_read(name: str) -> None:
            record_stage(self.name, name, subject, in_run_only=True)

        found = store().family(self.name, self._prefix(inputs), self.value_type, about_to_read=about_to_read)
        # Of other inputs with equal first digits, if such there are, the whole key tells.
        members = [
            one for one in found if one.key == self._key_of({**inputs, self._apart: getattr(one.value, self._apart)})
        ]
        for one in members:
            store().mark_used(self.name, one.key)
        return tuple(members)

    def hold_family(self, **others: object) -> AbstractContextManager[None]:
        """No other run makes a member of the family as long as this is held. ``others`` as of ``family``."""

        def waiting() -> None:
            log.info("%s is being made by another run; waiting for it", self.name)

        return store().hold_family(self.name, self._prefix(self._others(others)), waiting)

    def _others(self, others: Mapping[str, object]) -> dict[str, object]:
        return {name: others[name] for name in self._signature.parameters if name != self._apart}

    def _prefix(self, inputs: Mapping[str, object]) -> str:
        assert self._apart is not None, f"{self.name} declares no argument that tells a family apart"
        return family_prefix(self.name, self.version, inputs, self._apart)

    def _key_of(self, inputs: Mapping[str, object]) -> str:
        return stage_key(self.name, self.version, inputs, self._apart)

    def _build(self, call: StageCall) -> tuple[Artifact[V], StageStatus]:
        told, damage = self._watch(call)
        artifact, made = store().build(
            self.name,
            call.key,
            self.value_type,
            lambda out: read_pinned(
                call.inputs.arguments,
                store().hashes,
                lambda: self.work(out, *call.inputs.args, **call.inputs.kwargs),
                begin_anew=lambda: _empty(out),
            ),
            hashes_of=self._hashes_of,
            resumable=self._resumable,
            **told,
        )
        return artifact, _status(made, damage)


class ValueStage(DeclaredStage[P, V, StoredValue[V]]):
    """A stage whose value is all that it makes."""

    def __init__(self, work: Callable[P, V], **declared: Any) -> None:
        super().__init__(work, 0, **declared)

    def _build(self, call: StageCall) -> tuple[StoredValue[V], StageStatus]:
        told, damage = self._watch(call)
        found, made = store().build_value(
            self.name,
            call.key,
            self.value_type,
            lambda: read_pinned(
                call.inputs.arguments,
                store().hashes,
                lambda: self.work(*call.inputs.args, **call.inputs.kwargs),
            ),
            **told,
        )
        return found, _status(made, damage)

    def _open(self, call: StageCall) -> StoredValue[V]:
        return store().open_value(self.name, call.key, self.value_type)


class StageFuture(Generic[A]):
    """A stage that runs beside others."""

    def __init__(self, future: PrefectFuture[Any]) -> None:
        self._future = future

    def result(self) -> A:
        """Its artifact, when it is there. Raises as a call of the stage does."""
        self._future.wait()
        return cast(A, _settled(self._future.state))


def stage(
    name: str,
    *,
    version: int,
    subject: str | None = None,
    hashes_of: Callable[[Any], Mapping[str, str]] = lambda value: {},
    resumable: bool = False,
    apart: str | None = None,
    retries: int = 0,
) -> Callable[[Callable[Concatenate[Path, P], V]], Stage[P, V]]:
    """Declare a stage that makes files.

    Args:
        name: One of the stage names of ``docs/architecture.md``; also its directory in the store.
        version: Bumped by hand when the meaning of the stage changes; part of every key.
        subject: Name of the parameter whose ``.name`` tells calls of this stage apart for a person.
        hashes_of: Hashes that the work computed while writing, by file name (see ``Store.build``).
        resumable: The work can go on from what a killed run left behind.
        apart: Name of the parameter that tells the members of a family apart: ``family`` finds all artifacts that
            differ in it alone. The value must say it under the same name.
        retries: How often it is tried again after an error that no user caused. Input and refusals are not retried.
    """
    return lambda work: Stage(
        work,
        hashes_of=hashes_of,
        resumable=resumable,
        apart=apart,
        name=name,
        version=version,
        subject=subject,
        retries=retries,
    )


def value_stage(
    name: str, *, version: int, subject: str | None = None, retries: int = 0
) -> Callable[[Callable[P, V]], ValueStage[P, V]]:
    """Declare a stage whose value is all that it makes. Arguments as of :func:`stage`."""
    return lambda work: ValueStage(work, name=name, version=version, subject=subject, retries=retries)


class StepValue(Protocol):
    """What a step returns: something to say, and whether it changed anything."""

    @property
    def new(self) -> bool: ...
    def summary(self) -> str: ...


S = TypeVar("S", bound=StepValue)


def step(
    name: str, *, is_done: Callable[P, bool] | None = None, retries: int = 0
) -> Callable[[Callable[P, S]], Callable[P, S]]:
    """Declare a step that is never cached because it looks at the world outside the store, or changes it.

    Running it again must be harmless: a step is idempotent by its own means. Pinned inputs are looked at before it;
    what it has done when they change meanwhile cannot be taken back, so it checks itself what it takes out of them.

    Args:
        is_done: Told the same arguments, whether all that it does is done, as far as that can be seen without doing it;
            when in doubt, no. Absent: nobody can tell, so there is always something to do.
    """

    declare_stage(name)

    def declare(work: Callable[P, S]) -> Callable[P, S]:
        signature = inspect.signature(work)

        def run(call: StageCall) -> State[S]:
            from prefect.states import Completed, Failed

            try:
                value = reported(call)
            except MergegateError as error:
                return Failed(name=state_name(error.status), message=str(error), data=error)
            return Completed(name="Made" if value.new else "Unchanged", message=value.summary(), data=value)

        def reported(call: StageCall) -> S:
            with report_stage(name, "") as report, disk_errors_refused(home()), within_limit(name):
                require_pinned(tuple(pinned_inputs(call.inputs.arguments.values())), store().hashes)
                value = work(*call.inputs.args, **call.inputs.kwargs)
                report.status, report.summary = ("made" if value.new else "cached"), value.summary()
            return value

        @functools.cache
        def task() -> Task[..., Any]:
            from prefect import Task
            from prefect.cache_policies import NO_CACHE

            return Task(
                fn=run,
                name=name,
                cache_policy=NO_CACHE,
                persist_result=False,
                retries=retries,
                retry_condition_fn=_may_help,
            )

        @functools.wraps(work)
        def called(*args: P.args, **kwargs: P.kwargs) -> S:
            call = StageCall(name, "", "", signature.bind(*args, **kwargs))
            if is_looking():
                if is_done is None or not is_done(*args, **kwargs):
                    raise WorkRequired(name)
                return reported(call)
            waited = _upstream(call.inputs.arguments)
            state = task()(call, return_state=True, wait_for=waited or None)
            return cast(S, _settled(state))

        return called

    return declare


# Which stages of the running flow made which content: (the flow run, state by digest).
_made: ContextVar[tuple[object, dict[str, Any]]] = ContextVar("made", default=(None, {}))


def _states() -> dict[str, Any]:
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    run = context.flow_run.id if context and context.flow_run else None
    if _made.get()[0] != run:
        _made.set((run, {}))
    return _made.get()[1]


def _upstream(arguments: Mapping[str, object]) -> list[Any]:
    """States of the stages in this flow whose content stands in ``arguments``: the edges of Prefect's graph."""
    states = _states()
    found = {id(states[text]): states[text] for text in _digests(arguments) if text in states}
    return list(found.values())


def _digests(value: object) -> set[str]:
    """Every text in ``value`` that may be a digest. What has no canonical form has none to find."""
    try:
        plain = canonical(value)
    except (TypeError, ValueError):
        if isinstance(value, Mapping):
            return set().union(*map(_digests, value.values()))
        if isinstance(value, (list, tuple)):
            return set().union(*map(_digests, value))
        parents = getattr(value, "parents", ())
        return _digests(parents) if isinstance(parents, tuple) else set()
    found: set[str] = set()
    waiting = [plain]
    while waiting:
        match waiting.pop():
            case str() as text if len(text) == 64:
                found.add(text)
            case dict() as inner:
                waiting += [*inner, *inner.values()]
            case list() as inner:
                waiting += inner
    return found


def _may_help(task: object, run: object, state: State[Any]) -> bool:
    """Whether trying again may help: what a user can cause is the same the next time."""
    return state.name not in ("Refused", "Invalid")


def _settled(state: Any) -> Any:
    """What a task run gave; what it failed with is raised here."""
    value = state.result(raise_on_failure=False)
    if isinstance(value, BaseException):
        raise value
    if isinstance(value, StoredValue):
        # Without its data: Prefect looks through everything that a task waits for.
        _states()[value.digest] = state.model_copy(update={"data": True})
    return value


def _tell_key(call: StageCall, version: int) -> None:
    """The key, and what it is made of: of two runs whose keys differ a person sees by which input."""
    if has_detail_listener():
        inputs = " · ".join(f"{name} {digest(value)[:8]}" for name, value in call.inputs.arguments.items())
        detail("%s: key %s of version %d · %s", call.label, call.key[:16], version, inputs)


def _empty(directory: Path) -> None:
    """Leave nothing in ``directory``: not even what unfinished work could go on from."""
    shutil.rmtree(directory)
    directory.mkdir()


def _status(made: bool, damage: Sequence[str]) -> StageStatus:
    return "cached" if not made else "rebuilt" if damage else "made"


def _show(call: StageCall, artifact: StoredValue[Any], summary: str) -> None:
    """What was made, on the page of the task run."""
    from prefect.artifacts import create_markdown_artifact

    rows = [f"| {name} | `{sha256}` |" for name, sha256 in sorted(getattr(artifact, "files", {}).items())]
    table = "\n".join(["", "| file | sha256 |", "| --- | --- |", *rows]) if rows else ""
    text = f"{summary}\n\n* key `{artifact.key}`\n* content `{artifact.digest}`\n{table}\n"
    create_markdown_artifact(text, key=f"stage-{call.name}", description=f"{call.label}: {summary}")
