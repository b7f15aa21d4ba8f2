"""The files that a merge carries next to its weights, and findings about those of its parents that it does not carry.

The donor gives processors and code. The model that gives the tokenizer gives tokenizer, chat templates and generation
settings. Modules of sentence-transformers come from a parent that has them, if all such parents agree. Any other small
file travels if it is the same in every parent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from mergegate.merge_core.checkpoint import (
    MODULES_FILE,
    TEXT_KINDS,
    Checkpoint,
    Companions,
    Kind,
    companion_kind,
    has_vocabulary,
    is_binary_vocabulary,
    is_read_template,
)
from mergegate.merge_core.errors import Finding, InvalidInput, shown
from mergegate.merge_core.parsing import JsonBounds, parse_json
from mergegate.merge_core.plan.special_ids import GENERATION
from mergegate.merge_core.recipe import Recipe

_BOUNDS = JsonBounds(size=96 << 20, values=4_000_000)
# Keys of JSON files that say who wrote the file and when.
_INCIDENTAL = ("transformers_version", "_from_model_config", "_name_or_path", "name_or_path", "__version__")
_LABELS: Mapping[Kind, str] = {
    "tokenizer": "tokenizer files",
    "chat template": "chat templates",
    "generation settings": "generation settings",
    "processor": "processor files",
    "code": "Python files",
    "module": "sentence-transformers files",
    "other": "other files",
}
# What decides the result is compared elsewhere: vocabularies, and tokens that end a text.
_MINOR = frozenset[Kind](("tokenizer", "generation settings"))
_SHOWN = 4  # files of a parent, and parents, that one finding lists


def gather_companions(donor: Checkpoint, tokenizer: Checkpoint, parents: Mapping[str, Checkpoint]) -> Companions:
    """Return the files that a merge carries as they are.

    Args:
        donor: The checkpoint that gives the configuration.
        tokenizer: The checkpoint that gives the tokenizer.
        parents: Every merged model by reference, the donor among them.
    """
    found = dict(tokenizer.companions.only(lambda name: companion_kind(name) in TEXT_KINDS).sources)
    found |= donor.companions.only(lambda name: companion_kind(name) in ("processor", "code")).sources
    if (reference := _module_reference(donor, parents)) is not None:
        found |= reference.companions.only(lambda name: companion_kind(name) == "module").sources
    for name, source in donor.companions.sources.items():
        contents = [_content(parent.companions, name) for parent in parents.values()] if name not in found else []
        if companion_kind(name) in ("other", "module") and len(set(contents)) == 1 and None not in contents:
            found[name] = source
    return Companions(dict(sorted(found.items())))


def tokenizer_donor(recipe: Recipe, checkpoints: Mapping[str, Checkpoint]) -> str:
    """Return the reference of the model whose tokenizer the result gets if the recipe does not choose one.

    A result that is an adapter gets that of the first adapter with a tokenizer of its own.
    """
    if recipe.output is None:
        return str(recipe.donor)
    names = [str(source.model) for source in recipe.sources if str(source.model) in checkpoints]
    own = (name for name in names if _has_own_text(checkpoints[name]))
    return next(own, names[0] if names else str(recipe.donor))


def _has_own_text(checkpoint: Checkpoint) -> bool:
    """Return whether tokenizer or chat templates are not those of the model's directory, but of an adapter's."""
    files = checkpoint.companions.only(lambda name: companion_kind(name) in ("tokenizer", "chat template"))
    return any(source != checkpoint.directory for source in files.sources.values())


def lost_files(donor: Checkpoint, tokenizer: Checkpoint, parents: Mapping[str, Checkpoint]) -> Iterator[Finding]:
    """Yield a finding for each kind of file that parents have and the merge does not carry with the same content.

    What tokenizers, chat templates and modules mean is compared elsewhere. See :func:`gather_companions` for the
    arguments.
    """
    carried = gather_companions(donor, tokenizer, parents)
    yield from _module_findings(donor, parents)
    missing: dict[Kind, dict[str, list[str]]] = {}
    differing: dict[Kind, dict[str, list[str]]] = {}
    for reference, parent in parents.items():
        for name in (*parent.companions, *parent.others):
            kind = companion_kind(name)
            if kind is None or (kind == "chat template" and is_read_template(name)):
                continue
            if kind == "module" and MODULES_FILE in parent.companions:
                continue
            if kind == "tokenizer" and not (is_binary_vocabulary(name) and has_vocabulary(carried.sources)):
                continue  # Other forms say the same again; that no tokenizer is left is another finding.
            if kind == "generation settings" and _content(parent.companions, name) == "{}":
                continue  # Token ids alone.
            if name not in carried:
                missing.setdefault(kind, {}).setdefault(reference, []).append(name)
            elif kind != "tokenizer" and _content(parent.companions, name) != _content(carried, name):
                differing.setdefault(kind, {}).setdefault(reference, []).append(name)
    for kind, files in missing.items():
        yield Finding(
            "info" if kind in _MINOR else "warn",
            f"{next(iter(files))}: {_LABELS[kind]}",
            found=f"not in the result: {_listing(files)}",
            expected="every file that the parents are used with",
            remedy="copy the files into the result if it needs them; a small file with the same content in every"
            " model is carried",
        )
    for kind, files in differing.items():
        yield Finding(
            "info" if kind in _MINOR else "warn",
            f"{next(iter(files))}: {_LABELS[kind]}",
            found=f"the result gets other content for {_listing(files)}",
            expected="the same content in every model",
            remedy="check that the content of the base model, which the result gets, is right for it",
        )


def _module_reference(donor: Checkpoint, parents: Mapping[str, Checkpoint]) -> Checkpoint | None:
    """Return the checkpoint that gives the modules of sentence-transformers: the donor if it has any."""
    return next((one for one in (donor, *parents.values()) if MODULES_FILE in one.companions), None)


def _module_findings(donor: Checkpoint, parents: Mapping[str, Checkpoint]) -> Iterator[Finding]:
    """Yield what keeps the result of embedding models from being one."""
    if (reference := _module_reference(donor, parents)) is None:
        return
    first = next((name for name, parent in parents.items() if parent is reference), str(reference.directory))
    mine = _modules(reference)
    for name, parent in parents.items():
        if parent is reference or MODULES_FILE not in parent.companions:
            continue
        theirs = _modules(parent)
        odd = sorted(file for file in mine.keys() | theirs.keys() if mine.get(file) != theirs.get(file))
        blocks = any(file == MODULES_FILE or "/" in file for file in odd)
        if odd:
            yield Finding(
                "block" if blocks else "warn",
                f"{name}: {odd[0]}",
                found=f"sentence-transformers modules differ from those of {first}: {_names(odd)}",
                expected="the same modules in every model, so that the result can have them",
                remedy="merge embedding models with the same pooling and the same further layers"
                if blocks
                else f"check that the settings of {first}, which the result gets, are right for it",
            )
    for path in _module_paths(reference):
        if f"{path.partition('/')[0]}/" in reference.others:
            yield Finding(
                "block",
                f"{first}: {MODULES_FILE}",
                found=f"the module in {shown(path)}/, which a merge does not carry",
                expected="directories with names such as 1_Pooling, which sentence-transformers gives them",
                remedy="save the model again with sentence-transformers",
            )


def _modules(checkpoint: Checkpoint) -> dict[str, object]:
    """Return the content of each file that belongs to modules of sentence-transformers."""
    files = checkpoint.companions
    return {name: _content(files, name) for name in files if companion_kind(name) == "module"}


def _module_paths(checkpoint: Checkpoint) -> list[str]:
    """Return the directories that ``modules.json`` names.

    Raises:
        InvalidInput: The file is not a list of modules.
    """
    files = checkpoint.companions
    where = files.where(MODULES_FILE)
    listed = parse_json(files.read(MODULES_FILE, _BOUNDS.size), where)
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise InvalidInput(where, found=f"{listed!r:.60}", expected="a list of sentence-transformers modules")
    paths = [one.get("path") for one in listed]
    return [path for path in paths if isinstance(path, str) and path]


def _content(files: Companions, name: str) -> bytes | str | None:
    """Return what a file says: bytes, or the value of a JSON file in one spelling; None if it is not there."""
    if name not in files:
        return None
    content = files.read(name)
    if not name.endswith(".json"):
        return content
    try:
        value = parse_json(content, name, bounds=_BOUNDS)
    except InvalidInput:
        return content
    if isinstance(value, dict):
        ids = "_token_id" if name == GENERATION else ()  # which are compared as tokens
        value = {key: item for key, item in value.items() if key not in _INCIDENTAL and not key.endswith(ids)}
    return json.dumps(value, sort_keys=True)


def _listing(files: Mapping[str, list[str]]) -> str:
    """List files of several models: ``a.json, b.json; model-c: a.json``. The first model is named elsewhere."""
    parts = [f"{name}: {_names(own)}" if number else _names(own) for number, (name, own) in enumerate(files.items())]
    more = f"; and of {len(parts) - _SHOWN} more models" if len(parts) > _SHOWN else ""
    return "; ".join(parts[:_SHOWN]) + more


def _names(files: list[str]) -> str:
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return ", ".join(map(shown, files[:_SHOWN])) + more
