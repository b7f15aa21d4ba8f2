"""A training run is released by window: only its last checkpoint is a reference, and each run finds new checkpoints."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from demo_project import PROFILES, Project, expect, make_project
from safetensors.torch import load_file, save_file

from mergegate.flows.profile import Profile, load_profile
from mergegate.merge_core.errors import InvalidInput

MODELS = PROFILES / "demo/models"
RUN = "{run: ../runs/a, window: 3, schedule: linear, dtype: bfloat16}"
REMEDIES = """\
remedies:
  - {window: 2}
  - {schedule: cosine}
  - {window: {steps: 400}, merge_method: median, base_model: demo/models/base, schedule: mean}
"""
PROFILE = f"""\
name: trained
recipe: {RUN}
{REMEDIES}checks: {{license: {{purpose: research, visibility: private}}}}
perplexity: {{documents: demo/data/held-out.jsonl, reference: last checkpoint}}
evaluate:
  documents: 100
  tasks: [{{task: demo/tasks/reverse.yaml, guarded_by: last checkpoint, max_drop: 3}}]
publish: {{to: directory, path: ../releases/trained}}
"""


def save(project: Project, step: int) -> None:
    """Save a checkpoint that is ``step`` thousandths of the way from the demo's base to its reverser, and a bit off."""
    directory = project.root / f"runs/a/checkpoint-{step}"
    shutil.copytree(MODELS / "base", directory)
    (directory / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    base, tuned = (load_file(MODELS / name / "model.safetensors") for name in ("base", "reverser"))
    generator = torch.Generator().manual_seed(step)
    noisy = {
        name: torch.lerp(tensor.float(), tuned[name].float(), step / 1000)
        + 0.002 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in base.items()
    }
    save_file({name: tensor.bfloat16() for name, tensor in noisy.items()}, directory / "model.safetensors")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = make_project(tmp_path)
    for step in (700, 800, 900, 1000):
        save(project, step)
    (project.root / "profiles/trained.yaml").write_text(PROFILE)
    return project


def profile_of(project: Project, text: str = PROFILE) -> Profile:
    (project.root / "profiles/trained.yaml").write_text(text)
    return load_profile(project.root / "profiles/trained.yaml")


def test_remedies_change_the_recipe_as_it_is_written(project: Project) -> None:
    first, smaller, cosine, median = profile_of(project).candidates()
    assert [len(candidate.windows[0].checkpoints) for candidate in (first, smaller, cosine, median)] == [3, 2, 3, 4]
    assert (first.summary, first.windows[0].steps) == ("linear of 3 checkpoints", "steps 800 to 1000")
    assert first.document is not None
    assert cosine.document is not None
    assert median.document is not None
    assert cosine.document["models"] != first.document["models"]
    assert (median.document["merge_method"], first.document["merge_method"]) == ("median", "linear")
    assert [remark.split(",")[0] for remark in smaller.remarks] == ["training run: 2 of 4 checkpoints"]
    assert not {"run", "window", "schedule"} & first.document.keys()


def test_a_document_of_several_may_be_a_run(project: Project) -> None:
    models = [{"model": "averaged", "parameters": {"weight": 1}}]
    documents = [
        {"name": "averaged", "run": "../runs/a", "window": 2},
        {"merge_method": "task_arithmetic", "base_model": "demo/models/base", "models": models},
    ]
    (project.root / "profiles/recipe.yaml").write_text(yaml.safe_dump_all(documents))
    (candidate,) = profile_of(project, PROFILE.replace(RUN, "recipe.yaml").replace(REMEDIES, "")).candidates()
    (window,) = candidate.windows
    assert window.checkpoints == ("../runs/a/checkpoint-900", "../runs/a/checkpoint-1000")
    assert candidate.summary == candidate.recipe.summary()
    assert len(candidate.recipe.steps) == 1


def test_a_guard_without_a_run_and_a_typing_error_in_a_remedy_are_refused(project: Project) -> None:
    profile_of(project, PROFILE.replace(RUN, "demo/recipes/ties.yaml").replace(REMEDIES, ""))
    result = project.mergegate("check", "profiles/trained.yaml")
    expect(result, 2, "'last checkpoint', which is not a model in this merge", "a recipe with one training run")
    with pytest.raises(InvalidInput, match="windwo"):
        profile_of(project, PROFILE.replace("{window: 2}", "{windwo: 2}")).candidates()


@pytest.mark.story
def test_each_run_merges_the_new_window_and_measures_only_the_last_checkpoint(project: Project) -> None:
    first = project.mergegate("run", "profiles/trained.yaml")
    expect(first, 0, "training run: 3 of 4 checkpoints, steps 800 to 1000, linear weights")
    assert len(project.artifacts("perplexity")) == 2  # of the last checkpoint and of the merge
    assert "checkpoint-900" not in first.output
    latest = project.root / "releases/trained/latest"
    assert yaml.safe_load((latest / "recipe.yaml").read_text())["models"][-1]["model"] == "../runs/a/checkpoint-1000"
    assert "# training run: 3 of 4 checkpoints" in (latest / "recipe.yaml").read_text()
    assert "from checkpoint-800 as checkpoint-1000" in " ".join(first.output.split())
    card = (latest / "README.md").read_text()
    assert "| ../runs/a/checkpoint-800 to checkpoint-1000 (3 checkpoints) | parents | apache-2.0 |" in card
    assert "linear of 3 checkpoints, steps 800 to 1000" in card

    expect(project.mergegate("run", "profiles/trained.yaml"), 0, "nothing new")

    save(project, 1100)
    expect(project.mergegate("run", "profiles/trained.yaml"), 0, "steps 900 to 1100")
    page = (project.home / "reports" / "trained.html").read_text()
    assert "<li>Training run: steps 800 to 1000 → steps 900 to 1100.</li>" in page
    assert "was added" not in page
    assert "Recipe:" not in page
    assert len(project.artifacts("perplexity")) == 4
    assert project.mergegate("verify", str(latest)).exit_code == 0


@pytest.mark.story
def test_init_proposes_a_recipe_for_a_directory_of_checkpoints(project: Project) -> None:
    expect(project.mergegate("init", "runs/a", "-o", "new", "--task", "profiles/demo/tasks/copy.yaml", "--yes"), 0)
    recipe = yaml.safe_load((project.root / "new/a.recipe.yaml").read_text())
    assert {"run": "../runs/a", "window": 8, "schedule": "mean"}.items() <= recipe.items()
    profile = yaml.safe_load((project.root / "new/a.yaml").read_text())
    assert profile["evaluate"]["tasks"][0]["guarded_by"] == "last checkpoint"
    assert project.mergegate("check", "new/a.yaml").exit_code == 0
    result = project.mergegate("init", "profiles/demo/models/base", "-o", "other")
    expect(result, 2, "the directory of a training run")


# Nights.

WINDOW, NIGHTS, EVERY = 8, 2, 5


def train(directory: Path, checkpoints: int, *options: str) -> None:
    """Train until ``directory`` has a number of checkpoints."""
    script = PROFILES / "demo" / "train_run.py"
    arguments = [str(directory), "--checkpoints", str(checkpoints), "--every", str(EVERY), *options]
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.proof
def test_each_night_releases_the_newest_checkpoints_if_they_pass_against_the_night_before(
    tmp_path: Path, prefect_api: None
) -> None:
    project = make_project(tmp_path)
    for night in range(NIGHTS):
        train(project.root / "runs" / "demo", (night + 1) * WINDOW)
        expect(project.mergegate("run", "profiles/demo-training-run.yaml"), 0, "released demo-training-run")
        release = (project.root / "releases/demo-training-run/latest").resolve()
        recipe = yaml.safe_load((release / "recipe.yaml").read_text())
        window = [f"checkpoint-{EVERY * (night * WINDOW + index)}" for index in range(1, WINDOW + 1)]
        assert [Path(model["model"]).name for model in recipe["models"]] == window
        verdict = json.loads((release / "evidence" / "gate.json").read_text())["verdict"]
        references = {guard["reference"] for guard in verdict["guards"]}
        assert references == ({window[-1]} if night == 0 else {"champion", window[-1]})
        expect(project.mergegate("verify", str(release), "--verdict"), 0)


@pytest.mark.proof
def test_a_run_that_continues_has_the_checkpoints_of_one_that_did_not_stop(tmp_path: Path) -> None:
    train(tmp_path / "nights", 1)
    train(tmp_path / "nights", 2)
    train(tmp_path / "whole", 2)
    for file in (f"checkpoint-{step}/model.safetensors" for step in (EVERY, 2 * EVERY)):
        assert (tmp_path / "nights" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
