"""The stored bytes define the output head, regardless of config.json and of the order of the models."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Literal

import pytest
import torch
from family import random_tensors, save_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mergegate.merge_core import load_recipe, merge_weights, open_checkpoint, plan_with_findings

Head = Literal["none", "equal", "different"]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MODELS = st.tuples(st.sampled_from([True, False, None]), st.sampled_from(["none", "equal", "different"]))


def save_model(directory: Path, seed: int, flag: bool | None, head: Head, shards: int = 1) -> dict[str, torch.Tensor]:
    """Save a small Llama and return its tensors, including the head that it computes with."""
    shutil.rmtree(directory, ignore_errors=True)
    # With multiples of 1/8, sums are exact in every order.
    tensors = {name: (8 * tensor).round() / 8 for name, tensor in random_tensors(seed).items()}
    if head == "none":
        del tensors[HEAD]
    elif head == "equal":
        tensors[HEAD] = tensors[EMBEDDING].clone()
    save_checkpoint(directory, tensors, shards=shards)
    config = json.loads((directory / "config.json").read_text())
    config["tie_word_embeddings"] = flag
    if flag is None:
        del config["tie_word_embeddings"]
    (directory / "config.json").write_text(json.dumps(config))
    return {HEAD: tensors[EMBEDDING], **tensors}


@pytest.mark.story
@settings(max_examples=40, deadline=None)
@given(models=st.lists(MODELS, min_size=2, max_size=3), shards=st.sampled_from([1, 2]))
def test_the_order_of_models_changes_neither_tensors_nor_bytes(
    models: list[tuple[bool | None, Head]], shards: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("heads")
    names = "abc"[: len(models)]
    parents = [save_model(root / name, seed, *models[seed], shards) for seed, name in enumerate(names)]
    results = []
    for order in itertools.permutations(names):
        lines = "".join(f"  - {{model: {name}, parameters: {{weight: 0.25}}}}\n" for name in order)
        recipe = load_recipe(f"merge_method: linear\nmodels:\n{lines}parameters: {{normalize: false}}\n")
        planned = plan_with_findings(recipe, {name: open_checkpoint(root / name) for name in names})
        if any(flag is False and head == "none" for flag, head in models):
            assert {finding.where.partition(": ")[2] for finding in planned.blocking} >= {
                "config.json: tie_word_embeddings"
            }
            return
        assert planned.plan is not None, planned.blocking
        out = root / "".join(order)
        out.mkdir()
        merge_weights(planned.plan, out)
        tensors = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
        results.append((tensors, json.loads((out / "config.json").read_text()).get("tie_word_embeddings")))
    first, flag = results[0]
    own = [head == "different" or (flag is False and head == "equal") for flag, head in models]
    assert (HEAD in first) == any(own)
    assert flag is not any(own) if any(own) else flag is not False
    for tensors, other_flag in results[1:]:
        assert tensors.keys() == first.keys()
        assert other_flag is flag
        assert all(torch.equal(tensors[name], first[name]) for name in first)
    for name, tensor in first.items():
        assert torch.equal(tensor, 0.25 * sum(parent[name] for parent in parents))


@pytest.mark.parametrize(("flag", "head"), [(True, "different"), (None, "different"), (None, "equal"), (True, "equal")])
def test_transformers_loads_the_result_with_the_head_that_it_stores(
    flag: bool | None, head: Head, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    networks = []
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        network = LlamaForCausalLM(LlamaConfig(vocab_size=24, **sizes)).eval()
        if head == "equal":
            network.lm_head.weight.data.copy_(network.model.embed_tokens.weight)
        network.save_pretrained(tmp_path / name)
        networks.append(network)
        config = json.loads((tmp_path / name / "config.json").read_text()) | {"tie_word_embeddings": flag}
        if flag is None:
            del config["tie_word_embeddings"]
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    recipe = load_recipe("merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 0.5}\n")
    planned = plan_with_findings(recipe, {name: open_checkpoint(tmp_path / name) for name in "ab"})
    assert planned.plan is not None, planned.blocking
    (tmp_path / "out").mkdir()
    merge_weights(planned.plan, tmp_path / "out")
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    average = networks[0].double()
    with torch.no_grad():
        for name, tensor in average.state_dict().items():
            tensor.copy_((tensor + networks[1].state_dict()[name]) / 2)
        ids = torch.arange(3, 20)[None]
        torch.testing.assert_close(merged.double()(ids).logits, average(ids).logits, rtol=1e-4, atol=1e-5)


def test_a_head_that_differs_in_one_number_is_not_tied(tmp_path: Path) -> None:
    save_model(tmp_path / "a", 0, flag=True, head="equal")
    assert HEAD not in open_checkpoint(tmp_path / "a").tensors
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors[HEAD][-1, -1] += 1
    save_file(tensors, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    opened = open_checkpoint(tmp_path / "a")
    assert HEAD in opened.tensors
    assert opened.config["tie_word_embeddings"] is False
    assert [finding.where for finding in opened.findings] == ["config.json: tie_word_embeddings"]


def test_a_model_without_a_head_may_have_one_under_an_unknown_name(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        tensors = random_tensors(seed)
        tensors["output.weight"] = tensors.pop(HEAD)
        save_checkpoint(tmp_path / name, tensors, config={"tie_word_embeddings": False})
    recipe = load_recipe("merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 0.5}\n")
    assert plan_with_findings(recipe, {name: open_checkpoint(tmp_path / name) for name in "ab"}).blocking == ()
