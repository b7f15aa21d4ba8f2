"""Parents can be saved by different classes of one family, with or without the base network's prefix or a head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family import random_tensors, save_checkpoint
from safetensors.torch import load_file, save_file

from mergegate.merge_core import PlannedMerge, load_recipe, merge_weights, open_checkpoint, plan_with_findings
from mergegate.merge_core.errors import InvalidInput

SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 32,
}  # fmt: skip
BERT, ROBERTA = transformers.BertConfig(**SIZES), transformers.RobertaConfig(**SIZES)
LLAMA, TIED = (transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied) for tied in (False, True))
GPT2 = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32)
MISTRAL = transformers.MistralConfig(**SIZES, num_key_value_heads=2)
# Configuration, class of the first model, class of the second model.
PAIRS = [
    (BERT, "BertForMaskedLM", "BertModel"),
    (BERT, "BertModel", "BertForMaskedLM"),
    (BERT, "BertForSequenceClassification", "BertModel"),
    (BERT, "BertModel", "BertForSequenceClassification"),
    (ROBERTA, "RobertaForMaskedLM", "RobertaModel"),
    (ROBERTA, "RobertaModel", "RobertaForSequenceClassification"),
    (GPT2, "GPT2LMHeadModel", "GPT2Model"),
    (GPT2, "GPT2Model", "GPT2LMHeadModel"),
    (LLAMA, "LlamaForCausalLM", "LlamaModel"),
    (LLAMA, "LlamaModel", "LlamaForCausalLM"),
    (TIED, "LlamaModel", "LlamaForCausalLM"),
    (MISTRAL, "MistralForCausalLM", "MistralModel"),
]


def save(directory: Path, config: Any, class_name: str, seed: int) -> Any:
    torch.manual_seed(seed)
    network = getattr(transformers, class_name)(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    network.save_pretrained(directory)
    return network


def change_config(directory: Path, **keys: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def rename(directory: Path, change: Any) -> None:
    path = directory / "model.safetensors"
    save_file({change(name): tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def merge(root: Path) -> PlannedMerge:
    recipe = load_recipe("merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 0.5}\n")
    planned = plan_with_findings(recipe, {name: open_checkpoint(root / name) for name in "ab"})
    if planned.plan is not None and not planned.blocking:
        (root / "out").mkdir()
        merge_weights(planned.plan, root / "out")
    return planned


def assert_average(root: Path, class_name: str, first: Any, second: Any) -> None:
    """Assert that transformers loads the result into a class and that it computes the average of two networks.

    Parameters that the second network lacks come from the first one.
    """
    merged, info = getattr(transformers, class_name).from_pretrained(root / "out", output_loading_info=True)
    assert (info["missing_keys"], info["unexpected_keys"]) == (set(), set())
    same = type(first) is type(second)
    mine, theirs = ((one if same else one.base_model).double() for one in (first, second))
    others = theirs.state_dict()
    mine.load_state_dict({name: (own + others.get(name, own)) / 2 for name, own in mine.state_dict().items()})
    with torch.no_grad():
        ids = torch.arange(3, 20)[None]
        torch.testing.assert_close(merged.double()(ids)[0], first.double()(ids)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("config", "first", "second"), PAIRS, ids=[f"{first}, {second}" for _, first, second in PAIRS])
@pytest.mark.parametrize("named", [True, False], ids=["classes", "null"])
def test_the_base_network_is_merged_and_the_head_is_that_of_the_first(
    config: Any, first: str, second: str, named: bool, tmp_path: Path
) -> None:
    networks = [
        save(tmp_path / name, config, kind, seed) for seed, (name, kind) in enumerate([("a", first), ("b", second)])
    ]
    if not named:
        change_config(tmp_path / "b", architectures=None)
    planned = merge(tmp_path)
    assert planned.blocking == ()
    assert_average(tmp_path, first, *networks)


@pytest.mark.parametrize("bare", ["a", "b"])
@pytest.mark.parametrize(
    ("config", "kind"), [(GPT2, "GPT2LMHeadModel"), (TIED, "LlamaForCausalLM"), (BERT, "BertModel")]
)
@pytest.mark.parametrize("named", [True, False], ids=["classes", "null"])
def test_a_prefix_of_the_base_network_more_or_less_changes_nothing(
    config: Any, kind: str, bare: str, named: bool, tmp_path: Path
) -> None:
    networks = [save(tmp_path / name, config, kind, seed) for seed, name in enumerate("ab")]
    prefix = f"{networks[0].base_model_prefix}."
    if kind.endswith("BertModel"):
        rename(tmp_path / bare, lambda name: prefix + name)
    else:
        rename(tmp_path / bare, lambda name: name.removeprefix(prefix))
    if not named:
        change_config(tmp_path / "a", architectures=None)
    assert merge(tmp_path).blocking == ()
    result = json.loads((tmp_path / "out/config.json").read_text())
    assert result["architectures"] == [kind]
    assert_average(tmp_path, kind, *networks)


def test_two_different_heads_are_two_architectures(tmp_path: Path) -> None:
    save(tmp_path / "a", BERT, "BertForMaskedLM", 0)
    save(tmp_path / "b", BERT, "BertForSequenceClassification", 1)
    assert "b: config.json: architectures" in [finding.where for finding in merge(tmp_path).blocking]


@pytest.mark.parametrize(
    "missing", ["model.norm.weight", "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"]
)
def test_a_base_network_must_be_whole(tmp_path: Path, missing: str) -> None:
    save_checkpoint(tmp_path / "a", random_tensors(0))
    tensors = random_tensors(1)
    save_checkpoint(tmp_path / "b", tensors, config={"architectures": None})
    del tensors[missing]
    save_file(tensors, tmp_path / "b/model.safetensors", {"format": "pt"})
    assert f"b: {missing}" in [finding.where for finding in merge(tmp_path).blocking]


def test_a_config_without_classes_is_of_another_family_if_it_says_so(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", random_tensors(0))
    save_checkpoint(tmp_path / "b", random_tensors(1), config={"architectures": None, "model_type": "mistral"})
    assert "b: config.json: architectures" in [finding.where for finding in merge(tmp_path).blocking]


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (lambda name: f"_orig_mod.{name}", "model._orig_mod"),
        (lambda name: name.replace("model.", "model._orig_mod."), "model._orig_mod"),
        (lambda name: f"module.{name}", "model.module"),
        (lambda name: f"module._orig_mod.{name}", "model._orig_mod"),
        (lambda name: f"base_model.model.{name}", "merge_and_unload"),
        (lambda name: f"_fsdp_wrapped_module.{name}", "unwrap_model"),
        (lambda name: name.replace("mlp.", "_fsdp_wrapped_module.mlp."), "unwrap_model"),
        (lambda name: name.replace("mlp.", "_checkpoint_wrapped_module.mlp."), "unwrap_model"),
    ],
)
def test_names_of_a_wrapper_are_refused_before_anything_is_merged(tmp_path: Path, change: Any, remedy: str) -> None:
    save_checkpoint(tmp_path / "a", random_tensors(0))
    rename(tmp_path / "a", change)
    with pytest.raises(InvalidInput, match="inside a wrapper") as caught:
        open_checkpoint(tmp_path / "a")
    assert remedy in caught.value.remedy
