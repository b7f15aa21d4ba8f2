"""Every run ends with a named state, a report page and a history entry, and a refusal shows no traceback."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
from demo_project import Project, expect, make_project
from prefect import flow
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from samples import sampled

from mergegate.flows.outcome import RunOutcome, StoppedRun, conclude_flow, flow_outcome
from mergegate.flows.outcome.flow_state import run_name
from mergegate.flows.outcome.run_outcome import prefect_page
from mergegate.flows.profile import Profile, profile_name
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.base.stage import StageValue, home, runs_directory, stage, value_stage
from mergegate.tasks.base.store import read_runs
from mergegate.tasks.release.report import RunRecord, archive_run, read_history

PAGE = "<style></style><main><header></header></main>"


class Checked(StageValue):
    forbidden: bool

    def summary(self) -> str:
        return "looked at"

    def refusal(self) -> Refused | None:
        return Refused("licences", found="cc-by-nc-4.0", remedy="leave it out") if self.forbidden else None


@value_stage("licenses", version=1)
def look(forbidden: bool) -> Checked:
    return Checked(forbidden=forbidden)


@stage("merge", version=1)
def write(out: Path, size: int) -> Checked:
    (out / "weights").write_bytes(b"x" * size)
    return Checked(forbidden=False)


def run_of(story: Callable[[], RunOutcome], name: str = "demo", *, deployed: bool = True) -> State[RunOutcome]:
    """Conclude a story in a flow run, as a worker does (``deployed``) or as a command does."""

    @flow(name="release")
    def run() -> object:
        with pytest.MonkeyPatch.context() as patch:
            if deployed:
                context = FlowRunContext.get()
                assert context is not None
                patch.setattr(context.flow_run, "deployment_id", uuid4())
            return conclude_flow(story, name)

    state: State[RunOutcome] = run(return_state=True)
    return state


def refused() -> RunOutcome:
    write(1000)
    look(True)
    raise AssertionError("a refusal went on")


def invalid() -> RunOutcome:
    raise InvalidInput("demo.yaml: recepe", found="unknown key <b>", expected="recipe", remedy="did you mean 'recipe'?")


def invalid_weights() -> RunOutcome:
    write(1000)
    raise InvalidInput("model.safetensors", found="NaN", expected="finite numbers")


def crashed() -> RunOutcome:
    write(1000)
    raise ZeroDivisionError("by <nothing>")


def passed() -> RunOutcome:
    write(1000)
    return RunOutcome(status="passed", message="demo passed the gate")


@pytest.mark.usefixtures("prefect_api", "home")
class TestEveryEnding:
    @pytest.mark.parametrize(
        ("story", "state", "code", "words"),
        [
            (refused, "Refused", 3, ("licences", "cc-by-nc-4.0", "leave it out", "looked at")),
            pytest.param(
                *(invalid, "Invalid", 2, ("demo.yaml: recepe", "unknown key &lt;b&gt;", "did you mean")),
                marks=pytest.mark.story,
            ),
            (crashed, "Failed", 1, ("ZeroDivisionError: by &lt;nothing&gt;", "report it with the traceback")),
            (passed, "Passed", 0, ("looked at",)),
        ],
    )
    def test_every_outcome_has_a_state_a_page_and_a_history_line(
        self, story: Callable[[], RunOutcome], state: str, code: int, words: tuple[str, ...]
    ) -> None:
        ended = run_of(story)
        assert ended.name == state
        assert ended.is_completed() == (code == 0)
        (line,) = read_history(home() / "reports").records
        assert line.status == state.lower()
        assert read_runs(runs_directory())[-1].judged is (story is passed)  # the others have no evidence
        page = (home() / "reports" / line.report).read_text(encoding="utf-8").replace("<wbr>", "")
        for word in (*words, "Error" if state == "Failed" else state):
            assert word in page
        assert (home() / "reports" / "demo.html").is_file()
        assert line.report in (home() / "reports" / "index.html").read_text(encoding="utf-8")
        outcome = flow_outcome(ended)
        if code == 1:
            assert isinstance(outcome, ZeroDivisionError)
            assert outcome.__notes__ == [f"report: {home() / 'reports' / 'demo.html'}"]
        else:
            assert isinstance(outcome, RunOutcome)
            assert (outcome.exit_code, outcome.report) == (code, home() / "reports" / "demo.html")
            assert ended.message == outcome.text
        if story is refused:
            with pytest.raises(StoppedRun, match="cc-by-nc") as stopped:
                ended.result()
            for error, shown in ((stopped.value, False), (None, False), (OSError(), True)):  # None: "NoneType: None"
                line = logging.makeLogRecord({"exc_info": (type(error), error, None)})
                assert bool(logging.getLogger("prefect.task_runs").filter(line)) is shown

    @pytest.mark.story
    def test_only_a_usage_error_of_an_attended_run_is_not_recorded(self) -> None:
        run_of(passed, deployed=False)
        page = (home() / "reports" / "demo.html").read_bytes()
        assert run_of(invalid, deployed=False).name == "Invalid"
        assert run_of(invalid, "another", deployed=False).name == "Invalid"
        assert [record.status for record in read_history(home() / "reports").records] == ["passed"]
        assert (home() / "reports" / "demo.html").read_bytes() == page
        assert not (home() / "reports" / "another.html").exists()

    @pytest.mark.story
    def test_invalid_weights_are_recorded_even_if_a_user_watches(self) -> None:
        run_of(invalid_weights, deployed=False)
        assert [record.status for record in read_history(home() / "reports").records] == ["invalid"]

    @pytest.mark.story
    def test_stages_and_what_they_added_to_the_store_are_told(self) -> None:
        run_of(passed)
        run_of(passed)
        first, second = read_history(home() / "reports").records
        assert 1000 <= first.bytes_made < 5000
        assert second.bytes_made == 0
        assert [(one.name, one.calls, one.cached) for one in first.stages] == [("merge", 1, 0)]
        assert [(one.name, one.calls, one.cached) for one in second.stages] == [("merge", 1, 1)]

    @pytest.mark.story
    def test_errors_of_the_history_do_not_fail_the_run(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("mergegate.flows.outcome.run_outcome.archive_run", full)
        with caplog.at_level(logging.WARNING):
            assert run_of(passed).name == "Passed"
            assert run_of(refused).name == "Refused"
            assert run_of(crashed).name == "Failed"
        assert "the report of this run could not be stored" in caplog.text


DATE = "2026-11-21"


class TestNames:
    def test_run_names_are_readable(self, tmp_path: Path) -> None:
        profiles = make_project(tmp_path).root / "profiles"
        named = run_name("release", {"profile": profiles / "demo.yaml"}, DATE)
        assert named == f"demo · ties of 2 · {DATE}"
        swept = run_name("sweep", {"profile": str(profiles / "demo-sweep.yaml")}, DATE)
        assert swept.startswith("demo-sweep · sweep of ")
        compared = run_name("compare", {"reference": "models/a", "candidate": "org/b@main"}, DATE)
        assert compared == f"b@main against a · {DATE}"
        profile = Profile.model_validate({"name": "inline", "recipe": "nowhere.yaml"})
        assert profile_name(profile) == "inline"
        assert run_name("release", {"profile": profile}, DATE) == f"inline · {DATE}"

    @pytest.mark.parametrize(
        ("content", "name"),
        [
            (None, "nightly"),
            (b"", "nightly"),
            (b"\xff\xfe\x00", "nightly"),
            (b"name: [1", "nightly"),
            (b"name: broken\nrecepe: 1", "broken"),
            (b"name: x/../y\nrecipe: 1", "nightly"),
            (b"name: n\nrecipe: nowhere.yaml\n", "n"),
            (b"- 1\n" * 10_000, "nightly"),
        ],
    )
    def test_run_names_never_fail_or_block(self, tmp_path: Path, content: bytes | None, name: str) -> None:
        file = tmp_path / "nightly.yaml"
        if content is not None:
            file.write_bytes(content)
        began = time.process_time()  # Not the wall clock, so other programs cannot fail this test.
        assert run_name("release", {"profile": file}, DATE) == f"{name} · {DATE}"
        assert time.process_time() - began < 5

    @pytest.mark.parametrize("parameters", [{}, {"profile": 3}, {"profile": {"name": "x"}}])
    def test_parameters_that_mean_nothing_have_a_name_too(self, parameters: dict[str, object]) -> None:
        assert run_name("release", parameters, DATE) == f"release · {DATE}"


class TestPrefectsPage:
    def test_prefects_page_is_small_and_keeps_status_and_report(self) -> None:
        outcome = RunOutcome(status="refused", message="é\n" * 10**6, report=Path("/somewhere/demo.html"))
        page = prefect_page(outcome, "demo")
        assert len(page.encode()) < 100_000
        assert page.startswith("## ✗ refused: demo")
        assert page.endswith("Report: `/somewhere/demo.html`\n")

    def test_a_message_cannot_close_its_code_fence(self) -> None:
        page = prefect_page(RunOutcome(status="invalid", message="a\n```\n# b"), "demo")
        assert page.count("````") == 2


LONG = "a-profile-whose-name-is-quite-long"


def archive(project: Project, number: int, profile: str) -> None:
    record = RunRecord(
        run=str(number), flow="release", profile=profile, ended=1_790_000_000.0 + number, seconds=4000,
        status="nothing new", message="m", version="0123456789abcdef",
    )  # fmt: skip
    archive_run(project.home / "reports", record, PAGE)


USAGE_ERRORS = (
    "run typing-error.yaml", "run recipe.yaml", "run nowhere.yaml", "run demo.yaml --set evaluate.documens=5",
    "run demo.yaml --set evaluate.documents=twenty", "run demo.yaml --set recipe=nowhere.yaml",
    "run demo.yaml --set 'evaluate.tasks=[{task: nowhere.yaml, guarded_by: base}]'",
    "run demo.yaml --set publish.path=/dev/null/x", "compare nowhere demo/models/base --profile demo.yaml",
    "compare demo/models/base demo/models/base --profile typing-error.yaml", "sweep demo.yaml",
    "sweep typing-error.yaml", "tune demo-refused.yaml", "shadow evaluate demo.yaml",
)  # fmt: skip


class TestTheCommand:
    @pytest.fixture
    def project(self, tmp_path: Path) -> Project:
        project = Project(tmp_path)
        for number, profile in enumerate(("demo", LONG, "demo")):
            archive(project, number, profile)
        return project

    def test_fits_eighty_columns_the_newest_first(self, project: Project) -> None:
        text = project.mergegate("history", columns=80).stdout
        assert all(len(line) <= 80 for line in text.splitlines()), text
        words = text.split()
        assert [word for word in words if word in ("demo", LONG)] == ["demo", LONG, "demo"]
        assert words.count("nothing") == 3
        assert text.count("1 h 06 m") == 3

    def test_of_one_profile_as_json_or_an_unknown_one(self, project: Project) -> None:
        said = json.loads(project.mergegate("history", "demo", "--json").stdout)
        assert [one["run"] for one in said["runs"]] == ["2", "0"]
        assert said["damaged"] == 0
        expect(project.mergegate("history", "demos"), 2, "did you mean 'demo'?")

    def test_damage_is_reported_and_an_empty_history_is_not_an_error(self, project: Project, tmp_path: Path) -> None:
        with (project.home / "reports" / "history.jsonl").open("ab") as file:
            file.write(b"garbage\n")
        assert "1 damaged line of the history left out." in project.mergegate("history").output
        assert project.mergegate("doctor").exit_code == 3
        assert "undamaged lines stay" in project.mergegate("doctor", "--repair").output
        assert "damaged" not in project.mergegate("history").output
        assert len(read_history(project.home / "reports").records) == 3
        empty = Project(tmp_path / "empty")
        empty.root.mkdir()
        assert "no run has finished here yet" in empty.mergegate("history").output

    @pytest.mark.parametrize("command", sampled(USAGE_ERRORS, USAGE_ERRORS[::5]))
    def test_a_usage_error_leaves_history_and_reports_unchanged(self, tmp_path: Path, command: str) -> None:
        project = make_project(tmp_path)
        profiles = project.root / "profiles"
        (profiles / "typing-error.yaml").write_text("name: demo\nrecepe: x\n")
        shutil.copy(profiles / "demo" / "recipes" / "ties.yaml", profiles / "recipe.yaml")
        archive(project, 1, "demo")
        reports = project.home / "reports"
        before = {path: path.read_bytes() for path in reports.rglob("*") if path.is_file()}
        files = {path.name for path in profiles.iterdir()}
        words = [
            f"profiles/{word}" if word in files or word.startswith("demo/") else word for word in shlex.split(command)
        ]
        assert project.mergegate(*words).exit_code == 2
        assert {path: path.read_bytes() for path in reports.rglob("*") if path.is_file()} == before
