"""Everyday commands: dry run, status, history and explanation, and one JSON schema for all machine-readable output."""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from demo_project import PROFILES, Printed, Project
from rich.cells import cell_len

from mergegate.flows.cli.json_events import EventLines

CLI = PROFILES.parent / "flows" / "cli"
ANSWERS = ("status", "history", "doctor", "methods", "store ls", "store du", "check profiles/demo.yaml", "explain demo")
FETCHED = "fetch-data profiles/by-name.yaml"
FINISHED = (
    "run profiles/demo.yaml --dry-run",
    "open",
    "store verify",
    "store gc --dry-run",
    "verify releases/demo/latest",
)
STOPPED = ("check nowhere.yaml", "explain nobody", "open nobody", "history nobody", "run nowhere.yaml")


@pytest.mark.parametrize("command", [*ANSWERS, *FINISHED, FETCHED, *STOPPED])
def test_what_commands_print_for_machines_has_one_shape(released: tuple[Project, Printed], command: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    project, _ = released
    if command == FETCHED:
        have_data_by_name(project)
    done = project.mergegate(*command.split(), "--json")
    schema = json.loads((PROFILES.parent / "docs" / "schema" / "answer.json").read_text())
    told = json.loads(done.stdout)
    jsonschema.Draft202012Validator(schema).validate(told)
    assert (done.exit_code == 2) is (command in STOPPED), done.output
    assert told["status"] in documented_statuses(command)
    if command == FETCHED:
        assert told["datasets"] == [
            {"dataset": "baber/piqa", "revision": "", "directory": str(project.root / "profiles/eval-data/baber/piqa")}
        ]


def documented_statuses(command: str) -> set[str]:
    """Return the statuses that the page about JSON output lists for a command and for errors."""
    page = (PROFILES.parent / "docs" / "reference" / "json.md").read_text()
    table = page.partition("| commands | `status` |")[2].partition("\n\n")[0]
    rows = {cells[0]: cells[1] for line in table.splitlines()[2:] if (cells := line.strip("| ").split(" | "))}
    first, *others = command.split()
    spellings = {first, f"{first} {others[0]}" if others else first, command}
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
    profile = {"name": "n", "recipe": "r.yaml", "evaluate": evaluate}
    (project.root / "profiles" / "by-name.yaml").write_text(json.dumps(profile))


def test_no_command_prints_json_in_a_shape_of_its_own() -> None:
    printing = {
        file.name
        for file in CLI.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node).startswith("print(json.dumps(")
    }
    # run_summary.py prints the outcome of a run. The first test validates it.
    assert printing == {"output.py", "json_events.py", "run_summary.py"}


@pytest.mark.story
def test_a_dry_run_says_what_is_cached_and_what_is_left(released: tuple[Project, Printed]) -> None:
    project, _ = released

    def planned(*more: str) -> dict[str, Any]:
        done = project.mergegate("run", "profiles/demo.yaml", "--dry-run", "--json", *more)
        assert done.exit_code == 0, done.output
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


def test_a_past_run_is_explained_in_lines(released: tuple[Project, Printed]) -> None:
    done = released[0].mergegate("explain", "demo")
    assert done.exit_code == 0, done.output
    assert "demo: released" in done.output
    assert "reverse: drop 0.5 [-0.3, 1.5] points against reverser, max_drop 3, margin 4" in done.output
    assert "merged    ties of 2 over base" in done.output


def test_status_needs_no_server(project: Project) -> None:
    done = project.mergegate("status")
    assert done.exit_code == 0, done.output
    assert "running  nothing" in done.output
    assert "no run has finished here yet" in done.output


def test_events_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    lines = EventLines()
    lines.on_start("evaluate", "base")
    lines.on_progress("evaluate", "base", 1, 10, "requests")
    lines.on_progress("evaluate", "base", 2, 10, "requests")
    lines.on_end("evaluate", "base", "made", 1.5, "copy 100.0")
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["event"] for one in told] == ["started", "advanced", "ended"]
    assert told[-1] | {"time": 0} == {
        "event": "ended",
        "time": 0,
        "stage": "evaluate",
        "subject": "base",
        "status": "made",
        "seconds": 1.5,
        "summary": "copy 100.0",
    }


PLAIN = (
    "status",
    "history",
    "explain demo",
    "check profiles/demo.yaml",
    "check profiles/demo-forbidden.yaml",
    "plan profiles/demo.yaml",
    "run profiles/demo.yaml",
    "run profiles/demo.yaml --dry-run",
    "verify releases/demo/latest",
    "verify nosuch",
    "open nosuch",
    "explain nosuch",
    "store ls",
    "store du",
    "store gc --dry-run",
    "methods",
    "doctor",
)


@pytest.mark.story
def test_no_line_is_wider_than_80_columns_and_no_word_is_broken(demo_release: Path, tmp_path: Path) -> None:
    # A project of its own, because another run of the profile changes what other tests expect of its last run.
    project = Project(tmp_path / "project")
    shutil.copytree(demo_release, project.root, symlinks=True)
    project.mergegate("run", "profiles/demo.yaml")
    (project.root / "schedules.yaml").write_text("profiles:\n  - {profile: profiles/demo.yaml, schedule: every 6 h}\n")
    for command in PLAIN:
        wide, narrow = (project.mergegate(*command.split(), columns=columns).output for columns in (1000, 80))
        for line in narrow.splitlines():
            # Only a word that is wider than the terminal may pass its end.
            assert cell_len(line.rstrip()) <= 80 or max(map(cell_len, line.split())) > 60, (command, line)
        assert narrow.count("…") == wide.count("…"), command
        # A narrow table may have other words, but no part of a word that is in one piece in the wide output. Numbers
        # change from call to call.
        new = {word for word in set(narrow.split()) - set(wide.split()) if not re.search(r"\d", word)}
        lost = set(wide.split()) - set(narrow.split())
        assert not [part for part in new if any(word.startswith(part) or word.endswith(part) for word in lost)], command
