"""Matrix methods and importance methods give FusionBench 0.2.33's numbers, or a documented difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from peer_family import require_peer, run_peer
from safetensors.torch import load_file, save_file

from mergegate.merge_core import checkpoint, load_recipe, merge_tensors, open_checkpoint, plan_merge
from mergegate.merge_core.recipe import InputMeasurements

pytestmark = pytest.mark.fusionbench

# A square, a tall and a wide matrix of a layer, each spanning several groups of rows.
MATRICES = {
    "model.layers.0.self_attn.q_proj.weight": (144, 144),
    "model.layers.0.mlp.up_proj.weight": (400, 96),
    "model.layers.0.mlp.down_proj.weight": (96, 300),
}
MODELS = 3
Tensors = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    """Matrices with low-rank task vectors plus noise, and moments of more inputs than a matrix has columns."""
    made = torch.Generator().manual_seed(11)
    found = {}
    for name, shape in MATRICES.items():
        found[f"{name}/base"] = 0.1 * torch.randn(shape, generator=made)
        for i in range(MODELS):
            change = torch.randn(shape[0], 8, generator=made) @ torch.randn(8, shape[1], generator=made)
            noise = torch.randn(shape, generator=made)
            found[f"{name}/model{i}"] = found[f"{name}/base"] + 0.01 * change + 0.004 * noise
            inputs = torch.randn(2 * shape[1], shape[1], generator=made) * torch.rand(shape[1], generator=made)
            moments = inputs.double().T @ inputs.double() / len(inputs)
            found[f"{name}/moments{i}"] = moments.float()
            found[f"{name}/importance{i}"] = torch.randn(shape, generator=made).square()
    return found


@pytest.fixture(scope="module")
def theirs(given: Tensors, tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    require_peer("fusionbench")
    place = tmp_path_factory.mktemp("fusionbench")
    save_file(dict(given), place / "inputs.safetensors")
    run_peer("fusionbench", "run_fusionbench.py", "inputs.safetensors", "results.safetensors", directory=place)
    return load_file(place / "results.safetensors")


@pytest.fixture(scope="module")
def root(given: Tensors, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same matrices as checkpoints, with the moments and importance of each model."""
    place = tmp_path_factory.mktemp("ours")
    for model in ("base", *(f"model{i}" for i in range(MODELS))):
        (place / model).mkdir()
        tensors = {name: given[f"{name}/{model}"] for name in MATRICES}
        save_file(tensors, place / model / "model.safetensors")
        (place / model / "config.json").write_text('{"model_type": "llama"}')
    for i in range(MODELS):
        measured = place / f"measured{i}"
        measured.mkdir()
        moments = {name: checkpoint.pack_moments(given[f"{name}/moments{i}"].double().numpy()) for name in MATRICES}
        importance = {name: given[f"{name}/importance{i}"] for name in MATRICES}
        for kind, tensors in (
            (checkpoint.INPUTS, {n: torch.from_numpy(one) for n, one in moments.items()}),
            (checkpoint.IMPORTANCE, importance),
        ):
            save_file(tensors, measured / checkpoint.measurement_file_name(kind, 0))
            checkpoint.write_measurement(measured / kind, {name: name for name in MATRICES}, positions=1)
    return place


def ours(root: Path, method: str, parameters: str = "", *, base: bool = True) -> Tensors:
    reads = method in ("regmean", "fisher")
    models = ", ".join(f"{{model: model{i}{', text: own' if reads else ''}}}" for i in range(MODELS))
    recipe = load_recipe(
        f"merge_method: {method}\nmodels: [{models}]\n"
        + ("base_model: base\n" if base else "")
        + f"parameters: {{{parameters}}}\n"
    )
    if reads:
        measured = {
            f"model{i}": InputMeasurements("", "", checkpoint.open_moments(place), checkpoint.open_importance(place))
            for i, place in ((i, root / f"measured{i}") for i in range(MODELS))
        }
        recipe = replace(recipe, measured=measured)
    checkpoints = {str(ref): open_checkpoint(root / ref.path) for ref in recipe.references()}
    return {name: tensor.clone() for name, tensor in merge_tensors(plan_merge(recipe, checkpoints), seed=0)}


def distance(one: torch.Tensor, other: torch.Tensor, base: torch.Tensor) -> float:
    """Return the distance between two merges, relative to the distance of the second one from the base."""
    return float((one.double() - other.double()).norm() / (other.double() - base.double()).norm())


@pytest.mark.parametrize(
    ("their", "method", "parameters", "base"),
    [
        ("regmean .9", "regmean", "off_diagonals: 0.9", False), ("regmean .5", "regmean", "off_diagonals: 0.5", False),
        ("fisher", "fisher", "", False), ("svc 1", "svc", "alpha: 1.0", True), ("svc .5", "svc", "alpha: 0.5", True),
        ("tsv_m", "tsv_m", "", True), ("consensus_ta", "consensus_ta", "threshold: 0.4, weight: 1.0", True),
    ],
)  # fmt: skip
def test_the_same_numbers(
    given: Tensors, theirs: Tensors, root: Path, their: str, method: str, parameters: str, base: bool
) -> None:
    """FusionBench inverts and decomposes in float32, while mergegate accumulates in float64."""
    for name, found in ours(root, method, parameters, base=base).items():
        apart = distance(theirs[f"{their}/{name}"], found, given[f"{name}/base"])
        print(f"{their:14} {name}: {apart:.1e}")
        assert apart < 1e-4, name


def test_svc_of_what_another_method_has_merged(given: Tensors, theirs: Tensors, root: Path) -> None:
    names = [f"model{i}" for i in range(MODELS)]
    steps = [
        {"name": "middle", "merge_method": "median", "models": [{"model": name} for name in names]},
        {
            "merge_method": "svc",
            "models": [*({"model": name} for name in names), {"model": "middle", "parameters": {"merged": True}}],
            "parameters": {"alpha": 0.5},
        },
    ]
    recipe = load_recipe(yaml.safe_dump_all([{**one, "base_model": "base", "dtype": "float32"} for one in steps]))
    checkpoints = {str(ref): open_checkpoint(root / ref.path) for ref in recipe.references()}
    for name, found in merge_tensors(plan_merge(recipe, checkpoints), seed=0):
        apart = distance(theirs[f"svc of a median/{name}"], found, given[f"{name}/base"])
        print(f"svc of a median {name}: {apart:.1e}")
        assert apart < 1e-4


def test_wudi_in_closed_form_is_where_adam_is_going(given: Tensors, theirs: Tensors, root: Path) -> None:
    """FusionBench takes 300 Adam steps of at most 1e-5 from the sum of task vectors, so the test compares losses."""
    for name, found in ours(root, "wudi", "ridge: 1e-6").items():
        base = given[f"{name}/base"].double()
        deltas = [given[f"{name}/model{i}"].double() - base for i in range(MODELS)]

        def loss(merged: torch.Tensor, base: torch.Tensor = base, deltas: list[torch.Tensor] = deltas) -> float:
            new = merged.double() - base
            return sum(float(((new - d) @ d.T).square().sum() / d.square().sum()) for d in deltas)

        start, adam, closed = loss(base + sum(deltas)), loss(theirs[f"wudi/{name}"]), loss(found)
        print(f"wudi           {name}: the sum {start:.3g}, Adam {adam:.3g}, closed {closed:.3g}")
        assert closed <= adam * (1 + 1e-6)
        assert adam <= start


def test_knots_of_a_mean_is_the_mean(given: Tensors, theirs: Tensors) -> None:
    """FusionBench computes only KnOTS's shared directions, and a mean in them must be the plain mean."""
    for name in MATRICES:
        base = given[f"{name}/base"]
        mean = torch.stack([given[f"{name}/model{i}"].double() for i in range(MODELS)]).mean(0)
        assert distance(theirs[f"knots, mean/{name}"], mean, base) < 1e-4


def test_fisher_as_they_usually_do_it_is_another_mean(given: Tensors, theirs: Tensors) -> None:
    """FusionBench scales each model's importance to unit norm over the whole model and adds 1e-6."""
    for name in MATRICES:  # Each FusionBench call gets one matrix here, so the matrix's norm is the model's norm.
        scaled = []
        for i in range(MODELS):
            importance = given[f"{name}/importance{i}"].double() + 1e-6
            scaled.append(importance / given[f"{name}/importance{i}"].double().norm())
        values = [given[f"{name}/model{i}"].double() for i in range(MODELS)]
        expected = sum(v * s for v, s in zip(values, scaled, strict=True)) / sum(scaled)
        assert distance(theirs[f"fisher as usual/{name}"], expected, given[f"{name}/base"]) < 1e-3
