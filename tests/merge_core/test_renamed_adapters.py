"""Adapters of families with other names on disk (merged, extracted, refused) give the numbers of PEFT in memory."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_table import parents_of
from family_trials import adaptable, read_all
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from samples import sampled
from tiny_families import BY_NAME

from mergegate.merge_core import load_recipe, merge_weights, open_checkpoint, plan_merge
from mergegate.merge_core.adapters import (
    ExtractionSettings,
    NewAdapter,
    apply_adapter,
    combine_adapters,
    extract_adapter,
    open_adapter,
    write_adapter,
)
from mergegate.merge_core.adapters.extraction import opened_files
from mergegate.merge_core.adapters.names import join_stored, split_stored
from mergegate.merge_core.adapters.tensors import JoinedRows, MemoryRows
from mergegate.merge_core.checkpoint import BY_CODE, StoredTensor
from mergegate.merge_core.errors import InvalidInput

RENAMED = ("kimi_k25", "kimi_linear", "mistral_large4", "deepseek_v4", "hy_v3", "hy_v4", "lfm3", "lfm3_vl", "step3p7")
# PEFT 0.21 renames the keys of an adapter as if they were names on disk, and so drops these of its own adapters.
DROPPED_BY_PEFT = {"mistral_large4": ".shared_experts."}


def adapter_of(model: Any, place: Path, seed: int, skipped: str) -> dict[str, torch.Tensor]:
    """Save a random adapter on all linear layers of a model, and return the parameters after merging it."""
    import peft

    torch.manual_seed(seed)
    found = [name for name in adaptable(model) if not skipped or skipped not in name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=found, init_lora_weights=False)
        adapted = peft.get_peft_model(copy.deepcopy(model), config)
        adapted.save_pretrained(place)
        merged = adapted.merge_and_unload()
    merged.save_pretrained(place / "merged")
    return read_all(place / "merged")


def loaded_by_peft(model: Any, adapter: Path, place: Path) -> dict[str, torch.Tensor]:
    """Return the parameters after PEFT loads an adapter and merges it. A missing or unexpected key fails."""
    import peft

    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        merged = peft.PeftModel.from_pretrained(copy.deepcopy(model), adapter).merge_and_unload()
    assert [str(warning.message) for warning in raised if "adapter key" in str(warning.message)] == []
    merged.save_pretrained(place)
    return read_all(place)


def require_close(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.story
@pytest.mark.parametrize("name", sampled(RENAMED, ["lfm3"], pytest.mark.proof))
def test_two_adapters_are_merged_combined_and_extracted_as_in_memory(name: str, tmp_path: Path) -> None:
    model, skipped = parents_of(BY_NAME[name], tmp_path)["a"], DROPPED_BY_PEFT.get(name, "")
    one, two = (adapter_of(model, tmp_path / place, seed, skipped) for seed, place in enumerate(("one", "two")))
    base = open_checkpoint(tmp_path / "a")
    adapters = {f"a+{place}": open_adapter(tmp_path / place) for place in ("one", "two")}
    weights = zip(adapters, (0.3, 0.7), strict=True)
    models = [{"model": ref, "parameters": {"weight": weight}} for ref, weight in weights]
    recipe = {"merge_method": "linear", "models": models}
    expected = {key: (0.3 * one[key].double() + 0.7 * two[key].double()).to(one[key].dtype) for key in one}

    tables = {ref: apply_adapter(base, adapter) for ref, adapter in adapters.items()}
    merge_weights(plan_merge(load_recipe(recipe), tables), tmp_path / "merged")
    require_close(read_all(tmp_path / "merged"), expected)

    output = load_recipe({**recipe, "output": "adapter"})
    combined = combine_adapters(output, base, adapters, tmp_path / "scratch")
    write_adapter(combined.adapter, tmp_path / "combined")
    require_close(loaded_by_peft(model, tmp_path / "combined", tmp_path / "by combined"), expected)

    alone = load_recipe({"merge_method": "passthrough", "models": [{"model": "a+one"}]})
    merge_weights(plan_merge(alone, tables), tmp_path / "tuned")
    extracted = extract_adapter(open_checkpoint(tmp_path / "tuned"), base, "a", ExtractionSettings(rank=4))
    assert extracted.error < 1e-4
    write_adapter(extracted.adapter, tmp_path / "extracted")
    assert {module.module for module in extracted.errors} == set(open_adapter(tmp_path / "one").modules)
    require_close(loaded_by_peft(model, tmp_path / "extracted", tmp_path / "by extracted"), one)


@pytest.mark.parametrize(
    ("module", "stored", "operation"),
    [
        ("mlp.experts.gate_up_proj", "model.llm.layers.0.mlp.experts.w13_weight", "Interleave"),
        ("mlp.gate_proj", "model.llm.layers.0.mlp.w13_dn.weight", "Interleave, Chunk"),
    ],
)
def test_a_conversion_that_cannot_be_reversed_is_refused_with_its_tensor(
    module: str, stored: str, operation: str, tmp_path: Path
) -> None:
    (tmp_path / "base").mkdir()
    config = {"model_type": "inkling_mm_model", "architectures": ["InklingForConditionalGeneration"]}
    (tmp_path / "base/config.json").write_text(json.dumps(config))
    shape = (2, 8, 4) if "experts" in stored else (8, 4)
    tensors = {stored: torch.randn(shape), "model.llm.norm.weight": torch.randn(4)}
    save_file(tensors, tmp_path / "base/model.safetensors", {"format": "pt"})
    factors = (torch.randn(2, 4), torch.randn(4, 2))
    name = f"model.language_model.layers.0.{module}"
    write_adapter(NewAdapter("base", {name: factors}), tmp_path / "adapter")
    with pytest.raises(InvalidInput) as refused:
        apply_adapter(open_checkpoint(tmp_path / "base"), open_adapter(tmp_path / "adapter"))
    assert f"{stored}: {operation}" in refused.value.found


@settings(max_examples=30)
@given(heads=st.integers(0, 3), chunk=st.integers(1, 2), width=st.integers(1, 3), block=st.integers(1, 40))
def test_rows_that_are_split_and_joined_again_are_the_stored_tensor(
    heads: int, chunk: int, width: int, block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = 4 * max(heads, 1)
    values = torch.randn(3 * rows, width)
    path = tmp_path_factory.mktemp("rows") / "model.safetensors"
    save_file({"qkv": values}, path, {"format": "pt"})
    offset = path.stat().st_size - values.numel() * 4
    stored = StoredTensor("qkv", path, BY_CODE["F32"], (3 * rows, width), offset)
    part = MemoryRows("q", stored.dtype, (rows, width), stored, chunk * rows, heads)
    with opened_files() as read:
        own = np.empty(part.numel * 4, np.uint8)
        part.open(read)(0, own)
        chosen = values[chunk * rows : (chunk + 1) * rows]
        if heads:  # As transformers permutes rows for rotary positions.
            chosen = chosen.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)
        assert torch.equal(torch.from_numpy(own.view(np.float32)).view(rows, width), chosen)
        joined = JoinedRows("qkv", stored.dtype, stored.shape, stored, (part,), (part,)).open(read)
        whole = np.empty(stored.numel * 4, np.uint8)
        for first in range(0, stored.numel, block):
            joined(first, whole[first * 4 : (first + block) * 4])
    assert torch.equal(torch.from_numpy(whole.view(np.float32)).view(values.shape), values)


@pytest.mark.story
def test_a_checkpoint_without_changes_is_unchanged_after_splitting(tmp_path: Path) -> None:
    parents_of(BY_NAME["kimi_k25"], tmp_path)
    stored = open_checkpoint(tmp_path / "a")
    split = split_stored(stored)
    assert "model.vision_tower.layers.0.attn.q_proj.weight" in split.tensors
    assert join_stored(split, stored).tensors == stored.tensors
