"""PEFT reads an extracted adapter without leftover keys, and the reported error is the error that remains."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_family import applied_by_us, differences, load_base, make_base, read_all, unloaded_by_peft
from safetensors.torch import load_file, save_file
from samples import sampled

from mergegate.merge_core import open_checkpoint
from mergegate.merge_core.adapters import ExtractionSettings, FactoredAdapter, extract_adapter, write_adapter
from mergegate.merge_core.adapters.extraction import factor_change, factor_sum
from mergegate.merge_core.errors import InvalidInput

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}), "tied": ("llama", {"tie_word_embeddings": True}), "biases": ("qwen2", {}),
    "transposed": ("gpt2", {}), "vision": ("gemma3_vision", {}),
}  # fmt: skip


def tuned(base: Path, place: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """Write a copy of ``base`` with ``change`` applied to each tensor."""
    place.mkdir()
    for file in base.iterdir():
        if file.suffix == ".safetensors":
            tensors = {name: change(name, tensor).contiguous() for name, tensor in load_file(file).items()}
            save_file(tensors, place / file.name, {"format": "pt"})
        else:
            (place / file.name).write_bytes(file.read_bytes())
    return place


def moved(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with noise added, except in the vision tower, the projector and the first layer's query."""
    if "vision_tower" in name or "projector" in name or "layers.0.self_attn.q_proj" in name:
        return tensor
    generator = torch.Generator().manual_seed(len(name))
    return tensor + 0.05 * torch.randn(tensor.shape, generator=generator)


def extracted(base: Path, fine_tune: Path, out: Path, rank: int, **settings: Any) -> FactoredAdapter:
    found = extract_adapter(
        open_checkpoint(fine_tune), open_checkpoint(base), str(base), ExtractionSettings(rank, **settings)
    )
    write_adapter(found.adapter, out)
    return found


@pytest.mark.parametrize("kind", sampled(FAMILIES, ("transposed",)))
def test_peft_reads_every_key_and_finds_the_error_that_is_reported(tmp_path: Path, kind: str) -> None:
    from peft import PeftModel

    family, more = FAMILIES[kind]
    base = make_base(tmp_path / "base", family, torch.float32, **more)
    fine_tune = tuned(base, tmp_path / "tuned", moved)
    found = extracted(base, fine_tune, tmp_path / "adapter", rank=4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        PeftModel.from_pretrained(load_base(base, torch.float32), tmp_path / "adapter")
    assert [str(one.message) for one in said if "key" in str(one.message)] == []
    theirs = unloaded_by_peft(base, tmp_path / "adapter", tmp_path / "theirs", torch.float32)
    before, wanted = read_all(base), read_all(fine_tune)
    change = sum(float((wanted[name] - before[name]).double().square().sum()) for name in before)
    rest = {name: float((wanted[name] - theirs[name]).double().square().sum()) for name in before}
    assert math.sqrt(sum(rest.values()) / change) == pytest.approx(found.error, rel=1e-4)
    for one in found.errors:
        inner = one.module.rpartition("language_model.")[2]
        stored = next(name for name in before if name.endswith(f"{inner}.weight") and "vision" not in name)
        own = float((wanted[stored] - before[stored]).double().square().sum())
        assert math.sqrt(rest[stored] / own) == pytest.approx(one.error, rel=1e-3), one.module
    factored = {".".join(one.module.split(".")[-3:]) for one in found.errors}
    without = [name for name in rest if ".".join(name.removesuffix(".weight").split(".")[-3:]) not in factored]
    assert {name: rest[name] for name in without if "embed" not in name and rest[name]} == {}


@pytest.mark.parametrize("kind", sampled(FAMILIES, ("biases",)))
def test_a_full_rank_reproduces_the_fine_tune(tmp_path: Path, kind: str) -> None:
    family, more = FAMILIES[kind]
    base = make_base(tmp_path / "base", family, torch.float32, **more)
    fine_tune = tuned(base, tmp_path / "tuned", moved)
    found = extracted(base, fine_tune, tmp_path / "adapter", rank=256)
    assert found.error < 5e-6
    ours = applied_by_us(base, tmp_path / "adapter", tmp_path / "ours")
    assert max(differences(ours, read_all(fine_tune)).values()) < 5e-6


def test_unchanged_tensors_are_omitted_and_epsilon_drops_weak_directions(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama", torch.float32)
    fine_tune = tuned(base, tmp_path / "tuned", lambda name, one: one + 0.1 if "layers.1.mlp.up" in name else one)
    found = extracted(base, fine_tune, tmp_path / "adapter", rank=4)
    assert list(found.adapter.factors) == ["model.layers.1.mlp.up_proj"]
    assert (found.adapter.full_tensors, found.adapter.biases) == ({}, {})
    # A constant difference has rank one, up to the rounding of each sum.
    assert found.error < 1e-5
    assert found.unchanged == len(read_all(base)) - 1
    limited = extracted(base, fine_tune, tmp_path / "limited", rank=4, epsilon=1e-3)
    assert [one.rank for one in limited.errors] == [1]


def test_a_changed_bias_of_an_unchanged_layer_is_saved_with_its_weight(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen2", torch.float32)
    moved = ("layers.0.self_attn.k_proj.bias", "layers.0.mlp.up_proj.weight")
    fine_tune = tuned(base, tmp_path / "tuned", lambda name, one: one + 0.1 if name.endswith(moved) else one)
    found = extracted(base, fine_tune, tmp_path / "adapter", rank=4)
    assert set(found.adapter.full_tensors["model.layers.0.self_attn.k_proj"]) == {"weight", "bias"}
    theirs = unloaded_by_peft(base, tmp_path / "adapter", tmp_path / "theirs", torch.float32)
    assert max(differences(theirs, read_all(fine_tune)).values(), default=0) < 5e-6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda name, one: one, "the same weights as base"),
        (lambda name, one: one + 1 if "norm" in name else one, "only model.layers.0"),
        (lambda name, one: one.new_ones(97, 32) if "embed" in name else one, "use equal vocabularies"),
        (lambda name, one: one.new_ones(5, 5) if "up_proj" in name else one, r"shape \[5, 5\]"),
        (lambda name, one: one * float("nan") if "up_proj" in name else one, "NaN"),
    ],
)
def test_changes_that_an_adapter_cannot_represent_are_refused_by_name(
    tmp_path: Path, change: Callable[[str, torch.Tensor], torch.Tensor], words: str
) -> None:
    base = make_base(tmp_path / "base", "llama", torch.float32)
    fine_tune = tuned(base, tmp_path / "tuned", change)
    with pytest.raises(InvalidInput, match=words):
        extracted(base, fine_tune, tmp_path / "adapter", rank=4)


@pytest.mark.parametrize(
    ("family", "part", "words"),
    [
        ("mixtral", "experts.1.w2", "experts or their router"), ("mixtral", "gate.weight", "experts or their router"),
        # Granite's fused experts have no module in memory by their name on disk, so PEFT would skip them.
        ("granite", "model.layers.1.block_sparse_moe.input_linear.weight", "experts"),
    ],
)  # fmt: skip
def test_experts_and_their_router_are_refused_by_name(tmp_path: Path, family: str, part: str, words: str) -> None:
    base = make_base(tmp_path / "base", family, torch.float32)
    fine_tune = tuned(base, tmp_path / "tuned", lambda name, one: one + 0.1 if part in name else one)
    with pytest.raises(InvalidInput, match=words):
        extracted(base, fine_tune, tmp_path / "adapter", rank=4)


def test_large_matrices_are_decomposed_like_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    strengths = torch.logspace(0, -4, 90)
    change = (torch.randn(90, 90, generator=generator) * strengths) @ torch.randn(90, 120, generator=generator)
    whole = factor_change(change, 8, dtype=torch.float32)
    monkeypatch.setattr("mergegate.merge_core.adapters.extraction._FULL_DECOMPOSITION", 16)
    assert factor_change(change, 8, dtype=torch.float32).error == pytest.approx(whole.error, rel=1e-4)


def factors(seed: int, rank: int) -> tuple[float, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rank, 40, generator=generator, dtype=torch.float64)
    return 0.5 + seed, a, torch.randn(60, rank, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("rank", [1, 4, 11, None])
def test_a_sum_equals_the_truncated_full_decomposition(rank: int | None) -> None:
    parts = [factors(1, 4), factors(2, 8)]
    cut = factor_sum(parts, rank, dtype=torch.float64)
    product = parts[0][0] * (parts[0][2] @ parts[0][1]) + parts[1][0] * (parts[1][2] @ parts[1][1])
    s = torch.linalg.svdvals(product)
    best = float((s[rank or 12 :].square().sum() / s.square().sum()).sqrt())
    assert float((cut.b @ cut.a - product).norm() / product.norm()) == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert cut.error == pytest.approx(best if rank else 0, rel=1e-6)
    assert len(cut.a) == (rank or 12)
