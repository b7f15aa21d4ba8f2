"""Tries a different vocabulary, an adapter, and two layouts of experts with each family of the table.

Each trial gives ``✓``, a dash if there is nothing to try, or the reason for a refusal, and fails otherwise.
"""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from in_memory import average
from safetensors.torch import load_file, save_file
from tiny_families import TOKENS, TinyFamily, load, logits, save
from tokenizer_samples import with_added, write_tokenizer
from tokenizers import Tokenizer, models
from torch import nn
from transformers.pytorch_utils import Conv1D

from mergegate.merge_core import load_recipe, merge_weights, open_checkpoint, plan_with_findings
from mergegate.merge_core.adapters import apply_adapter, open_adapter
from mergegate.merge_core.adapters.names import StoredNames, split_stored
from mergegate.merge_core.checkpoint import Checkpoint
from mergegate.merge_core.errors import Finding, InvalidInput

DONE, NOTHING = "✓", "\N{EN DASH}"
LINEAR = """merge_method: linear
models: [{{model: {}, parameters: {{weight: 0.3}}}}, {{model: {}, parameters: {{weight: 0.7}}}}]
"""
TIES = """merge_method: ties
base_model: {}
models: [{{model: {}}}, {{model: {}}}]
parameters: {{weight: 0.7, density: 0.5}}
"""
# PEFT does not adapt some layers of these families, because their kernels read the weights directly.
_MAMBA = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")


def refused(said: Finding | InvalidInput) -> str:
    """Return the key or tensor that a refusal names. It must have a remedy and say what was found or expected."""
    assert said.found, said
    assert said.remedy or said.expected, said
    return f"refused: `{said.where.rsplit(': ', 1)[-1]}`"


def merged(text: str, tables: Mapping[str, Checkpoint], out: Path) -> str | None:
    """Merge, or return the table cell for the refusal."""
    try:
        planned = plan_with_findings(load_recipe(text), tables)
    except InvalidInput as error:
        return refused(error)
    if planned.plan is None or planned.blocking:
        return refused(planned.blocking[0])
    merge_weights(planned.plan, out)
    return None


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    """Return all stored tensors of a checkpoint."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def require_same(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], what: str) -> None:
    """Require the same tensor names, dtypes and bits."""
    pairs = {name: (ours[name], theirs[name]) for name in ours.keys() & theirs.keys()}
    different = [name for name, (one, two) in pairs.items() if one.dtype != two.dtype or not torch.equal(one, two)]
    different += sorted(ours.keys() ^ theirs.keys())
    assert different == [], f"{what}: {different}"


def try_adapter(family: TinyFamily, parents: Mapping[str, Any], root: Path) -> str:
    """Compare an adapter on all linear layers and fused experts of a model with PEFT's ``merge_and_unload``."""
    import peft

    model = copy.deepcopy(parents["a"])
    found = adaptable(model)
    fused = [name for name, tensor in model.named_parameters() if _is_fused(name, tensor)]
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = peft.LoraConfig(
                r=4, lora_alpha=8, target_modules=found, target_parameters=fused, init_lora_weights=False
            )
            adapted = peft.get_peft_model(model, config)
            # PEFT leaves out some modules of a long list of names.
            wrapped = [name for name in found if hasattr(adapted.base_model.model.get_submodule(name), "lora_A")]
            adapted.save_pretrained(root / "adapter")
            theirs = adapted.merge_and_unload()
        except (ValueError, TypeError, AttributeError, NotImplementedError, RuntimeError) as error:
            return f"PEFT: {type(error).__name__} {error}"
    theirs.save_pretrained(root / "unloaded")
    try:
        table = apply_adapter(open_checkpoint(root / "a"), open_adapter(root / "adapter"))
    except InvalidInput as error:
        return refused(error)
    reason = merged("merge_method: passthrough\nmodels: [{model: m}]", {"m": table}, root / "applied")
    if reason is not None:
        return reason
    require_same(read_all(root / "applied"), read_all(root / "unloaded"), f"{family.name}: adapter")
    # Compared in memory, because several modules may be one tensor on disk.
    before, after = ([model.get_submodule(name).weight for name in wrapped] for model in (parents["a"], theirs))
    unchanged = [name for name, old, new in zip(wrapped, before, after, strict=True) if torch.equal(old, new)]
    assert wrapped, family.name
    assert unchanged == [], f"{family.name}: {unchanged}"
    load(family, root / "applied")
    require_known_names(family, parents["a"], open_checkpoint(root / "a"))
    return DONE


def require_known_names(family: TinyFamily, model: Any, stored: Checkpoint) -> None:
    """Require that adapters can address every stored tensor by name, or that mergegate refuses to extract one."""
    split = split_stored(stored)
    index, names = StoredNames(split), set()
    for name in split.tensors:
        try:
            names.add(index.in_memory(name))
        except InvalidInput:
            continue
    assert names <= model.state_dict().keys(), f"{family.name}: {sorted(names - model.state_dict().keys())}"


def adaptable(model: Any) -> list[str]:
    """Return the names of the linear layers that PEFT adapts, without a head that is tied to the embedding."""
    tied = {id(model.get_input_embeddings().weight)}
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and id(module.weight) not in tied
        and not (model.config.model_type in _MAMBA and name.endswith(("out_proj", "conv1d")))
    ]


def try_vocabulary(family: TinyFamily, parents: Mapping[str, Any], root: Path) -> str:
    """Require that all rows follow their tokens in a union with a model of another order and one more token."""
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(11))
    words = {f"t{number}": number for number in range(TOKENS)}
    moved = {f"t{number}": place for place, number in enumerate(order.tolist())}
    grown = {name: copy.deepcopy(parents[name]) for name in "ab"}
    before = {name: model.state_dict() for name, model in parents.items()}
    for one in grown.values():
        one.resize_token_embeddings(TOKENS + 1, mean_resizing=False)
    rows = {name: model.state_dict() for name, model in grown.items()}
    tables = [name for name, tensor in rows["a"].items() if tensor.shape != before["a"][name].shape]
    assert tables, family.name
    generator = torch.Generator().manual_seed(13)
    with torch.no_grad():
        for own in {rows["b"][name].data_ptr(): name for name in tables}.values():
            rows["b"][own][TOKENS:] += torch.randn(rows["b"][own][TOKENS:].shape, generator=generator)
        for name in tables:
            rows["a"][name][TOKENS:] = rows["b"][name][TOKENS:]  # The first parent borrows the row of the second.
    expected = average([grown["a"], grown["b"]], [0.3, 0.7])
    with torch.no_grad():
        for own in {rows["b"][name].data_ptr(): name for name in tables}.values():
            rows["b"][own][:TOKENS] = rows["b"][own][:TOKENS][order].clone()
    shutil.copytree(root / "a", root / "fewer")
    save(family, grown["b"], root / "more")
    write_tokenizer(root / "fewer", Tokenizer(models.WordLevel(words, unk_token="t3")))
    write_tokenizer(root / "more", with_added(Tokenizer(models.WordLevel(moved, unk_token="t3")), "<new>"))
    opened = {name: open_checkpoint(root / name) for name in ("fewer", "more")}
    reason = merged(LINEAR.format("fewer", "more") + "tokenizer_source: union\n", opened, root / "union")
    if reason is not None:
        return reason
    result = load(family, root / "union")
    require_same(result.state_dict(), expected.state_dict(), f"{family.name}: vocabulary")
    assert torch.equal(logits(family, result, TOKENS), logits(family, expected, TOKENS))
    wanted = dict(_sizes(json.loads((root / "more/config.json").read_text())))
    assert dict(_sizes(json.loads((root / "union/config.json").read_text()))) == wanted, family.name
    union = Tokenizer.from_file(str(root / "union/tokenizer.json")).get_vocab()
    assert union == {**words, "<new>": TOKENS}
    return DONE


def _sizes(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, int]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _sizes(value, f"{path}{key}.")
        elif key == "vocab_size":
            yield path + key, value


def try_experts(family: TinyFamily, parents: Mapping[str, Any], root: Path) -> str:
    """Require the same merge from checkpoints in the disk layout, in the memory layout, and in a mixture of both."""
    if not any(".experts" in name for name, _ in parents["a"].named_modules()):
        return NOTHING
    third = copy.deepcopy(parents["a"])
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for tensor in third.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))
    for name, model in {**parents, "c": third}.items():
        save(family, model, root / f"{name}-disk")
        save(family, model, root / f"{name}-memory", fused=True)
    tables = {
        f"{name}-{form}": open_checkpoint(root / f"{name}-{form}") for name in "abc" for form in ("disk", "memory")
    }
    results = {}
    for out, text, forms in (
        ("linear memory", LINEAR, ("memory", "memory")),
        ("linear mixed", LINEAR, ("disk", "memory")),
        ("ties disk", TIES, ("disk", "disk", "disk")),
        ("ties memory", TIES, ("memory", "memory", "memory")),
        ("ties mixed", TIES, ("disk", "memory", "disk")),
    ):
        named = [f"{name}-{form}" for name, form in zip("abc", forms, strict=False)]
        reason = merged(text.format(*named), {name: tables[name] for name in named}, root / out)
        if reason is not None:
            return reason
        results[out] = load(family, root / out).state_dict()
    averaged = average([parents["a"], parents["b"]], [0.3, 0.7]).state_dict()
    for out in ("linear memory", "linear mixed"):
        require_same(results[out], averaged, f"{family.name}: {out}")
    for out in ("ties memory", "ties mixed"):
        require_same(results[out], results["ties disk"], f"{family.name}: {out}")
    require_single(family, root)
    return DONE


def require_single(family: TinyFamily, root: Path) -> None:
    """Require that scaling the first expert's weights by 100 leaves the results of other experts as they are."""
    louder = {}
    for name in "abc":
        (root / f"{name}-loud").mkdir()
        shutil.copy(root / f"{name}-memory/config.json", root / f"{name}-loud/config.json")
        tensors = read_all(root / f"{name}-memory")
        routed = [key for key, tensor in tensors.items() if _is_fused(key, tensor)]
        for key in routed:
            tensors[key][0] *= 100
        assert routed, family.name
        save_file(tensors, root / f"{name}-loud/model.safetensors", {"format": "pt"})
        louder[f"{name}-loud"] = open_checkpoint(root / f"{name}-loud")
    assert merged(TIES.format("a-loud", "b-loud", "c-loud"), louder, root / "loud") is None
    usual, changed = read_all(root / "ties memory"), read_all(root / "loud")
    for key, tensor in usual.items():
        first = 1 if _is_fused(key, tensor) else 0
        assert torch.equal(tensor[first:], changed[key][first:]), f"{family.name}: {key}"


def _is_fused(name: str, tensor: torch.Tensor) -> bool:
    return tensor.ndim == 3 and (".experts." in name or name.endswith("_linear.weight"))
