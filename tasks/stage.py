"""What makes a function a stage: a Prefect task with a content key, a verified record behind it, and a watcher.

A stage is declared once, next to the function that does the work::

    @stage("merge", version=1)
    def merge(out: Path, recipe: Recipe, parents: Sequence[Parent]) -> MergeRecord:
        ...                                    # writes its files into ``out``, returns what is to be said about them

    artifact = merge(recipe, parents)          # through Prefect: cached by content, told to whoever watches
    record = merge.work(directory, recipe, parents)    # the plain function, without Prefect and without the store

The key is made of the stage's name, its version and its arguments (see ``merge_core.keys``). Bump ``version`` when the
meaning of a stage changes: what it made before is then made again. Prefect's record of a run holds only stage and key;
reading it opens the artifact in the store and checks it, so a deleted, truncated or altered artifact is a cache miss.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, get_type_hints

from prefect import task
from prefect.cache_policies import CachePolicy
from prefect.serializers import Serializer
from prefect.states import Failed
from pydantic import BaseModel, ConfigDict, Field

from merge_core.errors import MergegateError, Refused
from merge_core.keys import stage_key
from merge_core.store import Artifact, Store, StoreMiss

log = logging.getLogger(__name__)

P = ParamSpec("P")
V = TypeVar("V", bound="StageValue")

Ending = Literal["made", "cached", "refused", "failed"]


class StageValue(BaseModel):
    """What a stage has to say about its artifact: frozen, typed, stored as JSON beside the files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def summary(self) -> str:
        """One line for a person who watches."""
        raise NotImplementedError

    def refusal(self) -> Refused | None:
        """Why the flow must not go on, or None. A cached refusal refuses again."""
        return None


class Watcher(Protocol):
    """Whoever shows a run while it works. ``subject`` tells calls of one stage apart: the checkpoint's name, or ''."""

    def started(self, stage: str, subject: str) -> None: ...
    def advanced(self, stage: str, subject: str, done: int, total: int, unit: str) -> None: ...
    def ended(self, stage: str, subject: str, ending: Ending, seconds: float, summary: str) -> None: ...


_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
_running: ContextVar[tuple[str, str]] = ContextVar("running", default=("", ""))


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Tell ``watcher`` about every stage that is called inside."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def advance(done: int, total: int, unit: str) -> None:
    """Say how far the running stage has come: ``done`` of ``total`` in ``unit`` ('B', 'documents')."""
    if (watcher := _watcher.get()) is not None:
        watcher.advanced(*_running.get(), done, total, unit)


def home() -> Path:
    """The project's own state: ``$MERGEGATE_HOME``, else ``.mergegate`` in the working directory. Always absolute."""
    return Path(os.environ.get("MERGEGATE_HOME", ".mergegate")).absolute()


def store() -> Store:
    """The artifact store of this project."""
    return Store(home() / "store")


class ContentKey(CachePolicy):
    """Prefect's cache key is the stage's own content key, which is computed before the task is called."""

    def compute_key(
        self, task_ctx: object, inputs: dict[str, Any], flow_parameters: dict[str, Any], **kwargs: Any
    ) -> str:
        return f"{inputs['stage']}-{inputs['key'][:32]}"


class ArtifactSerializer(Serializer):  # type: ignore[type-arg]  # a parametrised base breaks its type registry
    """Writes stage and key; reads by opening and checking the artifact. Any doubt is a miss with a log line."""

    type: str = Field(default="mergegate-artifact", frozen=True)

    def dumps(self, obj: Any) -> bytes:
        return json.dumps({"stage": obj.stage, "key": obj.key}).encode()

    def loads(self, blob: bytes) -> Any:
        record = json.loads(blob)
        try:
            return store().open(record["stage"], record["key"], _value_types[record["stage"]])
        except StoreMiss as miss:
            log.warning("%s; the stage is run again", miss)
            raise


class Stage(Generic[P, V]):
    """A stage of the pipeline. Calling it runs it as a cached Prefect task; ``work`` is the plain function."""

    def __init__(
        self,
        work: Callable[Concatenate[Path, P], V],
        name: str,
        version: int,
        hashes_of: Callable[[V], Mapping[str, str]],
        resumable: bool,
        subject: str | None,
    ) -> None:
        self.work, self.name, self.version = work, name, version
        self._hashes_of, self._resumable, self._subject = hashes_of, resumable, subject
        signature = inspect.signature(work)
        self._signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        self.value_type: type[V] = get_type_hints(work)["return"]
        _value_types[name] = self.value_type

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Artifact[V]:
        """The artifact of these inputs, from the store or made now.

        Raises:
            Refused: when the value says that the flow must not go on.
            MergegateError: what the work raised about its input.
        """
        inputs = self._signature.bind(*args, **kwargs)
        inputs.apply_defaults()
        subject = str(getattr(inputs.arguments[self._subject], "name", "")) if self._subject else ""
        key = stage_key(self.name, self.version, inputs.arguments)
        watcher = _watcher.get()
        if watcher:
            watcher.started(self.name, subject)
        token = _running.set((self.name, subject))
        began = time.monotonic()
        ending: Ending = "failed"
        summary = ""
        try:
            artifact, made = self._run(key, subject, inputs)
            ending, summary = ("made" if made else "cached"), artifact.value.summary()
            if (refusal := artifact.value.refusal()) is not None:
                ending = "refused"
                raise refusal
            return artifact
        except MergegateError as error:
            ending = "refused" if isinstance(error, Refused) else "failed"
            summary = summary or error.found
            raise
        finally:
            _running.reset(token)
            if watcher:
                watcher.ended(self.name, subject, ending, time.monotonic() - began, summary)

    def _run(self, key: str, subject: str, inputs: inspect.BoundArguments) -> tuple[Artifact[V], bool]:
        made = False
        problem: MergegateError | None = None

        def body(stage: str, key: str) -> Any:
            nonlocal made, problem
            try:
                artifact, made = store().build(
                    stage,
                    key,
                    self.value_type,
                    lambda out: self.work(out, *inputs.args, **inputs.kwargs),
                    hashes_of=self._hashes_of,
                    resumable=self._resumable,
                    on_wait=lambda: log.info("%s is being made by another run; waiting for it", stage),
                )
                return artifact
            except MergegateError as error:
                # Returned, not raised: what a user can cause leaves no traceback in Prefect's log.
                problem = error
                return Failed(message=str(error))

        run = task(
            body,
            name=self.name,
            task_run_name=f"{self.name} {subject}".strip(),
            cache_policy=ContentKey(),
            persist_result=True,
            result_storage=home() / "records",
            result_serializer=ArtifactSerializer(),
            tags=[self.name],
        )
        state = run(self.name, key, return_state=True)
        if problem is not None:
            raise problem
        return state.result(), made


_value_types: dict[str, type[StageValue]] = {}


def stage(
    name: str,
    *,
    version: int,
    hashes_of: Callable[[Any], Mapping[str, str]] = lambda value: {},
    resumable: bool = False,
    subject: str | None = None,
) -> Callable[[Callable[Concatenate[Path, P], V]], Stage[P, V]]:
    """Declare a stage.

    Args:
        name: One of the stage names of ``docs/architecture.md``; also its directory in the store.
        version: Bumped by hand when the meaning of the stage changes; part of every key.
        hashes_of: Hashes that the work computed while writing, by file name (see ``Store.build``).
        resumable: The work can go on from what a killed run left behind.
        subject: Name of the parameter whose ``.name`` tells calls of this stage apart for a person.
    """
    return lambda work: Stage(work, name, version, hashes_of, resumable, subject)
