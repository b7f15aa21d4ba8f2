"""Adapters that cannot be applied to stored weights are refused by name, and no adapter tensor is silently dropped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_family import load_base, make_adapter, make_base
from safetensors.torch import load_file, save_file
from samples import sampled

from mergegate.merge_core import open_checkpoint
from mergegate.merge_core.adapters import apply_adapter, open_adapter
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.models.checkpoints.pin import ResolvedAdapter

PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("refused")
    make_base(place / "base", "llama", torch.float32)
    make_base(place / "tied", "llama", torch.float32, tie_word_embeddings=True)
    make_adapter(place / "base", place / "adapter", torch.float32, target_modules=["q_proj", "v_proj"])
    return place


@pytest.fixture
def adapter(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept / "adapter", tmp_path / "adapter"))


def configured(adapter: Path, **changes: Any) -> Path:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return adapter


def with_tensors(adapter: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return adapter


def applied(kept: Path, adapter: Path, base: str = "base") -> object:
    return apply_adapter(open_checkpoint(kept / base), open_adapter(adapter))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("peft_type", value) for value in ("LOHA", None)),
        *(("init_lora_weights", value) for value in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga")),
        ("init_lora_weights", "something new"), ("layer_replication", [[0, 1], [0, 2]]), ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}), ("alora_invocation_tokens", [1, 2]), ("arrow_config", {"top_k": 2}),
        ("kasa_config", {"beta": 1}), ("monteclora_config", {"num_samples": 2}), ("velora_config", {"rank": 1}),
        ("megatron_config", {"x": 1}), ("invented_by_a_later_version", {"x": 1}), *(("r", value) for value in (0, "8")),
        *(("lora_alpha", value) for value in (float("nan"), None)), *(("bias", "some"), ("use_dora", "yes")),
        *(("rank_pattern", value) for value in ([1], {"q_proj": 0}, {"(a+)+b": 2}, {"(": 2})),
        *(("trainable_token_indices", value) for value in ([1, 1], "all")), ("target_parameters", "experts"),
    ],
)  # fmt: skip
def test_a_configuration_that_cannot_be_applied_is_refused_by_its_key(
    kept: Path, adapter: Path, key: str, value: object
) -> None:
    with pytest.raises(InvalidInput, match=rf"adapter_config\.json: {key}"):
        applied(kept, configured(adapter, **{key: value}))


@pytest.mark.parametrize(
    "settings",
    [
        *({"init_lora_weights": value} for value in (True, False, "gaussian", "eva", "orthogonal")),
        # The orientation of a weight follows from the model.
        *({"fan_in_fan_out": value} for value in (None, True, 0, 5, "yes", [], {"a": 1})),
        {"invented": None, "another": {}, "third": False},
    ],
)
def test_settings_that_do_not_change_the_result_are_accepted(
    kept: Path, adapter: Path, settings: dict[str, Any]
) -> None:
    assert applied(kept, configured(adapter, **settings))


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def put(name: str, *shape: int) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop(f"{PREFIX}.lora_A.weight"), "q_proj.lora_B.weight: its counterpart is missing in the adapter"),
        (drop(f"{PREFIX}.lora_B.weight"), "q_proj.lora_A.weight: its counterpart is missing in the adapter"),
        (put("base_model.model.model.layers.7.mlp.up_proj.lora_A.weight", 4, 32), "its counterpart is missing"),
        (put("base_model.model.model.layers.0.router.weight", 4, 32), "has no tensor model.layers.0.router.weight"),
        (put("model.layers.0.self_attn.o_proj.lora_A.weight", 4, 32), "names that start with base_model.model."),
        (put(f"{PREFIX}.lora_C.weight", 4, 4), "an unknown kind of tensor"),
        (put(f"{PREFIX}.lora_A.default.weight", 4, 32), "an unknown kind of tensor"),
        (put(f"{PREFIX}.lora_magnitude_vector", 32), "without use_dora"),
        (put(f"{PREFIX}.lora_B.bias", 32), "without lora_bias"),
        (lambda tensors: tensors.update({f"{PREFIX}.lora_A.weight": torch.ones(4, 32).int()}), "I32"),
        (put(f"{PREFIX}.lora_A.weight", 4, 24), "it fits a shape of"),
        (put(f"{PREFIX}.lora_A.weight", 8, 32), "rank 8"), (put(f"{PREFIX}.lora_A.weight", 0, 32), "without elements"),
        (put(f"{PREFIX}.lora_A.weight", 4, 8, 4), "convolutions are not supported"),
        (put(f"{PREFIX}.lora_embedding_A", 4, 32), "in addition to lora_A"),
        (put(f"{PREFIX}.base_layer.weight", 8, 32), "it fits a shape of"),
        (put("base_model.model.model.embed_tokens.weight", 97, 32), "97 rows"),
        (put("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", 2, 32), "trainable_token"),
    ],
)  # fmt: skip
def test_a_tensor_without_a_target_is_refused_by_name(
    kept: Path, adapter: Path, change: Callable[[dict[str, torch.Tensor]], Any], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        applied(kept, with_tensors(adapter, change))


@pytest.mark.parametrize("shape", [(), (2,), (2, 32, 1), (2, 16)])
@pytest.mark.parametrize(
    "name",
    [
        *("embed_tokens.token_adapter.trainable_tokens_delta", "embed_tokens.weight", "norm.weight"),
        *(f"layers.0.self_attn.q_proj.{part}.weight" for part in ("base_layer", "lora_A", "lora_B")),
    ],
)
def test_a_tensor_of_any_other_shape_is_refused_by_name(
    kept: Path, adapter: Path, name: str, shape: tuple[int, ...]
) -> None:
    configured(adapter, trainable_token_indices={"embed_tokens": [1, 5]})
    with pytest.raises(InvalidInput) as caught:
        applied(kept, with_tensors(adapter, put(f"base_model.model.model.{name}", *shape)))
    assert name in caught.value.where
    assert caught.value.expected


def test_an_unknown_name_in_an_existing_layer_does_not_blame_the_base(kept: Path, adapter: Path) -> None:
    def add(layer: int) -> Path:
        module = f"base_model.model.model.layers.{layer}.mixer.in_proj"
        with_tensors(adapter, put(f"{module}.lora_A.weight", 4, 32))
        return with_tensors(adapter, put(f"{module}.lora_B.weight", 32, 4))

    with pytest.raises(InvalidInput, match=r"remedy:\s+name the model that the adapter was trained on"):
        applied(kept, add(5))
    shutil.copytree(kept / "adapter", adapter, dirs_exist_ok=True)
    with pytest.raises(InvalidInput, match=r"does not know[\s\S]*trained on base, .*merge_and_unload"):
        applied(kept, add(1))


@pytest.mark.parametrize(
    "adapted",
    [
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1, 99]}},
    ],
    ids=["saved whole", "factors of the embedding", "factors of the head", "trainable tokens"],
)
def test_the_remedy_for_an_adapter_with_more_tokens_than_its_base_helps(
    kept: Path, tmp_path: Path, adapted: dict[str, Any]
) -> None:
    grown = load_base(kept / "base", torch.float32)
    grown.resize_token_embeddings(100, mean_resizing=False)
    grown.save_pretrained(tmp_path / "grown")
    make_adapter(tmp_path / "grown", tmp_path / "adapter", torch.float32, **adapted)
    opened = open_adapter(tmp_path / "adapter")
    with pytest.raises(InvalidInput, match=r"100 rows[\s\S]*resize_token_embeddings\(100\)"):
        apply_adapter(open_checkpoint(kept / "base"), opened)
    apply_adapter(open_checkpoint(tmp_path / "grown"), opened)


def test_the_shapes_of_another_base_are_refused(kept: Path, tmp_path: Path) -> None:
    make_base(tmp_path / "wide", "llama", torch.float32, hidden_size=64, head_dim=16)
    with pytest.raises(InvalidInput, match=r"expected: \[64, 64\], the shape of model\.layers\.0\.self_attn\.q_proj"):
        apply_adapter(open_checkpoint(tmp_path / "wide"), open_adapter(kept / "adapter"))


CARD = "The following `bitsandbytes` quantization config was used during training:\n- load_in_4bit: True\n"


@pytest.mark.parametrize(
    ("named", "card", "words"),
    [
        ("elsewhere/base", "", []), ("", "", []), ("org/other", "", ["other"]), ("acme/an-awkward-base", "", ["awk"]),
        ("elsewhere/base", CARD, ["a quantized copy of elsewhere/base"]), ("", CARD, ["a quantized copy of"]),
        ("other", "load_in_4bit: true", ["a quantized copy of other", "other"]),
        ("elsewhere/base", "AutoModel.from_pretrained(base, load_in_4bit=True)", []),
        ("acme/other-GPTQ", "", ["the quantized model acme/other-GPTQ", "other-GPTQ"]),
        *((f"acme/base{end}", "", [f"the quantized model acme/base{end}"]) for end in (
            "-bnb-4bit", "-unsloth-bnb-4bit", "-4bit", "_8bit", "-GPTQ", "-GPTQ-Int4", "-AWQ", "-FP8", "-FP8-dynamic",
            "-int8", "-NVFP4", "-quantized.w4a16", "-Q4_K_M", "-AQLM-2Bit-1x16",
        )),
    ],
)  # fmt: skip
def test_training_on_other_or_quantized_weights_is_a_warning(
    adapter: Path, named: str, card: str, words: list[str]
) -> None:
    configured(adapter, base_model_name_or_path=named)
    (adapter / "README.md").write_text(card)
    found = ResolvedAdapter(ref="adapter", directory=adapter).findings("org/base@main+adapter")
    assert [one.severity for one in found] == ["warn"] * len(words)
    assert all(part in one.found for one, part in zip(found, words, strict=True))
    assert card or not ResolvedAdapter(ref="adapter", directory=adapter).findings(f"{named}+adapter")


@pytest.mark.parametrize("zero", ["lora_A", "lora_B", "lora_alpha", "one lora_B", "DoRA"])
def test_an_adapter_that_changes_nothing_is_a_warning(kept: Path, tmp_path: Path, zero: str) -> None:
    place = make_adapter(kept / "base", tmp_path / "adapter", torch.float32, use_dora=zero == "DoRA")
    configured(place, lora_alpha=0 if zero == "lora_alpha" else 8)
    names = [name for name in load_file(place / "adapter_model.safetensors") if zero in name or zero == "DoRA"]
    if zero == "one lora_B":
        names = [f"{PREFIX}.lora_B.weight"]
    with_tensors(place, lambda tensors: [tensors[name].zero_() for name in names])
    findings = ResolvedAdapter(ref="adapter", directory=place).findings("base+adapter")
    assert ["changes nothing" in one.found for one in findings] == ([True] if zero[:4] == "lora" else [])


@pytest.mark.parametrize("name", ["lm_head.lora_A.weight", "lm_head.lora_B.weight"])
def test_a_change_of_only_a_tied_head_is_refused(kept: Path, adapter: Path, name: str) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["base_model.model.lm_head.lora_A.weight"] = torch.ones(4, 32)
        tensors["base_model.model.lm_head.lora_B.weight"] = torch.ones(96, 4)

    with pytest.raises(InvalidInput, match="tied to the embedding"):
        applied(kept, with_tensors(adapter, change), "tied")


def test_a_saved_tied_embedding_without_its_head_is_refused(kept: Path, adapter: Path) -> None:
    change = put("base_model.model.model.embed_tokens.weight", 96, 32)
    with pytest.raises(InvalidInput, match="tied to the head"):
        applied(kept, with_tensors(adapter, change), "tied")


@pytest.mark.parametrize("family", sampled(("mixtral", "gpt_oss"), ("mixtral",)))
def test_factors_for_another_number_of_experts_are_refused(tmp_path: Path, family: str) -> None:
    base = make_base(tmp_path / "base", family, torch.float32)
    parameters = ["mlp.experts.down_proj"]
    adapter = make_adapter(base, tmp_path / "adapter", torch.float32, target_parameters=parameters)
    other = make_base(tmp_path / "other", family, torch.float32, num_experts=2, num_local_experts=2)
    with pytest.raises(InvalidInput, match="fit 0 parameters"):
        apply_adapter(open_checkpoint(other), open_adapter(adapter))


def test_garbage_is_refused_without_a_traceback(kept: Path, adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(InvalidInput):
        applied(kept, adapter)
    (adapter / "adapter_config.json").write_text("[1]")
    with pytest.raises(InvalidInput):
        applied(kept, adapter)
