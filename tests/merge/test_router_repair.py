"""New routers of merged mixtures equal a dense float64 fit layer by layer in a plain transformers network."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mixtures
import numpy as np
import pytest
import torch
import yaml
from calibration_jobs import DEMO, SENTENCES, Killed, run_reader, saved, text_of, tokens_of, write_texts
from rich.console import Console
from safetensors.numpy import load_file
from samples import sampled
from test_router_fit import dense_solution

from mergegate.flows.operations.merge import MergeOptions, merge_recipe
from mergegate.merge_core import load_recipe, open_checkpoint, plan_merge, plan_with_findings
from mergegate.merge_core.architecture.experts import RouterScore, find_routers, read_routers
from mergegate.merge_core.engine.execution import require_prepared
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.recipe import CalibrationReading, RouterRepair
from mergegate.tasks.base.stage import runtime
from mergegate.tasks.merge.calibration import pin_calibration_texts, router_needs
from mergegate.tasks.merge.routers import ParentRouters, RepairRequest, RouterRepairSummary, new_routers, repair_routers
from mergegate.tasks.models.checkpoints import PinnedRecipe, pin_checkpoints, resolve_parents
from mergegate.tasks.models.checkpoints.model import Model
from mergegate.tasks.preflight.evidence import collect_calibration_texts

Array = np.ndarray
TEXTS = (SENTENCES, (*SENTENCES[:0:-1], "the shy fox likes the odd pig again."))
SIGMOID = ("glm4_moe", "lfm2_moe", "llama4")


@cache
def built(family: str) -> tuple[Any, tuple[Any, ...]]:
    """Return a network and two parents with the same experts and other routers."""
    model = mixtures.build(family)
    parents = []
    for seed in (1, 2):
        parent, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, tensor in parent.named_parameters():
                if is_router(name):
                    tensor += 0.3 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        parents.append(parent)
    return model, tuple(parents)


def is_router(name: str) -> bool:
    return any(f".{part}." in name for part in ("gate", "router")) and "shared" not in name and "proj" not in name


def repair(place: Path, parents: tuple[ParentRouters, ...], out: Path, *progress: Any, **reading: Any) -> Any:
    """Repair the routers of the merge in ``place`` in this process, in float32."""
    return run_reader(
        lambda job, on_progress: repair_routers(job, parents, RouterRepair(), on_progress),
        *(place, parents[0].text, out, *progress),
        **reading,
    )


def parents_of(root: Path, family: str) -> tuple[ParentRouters, ...]:
    found = []
    for number, parent in enumerate(built(family)[1]):
        place = saved(parent, root / f"parent-{number}")
        routers = read_routers(find_routers(open_checkpoint(place)).values())
        text = text_of(root, *TEXTS[number], name=f"{number}.jsonl")
        found.append(ParentRouters(f"parent-{number}", text, routers))
    return tuple(found)


def repaired(root: Path, family: str, out: str = "out", *progress: Any) -> RouterRepairSummary:
    return repair(saved(built(family)[0], root / "merge"), parents_of(root, family), root / out, *progress)


def routers_in(out: Path) -> dict[str, Array]:
    return {name: one for file in sorted(out.glob("*.safetensors")) for name, one in load_file(file).items()}


def by_hand(network: Any, family: str, tokens: list[list[list[int]]], parents: tuple[Any, ...]) -> dict[str, Array]:
    """Fit the routers of a copy of ``network`` in order, and return them with their biases as the last column."""
    network, found = copy.deepcopy(network), {}
    owners = [
        name.removesuffix(".weight") for name, _ in network.named_parameters() if is_router(name) and "weight" in name
    ]

    def matrix(of: Any, owner: str) -> Array:
        module = of.get_submodule(owner)
        bias = getattr(module, "bias", None)
        own = module.weight.detach().double()
        return (own if bias is None else torch.cat([own, bias.detach().double()[:, None]], 1)).numpy()

    for owner in owners:
        inputs = []
        for documents in tokens:
            seen: list[torch.Tensor] = []
            hook = network.get_submodule(owner).register_forward_pre_hook(
                lambda _, given, seen=seen: seen.append(given[0])
            )
            with torch.no_grad():
                for ids in documents:
                    network(torch.tensor([ids]))
            hook.remove()
            inputs.append(torch.cat([one.reshape(-1, one.shape[-1]) for one in seen]).double().numpy())

        start = matrix(network, owner)
        if start.shape[1] > inputs[0].shape[1]:
            inputs = [np.hstack([one, np.ones((len(one), 1))]) for one in inputs]
        routers = [matrix(parent, owner) for parent in parents]
        score: RouterScore = "sigmoid" if family in SIGMOID else "softmax"
        found[owner], _ = dense_solution(start, [*zip(inputs, routers, strict=True)], 0.9, score)
        module = network.get_submodule(owner)
        width = module.weight.shape[1]
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(found[owner][:, :width]))
            if found[owner].shape[1] > width:
                module.bias.copy_(torch.from_numpy(found[owner][:, width]))
    return found


@pytest.mark.parametrize("family", sampled(mixtures.FAMILIES, ("mixtral",)))
def test_each_layer_is_fitted_to_the_states_that_the_new_routers_below_it_produce(tmp_path: Path, family: str) -> None:
    summary = repaired(tmp_path, family)
    network, parents = built(family)
    place = tmp_path / "merge"
    wanted = by_hand(network, family, [tokens_of(place, documents) for documents in TEXTS], parents)
    found = routers_in(tmp_path / "out")
    assert len(summary.layers) == summary.new_layers == len(wanted)
    assert sum(map(np.size, found.values())) == sum(map(np.size, wanted.values()))
    assert [name.split(".")[2] for name in found if "weight" in name] == [name.split(".")[2] for name in wanted]
    weights = [one for one in found.values() if one.ndim == 2]
    for own, target in zip(weights, wanted.values(), strict=True):
        np.testing.assert_allclose(own, target[:, : own.shape[1]], atol=3e-5 * np.abs(target).max())
    biases = [one for one in found.values() if one.ndim == 1]
    for own, target in zip(biases, wanted.values(), strict=bool(biases)):
        np.testing.assert_allclose(own, target[:, -1], atol=3e-5 * np.abs(target).max())
    for layer in summary.layers:
        assert layer.divergence[1] < layer.divergence[0]
        assert layer.positions == sum(len(ids) for documents in TEXTS for ids in tokens_of(place, documents))


@pytest.mark.story
@pytest.mark.parametrize("damage", ["", "cut", "gone"])
def test_a_killed_repair_resumes_after_the_last_finished_layer(tmp_path: Path, damage: str) -> None:
    """The model process keeps models loaded, so the later repairs must start from the network's own routers."""
    whole = repaired(tmp_path, "mixtral", "whole")
    windows = sum(map(len, TEXTS))

    def kill(done: int, total: int) -> None:
        if done == windows + 1:
            raise Killed

    with pytest.raises(Killed):
        repaired(tmp_path, "mixtral", "out", kill)
    (first,) = (tmp_path / "out").glob("*.safetensors")
    if damage == "cut":
        first.write_bytes(first.read_bytes()[:-4])
    elif damage == "gone":
        first.unlink()
    steps: list[tuple[int, int]] = []
    again = repaired(tmp_path, "mixtral", "out", lambda *counts: steps.append(counts))
    assert again == whole
    assert len(steps) == windows * (2 if damage else 1)
    assert steps[-1] == (2 * windows, 2 * windows)
    for file in (tmp_path / "whole").glob("*.safetensors"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_a_text_with_fewer_tokens_than_the_router_has_inputs_is_refused(tmp_path: Path) -> None:
    place, parents = saved(built("mixtral")[0], tmp_path / "merge"), parents_of(tmp_path, "mixtral")
    with pytest.raises(InvalidInput, match="at least 32") as problem:
        repair(place, parents, tmp_path / "out", documents=1)
    assert "raise statistics.documents" in str(problem.value.remedy)


def test_a_network_that_computes_nan_is_refused(tmp_path: Path) -> None:
    broken = copy.deepcopy(built("mixtral")[0])
    with torch.no_grad():
        broken.model.embed_tokens.weight[:] = float("nan")
    with pytest.raises(InvalidInput, match="NaN"):
        repair(saved(broken, tmp_path / "merge"), parents_of(tmp_path, "mixtral"), tmp_path / "out")


def test_a_router_whose_product_cannot_be_observed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(built("mixtral")[0].model.layers[0].mlp.gate)

    def einsum(self: Any, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = torch.einsum("ti,ei->te", states.reshape(-1, states.shape[-1]), self.weight)
        values, numbers = logits.softmax(-1).topk(2)
        return logits, values, numbers

    monkeypatch.setattr(kind, "forward", einsum)
    with pytest.raises(InvalidInput, match="could not observe"):
        repaired(tmp_path, "mixtral")


# --- recipes ---

RECIPE: dict[str, Any] = {
    "merge_method": "linear",
    "models": [{"model": f"parent-{n}", "text": f"{n}.jsonl", "parameters": {"weight": 0.5}} for n in (0, 1)],
    "router_repair": True,
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"router_repair": {"off_diagonals": 2}}, "a number from 0 to 1"),
        ({"router_repair": {"off_diagonal": 0.5}}, "off_diagonals"),
        ({"router_repair": "yes"}, "a mapping"),
        ({"router_repair": {}}, "at least one key"),
        ({"router_repair": False}, "does not read texts"),
        ({"models": [{"model": "a", "parameters": {"weight": 1}}]}, "router_repair reads it with the merge"),
        (
            {"slices": [{"sources": [{"model": "a", "text": "t", "layer_range": [0, 1]}]}], "models": None},
            "whole models",
        ),
    ],
)
def test_invalid_settings_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput) as problem:
        load_recipe({**RECIPE, **change})
    assert said in str(problem.value)


def test_a_step_cannot_have_its_routers_repaired() -> None:
    step = yaml.safe_dump({**RECIPE, "name": "made"})
    last = "merge_method: linear\nmodels: [{model: made, parameters: {weight: 1}}]"
    with pytest.raises(InvalidInput, match="in the document of the result"):
        load_recipe(f"{step}\n---\n{last}")


def test_a_recipe_without_a_repair_has_the_same_key_as_before() -> None:
    plain = {key: value for key, value in RECIPE.items() if key != "router_repair"}
    plain["models"] = [{key: value for key, value in model.items() if key != "text"} for model in plain["models"]]
    keys = load_recipe(plain).canonical().keys()
    assert not keys & {"router_repair", "routers", "texts", "statistics"}
    assert load_recipe(RECIPE).canonical().keys() - keys == {"router_repair", "texts", "statistics"}


def test_models_without_routers_are_refused_before_the_merge(tmp_path: Path) -> None:
    names = ("reverser", "shifter")
    models = [
        {**model, "model": str(DEMO / "models" / name)} for model, name in zip(RECIPE["models"], names, strict=True)
    ]
    recipe = load_recipe({**RECIPE, "models": models})
    planned = plan_with_findings(recipe, {str(ref): open_checkpoint(Path(ref.path)) for ref in recipe.references()})
    assert any("has no router of experts" in finding.found for finding in planned.blocking)


def test_an_unprepared_recipe_is_not_merged(tmp_path: Path) -> None:
    parents_of(tmp_path, "mixtral")
    recipe = load_recipe(RECIPE)
    plan = plan_merge(recipe, {str(ref): open_checkpoint(tmp_path / ref.path) for ref in recipe.references()})
    with pytest.raises(InvalidInput, match="the new routers are missing"):
        require_prepared(plan)


@pytest.mark.proof
@pytest.mark.usefixtures("own_store")
@pytest.mark.parametrize(
    ("family", "fused"),
    [pytest.param("mixtral", False, marks=pytest.mark.story), pytest.param("gpt_oss", True, marks=pytest.mark.proof)],
)
def test_a_merge_writes_the_new_routers_and_otherwise_the_same_bytes(tmp_path: Path, family: str, fused: bool) -> None:
    """The whole way from a recipe to a directory, with the model process."""
    parents_of(tmp_path, family)
    if fused:
        saved(built(family)[1][0], tmp_path / "parent-0", fused=True)
    lines = Console(file=(tmp_path / "log").open("w"), width=200)
    for name, is_repaired in (("plain", False), ("repaired", True)):
        content = json.loads(json.dumps(RECIPE))
        if not is_repaired:
            del content["router_repair"]
            for model in content["models"]:
                del model["text"]
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
        merge_recipe(tmp_path / f"{name}.yaml", MergeOptions(tmp_path / name, device="cpu"), lines)
    assert not merge_recipe(tmp_path / "repaired.yaml", MergeOptions(tmp_path / "repaired", device="cpu"), lines)["new"]
    plain, changed = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "repaired"))
    found = find_routers(open_checkpoint(tmp_path / "plain")).values()
    routers = {tensor.name for router in found for tensor in router.tensors}
    assert routers
    assert plain.keys() == changed.keys()
    for name, tensor in plain.items():
        assert np.array_equal(tensor, changed[name]) == (name not in routers), name
    lines.file.close()
    assert "2 of 2 layers have a new router" in (tmp_path / "log").read_text()

    repair(tmp_path / "plain", parents_of(tmp_path, family), tmp_path / "by-hand")
    for name, tensor in routers_in(tmp_path / "by-hand").items():
        np.testing.assert_allclose(changed[name], tensor, atol=1e-6 * np.abs(tensor).max())


def test_the_texts_of_a_repair_must_not_contain_documents_of_the_gate(tmp_path: Path) -> None:
    """The check of the gate's documents reads the same texts as the repair."""
    for number, documents in enumerate(TEXTS):
        write_texts(tmp_path / f"{number}.jsonl", documents)
    recipe = replace(load_recipe(RECIPE), directory=tmp_path)
    read = collect_calibration_texts(recipe, HashMemo(tmp_path / "hashes.db"))
    assert read.texts == (*TEXTS[0], *TEXTS[1])


@pytest.mark.usefixtures("own_store")
def test_other_texts_and_settings_are_other_keys(tmp_path: Path) -> None:
    parents_of(tmp_path, "mixtral")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    recipe = load_recipe(tmp_path / "recipe.yaml")
    parents = pin_checkpoints(resolve_parents(recipe), HashMemo(tmp_path / "hashes.db"))
    plain, model = (
        PinnedRecipe(replace(recipe, router_repair=None), parents),
        Model(name="m", digest="1", directory=tmp_path),
    )

    def key(off_diagonals: float = 0.9, dtype: str = "auto", documents: int = 256) -> str:
        texts = (text for _, text in pin_calibration_texts(recipe, HashMemo(tmp_path / "hashes.db")))
        pairs = tuple(zip(parents, texts, strict=True))
        request = RepairRequest(pairs, CalibrationReading(documents), RouterRepair(off_diagonals))
        return new_routers.key(model, plain, request, dtype, runtime())

    keys = [key(), key(0.5), key(dtype="float32"), key(documents=3)]
    write_texts(tmp_path / "0.jsonl", TEXTS[0][:-1])
    keys.append(key())
    assert len(set(keys)) == len(keys)
    write_texts(tmp_path / "0.jsonl", TEXTS[0])
    assert key() == keys[0]


def test_the_forecast_counts_the_texts_and_the_passes(tmp_path: Path) -> None:
    parents_of(tmp_path, "mixtral")
    recipe = replace(load_recipe(RECIPE), directory=tmp_path)
    opened = {str(ref): open_checkpoint(tmp_path / ref.path) for ref in recipe.references()}
    needs = router_needs(plan_merge(recipe, opened), HashMemo(tmp_path / "hashes.db"))
    assert (needs.texts, needs.layers) == (2, 2)
    assert needs.states == 4 * 32 * needs.positions
    shares = {name: 2 / mixtures.EXPERTS if ".experts." in name else 1 for name in opened["parent-0"].tensors}
    parameters = sum(tensor.numel * shares[name] for name, tensor in opened["parent-0"].tensors.items())
    assert needs.operations == pytest.approx(2 * needs.positions * parameters)
    plain = plan_merge(replace(recipe, router_repair=None), opened)
    assert router_needs(plain, HashMemo(tmp_path / "hashes.db")) is None
