"""Optional stages of a profile: the ensemble, a judge and serving. Each can stop a release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from demo_project import Printed, Project
from optional_stages import asks_a_judge, profile, says, served_by_a_stand_in, serving
from typer.testing import Result

Released = tuple[Project, Printed]


def outcome(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def everything(released_with_everything: Path) -> tuple[Project, dict[str, Any]]:
    """Return the demo released with every optional stage, and the outcome of that run. Tests must not change it."""
    return Project(released_with_everything), json.loads((released_with_everything / "outcome.json").read_text())


@pytest.mark.story
def test_the_report_compares_the_merge_with_the_ensemble(everything: tuple[Project, dict[str, Any]]) -> None:
    project, ended = everything
    together = ended["content"]["ensemble"]
    assert together["documents"] == 600
    assert "An ensemble that averages the token" in (project.home / "reports" / "everything.html").read_text()


@pytest.mark.story
def test_a_judge_with_position_bias_is_inconclusive(released: Released) -> None:
    project, _ = released
    with serving(lambda body: says("A")) as asked:
        biased = project.mergegate("run", profile(project, "judged", judge=asks_a_judge(project, asked.url)), "--json")
    # No win survives the swap.
    assert biased.exit_code == 3, biased.output
    content = outcome(biased)["content"]
    assert content["judge"]["consistency"] == 0
    assert content["verdict"]["outcome"] == "inconclusive"
    assert not (project.root / "releases" / "judged").exists()
    assert asked.bodies
    assert "judge-1" in Path(outcome(biased)["report"]).read_text()


def test_a_judge_with_an_unknown_reference_is_rejected_at_once(project: Project) -> None:
    name = profile(project, "unknown", judge={**asks_a_judge(project, "http://localhost:1/v1"), "guarded_by": "shiftr"})
    result = project.mergegate("run", name)
    assert result.exit_code == 2
    assert "judge.guarded_by" in result.output
    assert "shifter" in result.output


@pytest.mark.story
def test_a_merge_that_the_gate_refuses_is_not_judged(released: Released) -> None:
    project, _ = released
    recipe = {"recipe": "demo/recipes/linear.yaml"}
    guards = {"evaluate": yaml.safe_load((project.root / "profiles" / "demo-refused.yaml").read_text())["evaluate"]}
    with serving(lambda body: says("tie")) as asked:
        name = profile(project, "not-asked", judge=asks_a_judge(project, asked.url), **recipe, **guards)
        assert project.mergegate("run", name).exit_code == 3
    assert asked.bodies == []


def test_a_missing_server_is_found_before_the_merge(project: Project) -> None:
    result = project.mergegate("run", profile(project, "nowhere", serve={"python": "nowhere/bin/python"}))
    assert result.exit_code == 2
    assert "serve.python" in result.output
    assert "make serve-env" in result.output
    assert not (project.home / "store" / "merge").exists()


def checks_of(ended: dict[str, Any]) -> set[str]:
    return {check["outcome"] for check in ended["content"]["served"]}


def speeds(ended: dict[str, Any]) -> dict[str, float]:
    return {model["name"]: model["measured"]["tokens_per_second"] for model in ended["content"]["serving"]}


@pytest.mark.story
def test_a_merge_is_released_if_its_server_answers_like_the_model(
    everything: tuple[Project, dict[str, Any]],
) -> None:
    project, ended = everything
    assert "fail" not in checks_of(ended)
    assert "base" in speeds(ended)
    assert all(speeds(ended).values())
    assert "Tokens/s" in (project.home / "reports" / "everything.html").read_text()
    place = project.root / "releases" / "everything"
    (version,) = (path for path in place.iterdir() if not path.is_symlink())
    assert "Tokens/s" not in (version / "report.html").read_text(), "a release does not change with the machine"


@pytest.mark.story
def test_a_merge_whose_server_answers_differently_is_refused(released: Released) -> None:
    """Without a model, the stand-in server returns canned answers, so it does not serve the merge."""
    project, _ = released
    result = project.mergegate("run", profile(project, "canned", serve=served_by_a_stand_in()), "--json")
    assert result.exit_code == 3, result.output
    ended = outcome(result)
    assert "fail" in checks_of(ended)
    assert not (project.root / "releases" / "canned").exists()
    assert "base" not in speeds(ended), "a merge that is refused is compared with nobody"
    assert all(speeds(ended).values())
    assert "Tokens/s" in Path(ended["report"]).read_text()
