"""Choose the files that a merge writes next to its weights, and report the parents' files that it drops or changes.

The donor provides processors, code and the language adapters of MMS. The model that provides the tokenizer also
provides chat templates and generation settings. The modules of sentence-transformers come from a parent that has them,
if all such parents agree. The merge copies any other small file that is the same in every parent.

Settings are written so that transformers 4, and servers built on it, read the same values as transformers 5, which
saves rotary positions only as ``rope_parameters``. transformers 4 ignores that key and computes with the default base
of the family. It also cannot read some names that transformers 5 saves in ``tokenizer_config.json``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mergegate.merge_core.checkpoint import (
    MODULES_FILE,
    TEXT_KINDS,
    Checkpoint,
    Companions,
    Kind,
    companion_kind,
    config_parts,
    has_vocabulary,
    is_binary_vocabulary,
    is_template_file,
)
from mergegate.merge_core.checkpoint.vocabulary import TOKENIZER_BOUNDS
from mergegate.merge_core.errors import Finding, InvalidInput, to_printable
from mergegate.merge_core.parsing import parse_json
from mergegate.merge_core.plan.file_settings import (
    BOUNDS,
    GENERATION,
    INCIDENTAL_KEYS,
    compare_file_settings,
    is_processor_file,
    processor_settings,
    serialize_config,
)
from mergegate.merge_core.plan.module_weights import module_reference
from mergegate.merge_core.recipe import Recipe

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
    parts = [
        f"{name}: {_names(own_files)}" if index else _names(own_files)
        for index, (name, own_files) in enumerate(files.items())
    ]
    suffix = f"; and of {len(parts) - _SHOWN} more models" if len(parts) > _SHOWN else ""
    return "; ".join(parts[:_SHOWN]) + suffix


def _names(files: list[str]) -> str:
    suffix = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return ", ".join(map(to_printable, files[:_SHOWN])) + suffix
