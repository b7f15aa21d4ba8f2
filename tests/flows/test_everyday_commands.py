"""Everyday commands: dry run, status, history and explanation, one JSON schema for all answers, and the JSON log."""

from __future__ import annotations

import ast
import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from demo_project import PROFILES, Project, expect
from prefect import flow
from rich.cells import cell_len
from samples import sampled

from mergegate.flows.operations.progress import EventLines
from mergegate.flows.outcome import RunOutcome, conclude_flow, flow_outcome
from mergegate.merge_core.errors import Refused
from mergegate.tasks.base.stage import StageValue, value_stage

FLOWS = PROFILES.parent / "flows"
ANSWERS = ("status", "history", "doctor", "methods", "store ls", "store du", "check profiles/demo.yaml", "explain demo")
FETCHED = "fetch-data profiles/by-name.yaml"
FINISHED = (
    "run profiles/demo.yaml --dry-run",
    "open",
    "store verify",
    "store gc --dry-run",
    "verify releases/demo/latest",
)
QUICK = (
    "status", "doctor", "explain demo", "store ls", "store gc --dry-run", FETCHED, "explain nobody", "run nowhere.yaml",
)  # fmt: skip
STOPPED = ("check nowhere.yaml", "explain nobody", "open nobody", "history nobody", "run nowhere.yaml")


@pytest.mark.parametrize("command", sampled([*ANSWERS, *FINISHED, FETCHED, *STOPPED], QUICK))
def test_what_commands_print_for_machines_has_one_shape(demo: Project, command: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    if command == FETCHED:
        have_data_by_name(demo)
    done = demo.mergegate(*command.split(), "--json")
    schema = json.loads((PROFILES.parent / "docs" / "schema" / "answer.json").read_text())
    told = json.loads(done.stdout)
    jsonschema.Draft202012Validator(schema).validate(told)
    assert (done.exit_code == 2) is (command in STOPPED), done.output
    assert told["status"] in documented_statuses(command)
    if command == FETCHED:
        assert told["datasets"] == [
            {"dataset": "baber/piqa", "revision": "", "directory": str(demo.root / "profiles/eval-data/baber/piqa")}
        ]


def documented_statuses(command: str) -> set[str]:
    """Return the statuses that the page about JSON output lists for a command and for errors."""
    page = (PROFILES.parent / "docs" / "reference" / "machine-interface.md").read_text()
    table = page.partition("| commands | `status` |")[2].partition("\n\n")[0]
    rows = {cells[0]: cells[1] for line in table.splitlines()[2:] if (cells := line.strip("| ").split(" | "))}
    first, *others = command.split()
    spellings = {first, " ".join((first, *others[:1])), command}
    if "--dry-run" in others:
        spellings.add(f"{first} --dry-run")
    of_command = " ".join(words for names, words in rows.items() if spellings & set(re.findall(r"`([^`]+)`", names)))
    if "a run would end" in of_command:
        of_command += next(words for names, words in rows.items() if names.startswith("`run`"))
    return set(re.findall(r"`([^`]+)`", of_command + rows["any command that ends with an error"]))


def have_data_by_name(project: Project) -> None:
    """Write a profile with a task by name and its data, so that no network access is needed."""
    data = project.root / "profiles" / "eval-data"
    data.mkdir(exist_ok=True)
    (data / "piqa_validation.jsonl").write_text("{}\n")
    evaluate = {"data": "eval-data", "tasks": [{"task": "piqa", "guarded_by": "base"}]}
    profile = json.dumps({"name": "n", "recipe": "r.yaml", "evaluate": evaluate})
    (project.root / "profiles" / "by-name.yaml").write_text(profile)


def test_no_command_prints_json_in_a_shape_of_its_own() -> None:
    printing = {
        file.name
        for file in (*FLOWS.glob("cli/*.py"), *FLOWS.glob("operations/*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node).startswith("print(json.dumps(")
    }
    # summary.py prints the outcome of a run. The first test validates it.
    assert printing == {"console.py", "progress.py", "summary.py"}


@pytest.mark.story
def test_a_dry_run_says_what_is_cached_and_what_is_left(demo: Project) -> None:

    def planned(*more: str) -> dict[str, Any]:
        done = expect(demo.mergegate("run", "profiles/demo.yaml", "--dry-run", "--json", *more), 0)
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    assert all(stage["cached"] for stage in planned()["stages"])
    otherwise = planned("--set", "perplexity.max_documents=7")
    assert {stage["stage"] for stage in otherwise["stages"] if not stage["cached"]} == {"perplexity"}
    assert otherwise["seconds"] > 0
    assert not otherwise["rough"]
    assert otherwise["overrides"] == ["perplexity.max_documents=7"]
    never_run = planned("--set", "name=another", "--set", "perplexity.max_documents=7", "--price", "box=3600")
    assert never_run["rough"]
    assert never_run["attempts"] == 1
    assert planned("--remedy", "auto")["attempts"] == planned("--set", "remedies=auto")["attempts"] == 4
    assert 0 < never_run["seconds"] == never_run["cost"]["box"]


def test_a_past_run_is_explained_in_lines(demo: Project) -> None:
    done = expect(demo.mergegate("explain", "demo"), 0, "demo: released")
    assert "reverse: drop 0.5 [-0.3, 1.5] points against reverser, max_drop 3, margin 4" in done.output
    assert "merged    ties of 2 over base" in done.output


def test_status_needs_no_server(project: Project) -> None:
    expect(project.mergegate("status"), 0, "running  nothing", "no run has finished here yet")


def test_events_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    lines = EventLines()
    lines.on_start("evaluate", "base")
    lines.on_progress("evaluate", "base", 1, 10, "requests")
    lines.on_progress("evaluate", "base", 2, 10, "requests")
    lines.on_end("evaluate", "base", "made", 1.5, "copy 100.0")
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["event"] for one in told] == ["started", "advanced", "ended"]
    ended = {"event": "ended", "stage": "evaluate", "subject": "base", "status": "made", "seconds": 1.5}
    assert told[-1] | {"time": 0} == {**ended, "time": 0, "summary": "copy 100.0"}


REFUSED = ("check profiles/demo-forbidden.yaml", "explain nosuch", "open nosuch", "verify nosuch")
PLAIN = (
    *("run profiles/demo.yaml", "run profiles/demo.yaml --dry-run", "verify releases/demo/latest"),
    *("status", "history", "history demo", "explain demo", "open demo", "methods", "doctor"),
    *("store ls", "store du", "store verify", "store gc --dry-run", "store gc"),
    *("check profiles/demo.yaml", "plan profiles/demo.yaml", "plan profiles/demo/recipes/ties.yaml"),
)
ONCE = (
    "merge profiles/demo/recipes/ties.yaml out",
    "compare releases/demo/latest out -p profiles/demo.yaml",
    "reproduce releases/demo/latest --parents profiles/demo/recipes",
)


@pytest.mark.proof  # merges and evaluates models
def test_everyday_commands_end_well_and_neither_exceed_80_columns_nor_break_words(
    demo_release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webbrowser.open", lambda *_: True)
    # A project of its own, because another run of the profile changes what other tests expect of its last run.
    project = Project(tmp_path / "project")
    shutil.copytree(demo_release, project.root, symlinks=True)

    def output_of(command: str, columns: int = 1000) -> str:
        done = project.mergegate(*command.split(), columns=columns)
        assert (done.exit_code == 0) is (command not in REFUSED), f"{command}\n{done.output}"
        assert "Traceback" not in done.output
        return done.output

    output_of("run profiles/demo.yaml")
    for command in ONCE:
        output_of(command)
    (project.root / "schedules.yaml").write_text("profiles:\n  - {profile: profiles/demo.yaml, schedule: every 6 h}\n")
    for command in (*PLAIN, *REFUSED):
        wide, narrow = (output_of(command, columns) for columns in (1000, 80))
        for line in narrow.splitlines():
            # Only a word that is wider than the terminal may pass its end.
            assert cell_len(line.rstrip()) <= 80 or max(map(cell_len, line.split())) > 60, (command, line)
        assert narrow.count("…") == wide.count("…"), command
        # A narrow table may have other words, but no part of a word that is in one piece in the wide output. Numbers
        # change from call to call.
        new = {word for word in set(narrow.split()) - set(wide.split()) if not re.search(r"\d", word)}
        lost = set(wide.split()) - set(narrow.split())
        assert not [part for part in new if any(word.startswith(part) or word.endswith(part) for word in lost)], command


# --- the JSON log: every line identifies its run ---


class Said(StageValue):
    word: str

    def summary(self) -> str:
        return f"said {self.word}"


@value_stage("say", version=1)
def say(word: str) -> Said:
    logging.getLogger("mergegate.tasks.somebody").warning("odd: %s", word)
    if word == "no":
        raise Refused("here", found="no")
    return Said(word=word)


@pytest.fixture
def log(tmp_path: Path, home: Path, prefect_api: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MERGEGATE_LOG", str(tmp_path / "log.jsonl"))
    return tmp_path / "log.jsonl"


def night(word: str) -> RunOutcome:
    def make() -> RunOutcome:
        say(word)
        return RunOutcome(status="passed", message="passed")

    @flow(name="release")
    def run() -> object:
        return conclude_flow(make, "support")

    found = flow_outcome(run(return_state=True))
    assert isinstance(found, RunOutcome)
    return found


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.story
def test_every_line_names_run_flow_and_profile_and_those_of_a_stage_its_key(log: Path) -> None:
    handlers = [list(logging.getLogger(name).handlers) for name in ("", "prefect")]
    night("yes")
    assert [list(logging.getLogger(name).handlers) for name in ("", "prefect")] == handlers
    lines = lines_of(log)
    assert {(line["flow"], line["profile"]) for line in lines} == {("release", "support")}
    assert len({line["run"] for line in lines}) == 1
    started, odd, ended = (
        next(line for line in lines if line["event"] == event and line.get("stage") == "say")
        for event in ("stage started", "log", "stage ended")
    )
    key = say.key("yes")
    assert [started["key"], odd["key"], ended["key"]] == [key] * 3
    assert odd["message"] == "odd: yes"
    assert (ended["status"], ended["message"]) == ("made", "said yes")
    assert ended["seconds"] >= 0
    assert (lines[-1]["event"], lines[-1]["status"]) == ("run ended", "passed")


@pytest.mark.story
def test_the_log_distinguishes_cache_hits_and_refusals(log: Path) -> None:
    for word in ("yes", "yes", "no"):
        night(word)
    lines = lines_of(log)
    stages = [(line["status"], line["level"]) for line in lines if line["event"] == "stage ended"]
    assert stages == [("made", "info"), ("cached", "info"), ("refused", "warning")]
    assert [line["status"] for line in lines if line["event"] == "run ended"] == ["passed", "passed", "refused"]


@pytest.mark.story
@pytest.mark.parametrize("place", ["nowhere/log.jsonl", ".", "/dev/full"])
@pytest.mark.usefixtures("log")
def test_an_unwritable_log_does_not_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MERGEGATE_LOG", place)
    assert night("yes").status == "passed"
