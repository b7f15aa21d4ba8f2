"""Copying weights into the network that all candidates share gives the same result as loading them from files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from trial_settings import DEMO

from mergegate.merge_core import Checkpoint, load_recipe, merge_weights, open_checkpoint, plan_merge
from mergegate.merge_core.errors import Refused
from mergegate.tasks.models.checkpoints import Model, load_private_model
from mergegate.tasks.quality.evaluation import Scoring
from mergegate.tasks.sweep import trial

SETTING = trial.TrialSetting(parents=(), sets={}, metric_keys=(), scoring=Scoring(dtype="auto"))
SIZES = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}


def save_model(directory: Path, config: Any, seed: int) -> Path:
    """Save a random model with the demo's tokenizer."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "models/base" / name, directory)
    return directory


class Study:
    """Merges of two models with the same configuration, tried in one shared network."""

    def __init__(self, root: Path, config: Any) -> None:
        self.root = root
        self.tables: dict[str, Checkpoint] = {
            name: open_checkpoint(save_model(root / name, config, seed)) for seed, name in enumerate("ab")
        }
        self.network: trial.CandidateNetwork | None = None

    def try_recipe(self, recipe: dict[str, Any]) -> str:
        """Put a candidate into the network and return how: "copied" or "loaded"."""
        plan = plan_merge(load_recipe(recipe), self.tables)
        structure = trial.structure_digest(plan, {})
        previous = self.network
        if previous and previous.structure == structure and previous.fill(plan, SETTING, trial.Stopwatch(), None):
            return "copied"
        self.network = trial.load_network(plan, structure, SETTING, False, trial.Stopwatch())
        return "loaded"

    def require_equal_network(self, recipe: dict[str, Any]) -> None:
        """Assert that the network equals the one transformers loads from the files that the engine writes."""
        out = self.root / "out"
        shutil.rmtree(out, ignore_errors=True)
        merge_weights(plan_merge(load_recipe(recipe), self.tables), out, device="cpu")
        ours = self.network.loaded.network
        theirs = load_private_model(Model(name="out", digest="out", directory=out), dtype="auto", device="cpu").network
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(tensor, ours.state_dict()[name]), name
        tokens = torch.arange(20)[None]
        with torch.inference_mode():
            assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


def linear(weight: float, **more: Any) -> dict[str, Any]:
    models = [{"model": "a", "parameters": {"weight": weight}}, {"model": "b", "parameters": {"weight": 1 - weight}}]
    return {"merge_method": "linear", "models": models, **more}


@pytest.mark.proof
@pytest.mark.parametrize("tied", [False, True])
def test_candidates_are_copied_into_the_first_network(tmp_path: Path, tied: bool) -> None:
    study = Study(tmp_path, LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=tied))
    assert study.try_recipe(linear(0.5)) == "loaded"
    for weight in (0.1, 0.9):
        assert study.try_recipe(linear(weight)) == "copied"
        study.require_equal_network(linear(weight))


@pytest.mark.proof
def test_another_weight_format_needs_a_new_network(tmp_path: Path) -> None:
    study = Study(tmp_path, LlamaConfig(**SIZES, **HEADS))
    assert study.try_recipe(linear(0.5)) == "loaded"
    assert study.try_recipe(linear(0.5, dtype="bfloat16")) == "loaded"
    study.require_equal_network(linear(0.5, dtype="bfloat16"))
    assert study.network.loaded.network.dtype == torch.bfloat16


@pytest.mark.story
def test_another_layer_count_needs_a_new_network(tmp_path: Path) -> None:
    study = Study(tmp_path, LlamaConfig(**SIZES, **HEADS))
    cut = [{"sources": [{"model": "a", "layer_range": [0, 2]}]}, {"sources": [{"model": "b", "layer_range": [0, 3]}]}]
    stacked = {"merge_method": "passthrough", "slices": cut}
    for recipe, way in ((linear(0.2), "loaded"), (stacked, "loaded"), (stacked, "copied"), (linear(0.3), "loaded")):
        assert study.try_recipe(recipe) == way
        study.require_equal_network(recipe)


@pytest.mark.story
def test_a_candidate_is_loaded_if_transformers_joins_tensors(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1}
    config = AutoConfig.for_model("qwen3_moe", **SIZES, **HEADS, head_dim=8, **experts)
    study = Study(tmp_path, config)
    for weight in (0.5, 0.2):
        assert study.try_recipe(linear(weight)) == "loaded"
        study.require_equal_network(linear(weight))
    assert study.network.targets == {}


@pytest.mark.story
def test_a_stored_head_that_is_the_embedding_stays_tied_in_every_candidate(tmp_path: Path) -> None:
    study = Study(tmp_path, LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True))
    for name in "ab":
        path = tmp_path / name / "model.safetensors"
        tensors = load_file(path)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, path, {"format": "pt"})
    study.tables = {name: open_checkpoint(tmp_path / name) for name in "ab"}
    apart = linear(0.5)
    apart["models"][0]["parameters"]["weight"] = [{"filter": "lm_head", "value": 3.0}, {"value": 0.5}]
    for recipe, way in ((linear(0.5), "loaded"), (linear(0.2), "copied"), (apart, "copied"), (linear(0.3), "copied")):
        assert study.try_recipe(recipe) == way
        study.require_equal_network(recipe)


def test_a_merge_with_nan_is_refused_when_copied_and_when_loaded(tmp_path: Path) -> None:
    study = Study(tmp_path, LlamaConfig(**SIZES, **HEADS))
    nothing = linear(0.0)
    nothing["models"][1]["parameters"]["weight"] = 1e39
    nothing["parameters"] = {"normalize": False}
    for _ in range(2):
        with pytest.raises(Refused):
            study.try_recipe(nothing)
        study.try_recipe(linear(0.5))


def test_the_change_covers_only_tensors_of_both_models(tmp_path: Path) -> None:
    study = Study(tmp_path, LlamaConfig(**SIZES, **HEADS))
    distance = trial.BaseDistance(study.tables["a"])
    plan = plan_merge(load_recipe(linear(0.0)), study.tables)  # the merge is b itself
    distance.measure(plan, SETTING)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    moved, length = (
        sum(float(one.double().square().sum()) for one in part) for part in ((b[n] - a[n] for n in a), a.values())
    )
    assert distance.relative == pytest.approx((moved / length) ** 0.5)
    distance.measure(plan_merge(load_recipe(linear(1.0)), study.tables), SETTING)
    assert distance.relative == 0
    assert json.loads((tmp_path / "a/config.json").read_text())["num_hidden_layers"] == 3
