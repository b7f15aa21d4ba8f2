"""``mergegate compare`` evaluates two checkpoints with a profile's checks, and merges and publishes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from demo_project import PROFILES, Project, expect, make_project

from mergegate.flows.compare import find_checkpoints
from mergegate.merge_core.errors import InvalidInput

MODELS = PROFILES / "demo" / "models"
BASE = str(MODELS / "base")
PROFILE = """name: small
recipe: demo/recipes/ties.yaml
perplexity: {documents: demo/data/held-out.jsonl, max_documents: 30, max_increase: 50%}
evaluate:
  documents: 50
  extend: false
  tasks:
    - {task: demo/tasks/copy.yaml, guarded_by: base, max_drop: 3}
    - {task: demo/tasks/reverse.yaml, guarded_by: base, max_drop: 3}
    - {task: demo/tasks/reverse.yaml, guarded_by: reverser, max_drop: 3}
publish: {to: directory, path: ../releases/small}
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, prefect_api: None) -> tuple[Project, dict[str, Any]]:
    """Return a project in which base was compared with reverser, and the JSON output of the comparison."""
    project = make_project(tmp_path_factory.mktemp("compared"))
    (project.root / "profiles" / "small.yaml").write_text(PROFILE)
    code, outcome = compare(project, MODELS / "reverser", MODELS / "base")
    assert code == 3
    return project, outcome


def compare(project: Project, reference: Path, candidate: Path) -> tuple[int, dict[str, Any]]:
    done = project.mergegate("compare", str(reference), str(candidate), "--profile", "profiles/small.yaml", "--json")
    return done.exit_code, json.loads(done.stdout)


Compared = tuple[Project, dict[str, Any]]


@pytest.mark.proof
def test_a_lost_skill_is_refused_and_every_guard_is_held_against_the_reference_once(compared: Compared) -> None:
    project, outcome = compared
    assert (outcome["status"], outcome["location"]) == ("refused", None)
    assert outcome["message"].startswith("base does not pass against reverser\nreverse lost ")
    verdict = outcome["content"]["verdict"]
    guards = verdict["guards"]
    assert [(guard["task"], guard["reference"]) for guard in guards] == [("copy", "reverser"), ("reverse", "reverser")]
    assert guards[1]["outcome"] == "fail"
    assert guards[1]["drop"] > 50
    assert (verdict["drift"]["reference"], verdict["drift"]["documents"]) == ("reverser", 30)
    assert project.artifacts("merge") == set()
    assert not (project.root / "releases").exists()


@pytest.mark.story
def test_the_report_is_a_page_about_both(compared: Compared) -> None:
    project, outcome = compared
    page = Path(outcome["report"])
    assert page == project.home / "reports" / "base-against-reverser.html"
    text = page.read_text()
    assert "Compared models" in text
    assert ">License<" not in text, "no license was checked"
    assert "<h3>Recipe" not in text


@pytest.mark.story
def test_the_output_shows_lines_a_table_and_the_page(compared: Compared) -> None:
    project, _ = compared
    arguments = (str(MODELS / "reverser"), str(MODELS / "base"), "--profile", "profiles/small.yaml")
    done = expect(project.mergegate("compare", *arguments), 3)
    shown = ("perplexity", "evaluate", "gate", "base does not pass against reverser", "base-against-reverser.html")
    assert [words for words in shown if words not in done.stdout] == []


@pytest.mark.story
def test_the_other_way_round_nothing_is_measured_again(compared: Compared) -> None:
    project, first = compared
    before = {stage: project.artifacts(stage) for stage in ("perplexity", "evaluate")}
    assert all(before.values())
    _, outcome = compare(project, MODELS / "base", MODELS / "reverser")
    assert {stage: project.artifacts(stage) for stage in before} == before
    drops = [{g["task"]: g["drop"] for g in o["content"]["verdict"]["guards"]} for o in (first, outcome)]
    assert drops[1] == {task: -drop for task, drop in drops[0].items()}
    assert drops[0]["reverse"] > 50


@pytest.mark.story
def test_a_checkpoint_passes_against_itself(compared: Compared) -> None:
    project, _ = compared
    code, outcome = compare(project, MODELS / "reverser", MODELS / "reverser")
    assert (code, outcome["status"]) == (0, "passed")
    (first, second) = (model["digest"] for model in outcome["content"]["models"])
    assert first == second


@pytest.mark.parametrize(
    ("checkpoints", "profile", "words"),
    [
        ([BASE, f"{BASE}+./nowhere"], "profiles/demo.yaml", "./nowhere: no such directory"),
        pytest.param(
            [BASE, f"{BASE}+{BASE}"], "profiles/demo.yaml", "the adapter is incomplete", marks=pytest.mark.story
        ),
        ([BASE, str(MODELS / "reverser")], "nowhere.yaml", "No such file"),
        ([BASE, str(MODELS / "reverser")], "bare.yaml", "no evidence to compare with"),
    ],
)
def test_what_cannot_be_compared_is_said(project: Project, checkpoints: list[str], profile: str, words: str) -> None:
    (project.root / "bare.yaml").write_text("name: bare\nrecipe: none.yaml\n")
    expect(project.mergegate("compare", *checkpoints, "--profile", profile), 2, words)


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ("a/model", "b/model", ("a/model", "b/model")),
        ("a/model", "a/other", ("model", "other")),
        ("a/model", "a/model", ("a/model (reference)", "a/model")),
        ("a/one@two+three", "a/model", ("one@two+three", "model")),
    ],
)
def test_compared_checkpoints_have_distinct_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, second: str, names: tuple[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (first, second):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / "config.json").touch()
    found = find_checkpoints(first, second)
    assert tuple(model.name for model in found) == names
    assert [model.ref for model in found] == [first, second]
    assert [model.directory for model in found] == [tmp_path / first, tmp_path / second]


def test_a_reference_without_a_name_is_refused() -> None:
    with pytest.raises(InvalidInput):
        find_checkpoints("@main", "org/model")
