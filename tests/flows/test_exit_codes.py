"""All commands share one table of exit codes, and Prefect states use the same names."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from demo_project import Project
from patience import HANG_S
from typer.testing import CliRunner

from mergegate.flows.cli.app import app
from mergegate.flows.prefect_api.runs import FinishedRun
from mergegate.flows.preflight import Problems
from mergegate.merge_core.errors import (
    EXIT_CODES,
    INTERRUPTED,
    DiskUnavailable,
    Finding,
    InvalidInput,
    Refused,
    state_name,
)
from mergegate.tasks.report import read_history

MERGEGATE = str(Path(sys.executable).parent / "mergegate")


@pytest.mark.parametrize(("kind", "code"), [(InvalidInput, 2), (Refused, 3), (DiskUnavailable, 3)])
def test_what_is_wrong_and_what_is_refused_have_codes_of_their_own(kind: type[InvalidInput], code: int) -> None:
    assert kind("here", found="this").exit_code == code


def test_a_run_on_a_server_ends_with_the_code_that_it_would_have_here() -> None:
    for status, code in EXIT_CODES.items():
        run = FinishedRun(state_name(status), "", completed=code == 0)
        assert run.exit_code == code, status
    assert FinishedRun("Crashed", "", completed=False).exit_code == 1


def test_check_has_the_exit_code_of_a_run_that_stops_at_the_first_problem() -> None:
    problems = Problems(stop_at_once=False)
    assert problems.exit_code == 0
    problems.add([Finding("warn", "a", "odd")])
    assert problems.exit_code == 0
    problems.add([Finding("block", "b", "no")])
    problems.note(InvalidInput("c", found="wrong"))
    assert problems.exit_code == EXIT_CODES["refused"]


def test_ctrl_c_ends_a_run_with_a_line_a_state_and_a_place_in_the_history(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mergegate.flows.release.preflight_profile", interrupted)
    result = project.mergegate("run", "profiles/demo.yaml")
    assert result.exit_code == 130
    assert [line for line in result.output.splitlines() if "interrupted" in line] == [INTERRUPTED]
    assert "  next     mergegate run profiles/demo.yaml" in result.output.splitlines()
    (record,) = read_history(project.home / "reports").records
    assert record.status == "interrupted"


def test_ctrl_c_ends_any_other_command_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mergegate.flows.cli.check.is_recipe", interrupted)
    said = CliRunner().invoke(app, ["check", "profile.yaml"])
    message = "interrupted; to resume, run: mergegate check profile.yaml"
    assert (said.exit_code, said.output.strip()) == (130, message)
    told = CliRunner().invoke(app, ["check", "profile.yaml", "--json"])
    assert json.loads(told.stdout) == {
        "status": "interrupted",
        "message": f"{message} --json",
        "findings": [],
    }


@pytest.mark.story
def test_ctrl_c_in_the_middle_leaves_nothing_half_made_and_the_next_run_goes_on(project: Project) -> None:
    command = [MERGEGATE, "run", "profiles/demo.yaml"]
    run = subprocess.Popen(
        command,
        cwd=project.root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # the test process may ignore SIGINT
    )
    assert run.stdout is not None
    said = ""
    while "merge " not in said:  # by then, the model process is working
        said += (line := run.stdout.readline())
        assert line, said
    run.send_signal(signal.SIGINT)
    said += run.communicate(timeout=HANG_S)[0]
    assert run.returncode == 130, said
    assert "Traceback" not in said
    assert said.count("interrupted") == 1
    assert not (project.root / "releases").exists()
    assert project.mergegate("store", "verify").exit_code == 0
    assert project.mergegate("run", "profiles/demo.yaml").exit_code == 0
