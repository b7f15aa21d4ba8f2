"""Combining adapters and applying the result to the base equals merging the full models."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_family import differences, load_base, make_adapter, make_base, read_all, unloaded_by_peft
from safetensors.torch import load_file, save_file
from samples import sampled, sampled_rows

from mergegate.merge_core import load_recipe, merge_weights, open_checkpoint, plan_merge
from mergegate.merge_core.adapters import (
    FactoredAdapter,
    apply_adapter,
    combine_adapters,
    combined_size,
    open_adapter,
    write_adapter,
)
from mergegate.merge_core.errors import InvalidInput

LINEAR = ["q_proj", "up_proj"]
OTHERS = ["q_proj", "down_proj"]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and adapters to combine, among them ``one`` (rank 4) and ``two`` (rank 2), which share a module."""
    place = tmp_path_factory.mktemp("combined")
    base = make_base(place / "base", "llama", torch.float32)
    make_adapter(base, place / "one", torch.float32, target_modules=LINEAR)
    make_adapter(base, place / "two", torch.float32, seed=2, r=2, lora_alpha=6, target_modules=OTHERS, use_rslora=True)
    make_adapter(base, place / "table", torch.float32, seed=3, target_modules=["embed_tokens", "q_proj"])
    make_adapter(base, place / "dora", torch.float32, target_modules=LINEAR, use_dora=True)
    make_adapter(base, place / "norms", torch.float32, target_modules=LINEAR, modules_to_save=["norm"])
    moe = make_base(place / "moe", "mixtral", torch.float32)
    make_adapter(moe, place / "experts", torch.float32, target_parameters=["mlp.experts.down_proj"])
    gpt2 = make_base(place / "gpt2", "gpt2", torch.float32)
    for seed, name in enumerate(("three", "four"), start=3):
        make_adapter(gpt2, place / name, torch.float32, seed=seed, target_modules=["c_attn"], fan_in_fan_out=True)
    return place


def written(method: str, *names: str, base: str = "base", **more: Any) -> dict[str, Any]:
    """Return a recipe, with a density only for methods that have one."""
    sparse = {} if method in ("linear", "task_arithmetic") else {"density": 0.6}
    if method.startswith("breadcrumbs"):
        sparse["gamma"] = 0.05
    weights = [0.7, 0.5, 0.4]
    models = [
        {"model": f"{base}+{name}", "parameters": {"weight": weight, **sparse}}
        for name, weight in zip(names, weights, strict=False)
    ]
    anchored = {} if method == "linear" else {"base_model": base}
    return {"merge_method": method, "models": models, **anchored, **more}


def combined(family: Path, recipe: dict[str, Any], out: Path) -> FactoredAdapter:
    loaded = load_recipe(recipe)
    models = [source.model for source in loaded.modules[0].slices[0].sources if source.model.adapter]
    adapters = {str(model): open_adapter(family / str(model.adapter)) for model in models}
    found = combine_adapters(loaded, open_checkpoint(family / models[0].path), adapters, out.with_name("scratch"))
    write_adapter(found.adapter, out)
    return found


def merged_whole(family: Path, recipe: dict[str, Any], out: Path) -> dict[str, torch.Tensor]:
    loaded = load_recipe({key: value for key, value in recipe.items() if key not in ("output", "rank", "dtype")})
    base = open_checkpoint(family / loaded.references()[0].path)
    tables = {
        str(ref): apply_adapter(base, open_adapter(family / ref.adapter)) if ref.adapter else base
        for ref in loaded.references()
    }
    merge_weights(plan_merge(loaded, tables), out)
    return read_all(out)


METHODS = ("linear", "ties", "dare_ties", "task_arithmetic", "dare_linear", "della", "della_linear", "breadcrumbs")


@pytest.mark.story
@pytest.mark.parametrize("method", METHODS)
def test_an_unlimited_combination_equals_the_merge_of_the_full_models(
    family: Path, tmp_path: Path, method: str
) -> None:
    """The method sees the same differences either way, so masks, signs and thresholds agree."""
    recipe = written(method, "one", "two", output="adapter", rank=64)
    found = combined(family, recipe, tmp_path / "adapter")
    assert found.error < 1e-5
    theirs = unloaded_by_peft(family / "base", tmp_path / "adapter", tmp_path / "theirs", torch.float32)
    whole, before = merged_whole(family, recipe, tmp_path / "whole"), read_all(family / "base")
    for name in before:
        change = float((whole[name] - before[name]).double().norm())
        distance = float((theirs[name] - whole[name]).double().norm())
        # The full merge takes thresholds and signs from (base + Δ) - base, the combination from Δ. Rounding may
        # therefore move single elements across a threshold.
        assert distance <= (2e-2 if method not in ("linear", "task_arithmetic") else 1e-5) * change + 1e-7, name


SUMS = [
    ("task_arithmetic", "base", ("one", "two")),
    ("task_arithmetic", "base", ("one", "table")),
    ("linear", "base", ("one", "norms")),
    ("task_arithmetic", "gpt2", ("three", "four")),
]
TIES = ("ties", "base", ("one", "two", "norms"))  # It needs a rank.
SIZES = [(*SUMS[1], None), (*SUMS[2], 1), (*SUMS[3], 64), (*TIES, 5)]


@pytest.mark.parametrize(
    ("method", "base", "names", "rank"),
    sampled_rows([(*one, rank) for one in (*SUMS, TIES) for rank in (None, 1, 5, 64) if rank or one != TIES], SIZES),
)
def test_the_size_of_a_combination_is_known_from_headers(
    family: Path, tmp_path: Path, method: str, base: str, names: tuple[str, ...], rank: int | None
) -> None:
    kept = {"dtype": "bfloat16"} if rank == 5 else {}
    recipe = written(method, *names, base=base, output="adapter", **({"rank": rank} if rank else {}), **kept)
    adapters = {f"{base}+{name}": open_adapter(family / name) for name in names}
    size = combined_size(load_recipe(recipe), open_checkpoint(family / base), adapters)
    combined(family, recipe, tmp_path / "adapter")
    made = load_file(tmp_path / "adapter" / "adapter_model.safetensors").values()
    assert size.tensors == len(made)
    assert size.parameters == sum(one.numel() for one in made)
    assert size.nbytes == sum(one.nbytes for one in made)
    assert size.read == sum(one.nbytes for adapter in adapters.values() for one in adapter.stored_tensors)
    assert size.files == len(names)


@pytest.mark.parametrize(("base", "names"), [("base", ("one", "two", "table")), ("gpt2", ("three", "four"))])
def test_a_sum_without_a_rank_is_exact(family: Path, tmp_path: Path, base: str, names: tuple[str, ...]) -> None:
    recipe = written("task_arithmetic", *names, base=base, output="adapter")
    found = combined(family, recipe, tmp_path / "adapter")
    assert found.error == 0
    from peft import PeftModel

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        PeftModel.from_pretrained(load_base(family / base, torch.float32), tmp_path / "adapter")
    assert [str(one.message) for one in said if "key" in str(one.message)] == []
    theirs = unloaded_by_peft(family / base, tmp_path / "adapter", tmp_path / "theirs", torch.float32)
    whole = merged_whole(family, recipe, tmp_path / "whole")
    assert max(differences(theirs, whole).values(), default=0) < 1e-6


def test_a_float64_sum_is_accurate_to_twelve_digits(family: Path, tmp_path: Path) -> None:
    places = []
    for name in ("one", "two"):
        place = tmp_path / name
        place.mkdir()
        (place / "adapter_config.json").write_bytes((family / name / "adapter_config.json").read_bytes())
        tensors = load_file(family / name / "adapter_model.safetensors")
        save_file({key: one.double() / 3 for key, one in tensors.items()}, place / "adapter_model.safetensors")
        places.append(place)
    recipe = written("task_arithmetic", *map(str, places), base=str(family / "base"), output="adapter", dtype="float64")
    combined(tmp_path, recipe, tmp_path / "adapter")
    ours = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    product = ours[f"{key}B.weight"] @ ours[f"{key}A.weight"]
    expected = torch.zeros_like(product)
    for place, scale in zip(places, (0.7 * 8 / 4, 0.5 * 6 / math.sqrt(2)), strict=True):
        tensors = load_file(place / "adapter_model.safetensors")
        expected += scale * (tensors[f"{key}B.weight"] @ tensors[f"{key}A.weight"])
    assert float((product - expected).norm() / expected.norm()) < 1e-12


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_the_reported_error_is_the_truncated_part(family: Path, tmp_path: Path, method: str) -> None:
    recipe = written(method, "one", "two", output="adapter", rank=3)
    found = combined(family, recipe, tmp_path / "adapter")
    whole = combined(family, recipe | {"rank": 64}, tmp_path / "whole")
    assert 0.01 < found.error < 1
    left = total = 0.0
    for module, (a, b) in whole.adapter.factors.items():
        product = b.double() @ a.double()
        near, far = found.adapter.factors[module]
        left += float((product - far.double() @ near.double()).square().sum())
        total += float(product.square().sum())
    assert math.sqrt(left / total) == pytest.approx(found.error, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"output": "lora"}, "output: 'lora'"), ({"rank": 4}, "rank: rank without output"),
        ({"output": "adapter", "rank": 0}, "rank: 0"), ({"output": "adapter"}, "rank: not set"),
        ({"output": "adapter", "rank": 4, "tokenizer_source": "base"}, "tokenizer_source: it is set"),
        ({"output": "adapter", "rank": 4, "base_model": "other"}, "the base other"),
        ({"output": "adapter", "rank": 4, "models": [{"model": "m", "parameters": {"weight": 1}}] * 1}, "m"),
        (
            {"output": "adapter", "merge_method": "slerp", "models": [{"model": "b+one"}], "parameters": {"t": 0.5}},
            "slerp cannot produce an adapter",
        ),
    ],
)  # fmt: skip
def test_a_recipe_that_cannot_produce_an_adapter_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        load_recipe(written("ties", "one", "two") | changes)


@pytest.mark.parametrize(("name", "words"), [("dora", "DoRA"), ("experts", "experts")])
def test_changes_that_are_not_products_are_refused_by_name(family: Path, tmp_path: Path, name: str, words: str) -> None:
    base = "moe" if name == "experts" else "base"
    with pytest.raises(InvalidInput, match=words):
        combined(family, written("task_arithmetic", name, base=base, output="adapter"), tmp_path / "adapter")


@pytest.mark.parametrize("method", sampled(("linear", "task_arithmetic", "ties"), ("linear",)))
def test_full_norms_of_adapters_are_merged_with_the_same_method(family: Path, tmp_path: Path, method: str) -> None:
    recipe = written(method, "one", "norms", output="adapter", rank=64)
    combined(family, recipe, tmp_path / "adapter")
    theirs = unloaded_by_peft(family / "base", tmp_path / "adapter", tmp_path / "theirs", torch.float32)
    whole, before = merged_whole(family, recipe, tmp_path / "whole"), read_all(family / "base")
    assert torch.equal(theirs["model.norm.weight"], whole["model.norm.weight"])
    assert not torch.equal(theirs["model.norm.weight"], before["model.norm.weight"])


def test_weights_that_do_not_add_up_to_one_are_refused(family: Path, tmp_path: Path) -> None:
    recipe = written("linear", "one", "two", output="adapter", parameters={"normalize": False})
    with pytest.raises(InvalidInput, match=r"add up to 1\.2"):
        combined(family, recipe, tmp_path / "adapter")
