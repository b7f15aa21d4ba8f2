"""Recipes that change the architecture, from the recipe to the release: a mixture of experts, and a stack of layers."""

from __future__ import annotations

import json

import pytest
import torch
from demo_project import PROFILES, Project, expect, make_project
from safetensors.torch import load_file
from sheet_sources import require_correct_sheet

SHIFTER = PROFILES / "demo" / "models" / "shifter"


@pytest.fixture(scope="module")
def upcycled(tmp_path_factory: pytest.TempPathFactory, prefect_api: None) -> Project:
    """Return a project that released a mixture of dense models."""
    project = make_project(tmp_path_factory.mktemp("upcycled"))
    expect(project.mergegate("run", "profiles/demo-upcycled.yaml"), 0, "mixture of 4 experts over reverser")
    return project


@pytest.mark.proof
def test_a_mixture_is_released_with_a_correct_sheet_and_reproduced(upcycled: Project) -> None:
    latest = upcycled.root / "releases" / "demo-upcycled" / "latest"
    config = json.loads((latest / "config.json").read_text())
    assert (config["model_type"], config["num_local_experts"], config["num_experts_per_tok"]) == ("mixtral", 4, 2)
    card = (latest / "README.md").read_text()
    assert "positive_prompts" in card
    assert "license: apache-2.0" in card
    # 59 tensors of 779,232 parameters, a third of them with noise, and 24 prompts of about 20 tokens for 280,416.
    require_correct_sheet(latest, upcycled.root / "profiles" / "demo-upcycled.yaml")
    assert "| texts that models read for it | 24 prompts of the recipe" in (latest / "COMPLIANCE.md").read_text()
    parents = str(upcycled.root / "profiles" / "demo" / "recipes")
    expect(upcycled.mergegate("reproduce", "releases/demo-upcycled/latest", "--parents", parents), 0)


@pytest.mark.story
def test_plan_tells_the_size_of_a_stack_before(project: Project) -> None:
    result = expect(project.mergegate("plan", "profiles/demo-stacked.yaml", "--json"), 0)
    needs = json.loads(result.stdout)["needs"]
    parent = load_file(SHIFTER / "model.safetensors")
    last = [tensor for name, tensor in parent.items() if name.startswith("model.layers.2.")]
    assert needs["tensors"] == len(parent) + len(last)
    assert needs["parameters"] == sum(tensor.numel() for tensor in (*parent.values(), *last))


@pytest.mark.proof
def test_a_stack_is_checked_evaluated_and_released(project: Project) -> None:
    from transformers import AutoModelForCausalLM

    expect(project.mergegate("run", "profiles/demo-stacked.yaml"), 0, "released demo-stacked")
    released = project.root / "releases" / "demo-stacked" / "latest"
    model, info = AutoModelForCausalLM.from_pretrained(released, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    layers, parent = model.model.layers, AutoModelForCausalLM.from_pretrained(SHIFTER).model.layers
    assert len(layers) == len(parent) + 1
    for layer, index in zip(layers, (0, 1, 2, 2), strict=True):
        for name, tensor in layer.state_dict().items():
            assert torch.equal(tensor, parent[index].state_dict()[name])
