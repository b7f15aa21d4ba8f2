"""Tensors that transformers ignores, ties, renames or keeps in float32, in generated checkpoints of all its classes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from family import LINEAR, check_recipe, merge_text, random_tensors, save_checkpoint
from family_table import WHOLE, merge_or_refuse
from in_memory import average
from safetensors.torch import load_file, save_file
from samples import sampled
from tiny_families import BY_NAME, load, logits, make

from mergegate.merge_core.architecture import Conversions
from mergegate.merge_core.architecture.conversions import loading_facts

FACTS = loading_facts()
LAYER = "model.layers.0."
DIFFERENCES = "merge_method: task_arithmetic\nbase_model: a\nmodels: [{model: b}]\nparameters: {weight: 1}\n"
# Families with tensors that have other names in memory.
RENAMED = ("bert", "gemma3, vision", "llava", "mixtral", "phimoe", "qwen2_5_vl", "t5")


def linear_of(models: str) -> str:
    first, second = models
    return f"merge_method: linear\nmodels: [{{model: {first}}}, {{model: {second}}}]\nparameters: {{weight: 1}}\n"


def place_of_predictions(name: str) -> str | None:
    """Return where the class called ``name`` ignores layers for multi-token prediction, or None if it does not."""
    patterns = FACTS["ignored"][name]
    numbers = [number[1] for pattern in patterns if (number := re.search(r"layers\\\.(\d+)", pattern))]
    places = ("mtp.layers.0.", "model.mtp.layers.0.", "model.mtp_layers.0.", *(f"model.layers.{at}." for at in numbers))
    return next((place for place in places if any(re.search(pattern, place) for pattern in patterns)), None)


PREDICTING = {name: place for name in FACTS["ignored"] if "ForC" in name and (place := place_of_predictions(name))}


@pytest.mark.parametrize("name", PREDICTING)
def test_layers_that_a_writer_drops_come_from_the_base_or_from_no_model(name: str, tmp_path: Path) -> None:
    place = PREDICTING[name]
    layers = int(place.split(".")[2]) if place.startswith("model.layers.") else 2
    config = {"architectures": [name], "num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    base, tuned = (random_tensors(seed, layers=layers) for seed in (0, 1))
    extra = {part.replace(LAYER, place): tensor.clone() for part, tensor in base.items() if part.startswith(LAYER)}
    save_checkpoint(tmp_path / "a", base | extra, config=config)
    for one in "bc":
        save_checkpoint(tmp_path / one, tuned, config=config)
    planned = check_recipe(DIFFERENCES, tmp_path)
    assert [finding for finding in planned.findings if finding.where.startswith(f"b: {place}")]
    assert planned.plan is not None
    assert not planned.blocking
    copied = {job.output.name for job in planned.plan.jobs if job.mode == "copy"}
    assert (copied, planned.plan.config) == (extra.keys(), planned.plan.donor.config)
    for recipe in (linear_of("bc"), linear_of("ba"), DIFFERENCES + "drop_prediction_layers: true\n"):
        planned = check_recipe(recipe, tmp_path)
        assert planned.plan is not None
        assert not planned.blocking
        assert {job.output.name for job in planned.plan.jobs} == tuned.keys()
        assert planned.plan.config["num_nextn_predict_layers"] == 0


def test_tensors_that_a_class_may_load_must_be_in_every_model(tmp_path: Path) -> None:
    stored = random_tensors(0, layers=2)
    save_checkpoint(tmp_path / "a", stored | {"extra.norm.weight": torch.ones(4)})
    save_checkpoint(tmp_path / "b", stored)
    assert check_recipe(LINEAR, tmp_path).blocking


@pytest.mark.parametrize("name", FACTS["tied"])
def test_a_copy_of_a_tied_tensor_may_be_stored_or_not(name: str, tmp_path: Path) -> None:
    stored = random_tensors(0)
    sources = {of for of in FACTS["tied"][name].values() if of not in FACTS["tied"][name]}
    stored |= {of: torch.full((3, 2), 2.0) for of in sources if of not in stored}
    copies = {to: stored[of].clone() for to, of in FACTS["tied"][name].items() if of in sources}
    config = {"architectures": [name], "tie_word_embeddings": True}
    if "lm_head.weight" not in sources:
        del stored["lm_head.weight"]
    save_checkpoint(tmp_path / "a", stored, config=config)
    save_checkpoint(tmp_path / "b", stored | copies, config=config)
    for models in ("ab", "ba"):
        planned = check_recipe(linear_of(models), tmp_path)
        assert planned.plan is not None
        assert not planned.blocking
        assert all(len(job.inputs) == 2 for job in planned.plan.jobs)


@pytest.mark.parametrize("kind", FACTS["float32"])
def test_tensors_stay_float32_exactly_where_the_library_computes_with_them_in_float32(
    kind: str, tmp_path: Path
) -> None:
    always, for_float16 = FACTS["float32"][kind]
    others = random_tensors(0)
    for one, dtype in (("a", torch.float32), ("b", torch.float32), ("c", torch.bfloat16)):
        kept = {f"model.{pattern}.own": torch.ones(2, dtype=dtype) for pattern in (*always, *for_float16)}
        save_checkpoint(tmp_path / one, others | kept, config={"model_type": kind})
    for target in ("float16", "bfloat16", "float32"):
        expected = always if target == "bfloat16" else (*always, *for_float16) if target == "float16" else ()
        plan = check_recipe(LINEAR + f"dtype: {target}\n", tmp_path).plan
        assert plan is not None
        for job in plan.jobs:
            is_kept = any(re.search(pattern, job.output.name) for pattern in expected)
            assert job.output.dtype.torch_name == ("float32" if is_kept else target), job.output.name
    rounded = check_recipe(linear_of("ac") + "dtype: bfloat16\n", tmp_path).plan
    assert rounded is not None
    assert {job.output.dtype.torch_name for job in rounded.jobs if job.output.name.endswith(".own")} == {"bfloat16"}


def test_weight_norm_and_layer_norm_have_one_meaning_under_older_names(tmp_path: Path) -> None:
    older = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    older |= {"conv.weight_g": "conv.parametrizations.weight.original0"}
    older |= {"conv.weight_v": "conv.parametrizations.weight.original1"}
    for one, names in (("a", older.values()), ("b", older)):
        save_checkpoint(tmp_path / one, random_tensors(0) | {f"x.{name}": torch.ones(2) for name in names})
    merge_text(LINEAR, tmp_path)
    assert load_file(tmp_path / "out/model.safetensors").keys() == load_file(tmp_path / "a/model.safetensors").keys()


@pytest.mark.parametrize("name", sampled(RENAMED, ["mixtral"]))
def test_a_parent_with_the_names_of_the_class_has_the_same_architecture(name: str, tmp_path: Path) -> None:
    family = BY_NAME[name]
    models = [load(family, make(family, tmp_path / one, seed)) for seed, one in enumerate("ab")]
    file = tmp_path / "b/model.safetensors"
    stored, config = load_file(file), json.loads((tmp_path / "b/config.json").read_text())
    conversions = Conversions(config, config["architectures"][0], stored)
    loaded = {part: conversions.in_memory(part) for part in stored}
    names = {part: part if memory.operations else memory.names[0] for part, memory in loaded.items()}
    save_file({names[part]: tensor for part, tensor in stored.items()}, file, {"format": "pt"})
    assert merge_or_refuse(WHOLE, tmp_path, "out") is None
    assert load_file(tmp_path / "out/model.safetensors").keys() == load_file(tmp_path / "a/model.safetensors").keys()
    assert torch.equal(logits(family, load(family, tmp_path / "out")), logits(family, average(models, [0.3, 0.7])))


@pytest.mark.parametrize("text", ["gemma3", "llama4", "qwen3_5", "mistral"])
def test_a_text_model_is_told_from_the_multimodal_model_around_it(text: str, tmp_path: Path) -> None:
    whole = {"mistral": "mistral3"}.get(text, text)
    kind = text if text == "mistral" else f"{text}_text"
    inner = {"model_type": kind, "num_hidden_layers": 3, "vocab_size": 24}
    config = {"model_type": whole, "architectures": ["Whole"], "text_config": inner}
    save_checkpoint(tmp_path / "a", random_tensors(0), config=config)
    save_checkpoint(tmp_path / "b", random_tensors(0), config={"model_type": kind, "architectures": ["Text"]})
    for models in ("ab", "ba"):
        first = next(finding for finding in check_recipe(linear_of(models), tmp_path).findings)
        assert first.where == f"{models[1]}: config.json: architectures"
        assert "b is the text model alone of a multimodal model like a" in first.found
