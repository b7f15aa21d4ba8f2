"""Commands name the share of a text that different tokenizers affect. Users accept it or join the vocabularies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from demo_project import PROFILES, Printed, Project
from safetensors.torch import load_file
from tokenizers import Tokenizer

MODELS = PROFILES / "demo" / "models"
Released = tuple[Project, Printed]


def write_profile(project: Project, *accepted: str) -> str:
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
        checked = project.mergegate("check", write_profile(project, *accepted), "--json")
        assert checked.exit_code == code, checked.output
        (remark,) = [one for one in json.loads(checked.stdout)["remarks"] if "normalizer" in one["where"]]
        found.append(remark["found"].replace(str(project.root / "models") + "/", ""))
        severities.append(remark["severity"])
    assert severities == ["block", "info"]
    assert "tokens of shifter are segmented differently" in found[0]


@pytest.mark.story
def test_the_union_of_the_demo_keeps_both_skills_and_the_token_of_one_parent(released: Released) -> None:
    project, _ = released
    planned = project.mergegate("plan", "profiles/demo-union.yaml", "--no-probe")
    assert planned.exit_code == 0, planned.output
    result = project.mergegate("run", "profiles/demo-union.yaml", "--json")
    assert result.exit_code == 0, result.output
    outcome = json.loads(result.stdout)
    assert outcome["status"] == "released"
    release = Path(outcome["location"])
    union = Tokenizer.from_file(str(release / "tokenizer.json"))
    base = Tokenizer.from_file(str(MODELS / "base" / "tokenizer.json"))
    assert union.get_vocab() == {**base.get_vocab(), "<hint>": 34}
    assert json.loads((release / "config.json").read_text())["vocab_size"] == 35
    guards = {guard["task"]: guard["outcome"] for guard in outcome["content"]["verdict"]["guards"]}
    assert guards == {"copy": "pass", "reverse": "pass", "shift": "pass"}


def test_a_model_with_an_adapter_is_given_another_tokenizer_as_the_model_that_it_stands_for(project: Project) -> None:
    adapted = f"{MODELS / 'base'}+{PROFILES / 'demo' / 'adapters' / 'reverser-lora'}"
    recipe = project.root / "plain.yaml"
    recipe.write_text(yaml.safe_dump({"merge_method": "passthrough", "models": [{"model": adapted}]}))
    assert project.mergegate("merge", str(recipe), str(project.root / "whole")).exit_code == 0
    for name, model in (("adapted", adapted), ("plain", str(project.root / "whole"))):
        arguments = (model, str(MODELS / "marked"), str(project.root / name), "--method", "mean")
        assert project.mergegate("transplant-tokenizer", *arguments).exit_code == 0
    tensors, others = (
        {name: one for file in place.glob("*.safetensors") for name, one in load_file(file).items()}
        for place in (project.root / "adapted", project.root / "plain")
    )
    assert tensors.keys() == others.keys()
    assert [name for name, tensor in tensors.items() if not tensor.equal(others[name])] == []
