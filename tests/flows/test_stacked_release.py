"""A stack of layers is planned, checked, evaluated and released like any merge."""

from __future__ import annotations

import json

import pytest
import torch
from demo_project import PROFILES, Project
from safetensors.torch import load_file

SHIFTER = PROFILES / "demo" / "models" / "shifter"


def test_plan_tells_the_size_of_a_stack_before(project: Project) -> None:
    result = project.mergegate("plan", "profiles/demo-stacked.yaml", "--json")
    assert result.exit_code == 0, result.output
    needs = json.loads(result.stdout)["needs"]
    parent = load_file(SHIFTER / "model.safetensors")
    last = [tensor for name, tensor in parent.items() if name.startswith("model.layers.2.")]
    assert needs["tensors"] == len(parent) + len(last)
    assert needs["parameters"] == sum(tensor.numel() for tensor in (*parent.values(), *last))


@pytest.mark.story
def test_a_stack_is_checked_evaluated_and_released(project: Project) -> None:
    from transformers import AutoModelForCausalLM

    result = project.mergegate("run", "profiles/demo-stacked.yaml")
    assert result.exit_code == 0, result.output
    assert "released demo-stacked" in result.output
    released = project.root / "releases" / "demo-stacked" / "latest"
    model, info = AutoModelForCausalLM.from_pretrained(released, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    layers, parent = model.model.layers, AutoModelForCausalLM.from_pretrained(SHIFTER).model.layers
    assert len(layers) == len(parent) + 1
    for layer, index in zip(layers, (0, 1, 2, 2), strict=True):
        for name, tensor in layer.state_dict().items():
            assert torch.equal(tensor, parent[index].state_dict()[name])
