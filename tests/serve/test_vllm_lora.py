"""The real vLLM with an adapter on its base (``make test-serve``), compared with PEFT's merge of both."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from variants import DEMO, PROJECT, applied, linear_adapter, negated, pinned, real_server

from mergegate.flows.profile import load_profile
from mergegate.tasks.models.checkpoints.model import Model
from mergegate.tasks.quality.serve.launch import PYTHON, find_server
from mergegate.tasks.quality.serve.stage import SmokeSetup, smoke_checkpoint
from mergegate.tasks.quality.serve.verdict import ServeVerdict

sys.path.append(str(PROJECT / "tests" / "flows"))

from demo_project import make_project  # Shared with the flow tests.

pytestmark = real_server

torch.set_num_threads(1)

SERVED = load_profile(DEMO.parent / "demo-served.yaml").serve
assert SERVED is not None
SETTINGS = SERVED.model_copy(
    update={
        "python": PROJECT / PYTHON,
        "environment": {"OMP_NUM_THREADS": "1"},
        "prompts": ("rev: abcd>", "copy: abcd>", "the old "),
        "texts": ("rev: hgfe>efgh", "copy: hgfe>hgfe", "the old pig sees the red cat."),
        "stops": ("rev: abcd>",),
    }
)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linear_adapter(tmp_path_factory.mktemp("lora") / "adapter")


@pytest.fixture(scope="module")
def merged(adapter: Path) -> Model:
    return applied(adapter, adapter.with_name("merged"))


def smoke(merged: Model, adapter: Path, log: Path) -> ServeVerdict:
    kind = find_server(SETTINGS, PROJECT)
    return smoke_checkpoint(merged, SETTINGS, SmokeSetup(kind, "cpu", log), adapted_model=pinned(adapter))


@pytest.mark.proof
def test_an_adapter_with_the_wrong_sign_is_refused_by_parity(adapter: Path, merged: Model, tmp_path: Path) -> None:
    verdict = smoke(merged, negated(adapter, tmp_path / "negated"), tmp_path / "server.log")
    seen = {check.name: check.seen for check in verdict.failures}
    assert "on average" in seen["parity"]
    assert "adapter" in seen
    refusal = verdict.publication_error()
    assert refusal is not None
    assert refusal.exit_code == 3


RECIPE = """
merge_method: task_arithmetic
base_model: {base}
models:
  - {{model: "{base}+{one}", parameters: {{weight: 0.8}}}}
  - {{model: "{base}+{two}", parameters: {{weight: 0.2}}}}
output: adapter
"""
PROFILE = """
name: linear
recipe: recipe.yaml
checks:
  license: {{purpose: commercial, visibility: public}}
perplexity: {{documents: demo/data/held-out.jsonl, max_increase: 90%}}
evaluate:
  tasks:
    - {{task: demo/tasks/reverse.yaml, guarded_by: base, max_drop: 3, advisory: true}}  # the base cannot reverse
serve:
  python: {python}
  prompts: ["rev: abcd>", "copy: abcd>", "the old "]
  texts: ["rev: hgfe>efgh", "copy: hgfe>hgfe", "the old pig sees the red cat."]
publish: {{to: directory, path: ../releases/linear}}
"""


@pytest.mark.proof
def test_adapters_become_an_adapter_that_is_served_as_lora_and_released(tmp_path: Path, prefect_api: None) -> None:
    project = make_project(tmp_path / "project")
    # The cards of the shipped adapters refer to the models by this path, and the license check looks for them there.
    (tmp_path / "models").symlink_to(DEMO / "models")
    adapters = {name: linear_adapter(tmp_path / "adapters" / name, name) for name in ("reverser", "shifter")}
    for name, place in adapters.items():
        shutil.copy(DEMO / "adapters" / f"{name}-lora" / "README.md", place)
    profiles = project.root / "profiles"
    recipe = RECIPE.format(base="demo/models/base", one=adapters["reverser"], two=adapters["shifter"])
    (profiles / "recipe.yaml").write_text(recipe)
    (profiles / "linear.yaml").write_text(PROFILE.format(python=PROJECT / PYTHON))
    done = project.mergegate("run", "profiles/linear.yaml", "--json")
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)["content"]
    assert content["served_as"] == "served as LoRA on its base: factors of rank 32, room for 32"
    checks = {check["name"]: check["outcome"] for check in content["served"]}
    assert {"parity", "adapter"} <= checks.keys()
    assert set(checks.values()) == {"pass"}
    release = project.root / "releases" / "linear" / "latest"
    assert (release / "adapter_model.safetensors").is_file()
    card = (release / "README.md").read_text()
    assert "served as LoRA on its base" in card
    assert "--enable-lora" in card
