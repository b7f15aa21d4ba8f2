"""Different tokenizers, through the command line.

mergegate names the difference with the share of a text that it affects. The user accepts it by name or joins the
vocabularies.
"""

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


def with_another_cut(project: Project) -> Path:
    """Write a profile that merges the base with a model of the same token IDs whose tokenizer lowercases text."""
    place = project.root / "models"
    for name in ("base", "shifter"):
        shutil.copytree(MODELS / name, place / name)
    path = place / "shifter" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(content))
    recipe = {"merge_method": "linear", "parameters": {"weight": 0.5}}
    recipe["models"] = [{"model": str(place / name)} for name in ("base", "shifter")]
    profile = {
        "name": "lower",
        "recipe": recipe,
        "checks": {"license": {"purpose": "commercial", "visibility": "public"}},
    }
    path = project.root / "lower.yaml"
    path.write_text(yaml.safe_dump(profile))
    return path


@pytest.mark.story
def test_a_tokenizer_that_cuts_in_another_way_is_refused_with_the_share_and_accepted_by_name(project: Project) -> None:
    profile = with_another_cut(project)
    refused = project.mergegate("check", str(profile), "--json")
    assert refused.exit_code == 3
    (remark,) = [one for one in json.loads(refused.stdout)["remarks"] if "normalizer" in one["where"]]
    assert remark["severity"] == "block"
    assert "tokens of shifter are segmented differently" in remark["found"].replace(
        str(project.root / "models") + "/", ""
    )
    content = yaml.safe_load(profile.read_text())
    content["checks"]["tokenizer"] = {"accepted": ["normalizer"]}
    profile.write_text(yaml.safe_dump(content))
    accepted = project.mergegate("check", str(profile), "--json")
    assert accepted.exit_code == 0, accepted.output
    (remark,) = [one for one in json.loads(accepted.stdout)["remarks"] if "normalizer" in one["where"]]
    assert remark["severity"] == "info"


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
    made = []
    for name, model in (("adapted", adapted), ("plain", str(project.root / "whole"))):
        if name == "plain":
            assert project.mergegate("merge", str(recipe), str(project.root / "whole")).exit_code == 0
        out = project.root / name
        result = project.mergegate("transplant-tokenizer", model, str(MODELS / "marked"), str(out), "--method", "mean")
        made.append((result.exit_code, out))
    (code, first), (plain_code, second) = made
    assert code == plain_code == 0
    tensors, others = (
        {name: one for file in place.glob("*.safetensors") for name, one in load_file(file).items()}
        for place in (first, second)
    )
    assert tensors.keys() == others.keys()
    assert [name for name, tensor in tensors.items() if not tensor.equal(others[name])] == []
