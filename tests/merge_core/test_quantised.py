"""Tensors that are computed while they are read, such as those of quantized parents, merge like stored ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family import LINEAR, check_recipe
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mergegate.merge_core import MergeRecord, load_recipe, merge_weights, open_checkpoint, plan_merge
from mergegate.merge_core.checkpoint import Checkpoint, DerivedTensor, StoredTensor, patterns
from mergegate.merge_core.engine import EngineSettings
from mergegate.merge_core.errors import InvalidInput

EXPERTS, OUTPUTS, INPUTS = 3, 40, 96
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 24], "activation_scheme": "dynamic", "fmt": "e4m3"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
EXPERT = "model.layers.0.mlp.experts.gate_up_proj"
MATRIX = "model.layers.0.mlp.down_proj.weight"
NORM = "model.layers.0.norm.weight"


def saved(place: Path, tensors: dict[str, torch.Tensor], quantisation: dict[str, Any] | None = None) -> Path:
    place.mkdir()
    config: dict[str, Any] = {"architectures": ["X"], "num_hidden_layers": 1, "torch_dtype": "bfloat16"}
    if quantisation:
        config["quantization_config"] = quantisation
    (place / "config.json").write_text(json.dumps(config))
    save_file(tensors, place / "model.safetensors")
    return place


def fp8_weights(seed: int, rows: int = 45, columns: int = 70) -> dict[str, torch.Tensor]:
    """Return FP8 weights of a size that the blocks do not divide, with every code of the format but NaN."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 3
    scales = torch.rand(-(-rows // 16), -(-columns // 24), generator=generator) * 3e-4
    return {
        MATRIX: codes.view(torch.float8_e4m3fn),
        f"{MATRIX}_scale_inv": scales,
        NORM: torch.randn(columns, generator=generator).bfloat16(),
    }


def fp8_decoded(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    rows, columns = weights[MATRIX].shape
    factors = weights[f"{MATRIX}_scale_inv"].repeat_interleave(16, 0).repeat_interleave(24, 1)[:rows, :columns]
    return (weights[MATRIX].float() * factors).bfloat16()


def mxfp4_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = (EXPERTS, OUTPUTS, INPUTS // 32, 16)
    return {
        f"{EXPERT}_blocks": torch.randint(0, 256, blocks, generator=generator, dtype=torch.uint8),
        f"{EXPERT}_scales": torch.randint(100, 140, blocks[:3], generator=generator, dtype=torch.uint8),
        NORM: torch.randn(INPUTS, generator=generator).bfloat16(),
    }


def merged(models: list[Path], out: Path, method: str = "passthrough", **settings: Any) -> MergeRecord:
    weight = {"parameters": {"weight": 0.5}} if method == "linear" else {}
    recipe = load_recipe({"merge_method": method, "models": [{"model": str(one), **weight} for one in models]})
    plan = plan_merge(recipe, {str(one): open_checkpoint(one) for one in models})
    return merge_weights(plan, out, settings=EngineSettings(**settings))


@pytest.mark.parametrize("block", [64, 1000, 1 << 20])
def test_blocks_of_fp8_are_what_their_factors_say(tmp_path: Path, block: int) -> None:
    weights = fp8_weights(0)
    place = saved(tmp_path / "a", weights, FP8)
    merged([place], tmp_path / "out", block_elements=block, threads=3)
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == {MATRIX, NORM}
    assert found[MATRIX].dtype == torch.bfloat16
    assert torch.equal(found[MATRIX], fp8_decoded(weights))
    assert torch.equal(found[NORM], weights[NORM])
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.parametrize("size", [70, 71, 1 << 45, 1 << 63, 10**30])
def test_a_block_larger_than_the_matrix_needs_no_memory(tmp_path: Path, size: int) -> None:
    weights = fp8_weights(0)
    scales = weights[f"{MATRIX}_scale_inv"][:1, :1].contiguous()
    changed = {**weights, f"{MATRIX}_scale_inv": scales}
    place = saved(tmp_path / "a", changed, {**FP8, "weight_block_size": [size, size]})
    merged([place], tmp_path / "out", block_elements=1000)
    expected = (weights[MATRIX].float() * scales).bfloat16()
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")[MATRIX], expected)


@pytest.mark.parametrize("block", [64, 1000, 5000, 1 << 20])
def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path, block: int) -> None:
    weights = mxfp4_weights(0)
    place = saved(tmp_path / "a", weights, MXFP4)
    merged([place], tmp_path / "out", block_elements=block, threads=3)
    found = load_file(tmp_path / "out/model.safetensors")
    expected = convert_moe_packed_tensors(weights[f"{EXPERT}_blocks"], weights[f"{EXPERT}_scales"])
    assert found.keys() == {EXPERT, NORM}
    assert found[EXPERT].shape == (EXPERTS, INPUTS, OUTPUTS)
    assert torch.equal(found[EXPERT], expected)


@pytest.mark.parametrize("method", ["linear", "slerp"])
def test_a_merge_is_that_of_the_decoded_parents(tmp_path: Path, method: str) -> None:
    """The parents can be quantized, plain, or one of each."""
    quantised, plain = [], []
    for seed in range(2):
        weights = fp8_weights(seed)
        quantised.append(saved(tmp_path / f"q{seed}", weights, FP8).name)
        plain.append(saved(tmp_path / f"p{seed}", {MATRIX: fp8_decoded(weights), NORM: weights[NORM]}).name)
    slerp = "merge_method: slerp\nbase_model: a\nmodels: [{model: b}]\nparameters: {t: 0.3}\n"
    results = []
    for number, (a, b) in enumerate(((*quantised,), (quantised[0], plain[1]), (*plain,))):
        text = (slerp if method == "slerp" else LINEAR).replace(": a", f": {a}").replace(": b", f": {b}")
        planned = check_recipe(text, tmp_path)
        assert planned.blocking == ()
        assert planned.plan is not None
        assert sum("decodes it to bfloat16" in finding.found for finding in planned.findings) == 2 - number
        merge_weights(planned.plan, tmp_path / f"out{number}")
        results.append(load_file(tmp_path / f"out{number}/model.safetensors"))
    for name in (MATRIX, NORM):
        assert torch.equal(results[0][name], results[2][name])
        assert torch.equal(results[1][name], results[2][name])


def test_what_the_scales_make_infinite_is_refused(tmp_path: Path) -> None:
    weights = fp8_weights(0)
    weights[f"{MATRIX}_scale_inv"][0, 0] = float("nan")
    place = saved(tmp_path / "a", weights, FP8)
    with pytest.raises(InvalidInput, match="NaN or infinite"):
        merged([place], tmp_path / "out", "linear")


@pytest.mark.parametrize("change", ["transposed scales", "one short", "half of the scales", "wide blocks"])
def test_scales_that_do_not_fit_are_refused(tmp_path: Path, change: str) -> None:
    weights = fp8_weights(0)
    scales = weights[f"{MATRIX}_scale_inv"]
    changed = {
        "transposed scales": scales.T.contiguous().reshape(3, 3)[:2],
        "one short": scales[:-1].contiguous(),
        "half of the scales": scales.half(),
    }
    weights[f"{MATRIX}_scale_inv"] = changed.get(change, scales)
    size = {"weight_block_size": [128, 128]} if change == "wide blocks" else {}
    with pytest.raises(InvalidInput, match="_scale_inv"):
        open_checkpoint(saved(tmp_path / "a", weights, {**FP8, **size}))


@pytest.mark.parametrize(
    "said",
    [
        {**FP8, "activation_scheme": "static"},
        *({**FP8, "weight_block_size": size} for size in (None, [128, 0], "128")),
        {"quant_method": "gptq", "bits": 4},
    ],
)
def test_what_cannot_be_decoded_is_refused_by_name(tmp_path: Path, said: dict[str, Any]) -> None:
    for name in "ab":  # Even equal payloads are refused.
        saved(tmp_path / name, fp8_weights(0), said)
    assert any("quantized" in finding.found for finding in check_recipe(LINEAR, tmp_path).blocking)


ROWS, WIDTH = 37, 8


@dataclass(frozen=True)
class Scaled(DerivedTensor):
    """``factor`` times a stored tensor."""

    source: StoredTensor
    factor: float

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return (self.source,)

    def identity(self) -> Any:
        return self.factor

    def open(self, read: Callable[..., None]) -> Callable[..., None]:
        def elements(first: int, into: np.ndarray) -> None:
            stored = np.empty(len(into), np.uint8)
            read(self.source, first, stored)
            into.view(np.float32)[:] = patterns(stored, self.dtype).view(np.float32) * np.float32(self.factor)

        return elements


def scaled(checkpoint: Checkpoint, factor: float) -> Checkpoint:
    tensors = {
        name: Scaled(name, tensor.dtype, tensor.shape, tensor, factor) for name, tensor in checkpoint.tensors.items()
    }
    return replace(checkpoint, tensors=tensors)


@pytest.fixture
def pair(tmp_path: Path) -> dict[str, Checkpoint]:
    generator = torch.Generator().manual_seed(0)
    for name in "ab":
        names = [f"layers.{n}.up_proj.weight" for n in range(2)]
        saved(tmp_path / name, {name: torch.randn(ROWS, WIDTH, generator=generator) for name in names})
    return {name: open_checkpoint(tmp_path / name) for name in "ab"}


METHODS: dict[str, dict[str, Any]] = {
    "linear": {"models": [{"model": name, "parameters": {"weight": 1.0}} for name in "ab"]},
    "slerp": {"base_model": "a", "models": [{"model": "b"}], "parameters": {"t": 0.25}},
    "ties": {"base_model": "a", "models": [{"model": "b", "parameters": {"weight": 1.0}}]},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("block", [1 << 24, 64])
def test_is_merged_as_if_it_were_stored(pair: dict[str, Checkpoint], tmp_path: Path, method: str, block: int) -> None:
    recipe = load_recipe({"merge_method": method, **METHODS[method]})
    weights = {name: 2 * tensor for name, tensor in load_file(tmp_path / "b/model.safetensors").items()}
    other, settings = saved(tmp_path / "twice", weights), EngineSettings(block_elements=block, threads=2)
    derived, stored = (
        merge_weights(plan_merge(recipe, {**pair, "b": checkpoint}), tmp_path / f"out{number}", settings=settings)
        for number, checkpoint in enumerate((scaled(pair["b"], 2.0), open_checkpoint(other)))
    )
    assert derived.files == stored.files


def test_what_a_killed_merge_left_of_another_derivation_is_not_continued(
    pair: dict[str, Checkpoint], tmp_path: Path
) -> None:
    recipe = load_recipe({"merge_method": "passthrough", "models": [{"model": "b"}]})

    def killed() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_weights(plan_merge(recipe, {"b": scaled(pair["b"], 2.0)}), tmp_path / "out", before_sealing=killed)
    goes_on = merge_weights(plan_merge(recipe, {"b": scaled(pair["b"], 3.0)}), tmp_path / "out")
    fresh = merge_weights(plan_merge(recipe, {"b": scaled(pair["b"], 3.0)}), tmp_path / "fresh")
    assert goes_on.files == fresh.files
