"""Matrix methods match float64 references, written from the formulas, through the engine with any blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from family import load, open_models, save_checkpoint
from safetensors.torch import save_file
from samples import sampled

from mergegate.merge_core import EngineSettings, checkpoint, load_recipe, merge_tensors, merge_weights, plan_merge
from mergegate.merge_core.checkpoint import INPUTS as MOMENTS
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.methods.matrices import GRAIN_ROWS
from mergegate.merge_core.recipe import InputMeasurements

Array = np.ndarray
# A square, a tall and a wide matrix with several groups of rows and a remainder each, and tensors of other kinds.
SHAPES = {
    "model.embed_tokens.weight": (24, 36),
    "model.layers.0.self_attn.q_proj.weight": (36, 36),
    "model.layers.0.mlp.up_proj.weight": (2 * GRAIN_ROWS + 60, 36),
    "model.layers.0.mlp.down_proj.weight": (36, 2 * GRAIN_ROWS + 60),
    "model.layers.0.input_layernorm.weight": (36,),
    "model.norm.weight": (36,),
}
MATRICES = [name for name in SHAPES if "_proj" in name]
NAMES = ("a", "b", "c")


def of(method: str, models: Sequence[str] = NAMES, weights: Sequence[float] = (), **parameters: Any) -> dict[str, Any]:
    """Return a recipe of a method with a base, and with a weight of each model if there are weights."""
    listed: list[dict[str, Any]] = [{"model": name} for name in models]
    for entry, weight in zip(listed, weights, strict=False):
        entry["parameters"] = {"weight": weight}
    content = {"merge_method": method, "base_model": "base", "models": listed}
    return {**content, "parameters": parameters} if parameters else content


def drawn(seed: int, around: Mapping[str, torch.Tensor] | None = None, rank: int = 6) -> dict[str, torch.Tensor]:
    """Return random weights, or ``around`` plus low-rank changes and some noise, as fine-tuning produces them."""
    made = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in SHAPES.items():
        full = torch.randn(shape, generator=made)
        if around is None:
            found[name] = full
            continue
        change = 0.01 * full
        if len(shape) == 2:
            left = torch.randn(shape[0], rank, generator=made)
            change = change + 0.05 * left @ torch.randn(rank, shape[1], generator=made)
        found[name] = around[name] + change
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("matrices")
    base = drawn(0)
    save_checkpoint(place / "base", base)
    for number, name in enumerate(NAMES):
        save_checkpoint(place / name, drawn(number + 1, base))
        save_moments(place / f"{name}-inputs", number)
    return place


def save_moments(place: Path, seed: int, diagonal: tuple[str, ...] = ()) -> Path:
    """Write moments of 20 positions, fewer than a matrix has inputs, so the moments are rank-deficient."""
    made = np.random.default_rng(seed)
    place.mkdir()
    kept = {}
    for name in MATRICES:
        inputs = made.normal(size=(20, SHAPES[name][1])) * made.lognormal(size=SHAPES[name][1])
        moments = inputs.T @ inputs / len(inputs)
        kept[name] = torch.from_numpy(checkpoint.pack_moments(moments.diagonal() if name in diagonal else moments))
    save_file(kept, place / checkpoint.measurement_file_name(MOMENTS, 0))
    checkpoint.write_measurement(place / MOMENTS, {name: name for name in MATRICES}, positions=20)
    return place


def moments_in(place: Path) -> dict[str, Array]:
    return {name: found.read() for name, found in checkpoint.open_moments(place).items()}


def planned(root: Path, recipe: Mapping[str, Any], inputs: Mapping[str, str] | None = None) -> Any:
    read = load_recipe(recipe)
    if inputs is not None:
        measured = {
            name: InputMeasurements(place, place, checkpoint.open_moments(root / place))
            for name, place in inputs.items()
        }
        read = replace(read, measured=measured)
    return plan_merge(read, open_models(read, root))


def merged(plan: Any, **settings: Any) -> dict[str, Array]:
    made = merge_tensors(plan, settings=EngineSettings(**settings))
    return {name: tensor.double().numpy() for name, tensor in made}


def regmean_recipe(models: tuple[str, ...] = NAMES, **parameters: Any) -> dict[str, Any]:
    own = [{"model": name, "text": f"{name}.jsonl"} for name in models]
    return {"merge_method": "regmean", "models": own, **({"parameters": parameters} if parameters else {})}


INPUTS = {name: f"{name}-inputs" for name in NAMES}


# --- References: whole matrices in float64 without blocks, from the published formulas. ---


def mean(models: list[Array], weight: list[float]) -> Array:
    return sum(x * w for x, w in zip(models, weight, strict=True)) / sum(weight)


def regmean(models: list[Array], grams: list[Array], weight: list[float], keep: float, floor: float) -> Array:
    own = [w * (g * keep + np.diag(g.diagonal()) * (1 - keep)) for g, w in zip(grams, weight, strict=True)]
    total = sum(own)
    total = total + floor * total.diagonal().mean() * np.eye(len(total))
    middle = mean(models, weight)
    right = sum((x - middle) @ g for x, g in zip(models, own, strict=True))
    return middle + np.linalg.solve(total, right.T).T


def ace(deltas: list[Array], weight: list[float], ridge: float, *, normalized: bool) -> Array:
    """The published closed form: each covariance with its own floor, in the task vectors and in their sum."""
    own = [np.cov(d, rowvar=False, bias=True) * len(d) for d in deltas]
    traces = [np.trace(c) for c in own]
    own = [c / (t if normalized else np.mean(traces)) for c, t in zip(own, traces, strict=True)]
    floor = ridge * np.mean(sum(w * c.diagonal() for w, c in zip(weight, own, strict=True))) / sum(weight)
    own = [w * (c + floor * np.eye(len(c))) for w, c in zip(weight, own, strict=True)]
    return np.linalg.solve(sum(own), sum(d @ c for d, c in zip(deltas, own, strict=True)).T).T


def leading(matrix: Array, rank: int) -> tuple[Array, Array, Array]:
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    return u[:, :rank], s[:rank], vt[:rank]


def polar(columns: Array) -> Array:
    u, _, vt = np.linalg.svd(columns, full_matrices=False)
    return u @ vt


def tsv_m(deltas: list[Array]) -> Array:
    parts = [leading(delta, min(delta.shape) // len(deltas)) for delta in deltas]
    u, v = polar(np.hstack([u for u, _, _ in parts])), polar(np.hstack([vt.T for _, _, vt in parts]))
    return u * np.concatenate([s for _, s, _ in parts]) @ v.T


def svc(deltas: list[Array], alpha: float, merged: Array | None = None) -> Array:
    treated = sum(deltas) if merged is None else merged
    u, s, vt = np.linalg.svd(treated, full_matrices=False)
    shrunk = np.zeros(len(s))
    for delta in deltas:
        whole, own = u.T @ treated, u.T @ delta
        shrunk += np.maximum(alpha, (whole * own).sum(1) / (own**2).sum(1))
    return u * (s * len(deltas) / shrunk) @ vt


def knots(deltas: list[Array], weights: tuple[float, ...], density: float) -> Array:
    u, s, _ = np.linalg.svd(np.hstack(deltas), full_matrices=False)
    u, turned = u[:, s > 1e-6 * s[0]], [u[:, s > 1e-6 * s[0]].T @ delta for delta in deltas]
    kept = []
    for one in turned:
        order = np.sort(np.abs(one), axis=None)
        kept.append(np.where(np.abs(one) >= order[one.size - int(density * one.size)], one, 0))
    weighted = np.stack([one * w for one, w in zip(kept, weights, strict=True)])
    sign = np.where(weighted.sum(0) >= 0, 1, -1)
    agrees = np.sign(weighted) == sign
    shares = (agrees * np.array(weights)[:, None, None]).sum(0)
    return u @ ((weighted * agrees).sum(0) / np.where(shares == 0, 1, shares))


# --- Comparisons with the references ---

WAYS: list[dict[str, Any]] = [
    {"block_elements": 1, "threads": 1},
    {"block_elements": 5000, "tile_elements": 1, "threads": 2, "kernels": "fused"},
]


def agrees(root: Path, plan: Any, wanted: Mapping[str, Array], tolerance: float = 2e-6) -> None:
    found = [merged(plan, **way) for way in WAYS]
    assert found[0].keys() == wanted.keys()
    for name in wanted:
        size = np.abs(wanted[name]).max()
        np.testing.assert_allclose(found[0][name], wanted[name], atol=tolerance * size, err_msg=name)
        for other in found[1:]:
            np.testing.assert_array_equal(other[name], found[0][name], err_msg=f"{name}: other bytes in other blocks")


EVEN, UNEVEN = (1.0, 1.0, 1.0), (0.2, 1.5, 0.6)


@pytest.mark.parametrize(("keep", "weight"), [(0.0, UNEVEN), (0.5, EVEN), (0.9, UNEVEN), (1.0, EVEN)])
def test_regmean_solves_the_normal_equations(root: Path, keep: float, weight: tuple[float, ...]) -> None:
    recipe = regmean_recipe(off_diagonals=keep)
    for entry, own in zip(recipe["models"], weight, strict=True):
        entry["parameters"] = {"weight": own}
    models = [load(root / name) for name in NAMES]
    grams = [moments_in(root / place) for place in INPUTS.values()]
    wanted = {}
    for name in SHAPES:
        own = [model[name] for model in models]
        own_grams = [gram[name] for gram in grams] if name in MATRICES else None
        wanted[name] = regmean(own, own_grams, list(weight), keep, 1e-6) if own_grams else mean(own, list(weight))
    # With all off-diagonals and few positions, only the ridge limits the condition number of the system.
    agrees(root, planned(root, recipe, INPUTS), wanted, 2e-6 if keep < 1 else 1e-4)


def test_only_diagonals_count_if_one_model_has_only_a_diagonal(root: Path, tmp_path: Path) -> None:
    wide = "model.layers.0.mlp.down_proj.weight"
    save_moments(root / "b-squares", 1, diagonal=(wide,))
    found = merged(planned(root, regmean_recipe(), {**INPUTS, "b": "b-squares"}))
    models = [load(root / name)[wide] for name in NAMES]
    squares = [np.diag(moments_in(root / place)[wide].diagonal()) for place in INPUTS.values()]
    np.testing.assert_allclose(found[wide], regmean(models, squares, [1.0] * 3, 1.0, 1e-6), atol=2e-6)


@pytest.mark.parametrize("ridge", [0.01, 0.3])
def test_wudi_is_regmean_with_the_moments_of_task_vectors(root: Path, ridge: float) -> None:
    recipe = of("wudi", ridge=ridge)
    base, tuned = load(root / "base"), [load(root / name) for name in NAMES]
    wanted = {}
    for name in SHAPES:
        own = [model[name] for model in tuned]
        if name in MATRICES:
            deltas = [x - base[name] for x in own]
            wanted[name] = regmean(own, [d.T @ d / (d**2).sum() for d in deltas], [1.0] * 3, 1.0, ridge)
        else:
            wanted[name] = mean(own, [1.0] * 3)
    agrees(root, planned(root, recipe), wanted)


@pytest.mark.parametrize(
    ("sizes", "ridge", "weight"),
    [(EVEN, 1.0, UNEVEN), ((1.0, 1.5, 0.8), 0.1, EVEN), ((0.2, 3.0, 1.0), 1.0, EVEN), ((9.0, 0.1, 0.1), 0.1, UNEVEN)],
)
def test_ace_matches_its_closed_form(
    root: Path, tmp_path: Path, sizes: tuple[float, ...], ridge: float, weight: tuple[float, ...]
) -> None:
    """Models that changed a matrix by very different amounts have normalized covariances, others do not."""
    base = load(root / "base")
    save_checkpoint(tmp_path / "base", {name: torch.from_numpy(x).float() for name, x in base.items()})
    for model, size in zip(NAMES, sizes, strict=True):
        changed = {name: base[name] + size * (x - base[name]) for name, x in load(root / model).items()}
        save_checkpoint(tmp_path / model, {name: torch.from_numpy(x).float() for name, x in changed.items()})
    recipe = of("ace", weights=weight, **{"ridge": ridge, "lambda": 0.8})
    tuned = [load(tmp_path / name) for name in NAMES]
    wanted = {}
    for name in SHAPES:
        deltas = [model[name] - base[name] for model in tuned]
        if name in MATRICES:
            normalized = np.var([np.log(((d - d.mean(0)) ** 2).sum()) for d in deltas], ddof=1) > 1
            assert normalized == (max(sizes) > 2)
            wanted[name] = base[name] + 0.8 * ace(deltas, list(weight), ridge, normalized=normalized)
        else:
            wanted[name] = base[name] + 0.8 * mean(deltas, list(weight))
    agrees(tmp_path, planned(tmp_path, recipe), wanted)


def test_ace_scales_with_its_task_vectors(tmp_path: Path) -> None:
    """Task vectors 64 times smaller give a change 64 times smaller. The published program gives the mean instead."""
    zero = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    found = []
    for scale in (1.0, 1 / 64):
        place = tmp_path / str(scale)
        save_checkpoint(place / "base", zero)
        for number, name in enumerate(("a", "b")):
            save_checkpoint(place / name, {key: x * scale for key, x in drawn(number + 1).items()})
        found.append(merged(planned(place, of("ace", "ab"))))
    for name in SHAPES:
        np.testing.assert_allclose(found[1][name] * 64, found[0][name], rtol=1e-6, atol=1e-7, err_msg=name)


def test_ace_of_changes_without_variance_is_the_mean(tmp_path: Path) -> None:
    """If a model changes all rows of a matrix equally, the covariance has only rounding errors, which do not count."""
    base = drawn(0)
    save_checkpoint(tmp_path / "base", base)
    for number, name in enumerate(("a", "b")):
        rows = {key: drawn(number + 1)[key][:1].expand_as(x) for key, x in base.items()}
        save_checkpoint(tmp_path / name, {key: (x + rows[key]).contiguous() for key, x in base.items()})
    found, own = merged(planned(tmp_path, of("ace", "ab", ridge=1e-3))), [load(tmp_path / name) for name in ("a", "b")]
    for name in SHAPES:
        wanted = mean([model[name] for model in own], [1.0, 1.0])
        np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("method", "parameters", "reference"),
    [("tsv_m", {}, tsv_m), ("svc", {}, lambda d: svc(d, 1.0)), ("svc", {"alpha": 0.2}, lambda d: svc(d, 0.2))],
)
def test_spectral_methods_match_the_decomposition_of_whole_matrices(
    root: Path, method: str, parameters: dict[str, float], reference: Any
) -> None:
    weights = (1.0, 0.7, 1.3)
    recipe = of(method, weights=weights, **{"lambda": 0.8, **parameters})
    base, tuned = load(root / "base"), [load(root / name) for name in NAMES]
    wanted = {}
    for name in SHAPES:
        deltas = [w * (model[name] - base[name]) for model, w in zip(tuned, weights, strict=True)]
        wanted[name] = base[name] + 0.8 * (reference(deltas) if name in MATRICES else sum(deltas) / 3)
    agrees(root, planned(root, recipe), wanted, 1e-5)


def test_svc_post_processes_the_merge_of_another_method(root: Path) -> None:
    """A recipe of two documents applies SVC to the matrices of a TIES merge and keeps its other tensors."""
    weight = 0.6
    models = [{"model": name, "parameters": {"weight": 1.0, "density": 0.4}} for name in NAMES]
    ties = {"merge_method": "ties", "base_model": "base", "models": models, "dtype": "float32"}
    elected = merged(planned(root, ties))
    treated = {"model": "elected", "parameters": {"merged": True, "weight": weight}}
    own = [*({"model": name} for name in NAMES[:2]), treated, {"model": NAMES[2]}]
    svc_of_it = {"merge_method": "svc", "base_model": "base", "models": own, "parameters": {"alpha": 0.3}}
    svc_of_it["dtype"] = "float32"
    both = load_recipe(yaml.safe_dump_all([{**ties, "name": "elected"}, svc_of_it]))
    plan = plan_merge(both, open_models(both, root))
    base, tuned = load(root / "base"), [load(root / name) for name in NAMES]
    wanted = {}
    for name in SHAPES:
        whole = weight * (elected[name] - base[name])
        deltas = [model[name] - base[name] for model in tuned]
        wanted[name] = base[name] + (svc(deltas, 0.3, whole) if name in MATRICES else whole)
    agrees(root, plan, wanted, 1e-5)


@pytest.mark.parametrize("said", [(True, True, False), (True, True, True)])
def test_at_most_one_model_is_marked_as_merged(root: Path, said: tuple[bool, ...]) -> None:
    models = [{"model": name, "parameters": {"merged": one}} for name, one in zip(NAMES, said, strict=True)]
    with pytest.raises(InvalidInput, match=r"merged(.|\n)*at most one merged model"):
        planned(root, {"merge_method": "svc", "base_model": "base", "models": models})


def test_knots_equals_ties_in_shared_directions(root: Path) -> None:
    weights, density = (1.0, 0.7, 1.3), 0.3
    recipe = of("knots", weights=weights, **{"lambda": 0.8, "density": density})
    base, tuned = load(root / "base"), [load(root / name) for name in NAMES]
    plan = planned(root, recipe)
    found = [merged(plan, **way) for way in WAYS]
    for name in SHAPES:
        deltas = [model[name] - base[name] for model in tuned]
        if name in MATRICES:
            wanted = base[name] + 0.8 * knots(deltas, weights, density)
        else:
            wanted = base[name] + 0.8 * sum(d * w for d, w in zip(deltas, weights, strict=True)) / 3
        # Rounding may move an element across the threshold or across zero.
        close = np.isclose(found[0][name], wanted, atol=1e-5 * np.abs(wanted).max())
        assert close.mean() > 0.99, name
        for other in found[1:]:
            np.testing.assert_array_equal(other[name], found[0][name], err_msg=name)


# --- Promises of the methods ---


@pytest.mark.parametrize("method", ["tsv_m", "svc", "wudi", "ace", "knots"])
def test_unchanged_matrices_keep_the_base(tmp_path: Path, method: str) -> None:
    base = drawn(0)
    save_checkpoint(tmp_path / "base", base)
    for name in ("a", "b"):
        save_checkpoint(tmp_path / name, base)
    found = merged(planned(tmp_path, of(method, "ab")))
    for name, tensor in base.items():
        np.testing.assert_array_equal(found[name], tensor.double().numpy(), err_msg=name)


def test_two_equal_models_give_that_model_up_to_truncation(tmp_path: Path) -> None:
    """The published TSV-M is wrong by its own size here, because it decomposes a rank-deficient matrix by SVD."""
    base = drawn(0)
    twin = drawn(1, base, rank=6)
    save_checkpoint(tmp_path / "base", base)
    for name in ("a", "b"):
        save_checkpoint(tmp_path / name, twin)
    found = merged(planned(tmp_path, of("tsv_m", "ab")))
    for name in MATRICES:
        delta = (twin[name] - base[name]).double().numpy()
        u, s, vt = leading(delta, min(delta.shape) // 2)
        cut_off = np.linalg.norm(delta - u * s @ vt)
        # Both twins weight the same directions. Orthonormalized together, each contributes half of them.
        assert np.linalg.norm(found[name] - base[name].double().numpy() - u * s @ vt) < 1e-4 * np.linalg.norm(delta)
        assert cut_off < 0.2 * np.linalg.norm(delta)


@pytest.mark.parametrize("method", sampled(("regmean", "wudi", "ace", "tsv_m", "svc", "knots"), ("regmean",)))
def test_a_resumed_matrix_merge_writes_the_same_bytes(root: Path, tmp_path: Path, method: str) -> None:
    plan = planned(root, regmean_recipe(), INPUTS) if method == "regmean" else planned(root, of(method))
    merge_weights(plan, tmp_path / "whole")

    class Killed(BaseException):
        pass

    def kill(done: int, total: int) -> None:
        if done:
            raise Killed

    with pytest.raises(Killed):
        merge_weights(plan, tmp_path / "killed", on_progress=kill, settings=EngineSettings(threads=1))
    merge_weights(plan, tmp_path / "killed", settings=EngineSettings(threads=2, block_elements=1))
    name = "model.safetensors"
    assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


# --- Experts stored as [in, out] ---

TURNED = {"gate_up_proj": (3, 2 * GRAIN_ROWS + 44, 24), "down_proj": (3, 12, 2 * GRAIN_ROWS + 44)}


@pytest.fixture(scope="module")
def turned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer of three experts ``[experts, in, out]``, with full moments, with squares only, and with none."""
    place = tmp_path_factory.mktemp("turned")
    made = np.random.default_rng(5)
    for name in ("base", *NAMES):
        whole = {
            f"model.layers.0.mlp.experts.{part}": torch.from_numpy(made.normal(size=shape).astype(np.float32))
            for part, shape in TURNED.items()
        }
        whole["model.embed_tokens.weight"] = torch.ones(8, 4)
        save_checkpoint(place / name, whole, config={"num_hidden_layers": 1})
        seen = place / f"{name}-inputs"
        seen.mkdir()
        kept = {}
        for part, (experts, width, _) in TURNED.items():
            for expert in range(experts):
                flowed = made.normal(size=(40, width))
                moments = flowed.T @ flowed / 40
                own = checkpoint.pack_moments(moments.diagonal() if expert == 1 else moments)
                own = checkpoint.empty_moments(width, is_diagonal=False) if expert == 2 else own
                kept[f"model.layers.0.mlp.experts.{expert}.{part}"] = torch.from_numpy(own)
        save_file(kept, seen / checkpoint.measurement_file_name(MOMENTS, 0))
        checkpoint.write_measurement(seen / MOMENTS, {name: name for name in kept}, positions=40)
    return place


@pytest.mark.parametrize("scale", [None, 1.3])
def test_regmean_solves_experts_that_are_stored_inputs_first(turned: Path, scale: float | None) -> None:
    recipe = regmean_recipe()
    if scale is not None:
        recipe = {**regmean_recipe(**{"lambda": scale}), "base_model": "base"}
    plan = planned(turned, recipe, INPUTS)
    grams = [moments_in(turned / place) for place in INPUTS.values()]
    parents = {name: load(turned / name) for name in ("base", *NAMES)}
    wanted = {"model.embed_tokens.weight": np.ones((8, 4))}
    for part in TURNED:
        name = f"model.layers.0.mlp.experts.{part}"
        experts = []
        for expert in range(3):
            models = [parents[one][name][expert].astype(float).T for one in NAMES]
            own = [one[f"model.layers.0.mlp.experts.{expert}.{part}"] for one in grams]
            own = [np.diag(one) if one.ndim == 1 else one for one in own]
            known = expert < 2
            solved = regmean(models, own, [1.0] * 3, 0.9, 1e-6) if known else mean(models, [1.0] * 3)
            base = parents["base"][name][expert].astype(float).T
            experts.append((solved if scale is None else base + scale * (solved - base)).T)
        wanted[name] = np.stack(experts)
    agrees(turned, plan, wanted, 5e-6)
    costs = plan.method.costs
    assert costs is not None
    assert costs.held_bytes is not None
    first = next(job.task() for job in plan.jobs if job.output.name.endswith("experts.0.gate_up_proj"))
    width = 2 * GRAIN_ROWS + 44
    assert costs.held_bytes(first) == 8 * width**2 * 6 + 3 * 8 * width * 24
    assert costs.folds(first) == 1


# --- Recipes that are refused ---


def test_an_unprepared_merge_and_lambda_without_a_base_are_refused(root: Path) -> None:
    with pytest.raises(InvalidInput, match="on their texts are missing"):
        merged(planned(root, regmean_recipe()))
    with pytest.raises(InvalidInput, match="without a base"):
        planned(root, regmean_recipe(**{"lambda": 1.2}), INPUTS)


@pytest.mark.parametrize(
    ("count", "value", "words"),
    [
        (35 * 36 // 2, 1.0, "width 35"),
        *((36 * 37 // 2, value, "not finite, or squares are negative") for value in (np.nan, np.inf, -1.0)),
    ],
)
def test_invalid_moments_or_those_of_another_width_are_refused(
    root: Path, tmp_path: Path, count: int, value: float, words: str
) -> None:
    save_file({MATRICES[0]: torch.full((1, count), value)}, tmp_path / checkpoint.measurement_file_name(MOMENTS, 0))
    checkpoint.write_measurement(tmp_path / MOMENTS, {MATRICES[0]: MATRICES[0]}, positions=1)
    with pytest.raises(InvalidInput, match=words):
        merged(planned(root, regmean_recipe(("a",)), {"a": str(tmp_path)}))


@pytest.mark.parametrize("width", [1, 2, 7])
def test_moments_are_read_as_they_were_stored(tmp_path: Path, width: int) -> None:
    made = np.random.default_rng(width).normal(size=(width, width)).astype(np.float32)
    whole = (made + made.T).astype(np.float64)
    np.fill_diagonal(whole, np.abs(whole.diagonal()))
    values = {"whole": whole, "squares": whole.diagonal()}
    kept = {name: torch.from_numpy(checkpoint.pack_moments(one)) for name, one in values.items()}
    save_file(kept, tmp_path / checkpoint.measurement_file_name(MOMENTS, 0))
    checkpoint.write_measurement(tmp_path / MOMENTS, {"a": "whole", "b": "squares", "c": "whole"}, positions=3)
    found = checkpoint.open_moments(tmp_path)
    np.testing.assert_array_equal(found["a"].read(), whole.astype(np.float32))
    np.testing.assert_array_equal(found["b"].read(), whole.diagonal().astype(np.float32))
    assert found["c"] == found["a"]
    assert [found[name].is_diagonal for name in "ab"] == [False, True]
