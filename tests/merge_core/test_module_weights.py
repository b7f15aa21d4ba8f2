"""A merge applies its recipe to the weights of sentence-transformers modules, or it is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from family import LINEAR, merge_text, plan_recipe, save_family
from safetensors.torch import load_file, save_file
from samples import sampled
from test_companions import POOLING, findings, write
from test_merge_tensors import require_same_bits
from test_methods import CASES, expected_tensor

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.plan import network_shards

SHAPES = {"2_Dense": {"linear.weight": (5, 12), "linear.bias": (5,)}, "3_LayerNorm": {"norm.weight": (5,)}}
DENSE = "2_Dense/model.safetensors"
SLICES = "slices: [{sources: [{model: a, layer_range: [0, 3]}]}, {sources: [{model: b, layer_range: [1, 3]}]}]"
TIES = "merge_method: ties\nbase_model: base\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 0.5, density: 0.5}"


def draw_modules(seed: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return random weights of two modules, close to those of other seeds."""
    common, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed + 1)
    return {
        folder: {
            name: torch.randn(shape, generator=common) + 0.1 * torch.randn(shape, generator=own)
            for name, shape in shapes.items()
        }
        for folder, shapes in SHAPES.items()
    }


@pytest.fixture
def embeddings(family: Path) -> Path:
    """Embedding models ``base``, ``a``, ``b`` and ``c`` with a dense layer and a norm of their own."""
    for seed, name in enumerate(("base", "a", "b", "c")):
        write(family / name, {file: text for file, text in POOLING.items() if file != DENSE})
        for folder, tensors in draw_modules(seed).items():
            (family / name / folder).mkdir(exist_ok=True)
            save_file(tensors, family / name / folder / "model.safetensors", {"format": "pt"})
    return family


def load_module(directory: Path, folder: str = "2_Dense") -> dict[str, np.ndarray]:
    tensors = load_file(directory / folder / "model.safetensors")
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


def blocking(root: Path, recipe: str = LINEAR) -> list[str]:
    return [f"{one.where}: {one.found}" for one in findings(root, recipe) if one.severity == "block"]


@pytest.mark.parametrize("case", sampled(list(CASES)[::3], list(CASES)[::21]))
def test_modules_match_the_float64_formula_of_the_method(embeddings: Path, case: str) -> None:
    merge_text(CASES[case][0], embeddings)
    for folder in SHAPES:
        inputs = {name: load_module(embeddings / name, folder) for name in ("base", *"abc")}
        for name, merged in load_module(embeddings / "out", folder).items():
            expected = expected_tensor(case, inputs["base"][name], {one: inputs[one][name] for one in "abc"})
            np.testing.assert_allclose(merged, expected, rtol=1e-4, atol=2e-6)


def test_the_network_is_merged_as_without_modules(embeddings: Path, tmp_path: Path) -> None:
    merge_text(TIES, embeddings)
    plain = save_family(tmp_path / "plain")
    merge_text(TIES, plain)
    for name in ("model.safetensors", "config.json"):
        assert (embeddings / "out" / name).read_bytes() == (plain / "out" / name).read_bytes()


def test_a_merge_in_memory_yields_the_bytes_of_the_files(embeddings: Path) -> None:
    plan = plan_recipe("merge_method: dare_ties" + TIES.partition("ties")[2], embeddings)
    assert {"2_Dense/linear.weight", "3_LayerNorm/norm.weight"} < {job.output.name for job in plan.jobs}
    require_same_bits(plan, embeddings / "out", block_elements=32768, threads=3, kernels="fused")


def test_the_plan_counts_modules_and_the_index_does_not(embeddings: Path) -> None:
    plan = plan_recipe(LINEAR, embeddings)
    assert [shard.name for shard in plan.shards] == ["model.safetensors", DENSE, "3_LayerNorm/model.safetensors"]
    assert len(network_shards(plan.shards)) == 1
    assert plan.parameters == 70 + sum(job.output.numel for job in plan.jobs if "/" not in job.output.name)
    merge_text(LINEAR, embeddings)
    assert not (embeddings / "out" / "model.safetensors.index.json").exists()


def test_a_filter_selects_a_module(embeddings: Path) -> None:
    models = ", ".join(
        f"{{model: {name}, parameters: {{weight: [{{filter: 2_Dense, value: {value}}}, {{value: 0.5}}]}}}}"
        for name, value in (("a", 1), ("b", 0))
    )
    merge_text(f"merge_method: linear\nmodels: [{models}]", embeddings)
    merged, a, b = (load_module(embeddings / name) for name in ("out", "a", "b"))
    norm, *norms = (load_module(embeddings / name, "3_LayerNorm")["norm.weight"] for name in ("out", "a", "b"))
    assert all(np.array_equal(merged[name], a[name]) for name in a)
    assert not any(np.array_equal(a[name], b[name]) for name in a)
    np.testing.assert_allclose(norm, (norms[0] + norms[1]) / 2, rtol=1e-6)


def test_a_dtype_in_the_recipe_applies_to_modules(embeddings: Path) -> None:
    merge_text(LINEAR + "dtype: bfloat16\n", embeddings)
    assert {tensor.dtype for tensor in load_file(embeddings / "out" / DENSE).values()} == {torch.bfloat16}


@pytest.mark.story
def test_steps_pass_modules_on(embeddings: Path) -> None:
    text = f"{TIES.replace('model: b}', 'model: first}')}\n---\nname: first\n{LINEAR.replace('model: a', 'model: c')}"
    merge_text(text, embeddings)
    merge_text(LINEAR.replace("model: a", "model: c"), embeddings, "first")
    merge_text(TIES.replace("model: b}", "model: first}"), embeddings, "by hand")
    for name in (DENSE, "3_LayerNorm/model.safetensors", "model.safetensors"):
        assert (embeddings / "out" / name).read_bytes() == (embeddings / "by hand" / name).read_bytes()
    require_same_bits(plan_recipe(text, embeddings), embeddings / "again")


def test_a_pickled_module_is_merged_and_written_as_safetensors(embeddings: Path) -> None:
    merge_text(LINEAR, embeddings)
    expected = load_module(embeddings / "out")
    for name in ("a", "b"):
        tensors = load_file(embeddings / name / DENSE)
        torch.save(tensors, embeddings / name / "2_Dense" / "pytorch_model.bin")
    (embeddings / "a" / DENSE).unlink()
    merge_text(LINEAR, embeddings, "pickled")
    assert [path.name for path in (embeddings / "pickled" / "2_Dense").glob("*model*")] == ["model.safetensors"]
    merged = load_module(embeddings / "pickled")
    assert merged.keys() == expected.keys()
    assert all(np.array_equal(merged[name], expected[name]) for name in expected)


def test_equal_modules_are_copied_by_every_method(embeddings: Path) -> None:
    for name in ("b", "base"):
        for folder in SHAPES:
            (embeddings / name / folder / "model.safetensors").write_bytes(
                (embeddings / "a" / folder / "model.safetensors").read_bytes()
            )
    for number, text in enumerate((LINEAR, TIES, f"merge_method: passthrough\n{SLICES}")):
        assert blocking(embeddings, text) == []
        merge_text(text, embeddings, f"out{number}")
        assert (embeddings / f"out{number}" / DENSE).read_bytes() == (embeddings / "a" / DENSE).read_bytes()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"merge_method: passthrough\n{SLICES}", "cuts layers"),
        ("merge_method: regmean\nmodels: [{model: a, text: a}, {model: b, text: b}]", "calibration texts"),
    ],
)
def test_a_recipe_that_cannot_merge_modules_is_refused(embeddings: Path, text: str, reason: str) -> None:
    blocked = [one for one in findings(embeddings, text) if one.severity == "block"]
    assert {one.where for one in blocked} == {"b: 2_Dense", "b: 3_LayerNorm"}
    assert all(reason in one.expected and "another method" in one.remedy for one in blocked)
    with pytest.raises(InvalidInput, match=reason):
        plan_recipe(text, embeddings)


def test_a_base_without_the_module_is_refused_with_a_remedy(embeddings: Path) -> None:
    for path in (embeddings / "base").rglob("[123]_*/*"):
        path.unlink()
    (embeddings / "base" / "modules.json").unlink()
    blocked = [one for one in findings(embeddings, TIES) if one.severity == "block"]
    assert [one.where for one in blocked] == ["base: 2_Dense", "base: 3_LayerNorm"]
    assert "a method without a base" in blocked[0].remedy
    assert blocking(embeddings) == []


def test_a_module_that_one_parent_lacks_is_refused(embeddings: Path) -> None:
    (embeddings / "b" / DENSE).unlink()
    assert blocking(embeddings) == ["b: 2_Dense: no weights of the module 2_Dense/, which differ in the other models"]


@pytest.mark.parametrize(
    ("name", "tensor", "found"),
    [
        ("linear.scale", torch.ones(5), "a tensor that a does not have"),
        ("linear.weight", torch.ones(6, 12), "shape [6, 12]"),
        ("linear.bias", torch.ones(5, dtype=torch.int64), "I64, but F32 in other models"),
    ],
)
def test_modules_that_do_not_fit_are_refused(embeddings: Path, name: str, tensor: torch.Tensor, found: str) -> None:
    file = embeddings / "b" / DENSE
    save_file({**load_file(file), name: tensor}, file)
    assert blocking(embeddings) == [f"b: 2_Dense/{name}: {found}"]


def test_a_damaged_module_is_refused(embeddings: Path) -> None:
    file = embeddings / "b" / DENSE
    file.write_bytes(b"damaged bytes")
    size = int.from_bytes(b"damaged ", "little")
    assert blocking(embeddings) == [f"{file}: a header of {size} bytes in a file of 13"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_module_with_nan_is_refused(embeddings: Path, bad: float) -> None:
    tensors = load_file(embeddings / "b" / DENSE)
    tensors["linear.bias"][2] = bad
    save_file(tensors, embeddings / "b" / DENSE)
    with pytest.raises(InvalidInput, match=r"b: 2_Dense/linear\.bias.*1 of 5 numbers are NaN or infinite"):
        merge_text(LINEAR, embeddings)
