"""Optional stages of a profile: the ensemble, a judge and serving. Each can stop a release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from demo_project import Project, expect
from optional_stages import asks_a_judge, profile, says, served_by_a_stand_in, serving
from typer.testing import Result


def outcome(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def checks_of(ended: dict[str, Any]) -> set[str]:
    return {check["outcome"] for check in ended["content"]["served"]}


def speeds(ended: dict[str, Any]) -> dict[str, float]:
    return {model["name"]: model["measured"]["tokens_per_second"] for model in ended["content"]["serving"]}


@pytest.mark.proof
def test_a_merge_is_compared_with_the_ensemble_and_released_if_its_server_answers_like_the_model(
    released_with_everything: Path,
) -> None:
    project = Project(released_with_everything)
    ended = json.loads((project.root / "outcome.json").read_text())
    page = (project.home / "reports" / "everything.html").read_text()
    assert ended["content"]["ensemble"]["documents"] == 600
    assert "An ensemble that averages the token" in page
    assert "fail" not in checks_of(ended)
    assert "base" in speeds(ended)
    assert all(speeds(ended).values())
    assert "Tokens/s" in page
    (version,) = (path for path in (project.root / "releases" / "everything").iterdir() if not path.is_symlink())
    assert "Tokens/s" not in (version / "report.html").read_text(), "a release does not change with the machine"


@pytest.mark.proof
def test_a_judge_with_position_bias_is_inconclusive(demo: Project) -> None:
    with serving(lambda body: says("A")) as asked:
        biased = demo.mergegate("run", profile(demo, "judged", judge=asks_a_judge(demo, asked.url)), "--json")
    # No win survives the swap.
    assert biased.exit_code == 3, biased.output
    content = outcome(biased)["content"]
    assert content["judge"]["consistency"] == 0
    assert content["verdict"]["outcome"] == "inconclusive"
    assert not (demo.root / "releases" / "judged").exists()
    assert asked.bodies
    assert "judge-1" in Path(outcome(biased)["report"]).read_text()


@pytest.mark.story
def test_a_judge_with_an_unknown_reference_is_rejected_at_once(project: Project) -> None:
    name = profile(project, "unknown", judge={**asks_a_judge(project, "http://localhost:1/v1"), "guarded_by": "shiftr"})
    expect(project.mergegate("run", name), 2, "judge.guarded_by", "shifter")


@pytest.mark.story
def test_a_merge_that_the_gate_refuses_is_not_judged(demo: Project) -> None:
    recipe = {"recipe": "demo/recipes/linear.yaml"}
    guards = {"evaluate": yaml.safe_load((demo.root / "profiles" / "demo-refused.yaml").read_text())["evaluate"]}
    with serving(lambda body: says("tie")) as asked:
        name = profile(demo, "not-asked", judge=asks_a_judge(demo, asked.url), **recipe, **guards)
        assert demo.mergegate("run", name).exit_code == 3
    assert asked.bodies == []


@pytest.mark.story
def test_a_missing_server_is_found_before_the_merge(project: Project) -> None:
    result = project.mergegate("run", profile(project, "nowhere", serve={"python": "nowhere/bin/python"}))
    expect(result, 2, "serve.python", "-m venv .venv-vllm && .venv-vllm/bin/pip install")
    assert not (project.home / "store" / "merge").exists()


@pytest.mark.story
def test_a_merge_whose_server_answers_differently_is_refused(demo: Project) -> None:
    """Without a model, the stand-in server returns canned answers, so it does not serve the merge."""
    result = expect(demo.mergegate("run", profile(demo, "canned", serve=served_by_a_stand_in()), "--json"), 3)
    ended = outcome(result)
    assert "fail" in checks_of(ended)
    assert not (demo.root / "releases" / "canned").exists()
    assert "base" not in speeds(ended), "a merge that is refused is compared with nobody"
    assert all(speeds(ended).values())
    assert "Tokens/s" in Path(ended["report"]).read_text()
