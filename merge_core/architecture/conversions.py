"""Map the names of stored tensors to the names of the parameters that transformers builds from them.

transformers renames tensors when it loads a checkpoint, joins some of them (the experts of a layer), and splits others
(a fused query, key and value). ``conversions.json`` contains its table of these conversions, and the prefix of each
submodel, under which its own conversions apply. ``tests/merge_core/test_conversions.py`` generates the file from
transformers, so no family is listed by hand.

The file also lists which tensors each class ignores, ties or keeps in float32. A writer that loads a model and saves it
again drops the ignored tensors, such as layers for multi-token prediction, and may add or drop tied copies.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from mergegate.merge_core.checkpoint import Checkpoint, DType, config_parts, is_embedding, ties_embeddings

_FIRST_NUMBER = re.compile(r"\.([0-9]{1,6})(?:\.|$)")
_EXPERT_TENSOR = re.compile(r"(.*\.experts\.)([0-9]{1,6})(\..*)")
_NUMBER = re.compile(r"(?<=\.)[0-9]{1,6}(?=\.|$)")


@dataclass(frozen=True)
class Operation:
    """One step of a conversion of values, with the name and the settings of transformers' class."""

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class InMemory:
    """Parameters in memory that contain the values of one stored tensor."""

    # Names of the parameters. There are several if transformers splits the stored tensor.
    names: tuple[str, ...]
    # Steps from the stored tensor to the parameters. Empty if only the name differs.
    operations: tuple[Operation, ...] = ()
    source: int = 0  # position in a join along a dimension, such as 0 for ``gate_proj`` and 1 for ``up_proj``
    number: int | None = None  # position in a stack of tensors, such as the number of an expert, or None


@dataclass(frozen=True)
class _Transform:
    """One entry of transformers' table."""

    # Pattern of all sources. The named group ``g<number>`` shows which one matches.
    match: re.Pattern[str]
    # Targets. One per source for a group of renamings, otherwise the targets of every source.
    to: tuple[str, ...]
    # Prefixes below which the transform applies. The pattern is compared with the rest of a name. None: all names.
    scope: tuple[str, ...] | None
    # Steps for the values. Empty for a renaming.
    operations: tuple[Operation, ...]
    is_grouped: bool  # whether the entry is a group of renamings
    is_first_only: bool  # whether only the first source applies
    offset: int  # number to add to a number in a name

    def apply(self, name: str) -> tuple[tuple[str, ...], int, str] | None:
        """Return the new names of a tensor, the number of the source that matches, and the text that it matches.

        Return None if the transform does not apply to the tensor.
        """
        prefix = next((prefix for prefix in self.scope if name.startswith(prefix)), None) if self.scope else ""
        if prefix is None:
            return None
        rest = name.removeprefix(prefix)
        match = self.match.search(rest)
        if match is None:
            return None
        group = next(key for key, value in match.groupdict().items() if value is not None)
        source, position = int(group[1:]), self.match.groupindex[group]
        if source and self.is_first_only:
            return None
        targets = (self.to[source],) if self.is_grouped else self.to
        expanded = []
        for target in targets:
            if r"\1" in target:
                value = match.group(position + 1)
                target = target.replace(r"\1", str(int(value) + self.offset) if self.offset else value)
            expanded.append(prefix + rest.replace(match.group(0), target, 1))
        return tuple(expanded), source, match.group(0)


class Conversions:
    """Conversions of one checkpoint's tensors.

    Args:
        config: Content of ``config.json``.
        class_name: First entry of ``architectures``, or an empty string.
        names: Names of all stored tensors.
    """

    def __init__(self, config: Mapping[str, Any], class_name: str, names: Collection[str]) -> None:
        structure = _structure(config)
        self.is_known = structure is not None
        self._of_first_expert: dict[str, InMemory] = {}
        self.transforms = tuple(_network_transforms(config, class_name, structure))
        # transformers ignores the other renamings of a group if the first one matches no tensor.
        self._renamings = [
            replace(transform, is_first_only=False)
            if transform.is_first_only and any(transform.apply(name) for name in names)
            else transform
            for transform in self.transforms
            if not transform.operations
        ]
        self._converters = [transform for transform in self.transforms if transform.operations]
        # Names in memory that the renamings would change. transformers does not rename a tensor that is stored
        # under such a name.
        self._unchanged = frozenset(structure["unchanged"] if structure is not None else ())
        self._prefix, self._inner, self._is_base = "", frozenset[str](), False
        if structure is not None and structure["prefix"]:
            self._prefix, self._inner = structure["prefix"] + ".", frozenset(structure["inner"])
            self._is_base = class_name == structure["base"]

    def in_memory(self, name: str) -> InMemory:
        """Return the parameters in memory that contain the values of the stored tensor called ``name``."""
        expert = _EXPERT_TENSOR.match(name)
        if expert is None:
            return self._convert(name)
        # All experts of a layer have the same names, and a large mixture has 70,000 of them.
        before, number, after = expert.groups()
        first = f"{before}0{after}"
        memory = self._of_first_expert.get(first) or self._of_first_expert.setdefault(first, self._convert(first))
        if memory.number is not None:
            return replace(memory, number=int(number))
        return replace(memory, names=tuple(each.replace(".experts.0.", f".experts.{number}.") for each in memory.names))

    def _convert(self, name: str) -> InMemory:
        if self._unchanged and _NUMBER.sub("#", name) in self._unchanged:
            return InMemory((name,))
        for renaming in self._renamings:
            if renamed := renaming.apply(name):
                name = renamed[0][0]
        for converter in self._converters:
            if converted := converter.apply(name):
                names, source, text = converted
                is_stacked = any(operation.name == "MergeModulelist" for operation in converter.operations)
                match = _FIRST_NUMBER.search(text) if is_stacked else None
                number = int(match[1]) if match else None
                return InMemory(tuple(map(self._of_class, names)), converter.operations, source, number)
        return InMemory((self._of_class(name),))

    def _of_class(self, name: str) -> str:
        """Add or remove the prefix of the network without its head, depending on the class that is loaded."""
        if self._is_base:
            inner = name.removeprefix(self._prefix)
            return inner if inner.partition(".")[0] in self._inner else name
        return self._prefix + name if self._prefix and name.partition(".")[0] in self._inner else name


def container_text(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the key of the text part's configuration and its default model type, for networks with several parts.

    Return None if transformers builds the text part with a class other than that of a standalone text model.
    """
    text = (_structure(config) or {}).get("text")
    return (text[0], text[1]) if text else None


def _structure(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the prefixes and parts of a network, or None for an unknown family."""
    kind = config.get("model_type")
    return _content()["structures"].get(kind) if isinstance(kind, str) else None


def loading_facts() -> Mapping[str, Any]:
    """Return what transformers' classes ignore, tie and keep in float32."""
    facts: Mapping[str, Any] = _content()["loading"]
    return facts


def _network_transforms(
    config: Mapping[str, Any], class_name: str, structure: Mapping[str, Any] | None
) -> Iterator[_Transform]:
    """Yield the transforms of a network in the order in which transformers applies them."""
    table, kind = _content()["transforms"], config.get("model_type")
    structure = structure or {"parts": [], "prefix": ""}
    root = class_name if class_name in table else kind
    if isinstance(root, str) and root in table:
        yield from (_read_transform(entry, None) for entry in _entries(root))
    for path, key, part in structure["parts"]:
        if part is not None:
            inner = config.get(part)
            key = inner.get("model_type") if isinstance(inner, Mapping) else None
            key = _content()["classes"].get(key, key) if isinstance(key, str) else None
        if key in table and key != root:
            scope, base = (f"{prefix}." if prefix else "" for prefix in (path, structure["prefix"]))
            yield from (_read_transform(entry, (base + scope, scope)) for entry in _entries(key))
    yield from (_read_transform(entry, None) for entry in _entries("legacy"))


def _entries(key: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] | str = _content()["transforms"][key]
    return _entries(entries) if isinstance(entries, str) else entries


def _read_transform(entry: Mapping[str, Any], scope: tuple[str, ...] | None) -> _Transform:
    operations = tuple(Operation(name, settings) for name, settings in entry.get("operations", ()))
    match = re.compile(entry["match"])
    is_grouped = entry.get("group", False)
    return _Transform(match, tuple(entry["to"]), scope, operations, is_grouped, is_grouped, entry.get("offset", 0))


@cache
def packaged_table(file: str) -> Any:
    """Return the content of a JSON file next to this module."""
    return json.loads((Path(__file__).parent / file).read_text("utf-8"))


def _content() -> dict[str, Any]:
    content: dict[str, Any] = packaged_table("conversions.json")
    return content


# Keys for the number of layers for multi-token prediction, such as ``num_nextn_predict_layers``.
_PREDICTION_COUNT = re.compile(r"^(?=.*layers)(?:.*_)?(?:mtp|nextn)(?:_|$)")


@lru_cache(maxsize=256)
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str] | None:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns)) if patterns else None


def loading_of(family: str, class_name: str) -> dict[str, list[str]]:
    """Return what transformers keeps in float32, ignores and shares: patterns of names, and names with their source."""
    facts = loading_facts()
    always, for_float16 = facts["float32"].get(family, ([], []))
    tied = facts["tied"].get(class_name, {})
    return {
        "float32": [*always, *(f"{pattern} (instead of float16)" for pattern in for_float16 if pattern not in always)],
        "ignored": facts["ignored"].get(class_name, []),
        "tied": [f"{name} = {source}" for name, source in tied.items()],
    }


def is_ignored(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether the class of ``checkpoint`` ignores the stored tensor called ``name``, and so drops it."""
    pattern = _compiled(tuple(loading_facts()["ignored"].get(checkpoint.class_name, ())))
    return pattern is not None and pattern.search(name) is not None


def tied_source(checkpoint: Checkpoint, name: str) -> str | None:
    """Return the name of the tensor that the class shares with ``name``, or None if the model shares none with it.

    ``find_tensor`` treats output heads of language models separately.
    """
    if ties_embeddings(checkpoint.config) is False and not is_embedding(name):
        return None
    sources: Mapping[str, str] = loading_facts()["tied"].get(checkpoint.class_name, {})
    return sources.get(name)


def keeps_float32(config: Mapping[str, Any], name: str, target: DType) -> bool:
    """Return whether transformers keeps the tensor called ``name`` in float32 if it loads the model as ``target``."""
    if target.torch_name not in ("float16", "bfloat16"):
        return False
    patterns: list[str] = []
    for part in config_parts(config):
        always, for_float16 = loading_facts()["float32"].get(str(part.get("model_type")), ([], []))
        patterns += always + (for_float16 if target.torch_name == "float16" else [])
    pattern = _compiled(tuple(patterns))
    return pattern is not None and pattern.search(name) is not None


def without_predictions(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with a count of zero for layers for multi-token prediction, also in its text part."""
    result: dict[str, Any] = copy.deepcopy(dict(config))
    parts: list[Any] = config_parts(result)
    for part in parts:
        part |= {key: 0 for key, value in part.items() if type(value) is int and _PREDICTION_COUNT.search(key)}
    return result
