"""mergegate and mergekit 0.1.5 agree on a recipe, even with null values, unknown keys and unused parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from peer_family import TOKENS, require_peer, run_peer, write_family
from test_against_mergekit import load
from tokenizers import Tokenizer, models

from mergegate.merge_core import EngineSettings, MergePlan, load_recipe, merge_weights, open_checkpoint, plan_merge
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.recipe import RunCheckpoint, Schedule, run_recipe

pytestmark = pytest.mark.peer

LINEAR = """merge_method: linear
models:
  - {model: one, parameters: {weight: 0.25}}
  - {model: two, parameters: {weight: 0.75}}
"""
SLICES = """merge_method: passthrough
slices:
  - sources: [{model: one, layer_range: [0, 4]}]
"""
TIES = """merge_method: ties
base_model: base
models:
  - {model: one, parameters: {weight: 0.5, density: 0.5}}
  - {model: two, parameters: {weight: 0.5, density: 0.5}}
"""
EMPTY = ("null", "''", "{}", "[]")
KEYS = ("base_model", "dtype", "out_dtype", "tokenizer_source", "tokenizer", "chat_template", "parameters", "name")
BLOCKS = (
    *("{source: null}", "{source: union, tokens: null}", "{tokens: {}}", "{tokens: []}", "{sourc: base}"),
    *("{pad_to_multiple_of: null}", "{pad_to_multiple_of: 0}", "{pad_to_multiple_of: '64'}", "{source: 'model:one'}"),
    *("{tokens: {t1: {}}}", "{tokens: {t1: {source: null}}}", "{tokens: {t1: {source: one, forse: true}}}"),
    *("{tokens: {t1: {force: true}}}", "{tokens: {t1: null}}"),
)
MODELS = (
    *("one", "{model: one, parameters: null}", "{model: one, parameters: {weight: null}}", "{parameters: {weight: 1}}"),
    *("{model: one, parameters: {weight: []}}", "{model: one, parameters: {weight: {}}}"),
    *("{model: one, parameters: {weight: 0.5}, revision: x}", "{model: one, parameters: {weight: 0.5, densty: 1}}"),
    *(
        "{model: one, parameters: {weight: 0.5, normalize: false}}",
        "{model: one, weight: 1, parameters: {weight: 0.5}}",
    ),
    "{model: {model: {path: one, revision: null, x: 1}, lora: null, x: 1}, parameters: {weight: 0.5}}",
    "{model: one, parameters: {weight: [{value: 0.3}, {value: 0.5, filter: mlp}]}}",
    "{model: one, parameters: {weight: [{value: 0.5, filtre: mlp}, {value: 0.2}]}}",
    "{model: one, parameters: {weight: {value: 0.5, filter: ''}}}",
    "{model: one, parameters: {weight: {value: null}}}",
)
WINDOW = tuple(RunCheckpoint(name, step) for step, name in enumerate(("one", "two", "three"), start=1))
RECIPES: Mapping[str, str] = {
    **{f"{key}: {value}": f"{LINEAR}{key}: {value}\n" for key in (*KEYS, "slices", "modules", "x") for value in EMPTY},
    **{f"slices, {key}: {value}": f"{SLICES}{key}: {value}\n" for key in ("models", "modules") for value in EMPTY},
    **{
        f"slices[0].{key}: {value}": f"{SLICES}    {key}: {value}\n"
        for key in ("base_model", "parameters", "residual_weight", "x")
        for value in ("null", "{}", "0.5")
    },
    **{f"tokenizer: {block}": f"{LINEAR}tokenizer: {block}\n" for block in (*BLOCKS, "union", "base")},
    **{
        f"tokenizer_source: {value}": f"{LINEAR}tokenizer_source: {value}\n" for value in ("union", "base", "model:one")
    },
    "no tokenizer, a source": LINEAR + "tokenizer: null\ntokenizer_source: union\n",
    "a tokenizer, no source": LINEAR + "tokenizer: {source: union}\ntokenizer_source: null\n",
    "a tokenizer and a source": LINEAR + "tokenizer: {}\ntokenizer_source: union\n",
    **{f"model: {entry}": LINEAR.replace("{model: one, parameters: {weight: 0.25}}", entry) for entry in MODELS},
    "a base with parameters": TIES.replace(
        "models:\n", "models:\n  - {model: base, parameters: {weight: 0.3, density: 0.1}}\n"
    ),
    "parameters of other methods": TIES
    + "normalise: false\nparameters: {normalise: false, t: 0.5, select_topk: 0.1}\n",
    "a shared parameter as an empty list": LINEAR + "parameters: {normalize: []}\n",
    "layers as text": SLICES.replace("[0, 4]", "['0', '4']"),
    "layers with a point": SLICES.replace("[0, 4]", "[0.0, 4.0]"),
    "a key beside the layers": SLICES.replace("[0, 4]", "[0, 4], layers: 3"),
    "no layers": SLICES.replace(", layer_range: [0, 4]", ""),
    **{
        f"a training run with {schedule} weights": "# a remark\n"
        + yaml.safe_dump(run_recipe({"run": "runs"}, WINDOW, Schedule(schedule, 0.5), "recipe"), sort_keys=False)
        for schedule in ("mean", "linear", "cosine", "minus_sqrt", "exponential", "ema")
    },
}
# Recipes that mergegate accepts although mergekit refuses them → the reason.
DIFFERENT = {
    "slices[0].residual_weight: {}": "mergekit checks the type of a key that it never uses",
    "tokenizer: {tokens: {t1: null}}": "a token without settings, as {}; people write it so in YAML",
}


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, str | None]]:
    """A directory with models, recipes and mergekit's results, and mergekit's error per recipe (None if it merged)."""
    require_peer("peer")
    root = tmp_path_factory.mktemp("reading")
    write_family(root, spread=0.03, dtype=torch.float32)
    tokenizer = Tokenizer(models.WordLevel({f"t{number}": number for number in range(TOKENS)}, unk_token="t0"))
    for model in ("base", "one", "two", "three"):
        tokenizer.save(str(root / model / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}
        (root / model / "tokenizer_config.json").write_text(json.dumps(settings))
    jobs = []
    for number, text in enumerate(RECIPES.values()):
        (root / f"{number}.yaml").write_text(text)
        jobs.append({"recipe": f"{number}.yaml", "out": f"{number}.out", "seed": 0, "multi": False, "final": None})
    (root / "jobs.json").write_text(json.dumps(jobs))
    run_peer("peer", "run_mergekit.py", "jobs.json", "results.json", directory=root)
    return root, json.loads((root / "results.json").read_text())


def planned(root: Path, number: int) -> MergePlan:
    recipe = load_recipe(root / f"{number}.yaml")
    return plan_merge(recipe, {str(ref): open_checkpoint(root / ref.path) for ref in recipe.references()})


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_read_alike(peer: tuple[Path, Mapping[str, str | None]], name: str, tmp_path: Path) -> None:
    (root, errors), number = peer, list(RECIPES).index(name)
    error = errors[f"{number}.out"]
    if name in DIFFERENT:
        assert error is not None
        load_recipe(root / f"{number}.yaml")
        return
    if error is not None:
        with pytest.raises(InvalidInput):
            planned(root, number)
        return
    plan = planned(root, number)
    merge_weights(plan, tmp_path / "out", device="cpu", settings=EngineSettings(threads=1, kernels="torch"))
    ours, theirs = load(tmp_path / "out"), load(root / f"{number}.out")
    assert ours.keys() == theirs.keys()
    for tensor, values in theirs.items():
        np.testing.assert_allclose(ours[tensor], values, rtol=1e-5, atol=1e-7, err_msg=tensor)
