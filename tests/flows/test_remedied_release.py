"""Remedies: which recipes follow a refused merge, and which releases a better one must not replace."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from demo_project import Printed, Project

from mergegate.flows.attempt import assess_merge
from mergegate.flows.preflight import pin_profile_evidence
from mergegate.flows.profile import load_profile
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.checkpoints.model import Model
from mergegate.tasks.checkpoints.pin import pin_checkpoints, resolve_parents
from mergegate.tasks.merge import MERGED

pytestmark = pytest.mark.story

Released = tuple[Project, Printed]


@pytest.fixture(scope="module")
def remedied(released: Released) -> Released:
    """Run the profile whose first recipe is refused, and return the demo project with the result."""
    project, _ = released
    return project, project.mergegate("run", "profiles/demo-remedied.yaml", "--json")


def test_a_remedy_turns_a_refused_merge_into_a_release(remedied: Released) -> None:
    _, result = remedied
    assert result.exit_code == 0, result.output
    outcome = json.loads(result.stdout)
    assert outcome["status"] == "released"
    tried = outcome["content"]["attempts"]
    assert [(one["recipe"], one["outcome"]) for one in tried] == [
        ("linear of 2", "fail"),
        ("ties of 2 over base", "pass"),
    ]
    assert "reverse" in tried[0]["reason"]
    assert yaml.safe_load((Path(outcome["location"]) / "recipe.yaml").read_text())["merge_method"] == "ties"


def test_the_report_compares_what_was_tried(remedied: Released) -> None:
    _, result = remedied
    page = Path(json.loads(result.stdout)["report"]).read_text()
    assert "linear of 2" in page
    assert "merge_method: ties" in page


def test_a_second_run_finds_the_remedied_release(remedied: Released) -> None:
    project, _ = remedied
    before = project.artifacts("evaluate"), project.artifacts("gate")
    result = project.mergegate("run", "profiles/demo-remedied.yaml")
    assert result.exit_code == 0
    assert "nothing new" in result.output
    assert (project.artifacts("evaluate"), project.artifacts("gate")) == before


def test_parents_are_not_evaluated_again_for_a_remedy(remedied: Released) -> None:
    project, _ = remedied
    names = [
        json.loads((path / "value.json").read_text())["model"]
        for path in (project.home / "store" / "evaluate").iterdir()
        if path.is_dir()
    ]
    assert {name: names.count(name) for name in ("base", "reverser", "shifter")} == dict.fromkeys(
        ("base", "reverser", "shifter"), 3
    )


@pytest.mark.proof
def test_when_every_remedy_is_refused_nothing_is_released(released: Released) -> None:
    project, _ = released
    profile = project.edit("demo-remedied.yaml", "{merge_method: ties, base_model: ../models/base, ", "{")
    text = (project.root / profile).read_text().replace("weight: 1.0, density: 0.5", "dtype: float32")
    (project.root / profile).write_text(text)
    result = project.mergegate("run", profile, "--json")
    assert result.exit_code == 3
    assert [one["outcome"] for one in json.loads(result.stdout)["content"]["attempts"]] == ["fail", "fail"]
    assert not (project.root / "releases" / "edited-demo-remedied").exists()


def test_a_misspelt_remedy_is_found_before_anything_is_merged(project: Project) -> None:
    profile = project.edit("demo-remedied.yaml", "density: 0.5", "densty: 0.5")
    result = project.mergegate("run", profile)
    assert result.exit_code == 2
    assert "remedies[0]" in result.output
    assert "density" in result.output
    assert project.artifacts("merge") == set()


def test_a_merge_is_compared_with_the_current_release(released: Released) -> None:
    project, _ = released
    profile = project.edit("demo.yaml", "guarded_by: reverser", "guarded_by: champion")
    first = project.mergegate("run", profile, "--json")
    assert first.exit_code == 0, first.output
    again = project.mergegate("run", profile, "--json")
    assert json.loads(again.stdout)["status"] == "nothing new"
    champion = (project.root / "releases" / "edited-demo" / "latest").readlink()
    text = (project.root / profile).read_text().replace("recipes/ties.yaml", "recipes/linear.yaml")
    text = text.replace("guarded_by: base", "guarded_by: shifter")
    (project.root / profile).write_text(text)
    worse = project.mergegate("run", profile, "--json")
    assert worse.exit_code == 3
    guards = json.loads(worse.stdout)["content"]["verdict"]["guards"]
    assert [(guard["reference"], guard["outcome"]) for guard in guards if guard["task"] == "reverse"] == [
        ("champion", "fail")
    ]
    assert (project.root / "releases" / "edited-demo" / "latest").readlink() == champion


def test_noise_in_the_weights_is_refused_and_the_same_merge_without_it_passes(released: Released) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    project, _ = released
    noisy = project.root / "noisy"
    if not noisy.exists():
        shutil.copytree(project.latest.resolve(), noisy)
        weights = load_file(noisy / "model.safetensors")
        generator = torch.Generator().manual_seed(0)
        for name, tensor in weights.items():
            noise = torch.randn(tensor.shape, generator=generator) * 0.3 * tensor.float().std()
            weights[name] = (tensor.float() + noise).to(tensor.dtype)
        save_file(weights, noisy / "model.safetensors", {"format": "pt"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MERGEGATE_HOME", str(project.home))
        hashes = HashMemo(project.root / "memo.sqlite")
        profile = load_profile(project.root / "profiles" / "demo.yaml")
        found = resolve_parents(profile.candidates()[0].recipe)
        evidence = pin_profile_evidence(profile, found, hashes)
        parents = pin_checkpoints(found, hashes)
        verdicts = {
            place.name: assess_merge(
                Model(name=MERGED, digest=hashes.sha256(place / "model.safetensors"), directory=place),
                parents,
                None,
                evidence,
            ).verdict.value
            for place in (project.latest.resolve(), noisy)
        }
    clean, broken = verdicts[project.latest.resolve().name], verdicts["noisy"]
    assert clean.publishable
    assert broken.outcome == "fail"
    assert not broken.publishable


@pytest.mark.proof
def test_what_a_refusal_proposes_is_new_and_is_tried_when_asked_for(released: Released) -> None:
    """The proposal is a merge over the base, not the plain average, which another profile has already seen refused."""
    project, _ = released
    assert project.mergegate("run", "profiles/demo-refused.yaml").exit_code == 3
    refused = project.mergegate("run", "profiles/demo-lopsided.yaml")
    assert refused.exit_code == 3
    block = refused.output.partition("remedies:")[2].partition("  report")[0]
    (item,) = yaml.safe_load(f"remedies:{block}")["remedies"]
    assert (item["merge_method"], item["base_model"]) == ("ties", "../models/base")
    tried = project.mergegate("run", "profiles/demo-lopsided.yaml", "--remedy", "auto", "--json")
    assert tried.exit_code == 0, tried.output
    outcome = json.loads(tried.stdout)
    assert outcome["content"]["attempts"][0]["outcome"] == "fail"
    assert outcome["status"] == "released"
