"""The tensors of a merge that are new or equal to a parent's are named, and so is a merge that is a copy."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from family import merge_text, random_tensors, save_checkpoint, save_family
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from samples import sampled
from tiny_models import make_model

from mergegate.merge_core.checkpoint import read_header
from mergegate.tasks.merge import WeightComparison, compare_with_parents, describe_changes, find_copied_parent
from mergegate.tasks.merge.weight_comparison import compare_tables
from mergegate.tasks.models.checkpoints.model import Model
from mergegate.tasks.models.checkpoints.pin import PinnedAdapter, PinnedCheckpoint

pytestmark = pytest.mark.usefixtures("own_store")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pinned(directory: Path, adapter: Path | None = None) -> PinnedCheckpoint:
    digest = hashlib.sha256(f"{directory} {adapter}".encode()).hexdigest()
    applied = PinnedAdapter(ref=adapter.name, directory=adapter, revision=None, files=()) if adapter else None
    return PinnedCheckpoint(
        name=directory.name, ref=directory.name, directory=directory, digest=digest, adapter=applied
    )


def compare(merge: Path, *parents: Path) -> WeightComparison:
    return compare_with_parents.build(pinned(merge), tuple(map(pinned, parents))).value


def count_equal(merge: dict[str, torch.Tensor], parent: dict[str, torch.Tensor]) -> int:
    """Return how many tensors of a merge are equal to one of a parent, by a float64 comparison of every number."""

    def is_equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
        return tensor.shape == other.shape and torch.equal(other.to(tensor.dtype).double(), tensor.double())

    return sum(any(is_equal(tensor, other) for other in parent.values()) for tensor in merge.values())


def tensors_by_parent(compared: WeightComparison) -> Counter[int]:
    """Return how many tensors of the merge each parent has."""
    counts = Counter[int]()
    for each in compared.copied:
        counts += Counter(dict.fromkeys((each.parent, *(each.further_parents or ())), each.tensors))
    return counts


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor], int]:
    """Draw the tensors of parents and of a merge, each new or copied. The last number counts the new ones."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    parents = []
    for _ in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(DTYPES))
        shapes = draw(st.lists(st.sampled_from([(3, 5), (40, 50), (5,), (1300,)]), min_size=1, max_size=4))
        parents.append({f"t{i}": torch.randn(shape, generator=generator).to(dtype) for i, shape in enumerate(shapes)})
    every = [tensor for parent in parents for tensor in parent.values()]
    dtype, merge, new = draw(st.sampled_from(DTYPES)), {}, 0
    for number in range(draw(st.integers(1, 5))):
        tensor = draw(st.sampled_from(every)).to(dtype).clone()
        if draw(st.booleans()):  # a single number differs, at any place
            place = draw(st.integers(0, tensor.numel() - 1))
            tensor.view(-1)[place] = tensor.view(-1)[place].abs() + 1
            new += 1
        merge[f"t{number}"] = tensor
    return parents, merge, new


@settings(max_examples=15, deadline=None)
@given(tables())
def test_each_tensor_is_counted_as_new_or_copied(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor], int]
) -> None:
    parents, merge, new = drawn
    root = tmp_path_factory.mktemp("tables")
    for index, tensors in enumerate((merge, *parents)):
        save_file(tensors, root / f"{index}.safetensors")
    merged, *others = [
        {tensor.name: tensor for tensor in read_header(root / f"{index}.safetensors")}
        for index in range(len(parents) + 1)
    ]
    compared = compare_tables(merged, others)
    assert (compared.tensors, compared.new) == (len(merge), new)
    assert compared.parameters == sum(tensor.numel() for tensor in merge.values())
    counted = {index: count_equal(merge, parent) for index, parent in enumerate(parents)}
    assert tensors_by_parent(compared) == {i: n for i, n in counted.items() if n}
    assert compared.new + sum(each.tensors for each in compared.copied) == compared.tensors
    assert compared.new_parameters + sum(each.parameters for each in compared.copied) == compared.parameters


MODELS = "models: [{model: a, parameters: {weight: %s}}, {model: b, parameters: {weight: %s}}]\n"
# For each recipe: the tensors of the merge (a small Llama has 12) that are new, and those copied from a and from b.
RECIPES = {
    "all new": ("merge_method: linear\n" + MODELS % (0.5, 0.5), (12, 0, 0)),
    "one parent alone": ("merge_method: linear\n" + MODELS % (1.0, 0.0), (0, 12, 0)),
    "a gradient": ("merge_method: linear\n" + MODELS % ([1, 0], [0, 1]), (3, 6, 3)),
    "rounded": ("merge_method: linear\ndtype: bfloat16\n" + MODELS % (0.0, 1.0), (0, 0, 12)),
    "stacked": (
        "merge_method: passthrough\nslices:\n- sources: [{model: a, layer_range: [0, 2]}]\n"
        "- sources: [{model: b, layer_range: [1, 3]}]\n",
        (0, 7, 8),
    ),
    "scaled in part": (
        "merge_method: passthrough\nmodels: [{model: a}]\n"
        "parameters: {scale: [{filter: q_proj, value: 0.5}, {value: 1}]}\n",
        (3, 9, 0),
    ),
    "no effect": (
        "merge_method: task_arithmetic\nbase_model: base\nmodels: [{model: a}]\nparameters: {weight: 1.0}\n",
        (0, 12, 0),
    ),
}


@pytest.mark.parametrize("name", sampled(RECIPES, ("a gradient", "rounded", "stacked")))
def test_the_comparison_agrees_with_the_weights_of_a_merge(tmp_path: Path, name: str) -> None:
    recipe, expected = RECIPES[name]
    save_family(tmp_path)
    merge_text(recipe, tmp_path)
    compared = compare(tmp_path / "out", tmp_path / "a", tmp_path / "b")
    copies = tuple(tensors_by_parent(compared)[index] for index in (0, 1))
    total = len(load_file(tmp_path / "out" / "model.safetensors"))
    # The embeddings of a stack come from the first model, its head and its last norm from the last one.
    assert (compared.new, *copies) == expected, describe_changes(compared, ("a", "b"))
    assert compared.tensors == total
    assert bool(compared.copy_of) == (compared.new == 0 and total in copies)
    text = compared.sentences(("a", "b"))
    assert ("is a copy" in text) == bool(compared.copy_of)
    assert ("are new" in text) == (compared.new > 0)


def test_a_tensor_of_another_shape_may_contain_copies(tmp_path: Path) -> None:
    weights = random_tensors(1)
    save_checkpoint(tmp_path / "a", weights)
    longer = torch.cat([weights["model.embed_tokens.weight"], torch.ones(1, 12)])
    save_checkpoint(tmp_path / "out", {**weights, "model.embed_tokens.weight": longer, "lm_head.weight": longer + 1})
    compared = compare(tmp_path / "out", tmp_path / "a")
    assert (compared.new, compared.reshaped, compared.copy_of) == (2, 2, ())
    assert "2 of the new tensors have a shape that no tensor of these models has." in compared.sentences(("a",))


def test_a_tied_head_is_not_a_difference(tmp_path: Path) -> None:
    weights = random_tensors(1)
    tied = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    save_checkpoint(tmp_path / "a", tied, config={"tie_word_embeddings": True})
    save_checkpoint(tmp_path / "out", {name: tensor for name, tensor in tied.items() if name != "lm_head.weight"})
    assert compare(tmp_path / "out", tmp_path / "a").copy_of == (0,)


def test_frozen_tensors_of_many_parents_are_named_once(tmp_path: Path) -> None:
    weights = random_tensors(1)
    frozen = {"model.embed_tokens.weight": weights["model.embed_tokens.weight"]}
    parents = [save_checkpoint(tmp_path / f"p{seed}", random_tensors(seed) | frozen) for seed in range(2, 9)]
    merge = save_checkpoint(tmp_path / "out", random_tensors(9) | frozen)
    text = compare(merge, *parents).sentences([parent.name for parent in parents])
    assert re.findall(r"1 of 12 \(\S+ % of the parameters\) is copied unchanged from (.*?)\.", text) == [
        "each of 7 models"
    ]


def test_the_tensors_of_an_adapter_are_compared_with_those_of_adapters(tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base", random_tensors(0))
    names = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{kind}.weight" for kind in "AB"]
    for seed in range(2):
        adapter = tmp_path / f"lora{seed}"
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]})
        )
        weights = {names[0]: torch.full((2, 12), seed + 1.0), names[1]: torch.full((12, 2), seed + 3.0)}
        save_file(weights, adapter / "adapter_model.safetensors")
    shutil.copytree(tmp_path / "lora1", tmp_path / "out")
    parents = tuple(pinned(base, tmp_path / f"lora{seed}") for seed in range(2))
    merge = pinned(base, tmp_path / "out")
    copied = compare_with_parents.build(merge, parents).value
    assert (copied.is_adapter, copied.copy_of) == (True, (1,))
    weights = load_file(tmp_path / "out" / "adapter_model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, tmp_path / "out" / "adapter_model.safetensors")
    changed = compare_with_parents.work(merge, parents)
    assert (changed.tensors, changed.new) == (len(weights), len(weights))
    assert "none is equal to a tensor of their adapters" in changed.sentences(("a", "b"))


def test_without_a_comparison_nothing_is_claimed() -> None:
    assert describe_changes(None, ("a",)) == "mergegate did not compare them with the weights of these models."


Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def changed(model: Model, directory: Path, change: Change) -> Model:
    """Return a copy of a model with changed weights."""
    shutil.copytree(model.directory, directory)
    weights = change(load_file(directory / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors")
    return Model(name=directory.name, digest=f"{directory}", directory=directory)


def each(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda weights: {name: change(tensor) for name, tensor in weights.items()}


def last_element(weights: dict[str, torch.Tensor], by: float) -> dict[str, torch.Tensor]:
    name = max(weights)
    weights[name].view(-1)[-1] += by * weights[name].abs().max()
    return weights


COPIES: dict[str, Change] = {
    "same bytes": each(lambda tensor: tensor),
    "sums in another order": each(lambda tensor: (tensor + 0.3) - 0.3),
    "negative zeros": each(lambda tensor: torch.where(tensor == 0, -0.0, tensor)),
    "rounded to bfloat16": each(lambda tensor: tensor.bfloat16()),
    "rounded to float16": each(lambda tensor: tensor.half()),
    "in float64": each(lambda tensor: tensor.double()),
}
OTHERS: dict[str, Change] = {
    "a hundredth of a task vector": each(lambda tensor: tensor * 1.0001),
    "one number differs": lambda weights: last_element(weights, 1e-3),
    "one layer fewer": lambda weights: {name: tensor for name, tensor in weights.items() if "layers.1." not in name},
    "another vocabulary": lambda weights: {
        name: torch.cat([tensor, tensor[:1]]) if "embed" in name or "lm_head" in name else tensor
        for name, tensor in weights.items()
    },
}


@pytest.mark.parametrize("name", sampled(COPIES, ("sums in another order", "rounded to bfloat16")))
def test_a_merge_with_the_weights_of_a_parent_is_a_copy(tmp_path: Path, name: str) -> None:
    first, second = (make_model(tmp_path / f"parent{seed}", seed=seed) for seed in range(2))
    merge = changed(second, tmp_path / "merge", COPIES[name])
    assert find_copied_parent.build(merge, (first, second)).value.parent == 1


@pytest.mark.parametrize("name", sampled(OTHERS, ("one number differs", "another vocabulary")))
def test_a_merge_with_other_weights_is_not_a_copy(tmp_path: Path, name: str) -> None:
    parent = make_model(tmp_path / "parent")
    merge = changed(parent, tmp_path / "merge", OTHERS[name])
    assert find_copied_parent.build(merge, (parent,)).value.parent is None


def test_a_small_change_of_bfloat16_weights_is_not_rounding(tmp_path: Path) -> None:
    """A fine-tune may move each weight by no more than the last bit of bfloat16."""
    parent = make_model(tmp_path / "parent", dtype=torch.bfloat16)
    moved = changed(parent, tmp_path / "merge", each(lambda tensor: (tensor.float() * 1.004).bfloat16()))
    assert find_copied_parent.build(moved, (parent,)).value.parent is None
