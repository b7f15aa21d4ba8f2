"""Stages in the real Prefect: cached by content, verified on every cache hit, without tracebacks for user errors."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from prefect import State, flow, task_engine
from prefect.client.schemas.objects import StateType, TaskRun, TaskRunResult
from prefect.task_runners import ThreadPoolTaskRunner

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.base.stage.dry_run_pass import WorkRequired, dry_pass
from mergegate.tasks.base.stage.progress import StageStatus, advance, progress_watcher
from mergegate.tasks.base.stage.stages import StageValue, stage, step, store, value_stage
from mergegate.tasks.base.store.store import Artifact, StoredValue
from mergegate.tasks.models.checkpoints.model import Model

pytestmark = pytest.mark.usefixtures("prefect_api", "home")

calls: list[int] = []


class Counted(StageValue):
    number: int
    allowed: bool = True

    def summary(self) -> str:
        return f"number {self.number}"

    def refusal(self) -> Refused | None:
        return None if self.allowed else Refused("here", found="no")


@stage("count", version=1, subject="model")
def count(out: Path, number: int, model: Model | None = None, *, fail: bool = False, allowed: bool = True) -> Counted:
    calls.append(number)
    advance(1, 2, "steps")
    if fail:
        raise InvalidInput("number", found=str(number), remedy="another")
    (out / "number.txt").write_text(str(number))
    return Counted(number=number, allowed=allowed)


class Spy:
    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def on_start(self, stage: str, subject: str) -> None:
        self.seen.append(("started", stage, subject))

    def on_progress(self, stage: str, subject: str, completed: int, total: int, unit: str) -> None:
        self.seen.append(("advanced", stage, subject, completed, total, unit))

    def on_end(self, stage: str, subject: str, ending: StageStatus, seconds: float, summary: str) -> None:
        self.seen.append(("ended", stage, subject, ending, summary))


def run(number: int, **options: object) -> tuple[Artifact[Counted] | Exception, Spy, int]:
    """Run one stage in one flow; return its result or error, the progress watcher, and the number of executions."""
    spy, before = Spy(), len(calls)

    @flow
    def one() -> Artifact[Counted] | Exception:
        with progress_watcher(spy):
            try:
                return count(number, **options)  # type: ignore[arg-type]
            except (InvalidInput, Refused) as error:
                return error

    return one(return_state=True).result(raise_on_failure=False), spy, len(calls) - before


@pytest.mark.story
def test_the_second_run_is_served_from_the_store() -> None:
    first, spy, ran = run(1)
    again, spy_again, ran_again = run(1)
    assert (ran, ran_again) == (1, 0)
    assert first == again
    assert spy.seen[-1] == ("ended", "count", "", "made", "number 1")
    assert spy_again.seen == [("started", "count", ""), ("ended", "count", "", "cached", "number 1")]
    assert run(2)[2] == 1  # Other inputs are a miss.


@pytest.mark.story
def test_user_errors_are_raised_without_a_traceback_and_not_cached(caplog: pytest.LogCaptureFixture) -> None:
    error, spy, _ = run(5, fail=True)
    assert isinstance(error, InvalidInput)
    assert spy.seen[-1] == ("ended", "count", "", "failed", "5")
    assert "Traceback" not in caplog.text
    assert run(5, fail=True)[2] == 1


@pytest.mark.story
def test_a_cached_refusal_refuses_again() -> None:
    for expected_runs in (1, 0):
        error, spy, ran = run(6, allowed=False)
        assert isinstance(error, Refused)
        assert ran == expected_runs
        assert spy.seen[-1] == ("ended", "count", "", "refused", "number 6")


@pytest.mark.story
def test_the_name_of_a_model_is_in_its_progress_but_not_in_the_key() -> None:
    _, spy, _ = run(8, model=Model(name="reverser", digest="d", directory=Path("/here")))
    assert ("advanced", "count", "reverser", 1, 2, "steps") in spy.seen
    assert run(8, model=Model(name="math", digest="d", directory=Path("/there")))[2] == 0


def test_the_plain_function_runs_without_prefect_and_store(tmp_path: Path) -> None:
    assert count.work(tmp_path, 9).number == 9
    assert not store().root.exists()


class Done:
    def __init__(self, new: bool) -> None:
        self.new = new

    def summary(self) -> str:
        return "done"


@pytest.mark.story
def test_a_step_is_never_cached() -> None:
    done: list[int] = []

    @step("publish")
    def publish() -> Done:
        done.append(1)
        return Done(new=True)

    @flow
    def twice() -> None:
        publish()
        publish()

    twice(return_state=True)
    assert len(done) == 2


def test_a_dry_pass_stops_at_an_unfinished_step() -> None:
    done: list[str] = []

    def work(place: str) -> Done:
        done.append(place)
        return Done(new=False)

    told, silent = step("publish", is_done=lambda place: place == "there")(work), step("publish")(work)
    with dry_pass():
        assert told("there").summary() == "done"
        for one, place in ((told, "elsewhere"), (silent, "there")):
            with pytest.raises(WorkRequired, match="publish"):
                one(place)
    assert done == ["there"]


@value_stage("double", version=1)
def double(counted: StoredValue[Counted]) -> Counted:
    calls.append(2 * counted.value.number)
    return Counted(number=2 * counted.value.number)


@flow
def two_stages(number: int, allowed: bool = True) -> None:
    """Run both stages, the second on the artifact of the first."""
    with progress_watcher(Spy()), suppress(Refused):
        double(count(number, allowed=allowed))


meeting = threading.Barrier(2)


@stage("meet", version=1)
def meet(out: Path, number: int) -> Counted:
    meeting.wait(timeout=60)  # Passes only if two calls run at the same time.
    return Counted(number=number)


@pytest.mark.story
def test_submitted_stages_run_in_parallel_and_their_results_raise_errors() -> None:
    @flow(task_runner=ThreadPoolTaskRunner(max_workers=2))
    def both() -> list[int]:
        running = [meet.submit(1), meet.submit(2)]
        failing = count.submit(27, fail=True)
        with pytest.raises(InvalidInput, match="27"):
            failing.result()
        return [one.result().value.number for one in running]

    assert both() == [1, 2]


class Emitted(NamedTuple):
    """A task run in its last state, as Prefect's engine emits it."""

    run: TaskRun
    state: State[Any]


@pytest.fixture
def task_runs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Emitted]:
    """Collect the task runs that Prefect's engine emits, by name.

    The engine emits each state as an event, which a server records later and without a guarantee. The tests read the
    events, because the records may be late or missing when the machine is busy.
    """
    emit, emitted = task_engine.emit_task_run_state_change_event, dict[str, Emitted]()

    def record(task_run: TaskRun, initial_state: Any, validated_state: State[Any], follows: Any = None) -> Any:
        for name in [name for name, each in emitted.items() if each.run.id == task_run.id]:
            del emitted[name]  # A run gets its name after its first state.
        emitted[task_run.name] = Emitted(task_run, validated_state)
        return emit(task_run, initial_state, validated_state, follows)

    monkeypatch.setattr(task_engine, "emit_task_run_state_change_event", record)
    return emitted


@pytest.mark.story
def test_prefect_distinguishes_a_miss_a_hit_and_a_rebuild_and_shows_dependencies(task_runs: dict[str, Emitted]) -> None:
    def require(*names: str) -> None:
        two_stages(21)
        assert (task_runs["count"].state.name, task_runs["double"].state.name) == names
        assert upstream_of(task_runs["double"]) == [task_runs["count"].run.id]
        assert upstream_of(task_runs["count"]) == []

    require("Made", "Made")
    require("Cached", "Cached")
    artifact, _, _ = run(21)
    assert isinstance(artifact, Artifact)
    (artifact.directory / "number.txt").write_text("x")
    require("Rebuilt", "Cached")  # The rebuilt bytes are identical, so dependents stay valid.


def test_prefect_shows_a_refusal_as_a_failure_with_its_reason(task_runs: dict[str, Emitted]) -> None:
    two_stages(22, allowed=False)
    ((name, (_, state)),) = task_runs.items()
    assert (name, state.type, state.name, state.message) == ("count", StateType.FAILED, "Refused", "here: no")


@pytest.mark.story
def test_the_graph_has_stages_passed_to_after(task_runs: dict[str, Emitted]) -> None:
    @flow
    def allowed() -> None:
        count.after(double(count(24)))(25, Model(name="second", digest="d", directory=Path("/")))

    allowed()
    assert upstream_of(task_runs["count second"]) == [task_runs["double"].run.id]


def upstream_of(emitted: Emitted) -> list[UUID]:
    return [one.id for one in emitted.run.task_inputs.get("wait_for", []) if isinstance(one, TaskRunResult)]


@pytest.mark.story
def test_a_value_stage_has_no_directory_but_is_verified(home: Path, task_runs: dict[str, Emitted]) -> None:
    two_stages(26)
    (file,) = (home / "store" / "double").iterdir()
    assert file.suffix == ".json"
    file.write_text(file.read_text().replace("52", "53"))
    two_stages(26)
    assert task_runs["double"].state.name == "Rebuilt"
    assert "52" in file.read_text()
