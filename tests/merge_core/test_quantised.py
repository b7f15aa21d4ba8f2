"""Quantized parents are decoded while they are read, with the same bits as in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mergegate.merge_core import (
    MergeRecord,
    load_recipe,
    merge_weights,
    open_checkpoint,
    plan_merge,
    plan_with_findings,
)
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


def merged(models: list[Path], out: Path, method: str, **settings: Any) -> MergeRecord:
    weight = {"weight": 0.5}
    recipe = load_recipe(
        {"merge_method": method, "models": [{"model": str(one), "parameters": weight} for one in models]}
        if method == "linear"
        else {"merge_method": method, "models": [{"model": str(one)} for one in models]}
    )
    plan = plan_merge(recipe, {str(one): open_checkpoint(one) for one in models})
    return merge_weights(plan, out, settings=EngineSettings(**settings))


@pytest.mark.parametrize("block", [64, 1000, 1 << 20])
def test_blocks_of_fp8_are_what_their_factors_say(tmp_path: Path, block: int) -> None:
    weights = fp8_weights(0)
    place = saved(tmp_path / "a", weights, FP8)
    merged([place], tmp_path / "out", "passthrough", block_elements=block, threads=3)
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
    place = saved(
        tmp_path / "a", {**weights, f"{MATRIX}_scale_inv": scales}, {**FP8, "weight_block_size": [size, size]}
    )
    merged([place], tmp_path / "out", "passthrough", block_elements=1000)
    expected = (weights[MATRIX].float() * scales).bfloat16()
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")[MATRIX], expected)


@pytest.mark.parametrize("block", [64, 1000, 5000, 1 << 20])
def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path, block: int) -> None:
    weights = mxfp4_weights(0)
    place = saved(tmp_path / "a", weights, MXFP4)
    merged([place], tmp_path / "out", "passthrough", block_elements=block, threads=3)
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
        quantised.append(saved(tmp_path / f"q{seed}", weights, FP8))
        plain.append(saved(tmp_path / f"p{seed}", {MATRIX: fp8_decoded(weights), NORM: weights[NORM]}))
    if method == "slerp":
        text = "merge_method: slerp\nbase_model: {a}\nmodels: [{{model: {b}}}]\nparameters: {{t: 0.3}}\n"
    else:
        text = "merge_method: linear\nmodels: [{{model: {a}}}, {{model: {b}}}]\nparameters: {{weight: 0.5}}\n"
    results = []
    for number, (a, b) in enumerate(((*quantised,), (quantised[0], plain[1]), (*plain,))):
        recipe = load_recipe(text.format(a=a, b=b))
        checkpoints = {str(one): open_checkpoint(one) for one in (a, b)}
        planned = plan_with_findings(recipe, checkpoints)
        assert planned.blocking == ()
        assert sum("decodes it to bfloat16" in finding.found for finding in planned.findings) == 2 - number
        merge_weights(plan_merge(recipe, checkpoints), tmp_path / f"out{number}")
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
    weights, size = fp8_weights(0), FP8
    scales = weights[f"{MATRIX}_scale_inv"]
    match change:
        case "transposed scales":
            weights[f"{MATRIX}_scale_inv"] = scales.T.contiguous().reshape(3, 3)[:2]
        case "one short":
            weights[f"{MATRIX}_scale_inv"] = scales[:-1].contiguous()
        case "half of the scales":
            weights[f"{MATRIX}_scale_inv"] = scales.half()
        case "wide blocks":
            size = {**FP8, "weight_block_size": [128, 128]}
    with pytest.raises(InvalidInput, match="_scale_inv"):
        open_checkpoint(saved(tmp_path / "a", weights, size))


@pytest.mark.parametrize(
    "said",
    [
        {**FP8, "activation_scheme": "static"},
        {**FP8, "weight_block_size": None},
        {**FP8, "weight_block_size": [128, 0]},
        {**FP8, "weight_block_size": "128"},
        {"quant_method": "gptq", "bits": 4},
    ],
)
def test_what_cannot_be_decoded_is_refused_by_name(tmp_path: Path, said: dict[str, Any]) -> None:
    place = saved(tmp_path / "a", fp8_weights(0), said)
    other = saved(tmp_path / "b", fp8_weights(0), said)  # Even equal payloads are refused.
    models = [{"model": str(one), "parameters": {"weight": 1}} for one in (place, other)]
    recipe = load_recipe({"merge_method": "linear", "models": models})
    checkpoints = {str(one): open_checkpoint(one) for one in (place, other)}
    blocking = plan_with_findings(recipe, checkpoints).blocking
    assert any("quantized" in finding.found for finding in blocking)
