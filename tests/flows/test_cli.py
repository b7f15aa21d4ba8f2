"""The command line starts fast, and all commands share one table of exit codes and show no tracebacks to users."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from demo_project import PROFILES, Project, expect
from patience import HANG_S

from mergegate.flows.prefect_api.runs import FinishedRun
from mergegate.flows.preflight import Problems
from mergegate.merge_core import errors
from mergegate.merge_core.errors import EXIT_CODES, DiskUnavailable, Finding, InvalidInput, Refused
from mergegate.tasks.release.report import read_history

MERGEGATE = str(Path(sys.executable).parent / "mergegate")


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MERGEGATE_"))}
    return subprocess.run(
        [MERGEGATE, *arguments],
        cwd=cwd,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


@pytest.mark.story
@pytest.mark.parametrize(
    ("arguments", "environment", "code", "words"),
    [
        (["--version"], {}, 0, "mergegate 0."),
        pytest.param(["--help"], {}, 0, "Check, merge, evaluate", marks=pytest.mark.proof),
        pytest.param([], {}, 2, "Release:", marks=pytest.mark.proof),
        pytest.param(["run", "nowhere.yaml"], {}, 2, "No such file", marks=pytest.mark.proof),
        (["run", str(PROFILES / "demo.yaml")], {"PREFECT_API_URL": "http://127.0.0.1:9/api"}, 2, "no server answers"),
        (["run", str(PROFILES / "demo.yaml")], {"MERGEGATE_HOME": "/proc/nowhere"}, 2, "MERGEGATE_HOME"),
        pytest.param(["methods"], {}, 0, "arxiv.org/abs/2306.01708", marks=pytest.mark.proof),
        (["families", "deepseek_v3"], {}, 0, "kept in float32   e_score_correction_bias"),
        (["families", "qwen33"], {}, 2, "did you mean"),
    ],
)
def test_every_command_has_its_exit_code_and_message(
    tmp_path: Path, arguments: list[str], environment: dict[str, str], code: int, words: str
) -> None:
    done = run(*arguments, cwd=tmp_path, **environment)
    assert done.returncode == code, done.stdout + done.stderr
    assert words in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.proof
def test_merges_that_share_a_directory_make_what_one_makes(tmp_path: Path) -> None:
    recipe = str(PROFILES / "demo" / "recipes" / "dare_ties.yaml")
    assert run("merge", recipe, "alone", cwd=tmp_path).returncode == 0
    command = [MERGEGATE, "merge", recipe, "together", "--share"]
    together = [subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) for _ in range(3)]
    codes = [process.wait(HANG_S) for process in together]
    # A process that starts after the merge is complete fails with code 2 because the directory is not empty.
    assert set(codes) <= {0, 2}
    assert 0 in codes
    alone = {path.name: path.read_bytes() for path in (tmp_path / "alone").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "together").iterdir()} == alone


def test_help_does_not_wait_for_heavy_imports(tmp_path: Path) -> None:
    code = "import sys; sys.argv = ['mergegate', '--help']\nfrom mergegate.flows.cli import main\n"
    code += "try:\n main()\nfinally:\n"
    code += " print(sorted({'torch', 'prefect', 'numpy', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(("kind", "code"), [(InvalidInput, 2), (Refused, 3), (DiskUnavailable, 3)])
def test_what_is_wrong_and_what_is_refused_have_codes_of_their_own(kind: type[InvalidInput], code: int) -> None:
    assert kind("here", found="this").exit_code == code


def test_a_run_on_a_server_ends_with_the_code_that_it_would_have_here() -> None:
    for status, code in EXIT_CODES.items():
        run = FinishedRun(errors.state_name(status), "", completed=code == 0)
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


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C at the first step of ``run`` and ``check``."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mergegate.flows.release.preflight_profile", interrupt)
    monkeypatch.setattr("mergegate.flows.operations.check.is_recipe", interrupt)


@pytest.mark.story
@pytest.mark.usefixtures("interrupted")
def test_ctrl_c_ends_a_run_with_a_line_a_state_and_a_place_in_the_history(project: Project) -> None:
    result = expect(project.mergegate("run", "profiles/demo.yaml"), 130)
    assert [line for line in result.output.splitlines() if "interrupted" in line] == [errors.INTERRUPTED]
    assert "  next     mergegate run profiles/demo.yaml" in result.output.splitlines()
    (record,) = read_history(project.home / "reports").records
    assert record.status == "interrupted"


@pytest.mark.usefixtures("interrupted")
def test_ctrl_c_ends_any_other_command_with_a_line(tmp_path: Path) -> None:
    project = Project(tmp_path)
    said = project.mergegate("check", "profile.yaml")
    message = "interrupted; to resume, run: mergegate check profile.yaml"
    assert (said.exit_code, said.output.strip()) == (130, message)
    told = project.mergegate("check", "profile.yaml", "--json")
    assert json.loads(told.stdout) == {"status": "interrupted", "message": f"{message} --json", "findings": []}


@pytest.mark.proof
def test_ctrl_c_in_the_middle_leaves_nothing_half_made_and_the_next_run_goes_on(project: Project) -> None:
    run = subprocess.Popen(
        [MERGEGATE, "run", "profiles/demo.yaml"],
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
    assert len(re.findall("^interrupted", said, re.MULTILINE)) == 1
    assert not (project.root / "releases").exists()
    assert project.mergegate("store", "verify").exit_code == 0
    assert project.mergegate("run", "profiles/demo.yaml").exit_code == 0
