"""Release merges that have adapters as parents, and merges that are published as an adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from demo_project import PROFILES, Project, expect, make_project
from safetensors.torch import load_file
from sheet_sources import require_correct_sheet
from test_release import exact_match

DEMO = PROFILES / "demo"


@pytest.mark.parametrize("name", ["reverser", pytest.param("shifter", marks=pytest.mark.story)])
def test_the_shipped_adapters_are_what_extraction_makes(tmp_path: Path, name: str) -> None:
    project = make_project(tmp_path)
    models, out = project.root / "profiles" / "demo" / "models", project.root / "adapter"
    arguments = ("--rank", "16", "--dtype", "bfloat16", "--output", str(out))
    done = expect(project.mergegate("extract-lora", str(models / name), str(models / "base"), *arguments), 0)
    assert "% of the change" in done.output
    shipped, made = (
        load_file(place / "adapter_model.safetensors") for place in (DEMO / "adapters" / f"{name}-lora", out)
    )
    assert shipped.keys() == made.keys()
    # The signs of singular vectors depend on the machine, but the product of A and B does not.
    for key in (one for one in made if "lora_A" in one):
        b = key.replace("lora_A", "lora_B")
        product, before = (one[b].float() @ one[key].float() for one in (made, shipped))
        assert float((product - before).norm()) <= 0.01 * float(before.norm()), key


def test_an_existing_directory_is_not_written_over(tmp_path: Path) -> None:
    done = expect(make_project(tmp_path).mergegate("extract-lora", "a", "b", "--rank", "4", "-o", str(tmp_path)), 2)
    assert "it exists" in done.output


@pytest.mark.story
def test_a_recipe_with_adapters_is_merged_as_planned(tmp_path: Path) -> None:
    project, file = make_project(tmp_path), "profiles/demo/recipes/adapters.yaml"
    expect(project.mergegate("merge", file, "out"), 0)
    planned = json.loads(expect(project.mergegate("plan", file, "--json"), 0).stdout)
    made, needs = load_file(tmp_path / "out" / "adapter_model.safetensors").values(), planned["needs"]
    assert (needs["tensors"], needs["parameters"]) == (len(made), sum(one.numel() for one in made))
    assert needs["bytes_written"] == sum(one.nbytes for one in made)
    assert planned["time"] is None


def run(tmp_path: Path, profile: str) -> tuple[Project, Path]:
    """Release a profile, reproduce the release, and return the project and the release."""
    project = make_project(tmp_path)
    expect(project.mergegate("run", f"profiles/{profile}.yaml"), 0)
    release = project.root / "releases" / profile / "latest"
    expect(project.mergegate("reproduce", str(release), "--parents", str(DEMO / "recipes")), 0)
    return project, release


@pytest.mark.proof
def test_adapters_are_released_as_an_adapter(tmp_path: Path, prefect_api: None) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    project, release = run(tmp_path, "demo-adapters")
    assert "library_name: peft" in (release / "README.md").read_text()
    assert not (release / "model.safetensors").exists()
    # Seven matrices of 96 x 96 to 192 x 96 in each of three layers, two adapters, products of rank 96 at most, ties.
    require_correct_sheet(release, project.root / "profiles" / "demo-adapters.yaml")
    base = AutoModelForCausalLM.from_pretrained(DEMO / "models" / "base")
    whole = tmp_path / "whole"
    shutil.copytree(DEMO / "models" / "base", whole)
    PeftModel.from_pretrained(base, release).merge_and_unload().save_pretrained(whole)
    assert exact_match(whole, "reverse") > 0.95
    assert exact_match(whole, "shift") > 0.95
