"""Different tokenizers, and copies of a parent, are refused with what they affect, unless the profile accepts them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from demo_project import PROFILES, Project, expect
from tokenizers import Tokenizer

MODELS = PROFILES / "demo" / "models"


def write_lower_profile(project: Project, *accepted: str) -> str:
    """Write a profile that merges the base with a model of the same token IDs whose tokenizer lowercases text."""
    place = project.root / "models"
    for name in ("base", "shifter"):
        shutil.copytree(MODELS / name, place / name, dirs_exist_ok=True)
    path = place / "shifter" / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": {"type": "Lowercase"}}))
    models = [{"model": str(place / name)} for name in ("base", "shifter")]
    recipe = {"merge_method": "linear", "parameters": {"weight": 0.5}, "models": models}
    checks = {"license": {"purpose": "commercial", "visibility": "public"}, "tokenizer": {"accepted": [*accepted]}}
    (project.root / "lower.yaml").write_text(yaml.safe_dump({"name": "lower", "recipe": recipe, "checks": checks}))
    return "lower.yaml"


@pytest.mark.story
def test_a_tokenizer_that_cuts_in_another_way_is_refused_with_the_share_and_accepted_by_name(project: Project) -> None:
    found, severities = [], []
    for accepted, code in (((), 3), (("normalizer",), 0)):
        checked = expect(project.mergegate("check", write_lower_profile(project, *accepted), "--json"), code)
        (remark,) = [one for one in json.loads(checked.stdout)["remarks"] if "normalizer" in one["where"]]
        found.append(remark["found"].replace(str(project.root / "models") + "/", ""))
        severities.append(remark["severity"])
    assert severities == ["block", "info"]
    assert "tokens of shifter are segmented differently" in found[0]


@pytest.mark.proof
def test_the_union_of_the_demo_keeps_both_skills_and_the_token_of_one_parent(demo: Project) -> None:
    expect(demo.mergegate("plan", "profiles/demo-union.yaml", "--no-probe"), 0)
    result = expect(demo.mergegate("run", "profiles/demo-union.yaml", "--json"), 0)
    outcome = json.loads(result.stdout)
    assert outcome["status"] == "released"
    release = Path(outcome["location"])
    union = Tokenizer.from_file(str(release / "tokenizer.json"))
    base = Tokenizer.from_file(str(MODELS / "base" / "tokenizer.json"))
    assert union.get_vocab() == {**base.get_vocab(), "<hint>": 34}
    assert json.loads((release / "config.json").read_text())["vocab_size"] == 35
    guards = {guard["task"]: guard["outcome"] for guard in outcome["content"]["verdict"]["guards"]}
    assert guards == {"copy": "pass", "reverse": "pass", "shift": "pass"}


COPY = {"reverser": 1.0, "shifter": 0.0}


def write_copied_profile(project: Project, weights: dict[str, float], **checks: object) -> str:
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
def test_a_copy_is_refused_before_any_evaluation(project: Project) -> None:
    for name, weights in (("base", {"reverser": 0.0, "shifter": 0.0}), ("reverser", COPY)):
        result = expect(project.mergegate("run", write_copied_profile(project, weights)), 3)
        assert f"the merge is a copy of {name}: all weights are equal" in result.output
        assert f"publish {name} itself, or set checks.copies.accepted: [{name}]" in result.output
        assert project.artifacts("evaluate") == set()
        assert not (project.root / "releases" / "copied").exists()


@pytest.mark.proof
def test_an_accepted_copy_is_released(project: Project) -> None:
    name = write_copied_profile(project, COPY, copies={"accepted": ["reverser"]})
    expect(project.mergegate("run", name), 0, "released copied")
    release = project.root / "releases" / "copied" / "latest"
    for file in ("README.md", "MODIFICATIONS"):
        assert "This release is a copy. Its weights are those of " in (release / file).read_text()
    assert project.mergegate("verify", str(release)).exit_code == 0
