"""Permuted experts are detected and aligned. The oracle is transformers with experts and router rows permuted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import mixtures
import numpy as np
import pytest
import torch
from family import open_models
from hypothesis import given, settings
from hypothesis import strategies as st
from mixtures import build, permuted, related, save
from safetensors.torch import load_file
from samples import sampled

from mergegate.merge_core import load_recipe, merge_weights, plan_merge
from mergegate.merge_core.architecture.experts import MatchedExperts, assign, match_experts
from mergegate.merge_core.engine import EngineSettings
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.merge.stage import router_distances

FAMILIES = tuple(mixtures.FAMILIES)
# Experts in one order, and in groups.
TRIED = sampled(FAMILIES, ("mixtral", "glm4_moe"), pytest.mark.proof)
# GLM-4-MoE has two groups of two experts here. This order permutes both the groups and the experts within them.
ORDERS = {"glm4_moe": (3, 2, 0, 1)}


Twins = Callable[[str], Path]


@pytest.fixture(scope="session")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    """Return a function that writes a model ``a``, its relative ``near``, and both permuted: ``twin``, ``crossed``."""
    root = tmp_path_factory.mktemp("twins")

    @cache
    def write(family: str) -> Path:
        order = ORDERS.get(family, (2, 0, 3, 1))
        model = build(family)
        near = related(model, 1, share=0.05)
        made = {"a": model, "near": near, "twin": permuted(model, order), "crossed": permuted(near, order)}
        for name, one in made.items():
            save(one, root / family / name)
            save(one, root / family / f"{name}-fused", fused=True)
        return root / family

    return write


def linear(*models: str, **more: Any) -> dict[str, Any]:
    weighed = [{"model": name, "parameters": {"weight": 0.5}} for name in models]
    return {"merge_method": "linear", "models": weighed, **more}


def matched(root: Path, content: dict[str, Any]) -> MatchedExperts:
    recipe = load_recipe(content)
    return match_experts(recipe, open_models(recipe, root))


def merged(root: Path, content: dict[str, Any], out: Path, **engine: Any) -> Path:
    found = matched(root, content)
    merge_weights(plan_merge(found.recipe, found.checkpoints), out, settings=EngineSettings(**engine))
    return out


@pytest.mark.parametrize("layout", ["", "-fused"])
@pytest.mark.parametrize("family", TRIED)
def test_a_permuted_twin_aligned_equals_the_original(twins: Twins, tmp_path: Path, family: str, layout: str) -> None:
    home = twins(family)
    out = merged(home, linear("a", f"twin{layout}", align_experts=True), tmp_path / "out")
    original, aligned = (mixtures.load(place).state_dict() for place in (home / "a", out))
    for name, tensor in original.items():
        assert float((tensor.float() - aligned[name].float()).abs().max()) <= 1e-6, name


@pytest.mark.parametrize("family", TRIED)
def test_a_permuted_relative_aligned_merges_as_the_relative_does(twins: Twins, tmp_path: Path, family: str) -> None:
    home = twins(family)
    plain = merged(home, linear("a", "near"), tmp_path / "plain")
    aligned = merged(home, linear("a", "crossed", align_experts=True), tmp_path / "aligned", block_elements=64)
    one, other = (load_file(place / "model.safetensors") for place in (plain, aligned))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("family", TRIED)
def test_a_different_expert_order_is_a_warning_without_align_experts(twins: Twins, family: str) -> None:
    home = twins(family)
    crossed = matched(home, linear("a", "crossed"))
    (finding,) = crossed.findings
    assert finding.severity == "warn"
    assert "the order of the experts differs" in finding.found
    assert "align_experts" in finding.remedy
    assert matched(home, linear("a", "near")).findings == ()
    assert matched(home, linear("a", "crossed", align_experts=True)).findings == ()


def test_the_distance_of_the_routers_is_reported(twins: Twins) -> None:
    home = twins("qwen3_moe")
    (near,) = router_distances(matched(home, linear("a", "near")).layers)
    (crossed,) = router_distances(matched(home, linear("a", "crossed")).layers)
    (aligned,) = router_distances(matched(home, linear("a", "crossed", align_experts=True)).layers)
    one, other = (load_file(home / name / "model.safetensors") for name in ("a", "near"))
    gates = [name for name in one if name.endswith("mlp.gate.weight")]
    distances = [float((one[name] - other[name]).norm() / one[name].norm()) for name in gates]
    assert near.distance == pytest.approx(max(distances), rel=1e-5)
    cosines = [torch.cosine_similarity(one[name], other[name], dim=1).mean().item() for name in gates]
    assert near.routers == pytest.approx(np.mean(cosines), rel=1e-5)
    assert near.moved == 0
    assert near.diagonal == near.best > 0.95
    assert crossed.moved == crossed.layers == 2
    assert crossed.diagonal < 0.5 < 0.95 < crossed.best
    assert crossed.distance > 0.5
    assert (aligned.routers, aligned.distance) == pytest.approx((near.routers, near.distance))


def test_unrelated_experts_are_reported(twins: Twins, tmp_path: Path) -> None:
    save(build("mixtral", seed=9), tmp_path / "stranger")
    (tmp_path / "a").symlink_to(twins("mixtral") / "a")
    for more in ({}, {"align_experts": True}):
        found = matched(tmp_path, linear("a", "stranger", **more)).findings
        assert any("are not related" in finding.found for finding in found)


def test_dense_models_have_no_experts_to_align(tmp_path: Path) -> None:
    from test_upcycling import dense

    for name in "ab":
        dense("Llama").save_pretrained(tmp_path / name)
    assert matched(tmp_path, linear("a", "b")).layers == ()
    with pytest.raises(InvalidInput, match="has no experts"):
        matched(tmp_path, linear("a", "b", align_experts=True))


def test_experts_that_cannot_be_reordered_are_refused(twins: Twins) -> None:
    home = twins("qwen3_moe")
    cut = [{"model": name, "layer_range": [0, 2], "parameters": {"weight": 1}} for name in ("a", "crossed")]
    sliced = {"merge_method": "linear", "slices": [{"sources": cut}], "align_experts": True}
    with pytest.raises(InvalidInput, match="slices"):
        matched(home, sliced)
    with pytest.raises(InvalidInput, match="true or false"):
        load_recipe(linear("a", "b", align_experts="yes please"))
    recipe = load_recipe(linear("a", "crossed", align_experts=True))
    opened = open_models(recipe, home)
    odd = opened["crossed"].tensors["model.layers.0.mlp.gate.weight"]
    name = "model.layers.0.mlp.preference"
    tensors = {**opened["crossed"].tensors, name: replace(odd, name=name)}
    with pytest.raises(InvalidInput, match="does not know how this tensor depends"):
        match_experts(recipe, {**opened, "crossed": replace(opened["crossed"], tensors=tensors)})


def test_a_merge_with_align_experts_requires_matched_experts(twins: Twins, tmp_path: Path) -> None:
    recipe = load_recipe(linear("a", "crossed", align_experts=True))
    opened = open_models(recipe, twins("mixtral"))
    with pytest.raises(InvalidInput, match="matching of the experts is missing"):
        merge_weights(plan_merge(recipe, opened), tmp_path / "out")


@settings(max_examples=30)
@given(seed=st.integers(0, 2**16), groups=st.sampled_from([1, 2, 3]), each=st.sampled_from([1, 2]))
def test_the_assignment_is_optimal_among_those_that_respect_groups(seed: int, groups: int, each: int) -> None:
    """The result is compared with every permutation."""
    count = groups * each
    similarity = np.random.default_rng(seed).normal(size=(count, count))

    def allowed(order: tuple[int, ...]) -> bool:
        runs = [[order[g * each + k] // each for k in range(each)] for g in range(groups)]
        return all(len(set(run)) == 1 for run in runs)

    def total(order: Sequence[int]) -> float:
        return float(similarity[np.arange(count), list(order)].sum())

    best = max(filter(allowed, permutations(range(count))), key=total)
    found = assign(similarity, groups)
    assert allowed(tuple(found))
    assert total(found) == pytest.approx(total(best))
