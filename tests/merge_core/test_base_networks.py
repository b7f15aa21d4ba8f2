"""The stored bytes of a parent define prefix and head of its network, not config.json or the order of the models."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from family import change_json, check_recipe, random_tensors, save_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from samples import sampled
from transformers import LlamaConfig, LlamaForCausalLM

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
    (BERT, "BertForMaskedLM", "BertModel"), (BERT, "BertModel", "BertForMaskedLM"),
    (BERT, "BertForSequenceClassification", "BertModel"), (BERT, "BertModel", "BertForSequenceClassification"),
    (ROBERTA, "RobertaForMaskedLM", "RobertaModel"), (ROBERTA, "RobertaModel", "RobertaForSequenceClassification"),
    (GPT2, "GPT2LMHeadModel", "GPT2Model"), (GPT2, "GPT2Model", "GPT2LMHeadModel"),
    (LLAMA, "LlamaForCausalLM", "LlamaModel"), (LLAMA, "LlamaModel", "LlamaForCausalLM"),
    (TIED, "LlamaModel", "LlamaForCausalLM"), (MISTRAL, "MistralForCausalLM", "MistralModel"),
]  # fmt: skip


def save(directory: Path, config: Any, class_name: str, seed: int) -> Any:
    torch.manual_seed(seed)
    network = getattr(transformers, class_name)(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    network.save_pretrained(directory)
    return network


def rename(directory: Path, change: Any) -> None:
    path = directory / "model.safetensors"
    save_file({change(name): tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})


HALVES = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 0.5}\n"


def merge(root: Path) -> PlannedMerge:
    planned = check_recipe(HALVES, root)
    if planned.plan is not None and not planned.blocking:
        (root / "out").mkdir()
        merge_weights(planned.plan, root / "out")
    return planned


def assert_average(root: Path, class_name: str, first: Any, second: Any) -> None:
    """Assert that transformers loads the result and that it averages two networks, where both have a parameter."""
    merged, info = getattr(transformers, class_name).from_pretrained(root / "out", output_loading_info=True)
    assert (info["missing_keys"], info["unexpected_keys"]) == (set(), set())
    same = type(first) is type(second)
    mine, theirs = ((one if same else one.base_model).double() for one in (first, second))
    others = theirs.state_dict()
    mine.load_state_dict({name: (own + others.get(name, own)) / 2 for name, own in mine.state_dict().items()})
    with torch.no_grad():
        ids = torch.arange(3, 20)[None]
        torch.testing.assert_close(merged.double()(ids)[0], first.double()(ids)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("named", sampled((True, False), (False,)))
@pytest.mark.parametrize("pair", sampled(range(len(PAIRS)), (0, 3, 6, 10)))
def test_the_base_network_is_merged_and_the_head_is_that_of_the_first(pair: int, named: bool, tmp_path: Path) -> None:
    config, *kinds = PAIRS[pair]
    networks = [save(tmp_path / name, config, kinds[seed], seed) for seed, name in enumerate("ab")]
    if not named:
        change_json(tmp_path / "b/config.json", architectures=None)
    assert merge(tmp_path).blocking == ()
    assert_average(tmp_path, kinds[0], *networks)


@pytest.mark.parametrize("bare", sampled("ab", "b"))
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
        change_json(tmp_path / "a/config.json", architectures=None)
    assert merge(tmp_path).blocking == ()
    result = json.loads((tmp_path / "out/config.json").read_text())
    assert result["architectures"] == [kind]
    assert_average(tmp_path, kind, *networks)


def test_two_different_heads_or_families_are_two_architectures(tmp_path: Path) -> None:
    save(tmp_path / "a", BERT, "BertForMaskedLM", 0)
    save(tmp_path / "b", BERT, "BertForSequenceClassification", 1)
    other = tmp_path / "other"
    save_checkpoint(other / "a", random_tensors(0))
    save_checkpoint(other / "b", random_tensors(1), config={"architectures": None, "model_type": "mistral"})
    for root in (tmp_path, other):
        assert "b: config.json: architectures" in [finding.where for finding in merge(root).blocking]


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


Head = Literal["none", "equal", "different"]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MODELS = st.tuples(st.sampled_from([True, False, None]), st.sampled_from(["none", "equal", "different"]))


def save_llama(directory: Path, seed: int, flag: bool | None, head: Head, shards: int = 1) -> dict[str, torch.Tensor]:
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
    parents = [save_llama(root / name, seed, *models[seed], shards) for seed, name in enumerate(names)]
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


@pytest.mark.parametrize(("flag", "head"), [(True, "different"), (None, "equal")])
def test_transformers_loads_the_result_with_the_head_that_it_stores(
    flag: bool | None, head: Head, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    networks: list[Any] = []
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
    assert merge(tmp_path).blocking == ()
    assert_average(tmp_path, "AutoModelForCausalLM", *networks)


def test_a_head_that_differs_in_one_number_is_not_tied(tmp_path: Path) -> None:
    save_llama(tmp_path / "a", 0, flag=True, head="equal")
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
    assert check_recipe(HALVES, tmp_path).blocking == ()
