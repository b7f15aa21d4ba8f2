"""Every merge refuses NaN and infinite inputs, for any method, format and position."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family import MODELS, WITHOUT_BASE, merge_text, recipe_of, save_checkpoint, save_tokenizer, usual_parameters
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from samples import sampled_rows

from mergegate.merge_core import merge_methods, open_checkpoint
from mergegate.merge_core.analysis import measure_interference
from mergegate.merge_core.checkpoint import BY_CODE, EXPONENTS
from mergegate.merge_core.engine import health
from mergegate.merge_core.errors import InvalidInput

EMBEDDINGS, NORM = "model.embed_tokens.weight", "model.norm.weight"
TOKENS, HIDDEN = 300, 64  # More than a grain, so that small blocks split the tensor.
BAD = (float("nan"), float("inf"), float("-inf"))
FORMATS = ("bfloat16", "float16", "float32", "float64")
STORED = {dtype.torch_name: dtype for dtype in BY_CODE.values()}
CONFIG = {"num_hidden_layers": 0, "tie_word_embeddings": True}
# Variants that make further passes or work on rows instead of grains.
VARIANTS = {
    "nuslerp": ["weight: 0.5, nuslerp_flatten: false, nuslerp_row_wise: true"], "model_stock": ["filter_wise: true"],
    "ties": ["weight: 0.5, density: 0.4, rescale: true"], "dare_ties": ["weight: 0.5, density: 1.0"],
    "linear": ["weight: 0, normalize: false"], "task_arithmetic": ["weight: 0, lambda: 0"],
}  # fmt: skip


CASES = [
    (method, parameters)
    for method in sorted(merge_methods())
    for parameters in [usual_parameters(method), *VARIANTS.get(method, [])]
]
SAMPLE = sampled_rows(CASES, CASES[::5])


def models_of(method: str) -> list[str]:
    """Return the names of all models that the recipe of ``method`` reads."""
    return [*([] if method in WITHOUT_BASE else ["base"]), *MODELS.get(method, "abc")]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints without NaN or infinity in every format, as ``<format>/<name>``."""
    root = tmp_path_factory.mktemp("family")
    generator = torch.Generator().manual_seed(0)
    around = torch.randn(TOKENS, HIDDEN, generator=generator)
    for name in ("base", "a", "b", "c"):
        drawn = around + 0.1 * torch.randn(TOKENS, HIDDEN, generator=generator)
        for chosen in FORMATS:
            dtype = getattr(torch, chosen)
            tensors = {EMBEDDINGS: drawn.to(dtype), NORM: drawn[0].clone().to(dtype)}
            save_checkpoint(root / chosen / name, tensors, config=CONFIG)
    return root


def spoil(family: Path, chosen: str, root: Path, where: dict[str, dict[int, float]]) -> Path:
    """Copy one format of the family into ``root`` and replace some elements of some models' embeddings."""
    root.mkdir(exist_ok=True)
    for name in ("base", "a", "b", "c"):
        source = family / chosen / name
        if name not in where:
            (root / name).symlink_to(source)
            continue
        shutil.copytree(source, root / name)
        tensors = load_file(source / "model.safetensors")
        flat = tensors[EMBEDDINGS].flatten()
        for index, value in where[name].items():
            flat[index] = value
        tensors[EMBEDDINGS] = flat.reshape(TOKENS, HIDDEN)
        save_file(tensors, root / name / "model.safetensors", {"format": "pt"})
    return root


def refused(text: str, root: Path, model: str, count: int, tensor: str = EMBEDDINGS, **how: object) -> InvalidInput:
    """Require a refusal that names model, tensor and count and leaves no finished-looking output. Return it."""
    with pytest.raises(InvalidInput) as caught:
        merge_text(text, root, **how)
    assert caught.value.where == f"{model}: {tensor}"
    assert caught.value.found.startswith(f"{count} of ")
    assert "NaN or infinite" in caught.value.found
    assert caught.value.remedy
    out = root / "out"
    assert not (out / "config.json").exists()
    assert not list(out.glob("*.safetensors"))
    return caught.value


@pytest.mark.parametrize(("method", "parameters"), SAMPLE)
def test_every_method_refuses_nan_in_any_model(family: Path, tmp_path: Path, method: str, parameters: str) -> None:
    for number, model in enumerate(models_of(method), start=CASES.index((method, parameters))):
        chosen = FORMATS[number % len(FORMATS)]
        where = {model: {number * 1234 % (TOKENS * HIDDEN): BAD[number % 3]}}
        root = spoil(family, chosen, tmp_path / str(number), where)
        refused(recipe_of(method, parameters, ""), root, model, 1, kernels=("torch", "fused")[number % 2])


indices = st.dictionaries(st.integers(0, TOKENS * HIDDEN - 1), st.sampled_from(BAD), min_size=1, max_size=5)


@pytest.mark.story
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    case=st.sampled_from(CASES),
    chosen=st.sampled_from(FORMATS),
    how=st.fixed_dictionaries({
        "kernels": st.sampled_from(["torch", "fused"]), "threads": st.integers(1, 4),
        "block_elements": st.sampled_from([1, 4096, 16384, 1 << 20]),
    }),
    data=st.data(),
)  # fmt: skip
def test_nan_is_found_in_every_format_position_and_block_size(
    family: Path, tmp_path_factory: Any, case: tuple[str, str], chosen: str, how: dict[str, Any], data: st.DataObject
) -> None:
    model, where = data.draw(st.sampled_from(models_of(case[0]))), data.draw(indices)
    root = spoil(family, chosen, tmp_path_factory.mktemp("spoilt"), {model: where})
    refused(recipe_of(*case, ""), root, model, len(where), **how)


@settings(max_examples=40)
@given(
    st.sampled_from(FORMATS),
    st.lists(st.floats(width=16), min_size=1, max_size=99),
    st.integers(0, 3000),
    st.booleans(),
)
def test_the_count_is_that_of_isfinite(chosen: str, values: list[float], padding: int, fused: bool) -> None:
    tensor = torch.tensor(values + [1.0] * padding).to(getattr(torch, chosen))
    stored = tensor.view(torch.uint8).numpy()
    expected = int((~torch.isfinite(tensor)).sum()), bool((tensor != 0).any())
    assert health.inspect_numbers(stored, STORED[chosen], fused=fused) == expected


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("chosen", ["bfloat16", "float16"])
def test_every_sixteen_bit_number_is_classified_correctly(chosen: str, fused: bool) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    tensor = torch.from_numpy(every.copy()).view(getattr(torch, chosen))
    expected = int((~torch.isfinite(tensor)).sum())
    assert health.count_non_finite(every, STORED[chosen], fused=fused) == expected
    ones = np.full(1 << 16, 0xFFFF, np.uint16).view(np.uint8)  # One more NaN than a 16-bit counter can hold.
    assert health.count_non_finite(ones, STORED[chosen], fused=fused) == 1 << 16


def test_all_mergeable_formats_are_checked() -> None:
    assert {dtype.code for dtype in BY_CODE.values() if dtype.kind == "float"} == set(EXPONENTS)


def test_all_models_with_nan_are_named(family: Path, tmp_path: Path) -> None:
    spoil(family, "bfloat16", tmp_path, {"a": {0: BAD[0], 7: BAD[1]}, "c": {100: BAD[2]}})
    error = refused(recipe_of("ties", "weight: 0.5, density: 0.4", ""), tmp_path, "a", 2)
    assert "in c, 1" in error.found


def test_copied_tensors_are_checked(family: Path, tmp_path: Path) -> None:
    """A tensor that the other models lack is copied instead of merged, but still checked."""
    file = spoil(family, "float32", tmp_path, {"base": {}}) / "base/model.safetensors"
    head = torch.full((TOKENS, HIDDEN), 0.5)
    head[3, 3] = BAD[1]
    save_file({**load_file(file), "lm_head.weight": head}, file, {"format": "pt"})
    refused(recipe_of("ties", "weight: 0.5", ""), tmp_path, "base", 1, "lm_head.weight")


def test_a_resumed_merge_refuses_nan_again(family: Path, tmp_path: Path) -> None:
    spoil(family, "bfloat16", tmp_path, {"b": {TOKENS * HIDDEN - 1: BAD[0]}})
    text = recipe_of("dare_ties", "weight: 0.5, density: 0.4", "")
    for _ in range(3):
        refused(text, tmp_path, "b", 1, block_elements=16384)


def vocabularies(root: Path, rows: dict[str, Iterable[str]], bad: tuple[str, int]) -> Path:
    """Write checkpoints whose rows belong to these tokens, with one broken row in one of them."""
    for seed, (name, tokens) in enumerate(rows.items()):
        tokens = list(tokens)
        drawn = torch.randn(len(tokens), HIDDEN, generator=torch.Generator().manual_seed(seed))
        if name == bad[0]:
            drawn[bad[1], 5] = BAD[0]
        save_checkpoint(root / name, {EMBEDDINGS: drawn, NORM: torch.ones(HIDDEN)}, config=CONFIG)
        save_tokenizer(root / name, tokens)
    return root


BY_TOKENS = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 0.5}\ntokenizer_source: a\n"


def test_nan_in_a_lent_row_is_counted_for_its_lender_and_unused_rows_are_not_checked(tmp_path: Path) -> None:
    vocabularies(tmp_path, {"a": "xyzw", "b": "xyw"}, ("a", 2))  # b lacks z and borrows the row.
    error = refused(BY_TOKENS, tmp_path, "a", 1)
    assert not re.search(r"in b", error.found)
    merge_text(BY_TOKENS, vocabularies(tmp_path / "unused", {"a": "xyz", "b": "xyzw"}, ("b", 3)))


def test_a_step_that_overflows_is_named(family: Path, tmp_path: Path) -> None:
    spoil(family, "float16", tmp_path, {})
    text = (
        "merge_method: linear\nmodels: [{model: first}, {model: b}]\nparameters: {weight: 0.5}\n---\n"
        "name: first\nmerge_method: linear\nmodels: [{model: a}]\nparameters: {weight: 1e6, normalize: false}\n"
    )
    with pytest.raises(InvalidInput, match=r"first: model\.") as caught:
        merge_text(text, tmp_path)
    assert "dtype" in caught.value.remedy


@pytest.mark.parametrize(("method", "parameters"), SAMPLE)
def test_infinities_that_all_models_have_in_common_are_copied(
    family: Path, tmp_path: Path, method: str, parameters: str
) -> None:
    """Elsewhere, a merge equals that of models with zeros in place of the infinities, for any blocks."""
    models, turn = models_of(method), CASES.index((method, parameters))
    kernels = ("torch", "fused")[turn % 2]
    chosen = FORMATS[turn % len(FORMATS)]
    places = {0: BAD[1], 4097 + turn: BAD[2], TOKENS * HIDDEN - 1: BAD[1]}
    if len(models) == 1:  # A single model has no constants in a tensor with other elements.
        places = {index: BAD[1 + index % 2] for index in range(TOKENS * HIDDEN)}
    constant, finite_one = tmp_path / "constant", tmp_path / "finite"
    for root, where in ((constant, places), (finite_one, dict.fromkeys(places, 0.0))):
        spoil(family, chosen, root, dict.fromkeys(models, where))
    text = recipe_of(method, parameters, "")
    health = merge_text(text, constant, kernels=kernels).findings
    merge_text(text, constant, "small", kernels=kernels, block_elements=4096, threads=3)
    merge_text(text, finite_one, kernels=kernels)
    merged, small, expected = (
        load_file(root / "model.safetensors")[EMBEDDINGS].flatten()
        for root in (constant / "out", constant / "small", finite_one / "out")
    )
    for index, value in places.items():
        assert expected[index] == 0.0
        expected[index] = value
    assert torch.equal(merged, expected)
    assert torch.equal(small, expected)
    assert not any("infinite" in finding.found for finding in health)


@pytest.mark.parametrize("method", ["linear", "ties"])
@pytest.mark.parametrize(
    ("changed", "values"),
    [
        ("a nan", dict.fromkeys(("a", "b", "base"), BAD[0])),
        ("another sign", {"a": BAD[1], "b": BAD[2], "base": BAD[1]}),
        ("a finite number", {"a": BAD[1], "b": 3.0, "base": BAD[1]}),
    ],
)
@pytest.mark.parametrize("numel", [1, 5])
def test_a_clip_bound_is_copied_unless_a_model_differs(
    tmp_path: Path, method: str, changed: str, values: dict[str, float], numel: int
) -> None:
    """Clip bounds of audio towers are scalars that may be infinite."""
    name = "audio_tower.input_max"
    base = "" if method == "linear" else "base_model: base\n"
    text = f"merge_method: {method}\n{base}models: [{{model: a}}, {{model: b}}]\nparameters: {{weight: 0.5}}\n"

    def write_models(root: Path, values: dict[str, float]) -> Path:
        for model, value in values.items():
            bound = torch.full(() if numel == 1 else (numel,), BAD[1])
            bound.view(-1)[0] = value
            drawn = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(len(model)))
            save_checkpoint(root / model, {EMBEDDINGS: drawn, name: bound}, config=CONFIG)
        return root

    record = merge_text(text, write_models(tmp_path / "same", dict.fromkeys(values, BAD[2])))
    merged = load_file(tmp_path / "same/out/model.safetensors")[name].view(-1)
    assert not any(name in finding.where for finding in record.findings)
    assert merged[0] == BAD[2]
    assert bool((merged[1:] == BAD[1]).all())
    with pytest.raises(InvalidInput, match="are NaN or infinite"):
        merge_text(text, write_models(tmp_path / "other", values))


def test_one_model_has_no_constants_next_to_finite_numbers(family: Path, tmp_path: Path) -> None:
    where = dict.fromkeys(range(4096, TOKENS * HIDDEN), BAD[1])  # All blocks but the first are infinite.
    spoil(family, "float32", tmp_path, {"a": where})
    text = recipe_of("passthrough", "", "")
    refused(text, tmp_path, "a", len(where), block_elements=4096)


def test_common_infinities_are_no_differences_between_models(family: Path, tmp_path: Path) -> None:
    measured = []
    for value in (BAD[1], 0.0):
        root = spoil(family, "float32", tmp_path / str(value), {name: {7: value} for name in ("base", *"abc")})
        parents = [open_checkpoint(root / name) for name in "abc"]
        measured.append(measure_interference(open_checkpoint(root / "base"), parents))
    constant, zero = measured
    assert constant == zero
    assert not constant.skipped
