"""Select the weights of sentence-transformers modules that a merge computes, such as those of ``2_Dense``.

A module other than the network keeps its weights in its own folder. If all models have the same file there, the merge
copies it. Otherwise the recipe applies to these tensors as it applies to the network, with the same method, weights,
base and filters. In a plan, a tensor of a module is called ``2_Dense/linear.weight``, and the result gets
``2_Dense/model.safetensors``, which sentence-transformers reads before ``pytorch_model.bin``.

A recipe that cannot be applied to a module with different weights is refused, because a copy of the weights of one
model would not fit the merged network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mergegate.merge_core.checkpoint import (
    MODULES_FILE,
    PICKLED_SINGLE_NAME,
    SINGLE_NAME,
    Checkpoint,
    StoredTensor,
    is_module_file,
    read_header,
    read_pickled,
)
from mergegate.merge_core.errors import Finding
from mergegate.merge_core.recipe import Recipe


@dataclass(frozen=True)
class ModuleMerge:
    """Tensors of modules that a merge computes."""

    models: Mapping[str, Checkpoint]  # checkpoint of each model with only these tensors, by reference
    # Tensors of the model whose module files the result gets, by name. They decide the order in the files.
    tensors: Mapping[str, StoredTensor]
    # Reasons why other modules cannot be merged. All of them block.
    findings: tuple[Finding, ...] = ()


def is_module_weights(name: str) -> bool:
    """Return whether sentence-transformers reads the weights of a module from the file called ``name``."""
    return is_module_file(name) and name.partition("/")[2] in (SINGLE_NAME, PICKLED_SINGLE_NAME)


def module_reference(donor: str, models: Mapping[str, Checkpoint]) -> str | None:
    """Return the model whose module files the result gets: the donor if it has any. None if no model has modules."""
    return next((name for name in (donor, *models) if MODULES_FILE in models[name].companions), None)


def select_module_weights(recipe: Recipe, models: Mapping[str, Checkpoint]) -> ModuleMerge:
    """Return the tensors of modules to merge. ``models`` has all models of the recipe document by reference."""
    reference = module_reference(str(recipe.donor), models)
    if reference is None or recipe.output is not None:
        return ModuleMerge({}, {})
    weights = {name: _weights_by_folder(checkpoint) for name, checkpoint in models.items()}
    holders = [name for name, checkpoint in models.items() if MODULES_FILE in checkpoint.companions]
    tables: dict[str, dict[str, StoredTensor]] = {name: {} for name in models}
    findings = []
    for folder in sorted({folder for name in holders for folder in weights[name]}):
        if len({weights[name].get(folder) for name in holders}) == 1:
            continue  # The merge copies the file.
        problem = _recipe_problem(recipe, reference, folder, {name: weights[name].get(folder) for name in models})
        if problem is None:
            folder_tables = {name: _read_tensors(models[name], folder, weights[name][folder]) for name in models}
            problem = _name_problem(reference, folder, folder_tables)
        if problem is not None:
            findings.append(problem)
            continue
        for name, table in folder_tables.items():
            tables[name] |= table
    views = {name: replace(checkpoint, tensors=tables[name]) for name, checkpoint in models.items()}
    return ModuleMerge(views, tables[reference], tuple(findings))


# File of a module's weights, and the sha256 of its content. The digest is empty for the result of an earlier step.
_Weights = tuple[str, str]


def _weights_by_folder(checkpoint: Checkpoint) -> dict[str, _Weights]:
    """Return the weights of each module. As in sentence-transformers, safetensors takes precedence."""
    weights: dict[str, _Weights] = {}
    for name in sorted(filter(is_module_weights, checkpoint.companions), reverse=True):  # pytorch_model.bin comes first
        digest = hashlib.sha256(checkpoint.companions.read(name)).hexdigest()
        weights[name.partition("/")[0]] = name, digest
    for name, tensor in checkpoint.module_tensors.items():
        weights[name.partition("/")[0]] = str(tensor.file), ""
    return weights


def _read_tensors(checkpoint: Checkpoint, folder: str, weights: _Weights) -> dict[str, StoredTensor]:
    """Return the tensors of a module by their names in a plan."""
    planned = {name: tensor for name, tensor in checkpoint.module_tensors.items() if name.startswith(f"{folder}/")}
    if planned:
        return planned
    source = checkpoint.companions.sources[weights[0]]
    assert not isinstance(source, bytes)  # Only files of other kinds are rewritten.
    path = source / weights[0]
    header = (read_pickled if path.suffix == ".bin" else read_header)(path, within=source)
    return {f"{folder}/{tensor.name}": replace(tensor, name=f"{folder}/{tensor.name}") for tensor in header}


def _recipe_problem(
    recipe: Recipe, reference: str, folder: str, weights: Mapping[str, _Weights | None]
) -> Finding | None:
    """Return the reason why a module whose weights differ cannot be merged, or None."""
    lacking = next((name for name in weights if weights[name] is None), None)
    if lacking is not None:
        return Finding(
            "block",
            f"{lacking}: {folder}",
            found=f"no weights of the module {folder}/, which differ in the other models",
            expected="a module with weights that every model has, so that the recipe can merge it",
            remedy="use a base with this module, or a method without a base, such as linear"
            if lacking == str(recipe.base)
            else "merge models with the same modules",
        )
    reason = ""
    is_whole = len(recipe.modules) == 1 and recipe.modules[0].name is None and len(recipe.slices) == 1
    if recipe.mixture is not None:
        reason = "a mixture of experts"
    elif not is_whole or any(source.layers is not None for source in recipe.sources):
        reason = "a recipe that cuts layers or merges the parts of the network separately"
    elif recipe.method.traits.reads_text is not None:
        reason = f"{recipe.merge_method}, which needs measurements of the module on calibration texts"
    if not reason:
        return None
    different = next(name for name in weights if weights[name] != weights[reference])
    return Finding(
        "block",
        f"{different}: {folder}",
        found=f"the weights of the module {folder}/ differ from those in {reference}",
        expected=f"the same weights in every model, because they cannot be merged by {reason}",
        remedy="merge whole models with another method, such as linear or ties, or give every model the same module",
    )


def _name_problem(reference: str, folder: str, tables: Mapping[str, Mapping[str, StoredTensor]]) -> Finding | None:
    """Return a finding for the first model whose tensors in a module differ in name, or None."""
    for name, table in tables.items():
        if different := sorted(table.keys() ^ tables[reference].keys()):
            return Finding(
                "block",
                f"{name}: {different[0]}",
                found=f"a tensor that {reference} does not have" if different[0] in table else "missing",
                expected=f"the same tensors in the module {folder}/ as in {reference}",
                remedy="merge models with the same modules",
            )
    return None
