"""``mergegate store`` and run records: garbage collection keeps everything that is needed, and never changes a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from demo_project import Project, expect
from prefect import flow
from tampering import flip

from mergegate.flows.outcome import RunOutcome, conclude_flow, flow_outcome
from mergegate.merge_core.errors import Refused
from mergegate.tasks.base.stage import StageValue, home, progress_watcher, runs_directory, stage, store, value_stage
from mergegate.tasks.base.store import Artifact, RetentionRule, collect_garbage, list_store, read_runs

EVERYTHING = RetentionRule(grace_s=0.0, quota=0)


class Grown(StageValue):
    bytes: int

    def summary(self) -> str:
        return f"{self.bytes} bytes"


@stage("grow", version=1)
def grow(out: Path, size: int) -> Grown:
    (out / "data").write_bytes(bytes(size))
    return Grown(bytes=size)


@stage("copy", version=1)
def copy(out: Path, source: Artifact[Grown]) -> Grown:
    shutil.copy(source.directory / "data", out / "data")
    return Grown(bytes=source.value.bytes)


@value_stage("weigh", version=1)
def weigh(source: Artifact[Grown]) -> Grown:
    return source.value


class Said:
    """A progress watcher that records the lines between stages."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_message(self, text: str) -> None:
        self.lines.append(text)

    def __getattr__(self, name: str) -> object:
        return lambda *_: None


def night(size: int, *, disturb: object = None, refused: bool = False) -> tuple[RunOutcome, Said]:
    """Run a flow like a release: three stages, with a disturbance after the first."""
    said = Said()

    def make() -> RunOutcome:
        first = grow(size)
        if callable(disturb):
            disturb(first)
        weigh(copy.submit(first).result())
        if refused:
            raise Refused("here", found="no")
        return RunOutcome(status="passed", message="passed")

    @flow(name="release")
    def run() -> object:
        return conclude_flow(make, "demo")

    with progress_watcher(said):  # type: ignore[arg-type]
        outcome = flow_outcome(run(return_state=True))
    assert isinstance(outcome, RunOutcome)
    return outcome, said


def collect() -> None:
    collect_garbage(store().root, runs_directory(), EVERYTHING)


def stages() -> set[str]:
    return {one.stage for one in list_store(store().root)}


@pytest.mark.usefixtures("prefect_api", "home")
class TestRunsOfStages:
    @pytest.mark.story
    def test_a_run_notes_all_that_it_used_also_what_was_cached(self) -> None:
        night(10)
        night(10)
        runs = read_runs(runs_directory())
        assert [run.status for run in runs] == ["passed", "passed"]
        assert all({name.stage for name in run.used} == {"grow", "copy", "weigh"} for run in runs)
        assert runs[0].used == runs[1].used
        assert not any(run.is_live for run in runs)

    @pytest.mark.story
    def test_what_a_run_uses_does_not_go_while_it_runs(self) -> None:
        outcome, _ = night(10, disturb=lambda first: collect())
        assert outcome.status == "passed"
        collect()
        assert stages() == {"grow", "copy", "weigh"}, "it is the last run of its profile"

    @pytest.mark.story
    def test_an_artifact_that_goes_after_it_was_found_is_made_again_by_the_same_run(self) -> None:
        lost = []

        def lose(first: Artifact[Grown]) -> None:
            if not lost:
                lost.append(first)
                shutil.rmtree(first.directory)

        outcome, said = night(10, disturb=lose)
        assert outcome.status == "passed"
        assert [line for line in said.lines if "removed from the store" in line]
        assert grow.find(10) == lost[0]

    @pytest.mark.story
    def test_an_artifact_that_is_altered_under_a_run_is_refused_as_before(self) -> None:
        outcome, _ = night(10, disturb=lambda first: (first.directory / "data").write_bytes(b"other bytes"))
        assert outcome.status == "refused"
        assert "changed since it was pinned" in outcome.message

    @pytest.mark.story
    def test_a_run_enforces_the_quota_and_reports_it_in_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for size in (50_001, 50_002, 50_003):
            night(size)
        monkeypatch.setenv("MERGEGATE_STORE_QUOTA", "260 kB")
        outcome, said = night(50_004)
        assert outcome.status == "passed"
        (line,) = [line for line in said.lines if line.startswith("store: ")]
        assert "of 260 kB" in line
        assert "of unused artifacts removed" in line
        assert grow.find(50_001) is None
        assert grow.find(50_003) is not None
        assert grow.find(50_004) is not None
        assert night(50_004)[1].lines == [], "nothing to do, nothing said"

    @pytest.mark.story
    def test_an_unreachable_quota_or_a_failed_collection_does_not_fail_the_run(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MERGEGATE_STORE_QUOTA", "1kB")
        outcome, said = night(50_000)
        assert outcome.status == "passed"
        assert "quota is too small" in said.lines[-1]

        def fails(*_: object) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr("mergegate.tasks.base.stage.project.collect_garbage", fails)
        assert night(10)[0].status == "passed"

    @pytest.mark.story
    def test_an_invalid_quota_is_refused_before_any_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MERGEGATE_STORE_QUOTA", "plenty")
        outcome, _ = night(10)
        assert outcome.status == "invalid"
        assert "MERGEGATE_STORE_QUOTA: 'plenty'" in outcome.message
        assert not store().root.exists()

    def test_a_command_without_a_flow_protects_its_artifacts(self) -> None:
        made = grow.build(10)
        collect()
        assert made.directory.is_dir()
        assert home() / "runs" == runs_directory()


def told(project: Project, *arguments: str) -> dict[str, object]:
    result = project.mergegate("store", *arguments, "--json")
    answer = json.loads(result.output)
    assert isinstance(answer, dict)
    return answer


@pytest.mark.story
def test_the_store_of_a_release_is_listed_measured_verified_and_kept(demo: Project) -> None:
    expect(demo.mergegate("store", "ls"), 0, "release of demo")
    entries = told(demo, "ls")["entries"]
    assert isinstance(entries, list)
    assert {entry["why"] for entry in entries} == {"release of demo"}
    sizes = told(demo, "du")
    assert isinstance(sizes["stages"], list)
    assert {row["stage"] for row in sizes["stages"]} == {entry["stage"] for entry in entries}
    assert "needed" in demo.mergegate("store", "du").output
    verified = told(demo, "verify")
    assert (verified["status"], verified["read"], verified["damaged"]) == ("sound", len(entries), [])
    assert "kept" in demo.mergegate("store", "gc", "--older-than", "0", "--dry-run").output
    assert told(demo, "gc", "--older-than", "0", "--quota", "0")["goes"] == []
    again = demo.mergegate("run", "profiles/demo.yaml")
    assert "nothing new" in again.output
    assert "✓" not in "".join(line[:4] for line in again.output.splitlines())


def test_a_changed_byte_is_found_by_verify_and_a_profile_that_is_not_run_any_more_is_forgotten(
    demo: Project, tmp_path: Path
) -> None:
    project = Project(tmp_path / "project")
    shutil.copytree(demo.root, project.root, symlinks=True)
    (weights,) = project.home.glob("store/merge/*/model.safetensors")
    flip(weights)
    expect(project.mergegate("store", "verify"), 3, "model.safetensors was altered")
    assert told(project, "verify")["status"] == "damaged"
    expect(project.mergegate("store", "gc", "--forget", "dem"), 2, "did you mean 'demo'?")
    assert project.mergegate("store", "gc", "--forget", "demo", "--older-than", "0").exit_code == 0
    assert told(project, "ls")["entries"] == []


def test_commands_work_in_an_empty_home(tmp_path: Path) -> None:
    project = Project(tmp_path)
    for command in ("ls", "du", "verify", "gc"):
        assert project.mergegate("store", command).exit_code == 0
    assert project.mergegate("store", "gc", "--quota", "much").exit_code == 2
    assert not (tmp_path / ".mergegate").exists()
