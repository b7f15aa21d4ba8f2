"""Inputs of each expert equal float64 formulas over recomputed routers, and merges use them in either layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mixtures
import numpy as np
import pytest
import torch
from calibration_jobs import (
    SENTENCES,
    Killed,
    add_tokenizer,
    measure_importance,
    measure_inputs,
    saved,
    text_of,
    tokens_of,
)
from samples import sampled
from test_matrix_methods import regmean
from tiny_families import FAMILIES as TINY_FAMILIES

from mergegate.merge_core import EngineSettings, load_recipe, merge_weights, open_checkpoint, plan_merge
from mergegate.merge_core.architecture.experts import match_experts, split_experts
from mergegate.merge_core.checkpoint import open_importance, open_moments
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.recipe import InputMeasurements
from mergegate.tasks.merge.calibration import statistics_needs

Array = np.ndarray
FAMILIES = tuple(mixtures.FAMILIES)
IN_TWO_LAYOUTS = ("mixtral", "qwen3_moe", "glm4_moe", "lfm2_moe", "phimoe", "granitemoe")


built = cache(mixtures.build)
Pair = Callable[..., tuple[Path, dict[str, Path]]]


# --- what each expert sees, by recomputed routers ---


class Routed(NamedTuple):
    """The positions that an expert sees, and the factors that scale its inputs."""

    positions: list[int]
    factors: list[float]


def softmax_top(logits: torch.Tensor, chosen: int) -> list[Routed]:
    """Route to the largest probabilities, as Mixtral and Qwen3-MoE do; they weight the expert's output."""
    best = logits.softmax(-1).argsort(-1, descending=True)[:, :chosen]
    return [Routed([at for at, own in enumerate(best.tolist()) if e in own], []) for e in range(logits.shape[1])]


def scored_inputs(logits: torch.Tensor, chosen: int) -> list[Routed]:
    """Route as Llama 4 does, which weights the expert's input."""
    best = logits.argsort(-1, descending=True)[:, :chosen]
    every = [[at for at, own in enumerate(best.tolist()) if e in own] for e in range(logits.shape[1])]
    return [Routed(own, logits[own, e].sigmoid().tolist()) for e, own in enumerate(every)]


def silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate / (1 + (-gate).exp()) * up


def clamped(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up[:, ::2].clamp(max=7.0), gate_up[:, 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * (1.702 * gate).sigmoid()


ROUTERS = {"mixtral": softmax_top, "qwen3_moe": softmax_top, "gpt_oss": softmax_top, "llama4": scored_inputs}


def by_router(
    model: Any, family: str, documents: Sequence[Sequence[int]]
) -> dict[tuple[int, int], tuple[Array, Array]]:
    """Return, by layer and expert, the second moments of the inputs of its first and second matrix."""
    states: dict[int, list[torch.Tensor]] = {}
    blocks = [layer.feed_forward if family == "llama4" else layer.mlp for layer in model.model.layers]
    hooks = [
        block.register_forward_pre_hook(lambda _, given, at=at: states.setdefault(at, []).append(given[0][0].double()))
        for at, block in enumerate(blocks)
    ]
    with torch.no_grad():
        for ids in documents:
            model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    count, found = sum(map(len, documents)), {}
    for layer, block in enumerate(blocks):
        weights = {name: one.detach().double() for name, one in block.named_parameters()}
        flowed = torch.cat(states[layer])
        router = next(name for name in weights if name in ("gate.weight", "router.weight"))
        logits = flowed @ weights[router].T + weights.get("router.bias", 0.0)
        chosen = getattr(model.config, "num_experts_per_tok", 2)
        for expert, routed in enumerate(ROUTERS[family](logits, chosen)):
            first, second = weights["experts.gate_up_proj"][expert], None
            own = flowed[routed.positions]
            if routed.factors:
                own = own * torch.tensor(routed.factors, dtype=torch.float64)[:, None]
            if family == "gpt_oss":
                second = clamped(own @ first + weights["experts.gate_up_proj_bias"][expert])
            else:
                second = silu(*(own @ (first if family == "llama4" else first.T)).chunk(2, -1))
            found[layer, expert] = tuple((one.T @ one / count).numpy() for one in (own, second))
    return found


def place_of_expert(name: str) -> tuple[int, int, bool]:
    """Return the layer, the expert, and whether it is the expert's second matrix."""
    words = name.split(".")
    return int(words[2]), int(words[words.index("experts") + 1]), any(word in ("w2", "down_proj") for word in words)


@pytest.mark.parametrize("family", sampled(tuple(ROUTERS), ["mixtral", "llama4"]))
def test_an_expert_sees_the_tokens_that_its_router_sends(tmp_path: Path, family: str) -> None:
    model = built(family)
    place = saved(model, tmp_path / "model")
    found = measure_inputs(place, text_of(tmp_path), tmp_path / "out")
    wanted = by_router(model, family, tokens_of(place))
    kept = {name: one for name, one in open_moments(tmp_path / "out").items() if ".experts." in name}
    assert len({place_of_expert(name) for name in kept}) == 2 * len(wanted) == 2 * 2 * mixtures.EXPERTS
    for name, moments in kept.items():
        layer, expert, second = place_of_expert(name)
        own = wanted[layer, expert][int(second)]
        np.testing.assert_allclose(moments.read(), own, atol=2e-6 * own.max(), err_msg=name)
    assert found.unseen == ()


def by_module(model: Any, documents: Sequence[Sequence[int]], length: int) -> dict[str, Array]:
    """Return the moments of the inputs of the experts' modules, at positions that no earlier window had."""
    found: dict[str, Array] = {}
    seen: list[int] = [0]

    def look(name: str, given: tuple[torch.Tensor, ...]) -> None:
        states, numbers = given[0].double(), given[1]
        for expert in range(mixtures.EXPERTS):
            own = states[seen[0] :][(numbers == expert).any(-1)[seen[0] :]]
            key = f"{name}.{expert}"
            found[key] = found.get(key, 0.0) + (own.T @ own).numpy()

    modules = [(name, one) for name, one in model.named_modules() if name.endswith(".experts")]
    hooks = [one.register_forward_pre_hook(lambda _, given, name=name: look(name, given)) for name, one in modules]
    with torch.no_grad():
        for ids in documents:
            for start in range(0, len(ids), length):
                end = min(start + length, len(ids))
                seen[0] = min(length, end) - (end - start)
                model(torch.tensor([ids[max(0, end - length) : end]]))
    for hook in hooks:
        hook.remove()
    return {name: total / sum(map(len, documents)) for name, total in found.items()}


@pytest.mark.parametrize("length", [7, pytest.param(2048, marks=pytest.mark.story)])
@pytest.mark.parametrize("family", sampled([family for family in FAMILIES if family != "llama4"], ["mixtral"]))
def test_overlapping_windows_count_each_token_once(tmp_path: Path, family: str, length: int) -> None:
    model = built(family)
    place = saved(model, tmp_path / "model", fused=True)
    measure_inputs(place, text_of(tmp_path), tmp_path / "out", max_length=length)
    wanted = by_module(model, tokens_of(place), length)
    kept = {name: one for name, one in open_moments(tmp_path / "out").items() if ".experts." in name}
    assert len(kept) >= 2 * len(wanted)
    for name, moments in kept.items():
        layer, expert, second = place_of_expert(name)
        if not second:
            own = next(one for key, one in wanted.items() if f".{layer}." in key and key.endswith(f".{expert}"))
            np.testing.assert_allclose(moments.read(), own, atol=2e-6 * own.max(), err_msg=name)


@pytest.mark.parametrize("family", sampled(FAMILIES, ["gpt_oss"]))
def test_measurements_do_not_depend_on_the_layout_on_disk(tmp_path: Path, family: str) -> None:
    text, found = text_of(tmp_path), []
    for fused in (False, True):
        place, out = saved(built(family), tmp_path / f"{fused}", fused=fused), tmp_path / f"out-{fused}"
        assert measure_inputs(place, text, out).unseen == ()
        tensors = split_experts(open_checkpoint(place)).tensors
        assert open_moments(out).keys() <= tensors.keys()
        routed = {name for name, one in tensors.items() if ".experts." in name and len(one.shape) == 2}
        assert routed <= open_moments(out).keys()
        found.append({name: one.read() for name, one in open_moments(out).items()})
    assert found[0].keys() == found[1].keys()
    for name, moments in found[0].items():
        np.testing.assert_allclose(moments, found[1][name], atol=1e-6 * moments.max(), err_msg=name)


def test_the_eager_implementation_is_selected_only_during_the_measurement() -> None:
    from mergegate.tasks.merge.products import eager_experts

    network = built("mixtral")
    before = network.config._experts_implementation
    with eager_experts(layer.mlp.experts for layer in network.model.layers):
        assert network.config._experts_implementation == "eager" != before
    assert network.config._experts_implementation == before


def test_experts_with_unobserved_products_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def einsum(self: Any, states: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("ti,eoi->eto", states, self.gate_up_proj).chunk(2, -1)
        every = torch.einsum("eti,eoi->teo", self.act_fn(gate) * up, self.down_proj)
        return (every[torch.arange(len(states))[:, None], numbers] * weights[..., None]).sum(1)

    kind = type(built("mixtral").model.layers[0].mlp.experts)
    place = saved(built("mixtral"), tmp_path / "model")
    monkeypatch.setattr(kind, "forward", einsum)
    found = measure_inputs(place, text_of(tmp_path), tmp_path / "out")
    assert found.unseen == tuple(
        f"model.layers.*.block_sparse_moe.experts.*.{one}.weight" for one in ("w1", "w2", "w3")
    )
    assert "not observed, so merged by the mean: model.layers.*.block_sparse_moe" in found.summary()
    assert not any(".experts." in name for name in open_moments(tmp_path / "out"))


# Families of ``tiny_families`` compute their experts in all ways that transformers has.
ROUTED = {
    one.name: one for one in TINY_FAMILIES if one.auto == "AutoModelForCausalLM" and "experts" in str(one.settings)
}


@pytest.mark.story
@pytest.mark.parametrize(
    "name", sampled([name for name, family in ROUTED.items() if family.listed], sorted(ROUTED)[::4], pytest.mark.proof)
)
def test_every_expert_matrix_of_a_family_is_observed(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    network = ROUTED[name].loader.from_config(ROUTED[name].config())
    for parameter in network.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    network.save_pretrained(tmp_path / "model")
    place, text = add_tokenizer(tmp_path / "model"), text_of(tmp_path, "rev: abcd>dcba", "a hen.")
    assert measure_inputs(place, text, tmp_path / "inputs").unseen == ()
    assert measure_importance(place, text, tmp_path / "importance").unseen == ()
    tensors = split_experts(open_checkpoint(place)).tensors
    routed = {name for name, one in tensors.items() if ".experts." in name and len(one.shape) == 2}
    assert routed
    assert routed <= open_moments(tmp_path / "inputs").keys()
    assert routed <= open_importance(tmp_path / "importance").keys()


# --- in runs ---


@pytest.mark.story
@pytest.mark.parametrize("family", sampled(("mixtral", "llama4"), ["mixtral"], pytest.mark.proof))
def test_a_layer_of_experts_that_does_not_fit_is_measured_expert_by_expert(
    tmp_path: Path, request: pytest.FixtureRequest, family: str
) -> None:
    place, text = saved(built(family), tmp_path / "model"), text_of(tmp_path)
    whole = measure_inputs(place, text, tmp_path / "whole")
    request.getfixturevalue("little_memory")
    split = measure_inputs(place, text, tmp_path / "split")
    assert split == whole
    runs = sorted(path.name for path in (tmp_path / "split").glob("*.safetensors"))
    # For each of two layers, one run for everything except experts and one for each expert.
    assert len(runs) == 2 * (1 + mixtures.EXPERTS)

    def halt(done: int, total: int) -> None:
        if done > 4 * len(SENTENCES):
            raise Killed

    with pytest.raises(Killed):
        measure_inputs(place, text, tmp_path / "killed", halt)
    steps: list[int] = []
    assert measure_inputs(place, text, tmp_path / "killed", lambda done, total: steps.append(total)) == whole
    assert steps[-1] == (len(runs) - 4) * len(SENTENCES)
    kept = {name: one.read() for name, one in open_moments(tmp_path / "whole").items()}
    for name, moments in open_moments(tmp_path / "split").items():
        np.testing.assert_allclose(moments.read(), kept[name], atol=1e-6 * kept[name].max(), err_msg=name)
    for run in runs:
        assert (tmp_path / "killed" / run).read_bytes() == (tmp_path / "split" / run).read_bytes()


# --- merges ---

REGMEAN: dict[str, Any] = {"merge_method": "regmean"}


def planned(root: Path, models: Mapping[str, Path], **recipe: Any) -> Any:
    """Plan a merge of models by name, with the directory of each model's measurements."""
    content = {"models": [{"model": name, "text": "own.jsonl"} for name in models], **(recipe or REGMEAN)}
    loaded = load_recipe(content)
    measured = {
        name: InputMeasurements(name, name, open_moments(out), {})
        if (out / "inputs.json").exists()
        else InputMeasurements(name, name, {}, open_importance(out))
        for name, out in models.items()
    }
    matched = match_experts(
        replace(loaded, measured=measured), {str(ref): open_checkpoint(root / ref.path) for ref in loaded.references()}
    )
    return plan_merge(matched.recipe, matched.checkpoints)


def merged(plan: Any, out: Path, **settings: Any) -> dict[str, Array]:
    """Merge and return the result per expert, in float64."""
    merge_weights(plan, out, settings=EngineSettings(**settings))
    return values_of(out)


def values_of(place: Path) -> dict[str, Array]:
    found = {}
    for name, tensor in split_experts(open_checkpoint(place)).tensors.items():
        assert tensor.dtype.code == "F32"
        (part,) = tensor.parts
        found[name] = np.fromfile(part.file, np.float32, tensor.numel, offset=part.offset).reshape(tensor.shape)
    return {name: one.astype(float) for name, one in found.items()}


def wanted_of(root: Path, models: Mapping[str, Path]) -> dict[str, Array]:
    """Return every expected tensor of a ``regmean`` merge."""
    parents = [values_of(root / name) for name in models]
    moments = [open_moments(out) for out in models.values()]
    found = {}
    for name, first in parents[0].items():
        values = [one[name] for one in parents]
        if name not in moments[0]:
            found[name] = sum(values) / len(values)
            continue
        own, turned = [one[name].read() for one in moments], len(moments[0][name].read()) != first.shape[1]
        if not sum(one.diagonal().sum() for one in own):
            found[name] = sum(values) / len(values)
        else:
            done = regmean([one.T if turned else one for one in values], own, [1.0] * len(own), 0.9, 1e-6)
            found[name] = done.T if turned else done
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Return two related models of a family in both layouts, each with measurements on its own text."""

    @cache
    def of(family: str, *texts: str) -> tuple[Path, dict[str, Path]]:
        root = tmp_path_factory.mktemp(family)
        out = {}
        for seed, name in enumerate(("a", "b")):
            model = mixtures.related(built(family), seed + 1, share=0.2)
            saved(model, root / name)
            if family in IN_TWO_LAYOUTS:
                saved(model, root / f"{name}-fused", fused=True)
            documents = texts[seed : seed + 1] or SENTENCES[seed::2]
            out[name] = root / f"seen-{name}"
            measure_inputs(root / name, text_of(root, *documents, name=f"text-{name}.jsonl"), out[name])
        return root, out

    return of


@pytest.mark.parametrize("family", sampled(FAMILIES, ["mixtral"]))
def test_each_expert_is_solved_with_its_own_inputs(pair: Pair, tmp_path: Path, family: str) -> None:
    root, models = pair(family)
    found = merged(planned(root, models), tmp_path / "out")
    wanted = wanted_of(root, models)
    assert found.keys() == wanted.keys()
    parents = [values_of(root / name) for name in models]
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, atol=3e-5, err_msg=name)
    moved = [name for name in found if not np.allclose(found[name], sum(one[name] for one in parents) / 2, atol=1e-4)]
    assert sum(".experts." in name for name in moved) >= 2 * mixtures.EXPERTS


@pytest.mark.story
@pytest.mark.parametrize("family", sampled(IN_TWO_LAYOUTS, ["mixtral"], pytest.mark.proof))
def test_both_layouts_merge_into_the_same_numbers(pair: Pair, tmp_path: Path, family: str) -> None:
    """Measurements use names that both layouts share, so a measurement of either layout serves both."""
    root, models = pair(family)
    single = merged(planned(root, models), tmp_path / "single")
    fused = merged(planned(root, {f"{name}-fused": out for name, out in models.items()}), tmp_path / "fused")
    mixed = merged(planned(root, {"a": models["a"], "b-fused": models["b"]}), tmp_path / "mixed")
    assert single.keys() == fused.keys() == mixed.keys()
    for name, values in single.items():
        np.testing.assert_array_equal(values, fused[name])
        np.testing.assert_array_equal(values, mixed[name])


def test_unused_experts_take_no_space(tmp_path: Path) -> None:
    place = saved(built("mixtral"), tmp_path / "model")
    for limit in (8192, 24):
        out = tmp_path / f"{limit}"
        found = measure_inputs(place, text_of(tmp_path, "a"), out, diagonal_above=limit)
        nothing = {name: one for name, one in open_moments(out).items() if one.is_empty}
        assert found.unreached == len(nothing) * 2 // 3 > 0  # Gate and up projections share one input.
        assert f"{found.unreached} of unused experts" in found.summary()
        for one in nothing.values():
            assert one.tensor.nbytes == 0
            assert one.is_diagonal == (one.width > limit)
            assert one.read().shape == ((one.width,) if one.is_diagonal else (one.width, one.width))
            assert not one.read().any()


@pytest.mark.story
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_reordered_experts_keep_their_measurements(tmp_path: Path, family: str) -> None:
    root, near = tmp_path / "models", mixtures.related(built(family), 1, share=0.05)
    made = {"a": built(family), "near": near, "crossed": mixtures.permuted(near, (2, 0, 3, 1))}
    text, seen, matters = text_of(tmp_path), {}, {}
    for name, model in made.items():
        saved(model, root / name)
        measure_inputs(root / name, text, seen.setdefault(name, tmp_path / f"seen-{name}"))
        measure_importance(root / name, text, matters.setdefault(name, tmp_path / f"imp-{name}"))
    for measured, recipe in ((seen, REGMEAN), (matters, {"merge_method": "fisher"})):
        found = []
        for other, more in (("near", {}), ("crossed", {"align_experts": True})):
            models = {name: measured[name] for name in ("a", other)}
            method = recipe["merge_method"]
            found.append(merged(planned(root, models, **recipe, **more), tmp_path / f"{method}-{other}"))
        for name, values in found[0].items():
            np.testing.assert_allclose(found[1][name], values, atol=1e-4, err_msg=f"{recipe}: {name}")


# --- the plan ---


@pytest.mark.parametrize("family", sampled(("mixtral", "llama4"), ["mixtral"]))
def test_the_plan_forecasts_the_measurement(tmp_path: Path, family: str) -> None:
    place = saved(built(family), tmp_path / "model")
    text = text_of(tmp_path, name="own.jsonl")
    recipe = load_recipe({"merge_method": "regmean", "models": [{"model": str(place), "text": "own.jsonl"}]})
    plan = plan_merge(replace(recipe, directory=tmp_path), {str(place): open_checkpoint(place)})
    needs = statistics_needs(plan, HashMemo(tmp_path / "hashes.db"))
    found = measure_inputs(place, text, tmp_path / "out")
    own = {one.tensor.name: one for one in open_moments(tmp_path / "out").values()}
    assert needs.inputs == found.inputs == len(own)
    assert needs.nbytes == sum(one.tensor.nbytes for one in own.values())
    assert needs.sums == 8 * sum(one.width**2 for one in own.values())
    # Experts are solved one at a time, never all of a layer together.
    largest = max(one.width for one in own.values())
    held_bytes = plan.method.costs.held_bytes
    assert 0 < max(held_bytes(job.task()) for job in plan.jobs) <= 8 * largest**2 * 4 + 3 * 8 * 32 * 48
