"""A stage through the real Prefect: cached by content, verified on every hit, quiet about what a user can cause."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from prefect import flow

from merge_core.errors import InvalidInput, Refused
from merge_core.store.store import Artifact
from tasks.checkpoints.model import Model
from tasks.stage.progress import StageStatus, advance, watched_by
from tasks.stage.stages import StageValue, stage, step, store

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

    def started(self, stage: str, subject: str) -> None:
        self.seen.append(("started", stage, subject))

    def advanced(self, stage: str, subject: str, done: int, total: int, unit: str) -> None:
        self.seen.append(("advanced", stage, subject, done, total, unit))

    def ended(self, stage: str, subject: str, ending: StageStatus, seconds: float, summary: str) -> None:
        self.seen.append(("ended", stage, subject, ending, summary))


def run(number: int, **options: object) -> tuple[Artifact[Counted] | Exception, Spy, int]:
    """One flow run of one stage: what it gave or raised, what a watcher saw, how often the work ran."""
    spy, before = Spy(), len(calls)

    @flow
    def one() -> Artifact[Counted] | Exception:
        with watched_by(spy):
            try:
                return count(number, **options)  # type: ignore[arg-type]
            except (InvalidInput, Refused) as error:
                return error

    return one(return_state=True).result(raise_on_failure=False), spy, len(calls) - before


def test_the_second_run_is_served_from_the_store() -> None:
    first, spy, ran = run(1)
    again, spy_again, ran_again = run(1)
    assert (ran, ran_again) == (1, 0)
    assert first == again
    assert spy.seen[-1] == ("ended", "count", "", "made", "number 1")
    assert spy_again.seen == [("started", "count", ""), ("ended", "count", "", "cached", "number 1")]


def test_other_inputs_are_another_run() -> None:
    assert run(1)[2] + run(2)[2] == 2


@pytest.mark.parametrize("damage", ["delete", "truncate", "alter", "record"])
def test_a_damaged_artifact_is_made_again_and_the_log_says_why(
    damage: str, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, _, _ = run(3)
    assert isinstance(first, Artifact)
    file = first.directory / "number.txt"
    match damage:
        case "delete":
            shutil.rmtree(first.directory)
        case "truncate":
            file.write_text("")
        case "alter":
            file.write_text("4")
        case "record":
            for record in (home / "records").iterdir():
                record.write_text("{")
    with caplog.at_level(logging.WARNING, logger="tasks.stage"):
        again, _, ran = run(3)
    assert again == first
    if damage == "record":  # the artifact itself is whole: only Prefect's note of it is gone
        assert ran == 0
    else:
        assert ran == 1
        assert "the stage is run again" in caplog.text


def test_what_a_user_can_cause_is_raised_without_a_traceback_and_not_cached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error, spy, _ = run(5, fail=True)
    assert isinstance(error, InvalidInput)
    assert spy.seen[-1] == ("ended", "count", "", "failed", "5")
    assert "Traceback" not in caplog.text
    assert run(5, fail=True)[2] == 1


def test_a_cached_refusal_refuses_again() -> None:
    for expected_runs in (1, 0):
        error, spy, ran = run(6, allowed=False)
        assert isinstance(error, Refused)
        assert ran == expected_runs
        assert spy.seen[-1] == ("ended", "count", "", "refused", "number 6")


def test_progress_speaks_for_the_running_stage_and_its_subject() -> None:
    model = Model(name="reverser", digest="d", directory=Path("/nowhere"))
    _, spy, _ = run(7, model=model)
    assert ("advanced", "count", "reverser", 1, 2, "steps") in spy.seen


def test_a_model_is_the_same_under_another_name() -> None:
    run(8, model=Model(name="reverser", digest="d", directory=Path("/here")))
    _, _, ran = run(8, model=Model(name="math", digest="d", directory=Path("/there")))
    assert ran == 0


def test_the_plain_function_runs_without_prefect_and_store(tmp_path: Path) -> None:
    assert count.work(tmp_path, 9).number == 9
    assert not store().root.exists()


def test_a_step_is_never_cached() -> None:
    done: list[int] = []

    class Done:
        new = True

        def summary(self) -> str:
            return "done"

    @step("publish")
    def publish() -> Done:
        done.append(1)
        return Done()

    @flow
    def twice() -> None:
        publish()
        publish()

    twice(return_state=True)
    assert len(done) == 2
