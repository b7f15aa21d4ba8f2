"""The checkpoints of a training run are found in a directory and on the Hub, also while training writes them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family import random_tensors, save_checkpoint
from hub_family import go_offline
from hub_look_alike import LookAlike
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import save_file

from mergegate.flows.candidates import ExpandedRecipe, expand_training_runs
from mergegate.flows.operations.check import check_file
from mergegate.flows.operations.plan import PlanOptions, plan_file
from mergegate.merge_core import load_recipe, plan_merge
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import parse_yaml
from mergegate.merge_core.recipe import RunWindow, steps_in_names
from mergegate.tasks.base.stage import store
from mergegate.tasks.models.checkpoints import download_snapshots, open_parent, resolve_parents

# Name families of trainers. {n} is the step, {z} the step with leading zeros, {k} a number that grows with it.
FAMILIES = {
    "transformers": "checkpoint-{n}", "Megatron": "iter_{z}", "DeepSpeed": "global_step{n}",
    "OLMo": "step{n}-unsharded", "OLMo on the Hub": "stage1-step{n}-tokens{k}B", "Lightning": "epoch={k}-step={n}",
    "NeMo": "gpt--val_loss=2.{k}-step={n}-consumed_samples={n}0.0", "torchtune": "epoch_{k}-step_{n}",
    "Pythia": "step{n}", "converted": "hf_step_{n}", "nested": "step-{n}/hf", "Composer": "ep{k}-ba{n}", "bare": "{n}",
    "bare with zeros": "{z}", "other word": "weights-v{n}",
}  # fmt: skip


@settings(max_examples=40)
@given(st.sampled_from(sorted(FAMILIES)), st.lists(st.integers(1, 10**7), min_size=2, max_size=9, unique=True))
def test_steps_are_read_from_the_names_of_common_trainers(family: str, steps: list[int]) -> None:
    names = {
        FAMILIES[family].format(n=step, z=f"{step:09d}", k=position): step
        for position, step in enumerate(sorted(steps))
    }
    assert steps_in_names([*names, "logs", "final", "llama-3-8b"]) == names


def test_epochs_count_only_if_no_name_has_a_step() -> None:
    for names in ({"epoch_0": 0, "epoch_1": 1}, {"step_5": 5}, {"step-50K-105b": 50_000}):
        assert steps_in_names([*names, "last", "epoch_0"]) == names


BASE = random_tensors(0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Save four checkpoints as transformers does, in ``runs/a``, and return that directory."""
    for number in (1, 2, 3, 4):
        add(tmp_path / "runs/a", 100 * number)
    return tmp_path / "runs/a"


def add(run: Path, step: int, *, name: str = "", state: int | None = None, **sizes: int) -> Path:
    tensors = random_tensors(step, **sizes) if sizes else random_tensors(step, BASE)
    directory = save_checkpoint(run / (name or f"checkpoint-{step}"), tensors, shards=2)
    (directory / "trainer_state.json").write_text(json.dumps({"global_step": step if state is None else state}))
    return directory


def expand(root: Path, **changes: Any) -> ExpandedRecipe:
    document = {"run": "runs/a", "window": "all", **changes}
    return expand_training_runs([document], root.parents[1], "recipe")


def models(expanded: ExpandedRecipe) -> list[str]:
    return [Path(str(entry["model"])).name for entry in expanded.documents[0]["models"]]


def test_checkpoints_are_ordered_by_step_and_not_by_name(run: Path) -> None:
    add(run, 1000)
    assert models(expand(run)) == [f"checkpoint-{step}" for step in (100, 200, 300, 400, 1000)]
    assert models(expand(run, window=2)) == ["checkpoint-400", "checkpoint-1000"]
    assert models(expand(run, run="runs/*/checkpoint-[1-2]00")) == ["checkpoint-100", "checkpoint-200"]


def half_of(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-200])


def only_optimizer(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()
    (directory / "optimizer.pt").write_bytes(b"\0" * 100)


SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "config.json").unlink(), lambda path: (path / SHARDS[1]).unlink(),
        lambda path: half_of(path / SHARDS[1]), lambda path: (path / SHARDS[0]).write_bytes(b""),
        lambda path: (path / "trainer_state.json").write_text('{"global'),
        lambda path: (path / "trainer_state.json").unlink(), only_optimizer,
    ],
    ids=["no config", "missing shard", "truncated", "empty shard", "half a state", "no state", "only an optimizer"],
)  # fmt: skip
def test_a_checkpoint_that_training_still_writes_is_left_out_with_a_remark(run: Path, damage: Any) -> None:
    damage(run / "checkpoint-400")
    expanded = expand(run, window=2)
    assert models(expanded) == ["checkpoint-200", "checkpoint-300"]
    (remark,) = [remark for remark in expanded.remarks if "left out" in remark]
    assert remark.startswith("checkpoint-400: left out: ")
    assert str(run) not in remark


def test_links_and_copies_count_once_and_a_final_model_is_left_out(run: Path) -> None:
    (run / "latest").symlink_to("checkpoint-400")
    (run / "best").symlink_to(run / "checkpoint-200")
    shutil.copytree(run / "checkpoint-400", run / "last")  # has the state of step 400
    shutil.copytree(run / "checkpoint-400", run / "final")
    (run / "final/trainer_state.json").unlink()
    (run / "logs").mkdir()
    expanded = expand(run)
    assert models(expanded) == [f"checkpoint-{step}" for step in (100, 200, 300, 400)]
    assert sorted(remark for remark in expanded.remarks if "left out" in remark) == [
        "final: left out: its training step is unknown",
        "last: left out: another copy of step 400",
    ]


def test_a_trainer_state_counts_instead_of_a_name_and_a_file_instead_of_both(run: Path) -> None:
    add(run, 150, name="checkpoint-900", state=150)
    expanded = expand(run, window=3)
    assert models(expanded) == ["checkpoint-200", "checkpoint-300", "checkpoint-400"]
    assert "checkpoint-900: trainer_state.json has step 150, which counts instead of 900" in expanded.remarks
    (run.parent / "steps.yaml").write_text("{checkpoint-900: {step: 950, tokens: 4B}, checkpoint-100: 1}")
    assert models(expand(run, window=2, steps="runs/steps.yaml")) == ["checkpoint-400", "checkpoint-900"]


def test_checkpoints_of_another_model_than_the_newest_are_left_out(run: Path) -> None:
    add(run, 500, tokens=30)
    add(run, 600, tokens=30)
    expanded = expand(run)
    assert models(expanded) == ["checkpoint-500", "checkpoint-600"]
    assert "checkpoint-100: left out: another model than checkpoint-600: lm_head.weight differs" in [
        remark.replace("model.embed_tokens.weight", "lm_head.weight") for remark in expanded.remarks
    ]


def test_steps_that_start_again_in_the_next_stage_are_refused(run: Path) -> None:
    for number, name in enumerate(("stage1-step100", "stage1-step200", "stage2-step150")):
        shutil.copytree(run / f"checkpoint-{100 * (number + 1)}", run.parent / "b" / name)
        (run.parent / "b" / name / "trainer_state.json").unlink()
    with pytest.raises(InvalidInput, match="narrow the pattern to one stage"):
        expand(run, run="runs/b")
    assert models(expand(run, run="runs/b/stage1-*")) == ["stage1-step100", "stage1-step200"]


def test_a_run_without_complete_checkpoints_is_refused_with_the_reason(run: Path) -> None:
    for number in (1, 2, 3, 4):
        (run / f"checkpoint-{number}00/config.json").unlink()
    with pytest.raises(InvalidInput, match=r"no complete checkpoint; checkpoint-400: left out: config\.json"):
        expand(run)


def test_only_the_window_is_opened(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mergegate.flows.candidates import run_expansion

    opened = []
    original = run_expansion.open_checkpoint
    monkeypatch.setattr(run_expansion, "open_checkpoint", lambda path: opened.append(path.name) or original(path))
    expand(run, window=2)
    assert opened == ["checkpoint-400", "checkpoint-300"]


def test_a_path_with_a_sign_of_references_is_written_as_a_mapping(run: Path) -> None:
    run.rename(run.parent / "lr@1e-4+wd")
    entry = expand(run, run="runs/lr@1e-4+wd", window=1).documents[0]["models"][0]["model"]
    assert entry == {"model": {"path": "runs/lr@1e-4+wd/checkpoint-400"}}


@pytest.fixture
def hub_run(online: LookAlike, run: Path) -> LookAlike:
    """Serve the run as the branches ``step-100`` to ``step-300`` and the tag ``step-400`` of ``acme/run``."""
    for number in (1, 2, 3, 4):
        online.add_model("acme/run", run / f"checkpoint-{number}00", branch=f"step-{number}00")
    repository = online.repositories["acme/run"]
    repository.tags["step-400"] = repository.branches.pop("step-400")
    online.add_model("acme/run", run / "checkpoint-400")
    return online


def hub_models(**changes: Any) -> list[str]:
    document = {"run": "acme/run@step-*", "window": "all", **changes}
    return [entry["model"] for entry in expand_training_runs([document], Path(), "recipe").documents[0]["models"]]


def test_revisions_on_the_hub_are_checkpoints_of_a_run(hub_run: LookAlike) -> None:
    assert hub_models() == [f"acme/run@step-{step}" for step in (100, 200, 300, 400)]
    hub_run.sent.clear()
    assert hub_models(window=2) == ["acme/run@step-300", "acme/run@step-400"]
    assert not hub_run.sent  # headers are read once in a process


def test_an_incomplete_revision_is_left_out(hub_run: LookAlike, run: Path) -> None:
    (run / "checkpoint-300/config.json").unlink()
    hub_run.add_model("acme/run", run / "checkpoint-300", branch="step-500")
    document = {"run": "acme/run@step-*", "window": 2}
    expanded = expand_training_runs([document], Path(), "recipe")
    assert expanded.windows == (RunWindow(("acme/run@step-300", "acme/run@step-400"), 300, 400, "mean"),)
    assert expanded.remarks[0].startswith("step-500: left out: ")
    assert "no config.json" in expanded.remarks[0]


@pytest.mark.story
def test_without_steps_in_names_the_trainer_states_of_revisions_count(hub_run: LookAlike, run: Path) -> None:
    for name, step in (("alpha", 300), ("beta", 200)):
        hub_run.add_model("acme/run", run / f"checkpoint-{step}", branch=f"state-{name}")
    assert hub_models(run="acme/run@state-*") == ["acme/run@state-beta", "acme/run@state-alpha"]


@pytest.mark.story
def test_offline_the_revisions_in_the_cache_are_used(hub_run: LookAlike, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"run": "acme/run@step-*", "window": 2}
    recipe = load_recipe(dict(expand_training_runs([document], Path(), "recipe").documents[0]))
    snapshots = [snapshot for parent in resolve_parents(recipe) for snapshot in parent.snapshots]
    download_snapshots(snapshots, store().hashes)
    go_offline(monkeypatch)
    expanded = expand_training_runs([document], Path(), "recipe")
    repository = hub_run.repositories["acme/run"]
    commits = [repository.branches["step-300"], repository.tags["step-400"]]
    assert [window.checkpoints for window in expanded.windows] == [tuple(f"acme/run@{commit}" for commit in commits)]
    assert "only revisions in the Hub's cache are used" in expanded.remarks[0]
    with pytest.raises(InvalidInput, match="unset HF_HUB_OFFLINE for one run"):
        expand_training_runs([{"run": "acme/run@other-*"}], Path(), "recipe")


def test_a_pattern_without_a_match_and_an_unknown_repository_are_refused(hub_run: LookAlike) -> None:
    with pytest.raises(InvalidInput, match="none of the 5 branches and tags matches"):
        hub_models(run="acme/run@iter-*")
    with pytest.raises(InvalidInput, match="neither a local directory nor a Hub repository"):
        hub_models(run="acme/nothing@step-*")


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"run": "runs/c"}, "no directory runs/c"), ({"every": {"steps": 70}}, "every: no step is a multiple of 70"),
        ({"base_model": "runs/a/checkpoint-100"}, r"base_model: set, but linear merges only[\s\S]*task_arithmetic"),
        ({"run": "runs/a/checkpoint-400"}, "no checkpoint in runs/a/checkpoint-400"),
        ({"run": f"acme/{'x' * 5000}"}, "cannot match a directory"),
        ({"run": f"acme/run@{'x' * 5000}"}, "no matching revision is in the Hub's cache"),
        *(({"run": f"{name}@step-*"}, "(?i)repo.id") for name in ("../runs", "org/a--b", "org/n.git", "-x/y")),
    ],
)  # fmt: skip
def test_a_run_without_checkpoints_is_refused_with_the_reason(
    run: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], complaint: str
) -> None:
    go_offline(monkeypatch)
    with pytest.raises(InvalidInput, match=complaint):
        expand(run, **keys)


def test_the_file_of_steps_can_be_in_the_home_directory(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(run.parent))
    (run.parent / "steps.yaml").write_text("{checkpoint-100: 900, chekpoint-200: 1}")
    expanded = expand(run, steps="~/steps.yaml", window=1)
    assert expanded.documents[0]["models"][0]["model"] == "runs/a/checkpoint-100"
    assert "~/steps.yaml: no checkpoint is named 'chekpoint-200'" in expanded.remarks


@pytest.mark.story
def test_check_and_plan_name_the_window_and_what_is_left_out(run: Path) -> None:
    half_of(run / "checkpoint-300" / SHARDS[0])
    hostile = run / "final\x1b[2J\u202e"
    shutil.copytree(run / "checkpoint-400", hostile, ignore=lambda *names: ["trainer_state.json"])
    expanded = expand(run)
    assert [remark.partition(":")[0] for remark in expanded.remarks] == [hostile.name, "checkpoint-300", "training run"]
    parse_yaml(expanded.comments, "recipe")
    assert r"# final\x1b[2J\u202e: left out" in expanded.comments
    recipe = run.parents[1] / "recipe.yaml"
    recipe.write_text("run: runs/a\nwindow: all\n")
    assert plan_file(recipe, PlanOptions(run, "cpu", {}, probe=False)).remarks == expanded.remarks
    assert set(expanded.remarks) <= set(check_file(recipe, Console(quiet=True)).summary)


@pytest.mark.parametrize("method", ["linear", "karcher", "task_arithmetic", "model_stock"])
def test_a_run_of_adapters_is_merged_on_its_base(tmp_path: Path, method: str) -> None:
    save_checkpoint(tmp_path / "base", BASE)
    module = "base_model.model.model.layers.0.mlp.up_proj.lora_"
    for directory in (tmp_path / "run/checkpoint-10", tmp_path / "run/checkpoint-20"):
        directory.mkdir(parents=True)
        (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
        factors = {f"{module}A.weight": torch.ones(2, 12), f"{module}B.weight": torch.ones(40, 2)}
        save_file(factors, directory / "adapter_model.safetensors")
    document = {"run": "run", "base_model": "base", "merge_method": method}
    expanded = expand_training_runs([document], tmp_path, "recipe")
    recipe = replace(load_recipe(dict(expanded.documents[0])), directory=tmp_path)
    parents = {parent.ref: open_parent(parent) for parent in resolve_parents(recipe)}
    assert {"base+run/checkpoint-10", "base+run/checkpoint-20"} <= parents.keys()
    assert plan_merge(recipe, parents).method.name == method
