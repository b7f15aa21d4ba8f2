"""What makes a function a stage: a Prefect task with a content key, a verified record behind it, and a watcher.

A stage is declared once, next to the function that does the work::

    @stage("merge", version=1)
    def merge(out: Path, recipe: Recipe, parents: Sequence[Parent]) -> MergeRecord:
        ...                                    # writes its files into ``out``, returns what is to be said about them

    artifact = merge(recipe, parents)          # through Prefect: cached by content, told to whoever watches
    record = merge.work(directory, recipe, parents)    # the plain function, without Prefect and without the store

The key is made of the stage's name, its version and its arguments (see ``merge_core.store.keys``). Bump ``version``
when the meaning of a stage changes: what it made before is then made again. Prefect's record of a run holds only stage
and key; reading it opens the artifact in the store and checks it, so a deleted, truncated or altered artifact is a
cache miss.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, get_type_hints

from prefect import Task
from prefect.cache_policies import NO_CACHE, CachePolicy
from prefect.client.schemas.objects import State
from prefect.serializers import Serializer
from prefect.states import Failed
from pydantic import BaseModel, ConfigDict, Field

from merge_core.errors import MergegateError, Refused
from merge_core.store import Artifact, Store, StoreMiss, stage_key
from tasks.stage.progress import report_stage
from tasks.stage.project import home  # where it has always been looked for

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V", bound="StageValue")


class StageValue(BaseModel):
    """What a stage has to say about its artifact: frozen, typed, stored as JSON beside the files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def summary(self) -> str:
        """One line for a person who watches."""
        raise NotImplementedError

    def refusal(self) -> Refused | None:
        """Why the flow must not go on, or None. A cached refusal refuses again."""
        return None

    def refuses(self) -> bool:
        """Whether this is a no, also where the flow still goes on to report it."""
        return self.refusal() is not None


def store() -> Store:
    """The artifact store of this project."""
    return Store(home() / "store")


class ContentKey(CachePolicy):
    """Prefect's cache key is the stage's own content key, which is computed before the task is called."""

    def compute_key(
        self, task_ctx: object, inputs: dict[str, Any], flow_parameters: dict[str, Any], **kwargs: Any
    ) -> str:
        return f"{inputs['stage']}-{inputs['key'][:32]}"


class ArtifactSerializer(Serializer):  # unparametrised: Prefect registers serializers by concrete class
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
        with report_stage(self.name, subject) as telling:
            artifact, made = self._run(key, subject, inputs)
            telling.summary = artifact.value.summary()
            telling.ending = "refused" if artifact.value.refuses() else "made" if made else "cached"
            if (refusal := artifact.value.refusal()) is not None:
                raise refusal
            return artifact

    def _run(self, key: str, subject: str, inputs: inspect.BoundArguments) -> tuple[Artifact[V], bool]:
        made = False

        def body(stage: str, key: str) -> Artifact[V]:
            nonlocal made
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

        artifact = _run_as_task(
            body,
            {"stage": self.name, "key": key},
            name=self.name,
            task_run_name=f"{self.name} {subject}".strip(),
            cache_policy=ContentKey(),
            persist_result=True,
            result_storage=home() / "records",
            result_serializer=ArtifactSerializer(),
        )
        return artifact, made


_value_types: dict[str, type[StageValue]] = {}


class StepValue(Protocol):
    """What a step returns: something to say, and whether it changed anything."""

    @property
    def new(self) -> bool: ...
    def summary(self) -> str: ...


S = TypeVar("S", bound=StepValue)


def step(name: str) -> Callable[[Callable[P, S]], Callable[P, S]]:
    """Declare a step that is never cached because it looks at the world outside the store, or changes it.

    Running it again must be harmless: a step is idempotent by its own means.
    """

    def declare(work: Callable[P, S]) -> Callable[P, S]:
        @functools.wraps(work)
        def run(*args: P.args, **kwargs: P.kwargs) -> S:
            with report_stage(name, "") as telling:
                value = _run_as_task(lambda: work(*args, **kwargs), {}, name=name, cache_policy=NO_CACHE)
                telling.ending, telling.summary = ("made" if value.new else "cached"), value.summary()
                return value

        return run

    return declare


def _run_as_task(body: Callable[..., T], parameters: dict[str, object], **options: Any) -> T:
    """Run ``body`` as a Prefect task. What a user can cause fails the task without a traceback and is raised here."""
    problem: MergegateError | None = None

    def guarded(**parameters: object) -> Any:
        nonlocal problem
        try:
            return body(**parameters)
        except MergegateError as error:
            problem = error
            return Failed(message=str(error))

    # Prefect reads the parameters of a task off its signature; ours are whatever the caller names.
    guarded.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in parameters]
    )
    # No tags: each would ask the API for a concurrency slot before every stage.
    run: Task[..., Any] = Task(fn=guarded, **options)
    state = cast(State[Any], run(**parameters, return_state=True))
    if problem is not None:
        raise problem
    return cast(T, state.result())


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
