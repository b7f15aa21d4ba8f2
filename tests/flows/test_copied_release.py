"""A merge whose recipe has no effect is refused before any evaluation, unless the profile accepts the copy."""

from __future__ import annotations

import pytest
import yaml
from demo_project import Project

CHANGES = {
    "zero weights": ("base", {"reverser": 0.0, "shifter": 0.0}),
    "one parent alone": ("reverser", {"reverser": 1.0, "shifter": 0.0}),
}


def write_profile(project: Project, weights: dict[str, float], **checks: object) -> str:
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": "demo/models/base",
        "models": [{"model": f"demo/models/{it}", "parameters": {"weight": weights[it]}} for it in weights],
        "dtype": "bfloat16",
    }
    profile = {
        "name": "copied",
        "recipe": recipe,
        "checks": {"license": {"purpose": "commercial", "visibility": "public"}, **checks},
        "evaluate": {"tasks": [{"task": "demo/tasks/copy.yaml", "guarded_by": "base", "max_drop": 3}]},
        "publish": {"to": "directory", "path": "../releases/copied"},
    }
    (project.root / "profiles" / "copied.yaml").write_text(yaml.safe_dump(profile))
    return "profiles/copied.yaml"


@pytest.mark.story
@pytest.mark.parametrize(("name", "weights"), CHANGES.values(), ids=CHANGES)
def test_a_copy_is_refused_before_any_evaluation(project: Project, name: str, weights: dict[str, float]) -> None:
    result = project.mergegate("run", write_profile(project, weights))
    assert result.exit_code == 3, result.output
    assert f"the merge is a copy of {name}: all weights are equal" in result.output
    assert f"publish {name} itself, or set checks.copies.accepted: [{name}]" in result.output
    assert project.artifacts("evaluate") == set()
    assert not (project.root / "releases" / "copied").exists()


@pytest.mark.story
def test_an_accepted_copy_is_released(project: Project) -> None:
    name = write_profile(project, CHANGES["one parent alone"][1], copies={"accepted": ["reverser"]})
    result = project.mergegate("run", name)
    assert result.exit_code == 0, result.output
    assert "released copied" in result.output
    release = project.root / "releases" / "copied" / "latest"
    for file in ("README.md", "MODIFICATIONS"):
        assert "This release is a copy. Its weights are those of " in (release / file).read_text()
    assert project.mergegate("verify", str(release)).exit_code == 0
