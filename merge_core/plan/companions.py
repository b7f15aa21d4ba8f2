"""Choose the files that a merge writes next to its weights, and report the parents' files that it drops or changes.

The donor provides processors, code and the language adapters of MMS. The model that provides the tokenizer also
provides chat templates and generation settings. The modules of sentence-transformers come from a parent that has them,
if all such parents agree. The merge copies any other small file that is the same in every parent.

A module other than the network, such as ``2_Dense``, keeps its weights in its own folder. If all models have the same
file there, the merge copies it. Otherwise the recipe applies to these tensors as it applies to the network, with the
same method, weights, base and filters. In a plan, such a tensor is called ``2_Dense/linear.weight``, and the result
gets ``2_Dense/model.safetensors``, which sentence-transformers reads before ``pytorch_model.bin``. A recipe that cannot
be applied to a module is refused, because a copy of the weights of one model would not fit the merged network.

Settings are written so that transformers 4, and servers built on it, read the same values as transformers 5, which
saves rotary positions only as ``rope_parameters``. transformers 4 ignores that key and computes with the default base
of the family. It also cannot read some names that transformers 5 saves in ``tokenizer_config.json``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mergegate.merge_core.checkpoint import (
    MODULES_FILE,
    TEXT_KINDS,
    Checkpoint,
    Companions,
    Kind,
    StoredTensor,
    companion_kind,
    config_parts,
    has_vocabulary,
    is_binary_vocabulary,
    is_template_file,
    read_header,
    read_pickled,
)
from mergegate.merge_core.checkpoint.vocabulary import TOKENIZER_BOUNDS
from mergegate.merge_core.errors import Finding, InvalidInput, to_printable
from mergegate.merge_core.parsing import parse_json
from mergegate.merge_core.plan.file_settings import (
    BOUNDS,
    GENERATION,
    INCIDENTAL_KEYS,
    compare_file_settings,
    is_module_weights,
    is_processor_file,
    module_reference,
    processor_settings,
    serialize_config,
)
from mergegate.merge_core.recipe import Recipe

_LABELS: Mapping[Kind, str] = {
    "tokenizer": "tokenizer files",
    "chat template": "chat templates",
    "generation settings": "generation settings",
    "processor": "processor files",
    "code": "Python files",
    "language adapter": "language adapters",
    "module": "sentence-transformers files",
    "other": "other files",
}
# Other modules compare the parts that matter: vocabularies, and tokens that end a text.
_MINOR = frozenset[Kind](("tokenizer", "generation settings"))
_SHOWN = 8  # Number of files per parent, and of parents, that one finding lists.


def gather_companions(donor: Checkpoint, tokenizer: Checkpoint, parents: Mapping[str, Checkpoint]) -> Companions:
    """Return the files that a merge copies unchanged. The first of ``parents`` is the donor."""
    sources = dict(tokenizer.companions.only(lambda name: companion_kind(name) in TEXT_KINDS).sources)
    sources |= donor.companions.only(
        lambda name: companion_kind(name) in ("processor", "code", "language adapter")
    ).sources
    if (reference := module_reference(next(iter(parents)), parents)) is not None:
        sources |= parents[reference].companions.only(lambda name: companion_kind(name) == "module").sources
    for name, source in donor.companions.sources.items():
        contents = [_content(parent.companions, name) for parent in parents.values()] if name not in sources else []
        if companion_kind(name) in ("other", "module") and len(set(contents)) == 1 and None not in contents:
            sources[name] = source
    return Companions(dict(sorted(sources.items())))


def tokenizer_donor(recipe: Recipe, checkpoints: Mapping[str, Checkpoint]) -> str:
    """Return the reference of the model whose tokenizer the result gets if the recipe does not choose one.

    For a result that is an adapter, this is the first input adapter with a tokenizer of its own.
    """
    if recipe.output is None:
        return str(recipe.donor)
    names = [str(source.model) for source in recipe.sources if str(source.model) in checkpoints]
    for name in names:
        checkpoint = checkpoints[name]
        files = checkpoint.companions.only(lambda file: companion_kind(file) in ("tokenizer", "chat template"))
        if any(source != checkpoint.directory for source in files.sources.values()):  # The adapter's directory.
            return name
    return names[0] if names else str(recipe.donor)


def lost_files(
    donor: Checkpoint,
    tokenizer: Checkpoint,
    parents: Mapping[str, Checkpoint],
    accepted_differences: Collection[str] = (),
) -> Iterator[Finding]:
    """Yield a finding for each kind of file that parents have but the result lacks or has with other content.

    Other checks compare tokenizers and chat templates by their meaning. Files with settings are compared by setting.
    The first of ``parents`` is the donor. ``accepted_differences`` are keys of settings that may differ.
    """
    carried = gather_companions(donor, tokenizer, parents)
    yield from _unsupported_modules(parents)
    yield from newer_settings(next(iter(parents)), donor.config)
    yield from compare_file_settings(carried, parents, accepted_differences)
    has_processor = bool(processor_settings(donor.companions))
    missing: dict[Kind, dict[str, list[str]]] = {}
    differing: dict[Kind, dict[str, list[str]]] = {}
    for reference, parent in parents.items():
        for name in (*parent.companions, *parent.uncopied):
            kind = companion_kind(name)
            if kind is None or (kind == "chat template" and is_template_file(name)):
                continue
            if kind == "module" and MODULES_FILE in parent.companions:
                continue
            if kind == "tokenizer" and not (is_binary_vocabulary(name) and has_vocabulary(carried.sources)):
                continue  # Other formats repeat the same vocabulary. A missing tokenizer is a finding of its own.
            if has_processor and is_processor_file(name) and processor_settings(parent.companions):
                continue
            if kind == "generation settings" and _content(parent.companions, name) == "{}":
                continue  # The file has only token ids.
            if name not in carried:
                missing.setdefault(kind, {}).setdefault(reference, []).append(name)
            elif kind != "tokenizer" and _content(parent.companions, name) != _content(carried, name):
                differing.setdefault(kind, {}).setdefault(reference, []).append(name)
    for kind, files in missing.items():
        yield Finding(
            "info" if kind in _MINOR else "warn",
            f"{next(iter(files))}: {_LABELS[kind]}",
            found=f"not in the result: {_listing(files)}",
            expected="all files that are used with the parents",
            remedy="copy the files into the result if necessary; mergegate only copies small files that are the same "
            "in every model",
        )
    for kind, files in differing.items():
        yield Finding(
            "info" if kind in _MINOR else "warn",
            f"{next(iter(files))}: {_LABELS[kind]}",
            found=f"the result gets different content for {_listing(files)}",
            expected="the same content in every model",
            remedy="check that the content of the base model, which the result gets, is suitable",
        )


def _unsupported_modules(parents: Mapping[str, Checkpoint]) -> Iterator[Finding]:
    """Yield a finding for each module in a folder that a merge does not copy.

    Raises InvalidInput if ``modules.json`` is not a list of modules.
    """
    if (first := module_reference(next(iter(parents)), parents)) is None:
        return
    reference = parents[first]
    location = reference.companions.location(MODULES_FILE)
    listed_modules = parse_json(reference.companions.read(MODULES_FILE, BOUNDS.size), location)
    if not isinstance(listed_modules, list) or not all(isinstance(module, dict) for module in listed_modules):
        raise InvalidInput(
            location, found=f"{listed_modules!r:.60}", expected="a list of sentence-transformers modules"
        )
    for path in (module.get("path") for module in listed_modules):
        if isinstance(path, str) and path and f"{path.partition('/')[0]}/" in reference.uncopied:
            yield Finding(
                "block",
                f"{first}: {MODULES_FILE}",
                found=f"a merge does not copy the module in {to_printable(path)}/",
                expected="directory names of sentence-transformers, such as 1_Pooling",
                remedy="save the model again with sentence-transformers",
            )


def _content(files: Companions, name: str) -> bytes | str | None:
    """Return the content of a file in comparable form: bytes, or normalized JSON; None if the file is missing."""
    if name not in files:
        return None
    content = files.read(name)
    if not name.endswith(".json"):
        return content
    try:
        value = parse_json(content, name, bounds=BOUNDS)
    except InvalidInput:
        return content
    if isinstance(value, dict):
        ids = "_token_id" if name == GENERATION else ()  # Token ids are compared as tokens elsewhere.
        value = {key: item for key, item in value.items() if key not in INCIDENTAL_KEYS and not key.endswith(ids)}
    return json.dumps(value, sort_keys=True)


def _listing(files: Mapping[str, list[str]]) -> str:
    """List the files of several models, all but the first by name: ``a.json, b.json; model-c: a.json``."""
    parts: list[str] = []
    for name, own_files in files.items():
        more = f" and {len(own_files) - _SHOWN} more" if len(own_files) > _SHOWN else ""
        parts.append((f"{name}: " if parts else "") + ", ".join(map(to_printable, own_files[:_SHOWN])) + more)
    suffix = f"; and of {len(parts) - _SHOWN} more models" if len(parts) > _SHOWN else ""
    return "; ".join(parts[:_SHOWN]) + suffix


@dataclass(frozen=True)
class ModuleMerge:
    """Tensors of modules that a merge computes."""

    models: Mapping[str, Checkpoint]  # checkpoint of each model with only these tensors, by reference
    # Tensors of the model whose module files the result gets, by name. They decide the order in the files.
    tensors: Mapping[str, StoredTensor]
    # Reasons why other modules cannot be merged. All of them block.
    findings: tuple[Finding, ...] = ()


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


_SETTINGS = "tokenizer_config.json"
_KEYS = ("rope_theta", "partial_rotary_factor")
# Families of transformers 4 with other names for these keys.
_OLDER_KEYS = dict.fromkeys(("gpt_neox", "gpt_neox_japanese"), ("rotary_emb_base", "rotary_pct"))
# Families of transformers 4 that accept exactly these keys in rope_scaling.
_THREE_KEYS = ("phi3", "phi4_multimodal")
# Types of rope_parameters without scaling.
_UNSCALED = ("default", "axial")
# Keys that describe how the saved tokenizer was loaded.
_LOADING_KEYS = ("backend", "is_local", "local_files_only")


def with_older_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with ``rope_theta`` and ``rope_scaling`` next to each ``rope_parameters`` of all layers."""
    result = {
        key: with_older_rope(value) if key.endswith("_config") and isinstance(value, Mapping) else value
        for key, value in config.items()
    }
    rope, family = config.get("rope_parameters"), str(config.get("model_type"))
    if not isinstance(rope, Mapping) or _differs_by_layer(rope) or config.get("rope_scaling"):
        return result
    for key, older_key in zip(_KEYS, _OLDER_KEYS.get(family, _KEYS), strict=True):
        if rope.get(key) is not None:
            result[older_key] = rope[key]
    scaling = {key: value for key, value in rope.items() if key not in _KEYS}
    if scaling.get("rope_type") == "longrope" and family in _THREE_KEYS:
        scaling = {"type": "longrope", **{key: scaling.get(key) for key in ("short_factor", "long_factor")}}
    if scaling.get("rope_type", "default") not in _UNSCALED or scaling.keys() - {"rope_type"}:
        result["rope_scaling"] = scaling
    return result


def with_older_names(files: Companions) -> Companions:
    """Return ``files`` with names in ``tokenizer_config.json`` that transformers 4 and 5 read as the same settings."""
    settings = files.json(_SETTINGS, TOKENIZER_BOUNDS) or {}
    content = {key: value for key, value in settings.items() if key not in _LOADING_KEYS}
    if content.get("tokenizer_class") == "TokenizersBackend":
        content["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(content.get("extra_special_tokens"), list) and (tokens := content.pop("extra_special_tokens")):
        content["additional_special_tokens"] = tokens
    return files if content == settings else files.with_changes({_SETTINGS: serialize_config(content)})


def newer_settings(name: str, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding if only transformers 5 reads the rotary positions in ``config``, which the model ``name`` has."""
    for part in config_parts(config):
        rope = part.get("rope_parameters")
        if isinstance(rope, Mapping) and _differs_by_layer(rope) and "rope_theta" not in part:
            yield Finding(
                "info",
                f"{name}: config.json: rope_parameters",
                found=f"different values for {', '.join(map(str, rope))}",
                expected="one value for all layers, which mergegate also writes in the form of transformers 4",
                remedy="load the result with transformers 5, or with a server that reads rope_parameters",
            )


def _differs_by_layer(rope: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in rope.values())
