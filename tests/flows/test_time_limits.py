"""Time limits: work that exceeds its limit stops, reports the limit, and resumes in the next run."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from multiprocessing import Pipe
from typing import Any

import pytest
from demo_project import Project, expect
from patience import HANG_S
from pydantic import ValidationError

from mergegate.merge_core.errors import InvalidInput, OutOfTime
from mergegate.tasks.base.stage import Limits, apply_limits, memory_of_child
from mergegate.tasks.base.stage.limits import declare_stage, within_limit
from mergegate.tasks.models.checkpoints.model_process import answer_question, end_model_process

for known in ("merge", "gate"):
    declare_stage(known)


def wait(seconds: float = HANG_S) -> None:
    """Block on a lock until interrupted, as the engine's main thread does."""
    threading.Event().wait(seconds)


class TestTimeLimits:
    @pytest.mark.parametrize(
        ("limits", "where", "expected"),
        [({"stages": {"merge": "0.05 s"}}, "merge", "limits.stages.merge"), ({"run": "0.05 s"}, "the run", "")],
    )
    def test_work_ends_when_its_time_is_up_and_names_its_limit(
        self, limits: dict[str, Any], where: str, expected: str
    ) -> None:
        with pytest.raises(OutOfTime) as refused, apply_limits(Limits(**limits)), within_limit("merge"):
            wait()
        assert refused.value.where == where
        assert expected in refused.value.expected

    def test_the_next_stage_has_its_own_time(self) -> None:
        with apply_limits(Limits(stages={"merge": "0.05 s"})):
            with pytest.raises(OutOfTime), within_limit("merge"):
                wait()
            with within_limit("gate"):
                wait(0.1)

    def test_no_handler_takes_it_for_its_own_and_what_cleans_up_is_not_interrupted_again(self) -> None:
        cleaned = []

        def careless() -> None:
            try:
                wait()
            except Exception:  # Any code along the way may catch this broadly.
                wait()
            finally:
                wait(0.2)  # Longer than the limit itself.
                cleaned.append(True)

        with apply_limits(Limits(stage="0.05 s")), pytest.raises(OutOfTime), within_limit("gate"):
            careless()
        assert cleaned

    def test_a_time_limit_leaves_no_alarm_behind(self) -> None:
        before = signal.getsignal(signal.SIGALRM)
        with apply_limits(Limits()), within_limit("merge"):
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
        assert signal.getsignal(signal.SIGALRM) is before
        with within_limit("merge"):  # Where there is no run, there is no limit.
            assert signal.getitimer(signal.ITIMER_REAL)[0] == 0

    def test_in_another_thread_it_does_nothing(self) -> None:
        ended = []

        def work() -> None:
            with apply_limits(Limits(run="0.01 s")), within_limit("merge"):
                wait(0.05)
            ended.append(True)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(HANG_S)
        assert ended

    @pytest.mark.story
    def test_an_unresponsive_main_thread_is_ended_with_its_process(self) -> None:
        script = (
            "import signal, time, mergegate.tasks.base.stage.limits as limits\n"
            "limits._SHUTDOWN_S = 0.1\n"
            "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n"  # Simulates a call that never returns.
            "with limits.apply_limits(limits.Limits(run='0.1 s')):\n"
            "    time.sleep(1000)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], timeout=HANG_S, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert "this process ends itself" in done.stderr


class TestSettings:
    @pytest.mark.parametrize("limit", ["", "5", "h", "0 h", "-3 h", "3 weeks", "1e3 s", "nan s"])
    def test_an_invalid_time_limit_is_refused(self, limit: str) -> None:
        with pytest.raises(ValidationError):
            Limits(run=limit)

    def test_an_unknown_stage_is_refused_with_a_suggestion(self) -> None:
        limits = Limits(stages={"merg": "1 h"})
        with pytest.raises(InvalidInput, match="an unknown stage") as refused, apply_limits(limits):
            pass
        assert "merge" in refused.value.remedy

    def test_the_memory_of_processes_holds_inside_only(self) -> None:
        with apply_limits(Limits(memory="3GB")):
            assert memory_of_child(7) == 3_000_000_000
        assert memory_of_child(7) == 7


class TestMemoryOfAChild:
    """Any error that a lack of memory causes is reported as out of memory."""

    @pytest.mark.parametrize(
        "error",
        [
            MemoryError(),
            RuntimeError("can't start new thread"),
            OSError(12, "Cannot allocate memory"),
            ImportError("libtorch_cpu.so: failed to map segment from shared object"),
            ImportError("libnothing.so: cannot map zero-fill pages"),
            ImportError(f"{'a long introduction. ' * 30}liblarge.so: failed to map segment from shared object"),
            SystemError("<function _find_and_load at 0x7f9166e37ce0> returned NULL without setting an exception"),
            SystemError("error return without exception set"),
        ],
    )
    def test_a_shortage_is_reported_even_if_the_input_is_blamed(self, error: Exception) -> None:
        def loads(on_progress: object) -> None:
            try:
                raise error
            except Exception as cause:
                raise InvalidInput("task copy", found="its data cannot be loaded") from cause

        ours, _ = Pipe()
        kind, *said = answer_question(ours, loads, ())
        assert kind == "starved"
        assert str(error)[:200] in said[0]

    def test_another_fault_of_the_input_stays_one(self) -> None:
        def loads(on_progress: object) -> None:
            raise InvalidInput("task copy", found="no such file")

        ours, _ = Pipe()
        kind, problem = answer_question(ours, loads, ())
        assert kind == "problem"
        assert isinstance(problem, InvalidInput)


@pytest.mark.proof
def test_a_run_out_of_time_is_refused_and_the_next_one_goes_on(demo: Project) -> None:
    profile = demo.edit("demo.yaml", "recipes/ties.yaml", "recipes/dare_ties.yaml")  # Needs a new perplexity.
    path = demo.root / profile
    path.write_text(path.read_text() + "limits: {stages: {perplexity: 0.01 s}}\n")
    refused = expect(demo.mergegate("run", profile), 3, "limits.stages.perplexity")
    assert "Traceback" not in refused.output
    path.write_text(path.read_text().replace("0.01 s", "1 h"))
    done = demo.mergegate("run", profile)
    assert done.exit_code in (0, 3), done.output
    assert "limits" not in done.output


@pytest.mark.story
def test_a_process_cannot_exceed_its_memory_limit(project: Project) -> None:
    end_model_process()  # A process left by an earlier test may have a higher limit.
    profile = project.edit("demo.yaml", "max_increase: 5%", "max_increase: 5%")
    path = project.root / profile
    path.write_text(path.read_text() + "limits: {memory: 100MB}\n")
    refused = expect(project.mergegate("run", profile), 2, "ran out of memory")
    assert "Traceback" not in refused.output
