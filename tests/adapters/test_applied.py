"""An adapter applied while streaming matches PEFT's ``merge_and_unload`` bit for bit, for every kind of adapter."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_family import applied_by_us, differences, make_adapter, make_base, read_all, unloaded_by_peft
from safetensors.torch import load_file, save_file
from samples import sampled_rows

from mergegate.merge_core.adapters import tensors
from mergegate.merge_core.adapters.tensors import Grid, Product
from mergegate.merge_core.errors import InvalidInput

LINEAR = ["q_proj", "o_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

# Name → (family, changes to the model's configuration, the adapter's configuration).
Kind = tuple[str, dict[str, Any], dict[str, Any]]
TIED = {"tie_word_embeddings": True}
KINDS: dict[str, Kind] = {
    "plain": ("llama", {}, {"target_modules": LINEAR}),
    "patterns": ("llama", {}, {
        "target_modules": LINEAR,
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 6, r"layers\.0\..*o_proj": 3},
        "alpha_pattern": {"down_proj": 5, "^model.layers.0.self_attn.q_proj": 1},
    }),
    "rslora": ("llama", {}, {"target_modules": LINEAR, "use_rslora": True}),
    "dora": ("llama", {}, {"target_modules": LINEAR, "use_dora": True}),
    "biases": ("qwen2", {}, {"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"}),
    "all biases": ("gpt2", {}, {"target_modules": ["c_attn"], "bias": "all", "fan_in_fan_out": True}),
    "bias of B": ("qwen2", {}, {"target_modules": ["q_proj"], "lora_bias": True}),
    "transposed": ("gpt2", {}, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "transposed unsaid": ("gpt2", {}, {"target_modules": ["c_attn", "c_proj"]}),
    "modules to save": ("llama", {}, {
        "target_modules": LINEAR, "modules_to_save": ["lm_head", "embed_tokens", "input_layernorm"],
    }),
    "tokens": ("llama", {}, {"target_modules": LINEAR, "trainable_token_indices": [3, 94, 17]}),
    "tokens of tied": ("llama", TIED, {
        "target_modules": LINEAR, "trainable_token_indices": {"embed_tokens": [3, 94]},
    }),
    "tied": ("llama", TIED, {"target_modules": LINEAR}),
    "head": ("llama", {}, {"target_modules": ["lm_head", "q_proj"]}),
    "experts of mixtral": ("mixtral", {}, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "experts of qwen3": ("qwen3_moe", {}, {"target_parameters": EXPERTS[::-1], "rank_pattern": {"down_proj": 2}}),
    "experts of gpt-oss": ("gpt_oss", {}, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "experts of llama 4": ("llama4", {}, {
        "target_parameters": ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"],
    }),
    "a parameter by a bare name": ("qwen3_moe", {}, {
        "target_modules": ["lm_head", "q_proj"], "target_parameters": ["down_proj"],
    }),
    "one parameter": ("mixtral", {}, {"target_parameters": ["experts.down_proj"]}),
    "vision": ("gemma3_vision", {}, {
        "target_modules": r".*(language_model.*q_proj|vision_tower.*k_proj|language_model.*down_proj)",
    }),
    # PEFT rounds an embedding twice.
    "embedding": ("llama", {}, {"target_modules": ["embed_tokens", "q_proj"]}),
    "tied embedding": ("llama", TIED, {"target_modules": ["embed_tokens"]}),
}  # fmt: skip
# With the tables of a resized model, PEFT stores a table of modules_to_save three times.
TABLES = [{"modules_to_save": names} for names in (["embed_tokens", "lm_head"], ["embed_tokens"], ["lm_head"], [])]
TABLES += [{"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, {"trainable_token_indices": [3, 94]}]
for (number, tables), tie in itertools.product(enumerate(TABLES), ({}, TIED)):
    config = {"target_modules": ["q_proj"], "save_embedding_layers": True, **tables}
    KINDS[f"{'tied ' if tie else ''}tables {number}"] = ("llama", tie, config)
COLUMN_NORMS: dict[str, Kind] = {
    "dora embedding": ("llama", {}, {"target_modules": ["embed_tokens"], "use_dora": True}),
    "dora transposed": ("gpt2", {}, {"target_modules": ["c_attn", "c_proj"], "use_dora": True, "fan_in_fan_out": True}),
}


def both(
    place: Path, kind: Kind, dtype: torch.dtype, block: int = 1 << 20
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the stored tensors of the base, of mergegate's result and of PEFT's result."""
    family, model, config = kind
    base = make_base(place / "base", family, dtype, **model)
    adapter = make_adapter(base, place / "adapter", dtype, **config)
    ours = applied_by_us(base, adapter, place / "ours", block=block)
    return read_all(base), ours, unloaded_by_peft(base, adapter, place / "theirs", dtype)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
QUICK = [("dora", "bfloat16"), ("experts of mixtral", "float32"), ("tied tables 0", "bfloat16")]


@pytest.mark.parametrize(("kind", "dtype"), sampled_rows(itertools.product(KINDS, DTYPES), QUICK, pytest.mark.proof))
def test_applied_adapters_equal_those_of_peft(
    tmp_path: Path, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, ours, theirs = both(tmp_path, KINDS[kind], DTYPES[dtype])
    assert differences(ours, theirs) == {}
    assert differences(ours, base) != {}
    # Compiled kernels, which mergegate normally uses for large weights only, must give the same bits.
    monkeypatch.setattr(tensors, "_COMPILED_FROM_ELEMENTS", 0)
    assert differences(applied_by_us(tmp_path / "base", tmp_path / "adapter", tmp_path / "compiled"), theirs) == {}


@pytest.mark.story
@pytest.mark.parametrize("kind", COLUMN_NORMS)
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_column_norms_equal_those_of_peft_up_to_rounding(
    tmp_path: Path, kind: str, dtype: torch.dtype, within: float
) -> None:
    """We sum in float64 in one pass, PEFT in float32 in its own order, so the norms differ by one rounding."""
    base, ours, theirs = both(tmp_path, COLUMN_NORMS[kind], dtype)
    assert max(differences(ours, theirs).values(), default=0.0) <= within
    assert differences(ours, base) != {}


@pytest.mark.story
@pytest.mark.parametrize("kind", ["dora", "transposed", "tokens", "experts of mixtral", "experts of gpt-oss"])
def test_blocks_of_any_size_give_the_same_bytes(tmp_path: Path, kind: str) -> None:
    family, model, config = KINDS[kind]
    base = make_base(tmp_path / "base", family, torch.bfloat16, **model)
    adapter = make_adapter(base, tmp_path / "adapter", torch.bfloat16, **config)
    whole = applied_by_us(base, adapter, tmp_path / "whole")
    assert differences(applied_by_us(base, adapter, tmp_path / "blocks", block=64), whole) == {}


@pytest.mark.parametrize("width", [24, pytest.param(32, id="square")])
@pytest.mark.parametrize("version", ["0.18.1", "0.19.0", "0.21.2", None])
def test_experts_of_older_versions_of_peft_are_applied_as_those_versions_did(
    tmp_path: Path, version: str | None, width: int
) -> None:
    """PEFT 0.19.1 swapped the roles of the factors, so swapped factors of an older version give the same model."""
    settings = {"target_parameters": EXPERTS, "rank_pattern": {"down_proj": 2}}
    _, _, theirs = both(tmp_path, ("qwen3_moe", {"moe_intermediate_size": width}, settings), torch.float32)
    tensors = read_all(adapter := tmp_path / "adapter")
    for name in [name for name in tensors if "lora_A" in name and version != "0.21.2"]:
        a, b = tensors[name], tensors[other := name.replace("lora_A", "lora_B")]
        tensors[name] = b.view(len(b), -1, 4).permute(2, 1, 0).reshape(-1, len(b))
        tensors[other] = a.view(4, -1, a.shape[1]).permute(2, 1, 0).reshape(a.shape[1], -1)
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "peft_version": version}))
    if version is None and width == 32:
        with pytest.raises(InvalidInput, match="set peft_version"):
            applied_by_us(tmp_path / "base", adapter, tmp_path / "older")
        return
    older = applied_by_us(tmp_path / "base", adapter, tmp_path / "older")
    assert max(differences(older, theirs).values(), default=0.0) < 1e-6


@pytest.mark.parametrize("columns", [257, 1031])
@pytest.mark.parametrize("rows", [17, 257, 1031])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_tile_is_bit_identical_to_the_full_product(rows: int, columns: int, transposed: bool) -> None:
    """Tiling must not change a product: large weights have to match PEFT as exactly as small ones."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(1, columns if transposed else rows, 8, generator=generator)
    right = torch.randn(1, 8, rows if transposed else columns, generator=generator)
    product = Product(left, right, 0.5, transposed)
    whole = (left[0] @ right[0]) * 0.5
    tiles = list(Grid(1, rows, columns).tiles(0, rows * columns))
    found = torch.cat([product.rows(*tile).clone() for tile in tiles])
    assert torch.equal(found, whole.T if transposed else whole)
    assert [tile[1] for tile in tiles] == [0, *(tile[2] for tile in tiles[:-1])]
    assert tiles[-1][2] == rows


def test_an_adapter_in_bfloat16_on_a_float16_base(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama", torch.float16)
    adapter = make_adapter(base, tmp_path / "adapter", torch.float16, target_modules=LINEAR)
    file = adapter / "adapter_model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    ours = applied_by_us(base, adapter, tmp_path / "ours")
    assert differences(ours, unloaded_by_peft(base, adapter, tmp_path / "theirs", torch.float16)) == {}


def test_factors_of_single_experts_apply_to_separately_stored_experts(tmp_path: Path) -> None:
    """Older libraries wrote one pair of factors per expert, when each expert was a separate module."""
    base = make_base(tmp_path / "base", "mixtral", torch.float32)
    fused = make_adapter(base, tmp_path / "fused", torch.float32, target_modules=["q_proj"])
    tensors = load_file(fused / "adapter_model.safetensors")
    generator = torch.Generator().manual_seed(3)
    stored = read_all(base)
    expected = dict(stored)
    for expert in range(4):
        name = f"model.layers.0.block_sparse_moe.experts.{expert}.w1"
        a, b = torch.randn(4, 32, generator=generator), torch.randn(48, 4, generator=generator)
        tensors[f"base_model.model.{name}.lora_A.weight"], tensors[f"base_model.model.{name}.lora_B.weight"] = a, b
        expected[f"{name}.weight"] = stored[f"{name}.weight"] + (b @ a) * 2
    save_file(tensors, fused / "adapter_model.safetensors", {"format": "pt"})
    ours = applied_by_us(base, fused, tmp_path / "ours")
    changed = {name for name in differences(ours, expected) if "q_proj" not in name}
    assert changed == set()


@pytest.mark.story
def test_older_names_of_a_vision_language_model_are_accepted(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "gemma3_vision", torch.float32)
    adapter = make_adapter(base, tmp_path / "adapter", torch.float32, target_modules=r".*language_model.*q_proj")
    new = applied_by_us(base, adapter, tmp_path / "new")
    file = adapter / "adapter_model.safetensors"
    renamed = {
        name.replace("model.model.language_model.", "model.language_model.model."): tensor
        for name, tensor in load_file(file).items()
    }
    assert renamed.keys() != load_file(file).keys()
    save_file(renamed, file, {"format": "pt"})
    assert differences(applied_by_us(base, adapter, tmp_path / "old"), new) == {}
