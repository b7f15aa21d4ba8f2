"""Builds tiny random checkpoints for the tests of merge_core and merges them in one call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from mergegate import merge_core
from mergegate.merge_core.architecture import is_projection, is_routed_expert
from mergegate.merge_core.checkpoint import (
    IMPORTANCE,
    INPUTS,
    measurement_file_name,
    open_importance,
    open_moments,
    pack_moments,
    write_measurement,
)
from mergegate.merge_core.recipe import InputMeasurements

LAYERS, HIDDEN, WIDE, TOKENS = 3, 12, 40, 24
LINEAR = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 1}\n"
# Merges ``recipe.yaml`` of the working directory into ``out`` with compiled kernels, in a separate process.
MERGE_FUSED = """
from pathlib import Path
from mergegate.merge_core import EngineSettings, load_recipe, merge_weights, open_checkpoint, plan_merge
recipe = load_recipe(Path("recipe.yaml"))
plan = plan_merge(recipe, {str(ref): open_checkpoint(Path(ref.path)) for ref in recipe.references()})
record = merge_weights(plan, Path("out"), device="cpu", settings=EngineSettings(kernels="fused"))
"""


def shapes(layers: int = LAYERS, tokens: int = TOKENS) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a small Llama's tensors."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (tokens, HIDDEN)}
    for layer in range(layers):
        found[f"model.layers.{layer}.self_attn.q_proj.weight"] = (HIDDEN, HIDDEN)
        found[f"model.layers.{layer}.mlp.up_proj.weight"] = (WIDE, HIDDEN)
        found[f"model.layers.{layer}.input_layernorm.weight"] = (HIDDEN,)
    found["model.norm.weight"] = (HIDDEN,)
    found["lm_head.weight"] = (tokens, HIDDEN)
    return found


def random_tensors(
    seed: int, around: Mapping[str, torch.Tensor] | None = None, **sizes: int
) -> dict[str, torch.Tensor]:
    """Return random float32 weights, or ``around`` with small random differences added."""
    generator = torch.Generator().manual_seed(seed)
    scale = 0.1 if around else 1.0
    drawn = {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes(**sizes).items()}
    return {name: tensor + around[name] for name, tensor in drawn.items()} if around else drawn


def save_checkpoint(
    directory: Path, tensors: Mapping[str, torch.Tensor], *, shards: int = 1, config: Mapping[str, Any] | None = None
) -> Path:
    """Write a checkpoint with ``shards`` files, a config and a tokenizer."""
    directory.mkdir(parents=True)
    names = list(tensors)
    if shards == 1:
        save_file(dict(tensors), directory / "model.safetensors", {"format": "pt"})
    else:
        weight_map = {}
        for number in range(shards):
            file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            part = names[number::shards]
            save_file({name: tensors[name] for name in part}, directory / file, {"format": "pt"})
            weight_map.update(dict.fromkeys(part, file))
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    tokens = tensors["model.embed_tokens.weight"].shape[0]
    layers = sum("input_layernorm" in name for name in names)
    content = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers, "vocab_size": tokens,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": str(next(iter(tensors.values())).dtype).removeprefix("torch."), **(config or {}),
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(content))
    save_tokenizer(directory, [f"t{number}" for number in range(tokens)])
    return directory


def save_family(root: Path) -> Path:
    """Write float32 checkpoints ``base``, ``a``, ``b`` and ``c`` into ``root``."""
    base = random_tensors(0)
    save_checkpoint(root / "base", base)
    for seed, name in enumerate("abc", start=1):
        save_checkpoint(root / name, random_tensors(seed, base))
    return root


def save_tokenizer(directory: Path, tokens: list[str]) -> None:
    """Write a tokenizer.json that gives the tokens the ids 0, 1, ..."""
    vocab = {token: number for number, token in enumerate(tokens)}
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel", "vocab": vocab}}))


def entry(method: str, model: str) -> str:
    """Return a recipe's entry for a model, with a calibration text if the method reads one."""
    return (
        f"{{model: {model}, text: {model}}}"
        if merge_core.merge_methods()[method].traits.reads_text
        else f"{{model: {model}}}"
    )


def read_recipe(content: str | Mapping[str, Any], root: Path) -> merge_core.Recipe:
    """Load a recipe and prepare it, with random measurements for models in ``root`` that read calibration texts."""
    recipe = merge_core.load_recipe(content)
    if recipe.needs_distances:  # Keep the weights that the recipe sets.
        recipe = replace(recipe, distances={})
    if not recipe.texts:
        return recipe
    measured, what = {}, str(recipe.method.traits.reads_text)
    for number, ref in enumerate(map(str, recipe.texts)):
        place = root / what / ref
        if not place.exists():
            draw = draw_inputs if what == "moments" else draw_importance
            draw(place, merge_core.open_checkpoint(root / ref), seed=number)
        if what == "moments":
            measured[ref] = InputMeasurements(ref, ref, moments=open_moments(place))
        else:
            measured[ref] = InputMeasurements(ref, ref, importance=open_importance(place))
    return replace(recipe, measured=measured)


def draw_importance(place: Path, checkpoint: merge_core.Checkpoint, seed: int) -> None:
    """Write random importance for each element of a model's float tensors, zero for about half of the elements."""
    place.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    kept = {
        name: torch.randn(tensor.shape, generator=generator).relu().pow(4)
        for name, tensor in checkpoint.tensors.items()
        if tensor.dtype.kind == "float" and not is_routed_expert(name)
    }
    save_file(kept, place / measurement_file_name(IMPORTANCE, 0))
    write_measurement(place / IMPORTANCE, {name: name for name in kept}, positions=5)


def draw_inputs(place: Path, checkpoint: merge_core.Checkpoint, seed: int) -> None:
    """Write moments of five random inputs for every linear layer of a model."""
    place.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    kept = {}
    for name, tensor in checkpoint.tensors.items():
        if len(tensor.shape) == 2 and is_projection(name):
            inputs = torch.randn(5, tensor.shape[1], generator=generator, dtype=torch.float64)
            kept[name] = torch.from_numpy(pack_moments((inputs.T @ inputs / 5).numpy()))
    save_file(kept, place / measurement_file_name(INPUTS, 0))
    write_measurement(place / INPUTS, {name: name for name in kept}, positions=5)


def open_models(recipe: merge_core.Recipe, root: Path) -> dict[str, merge_core.Checkpoint]:
    """Open all models of a recipe, which are directories in ``root``."""
    return {str(ref): merge_core.open_checkpoint(root / ref.path) for ref in recipe.references()}


def plan_recipe(content: str | Mapping[str, Any], root: Path) -> merge_core.MergePlan:
    """Plan a recipe whose models are directories in ``root``."""
    recipe = read_recipe(content, root)
    return merge_core.plan_merge(recipe, open_models(recipe, root))


def check_recipe(content: str | Mapping[str, Any], root: Path, *accepted: str) -> merge_core.PlannedMerge:
    """Return the plan and the findings of a recipe whose models are directories in ``root``."""
    recipe = merge_core.load_recipe(content)
    return merge_core.plan_with_findings(recipe, open_models(recipe, root), accepted)


def merge_text(
    content: str | Mapping[str, Any], root: Path, out: str = "out", *, seed: int = 0, **settings: Any
) -> merge_core.MergeRecord:
    """Merge a recipe whose models are directories in ``root`` into ``root / out``."""
    return merge_core.merge_weights(
        plan_recipe(content, root), root / out, seed=seed, settings=merge_core.EngineSettings(**settings)
    )


def change_json(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def load(directory: Path) -> dict[str, np.ndarray]:
    """Return all tensors of a checkpoint as float64."""
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors.update({name: tensor.double().numpy() for name, tensor in load_file(file).items()})
    return tensors


# The models besides the base, and the parameters, of methods that do not take any number of weighted models.
MODELS = {"slerp": "ab", "nuslerp": "ab", "nearswap": "a", "arcee_fusion": "a", "passthrough": "a"}
WITHOUT_BASE = ("linear", "slerp", "karcher", "passthrough")
PARAMETERS = {"slerp": "t: 0.4", "nearswap": "t: 0.0005", "sce": "select_topk: 0.3"}
PARAMETERS |= {"ramplus_tl": "epsilon: 0.0001"}


def usual_parameters(method: str) -> str:
    """Return parameters for a method, as in a recipe."""
    usual = {"weight": 0.5, "density": 0.4}.items()
    taken = ", ".join(f"{name}: {value}" for name, value in usual if merge_core.merge_methods()[method].parameter(name))
    return PARAMETERS.get(method, taken)


def recipe_of(method: str, parameters: str | None = None, dtype: str = "dtype: bfloat16\n") -> str:
    """Return a recipe that uses every feature of a method, with models ``base``, ``a``, ``b`` and ``c``."""
    chosen = ", ".join(entry(method, name) for name in MODELS.get(method, "abc"))
    base = "" if method in WITHOUT_BASE else "base_model: base\n"
    values = usual_parameters(method) if parameters is None else parameters
    return f"merge_method: {method}\n{base}models: [{chosen}]\nparameters: {{{values}}}\n{dtype}"
