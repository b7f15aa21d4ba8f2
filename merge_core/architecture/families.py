"""Load descriptions of network families, which state how the number of a layer affects its computation.

Each family has one JSON file in ``families/``. Only merges that move layers (slices) need a description: without one,
they are refused.

A file states its ``model_type``, a reference (``source``), and the *kinds* of layers: sliding or full attention, dense
or with experts, and so on. The kind of a layer comes from a list with one entry per layer, or from a rule about the
layer number. A layer that moves must keep its kind: :func:`layer_kinds` reads the kinds from a configuration, and
:mod:`~merge_core.architecture.stacking` writes them for another sequence of layers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mergegate.merge_core.architecture.conversions import container_text, packaged_table
from mergegate.merge_core.checkpoint import TEXT_PARTS
from mergegate.merge_core.errors import InvalidInput

_DIRECTORY = Path(__file__).parent / "families"


@dataclass(frozen=True)
class LayerCondition:
    """Condition on a layer number ``i`` and the model's configuration.

    Exactly one of ``every``, ``below``, ``numbered_in``, ``enabled``, ``given`` and ``kind`` is set. *Key* means a key
    of the configuration.
    """

    every: str | int | None = None  # number, or key of a number: the condition is ``(i + shift) % every == at``
    below: str | None = None  # key of a number: the condition is ``i < below``
    numbered_in: str | None = None  # key of a list of layer numbers that must contain ``i``
    enabled: str | None = None  # key whose value must be truthy
    given: str | None = None  # key that must be present and not null
    kind: str | None = None  # name of a :class:`LayerKind` for which the layer must have the value ``equals``
    equals: Any = None  # required value for ``kind``
    default: Any = None  # value of the key if the configuration lacks it
    shift: int = 0  # offset for ``every``
    at: str | int = 0  # remainder for ``every``: a number, or a key
    at_default: int = 0  # value of the key ``at`` if the configuration lacks it
    negated: bool = False  # whether the condition must be false instead

    @property
    def keys(self) -> tuple[str, ...]:
        """Configuration keys that the condition reads."""
        keys = (self.every, self.below, self.numbered_in, self.enabled, self.given, self.at)
        return tuple(key for key in keys if isinstance(key, str))


@dataclass(frozen=True)
class Clause:
    """Rule clause: a layer that meets all conditions in ``when`` has the kind ``value``.

    With ``by_number``, the kind also includes the layer number, so no two layers are of the same kind.
    """

    value: Any
    when: tuple[LayerCondition, ...] = ()
    by_number: bool = False


@dataclass(frozen=True)
class Form:
    """Way to write into a configuration which layers are of one kind, for families that do not read a list of kinds."""

    # The kind. All layers that are not marked are of another kind.
    of: Any
    numbers: str | None = None  # key for a list of the numbers of the layers of this kind
    first: str | None = None  # key for the count of the layers of this kind, if they come before all others
    period: str | None = None  # key for the period in which the layers of this kind repeat
    offset: str | None = None  # key for the number of the first layer of this kind, used with ``period``
    also: Mapping[str, Any] = field(default_factory=dict)  # other keys and their required values

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that this form writes."""
        return tuple(key for key in (self.numbers, self.first, self.period, self.offset, *self.also) if key)


@dataclass(frozen=True)
class LayerKind:
    """Property in which the layers of a family differ."""

    name: str  # name of the property in messages
    listed_in: str | None = None  # key of a list with one entry per layer, which takes precedence over ``rule``
    spelt_in: str | None = None  # key of a string with one letter per layer, which also takes precedence over ``rule``
    required: bool = False  # whether the list must be present
    # Clauses that determine the value without a list. The first match applies.
    rule: tuple[Clause, ...] = ()
    write: tuple[Form, ...] = ()  # ways to write the property other than as a list

    @property
    def keys(self) -> tuple[str, ...]:
        """Configuration keys from which the property is read or to which it is written, most informative first."""
        rule_keys = [key for clause in self.rule for condition in clause.when for key in condition.keys]
        form_keys = [key for form in self.write for key in form.keys]
        return tuple(dict.fromkeys(key for key in (self.listed_in, self.spelt_in, *rule_keys, *form_keys) if key))


@dataclass(frozen=True)
class Family:
    """Description of a network family."""

    model_types: tuple[str, ...]  # values of ``model_type`` that the description covers
    source: str  # reference from which the description was written
    # Properties in which the layers differ. Empty if all layers are of the same kind.
    kinds: tuple[LayerKind, ...] = ()
    # For networks with several parts, the key of the text part's configuration and its default ``model_type``. Networks
    # whose text part transformers builds as if it were alone need no description of their own.
    text: tuple[str, str] | None = None
    text_optional: bool = False  # whether older configurations have the settings of the text part at the top level
    # Name parts of this family's tensors before the layers, in addition to the general ones.
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()  # name parts of this family's tensors after the layers, in addition to the general ones
    # Keys for the number of layers for multi-token prediction at the end of the main stack.
    prediction_keys: tuple[str, ...] = ()
    # Keys of lists or strings whose length is the number of layers, for families without a layer count.
    depth_of: tuple[str, ...] = ()
    # Renamings from an older to a newer layout, each as pairs of name prefixes.
    layouts: tuple[tuple[tuple[str, str], ...], ...] = ()
    ignored: tuple[str, ...] = ()  # keys that do not affect single layers, although their names suggest it
    refused: tuple[str, str] | None = None  # keys and reason, for families whose layers cannot be moved or removed

    @property
    def keys(self) -> tuple[str, ...]:
        """Configuration keys whose meaning the description covers."""
        own = (*self.ignored, *self.prediction_keys, *self.depth_of)
        return (*own, *(key for kind in self.kinds for key in kind.keys))


@dataclass(frozen=True)
class FamilyDefaults:
    """Default settings of a ``model_type`` in transformers."""

    values: Mapping[str, Any] = field(default_factory=dict)  # default value of each key that the family reads
    names: Mapping[str, str] = field(default_factory=dict)  # standard name of each key that is an alternative spelling
    # Default parameters of rotary positions (by layer type if they differ), or None for a family without them.
    rope: Mapping[str, Any] | None = None
    derived: tuple[str, ...] = ()  # keys whose default transformers computes from other keys


@dataclass(frozen=True)
class TextPart:
    """Part ``config`` of a model's configuration that describes the main layers.

    ``key`` is the key of the part, or None for the top level. ``family`` describes its family, or is None if the family
    or the network around it has no description. ``usual`` is the ``model_type`` if ``config`` does not contain it.
    """

    key: str | None
    config: Mapping[str, Any]
    family: Family | None
    usual: str | None = None

    @property
    def model_type(self) -> object:
        """``model_type`` of the language model, or None if it is not known."""
        return self.usual or self.config.get("model_type")


def described_families() -> tuple[Family, ...]:
    """Return the descriptions of all families."""
    return tuple(_read(path) for path in sorted(_DIRECTORY.glob("*.json")))


def find_family(config: Mapping[str, Any]) -> Family | None:
    """Return the description of the family in ``config``'s ``model_type``, or None if it has none."""
    model_type = config.get("model_type")
    return _by_type().get(model_type) if isinstance(model_type, str) else None


def text_part(config: Mapping[str, Any]) -> TextPart:
    """Return the part of ``config`` that describes the main stack of layers."""
    family = find_family(config)
    # transformers builds the text part of most networks as if it were alone, so its own description is enough.
    text = container_text(config) if family is None else family.text
    present = next((key for key in TEXT_PARTS if isinstance(config.get(key), Mapping)), None)
    if text is None or (family is None and present != text[0]):
        if family is None and present is not None:  # A network with several parts and no description.
            return TextPart(present, config[present], None)
        return TextPart(None, config, family)
    key, usual = text
    part = config.get(key)
    if isinstance(part, Mapping) and "model_type" in part:
        return TextPart(key, part, find_family(part))
    if not isinstance(part, Mapping) and family is not None and family.text_optional:
        return TextPart(None, config, family, usual)
    return TextPart(key, part if isinstance(part, Mapping) else {}, _by_type().get(usual), usual)


def family_defaults(model_type: object) -> FamilyDefaults | None:
    """Return transformers' default settings for ``model_type``, or None if they are not known.

    ``tests/merge_core/test_meaning.py`` generates the table from transformers.
    """
    entry = packaged_table("defaults.json").get(model_type) if isinstance(model_type, str) else None
    return FamilyDefaults(**entry) if entry is not None else None


def family_trials() -> Mapping[str, Mapping[str, str]]:
    """Return the results of trial merges by family: kind, class, and what works or the key that a refusal names.

    ``tests/merge_core/every_family.py`` writes the table.
    """
    trials: Mapping[str, Mapping[str, str]] = packaged_table("families.json")["families"]
    return trials


@cache
def _by_type() -> dict[str, Family]:
    return {name: family for family in described_families() for name in family.model_types}


@cache
def _read(path: Path) -> Family:
    # This file is part of mergegate, so no validation is needed. A misspelled key raises TypeError in the tests.
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    kinds = []
    for kind in content.pop("kinds"):
        rule = [
            Clause(**{**clause, "when": tuple(LayerCondition(**condition) for condition in clause.get("when", ()))})
            for clause in kind.pop("rule", ())
        ]
        kinds.append(LayerKind(rule=tuple(rule), write=tuple(Form(**form) for form in kind.pop("write", ())), **kind))
    if text := content.pop("text", None):
        content |= {"text": (text["part"], text["model_type"]), "text_optional": text.get("optional", False)}
    if refused := content.pop("refused", None):
        content["refused"] = refused["key"], refused["reason"]
    content["layouts"] = tuple(tuple((old, new) for old, new in layout) for layout in content.pop("layouts", ()))
    content = {key: tuple(value) if isinstance(value, list) else value for key, value in content.items()}
    return Family(kinds=tuple(kinds), **content)


# Keys whose names suggest an effect of the layer number.
_TELLING = re.compile(
    r"(?:^|_)(?:pattern|interval|period|offset|every|freq|first_k|step|indices|idxs?|ids)(?:_|$)"
    r"|layers?_(?:types?|block_type|ids?|idxs?|indices|list|map)|block_types?$|_layers$|per_layer|layer_index"
)
# Exceptions: layer counts, and keys that match by chance (time steps, dropout, initialization, tokens, image sizes).
_HARMLESS = re.compile(
    r"^num_(?:hidden_)?layers$|^n_layers?$|time_step|drop|init|token|vision|image|video|audio|spatial|norm_eps|^num_.*_layers$"
    r"|mrope|quantiz|position|^use_|chunk|label"
)


def layer_kinds(part: TextPart, index: int, depth: int, location: str) -> dict[str, Any]:
    """Return the kind of layer ``index``, by the name of each property in which the layers of the family differ.

    The result is empty for a family without a description.
    """
    kinds: dict[str, Any] = {}
    for kind in part.family.kinds if part.family else ():
        kinds[kind.name] = _kind(kind, part.config, index, depth, kinds, location)
    return kinds


def undescribed_key(part: TextPart, depth: int) -> str | None:
    """Return a key of ``part`` that may affect single layers but is not in the family's description, or None.

    A key counts if its name suggests an effect (``..._pattern``, ``..._interval``, ``layer_types``), if its value is a
    list with ``depth`` entries, or if the value is an object with layer numbers as keys. A value that is empty, false,
    0 or 1 affects all layers equally and does not count.
    """
    config, defaults = part.config, family_defaults(part.model_type)
    harmless_keys = set(part.family.keys) if part.family else set()
    # Derived configuration classes write keys that have no effect in their family, although they have one in others.
    if not (config.get("use_sliding_window") and config.get("sliding_window")):
        harmless_keys.add("max_window_layers")
    if defaults is not None and not config.get("auto_map"):
        all_keys = {key for family in described_families() for key in family.keys}
        harmless_keys |= {key for key in all_keys - defaults.values.keys() if isinstance(config.get(key), int)}
    for key, value in config.items():
        if key in harmless_keys or key.startswith("_") or _HARMLESS.search(key):
            continue
        if value is None or value is False or value in (0, 1) or value == []:
            continue
        is_per_layer = isinstance(value, list) and len(value) == depth > 2 and key != "architectures"
        is_numbered = isinstance(value, Mapping) and bool(value) and all(str(number).isdecimal() for number in value)
        if is_per_layer or is_numbered or _TELLING.search(key):
            return key
    return None


def _kind(
    kind: LayerKind, config: Mapping[str, Any], index: int, depth: int, kinds: Mapping[str, Any], location: str
) -> Any:
    forms: tuple[tuple[str | None, type[list[Any]] | type[str]], ...] = ((kind.listed_in, list), (kind.spelt_in, str))
    for key, form in forms:
        value = config.get(key) if key is not None else None
        if not value:
            continue
        if not isinstance(value, form) or len(value) < depth:
            found = f"{len(value)} entries" if isinstance(value, form) else type(value).__name__
            raise InvalidInput(f"{location}: {key}", found=found, expected=f"an entry for each of the {depth} layers")
        return value[index]
    if kind.required:
        raise InvalidInput(
            f"{location}: {kind.listed_in}", found="no value", expected=f"a list with {depth} entries, one per layer"
        )
    for clause in kind.rule:
        if all(_holds(condition, config, index, kinds, location) != condition.negated for condition in clause.when):
            return (clause.value, index) if clause.by_number else clause.value
    return None


def _holds(
    rule: LayerCondition, config: Mapping[str, Any], index: int, kinds: Mapping[str, Any], location: str
) -> bool:
    """Return whether a condition is true for layer ``index``. The caller applies ``negated``."""
    if rule.every is not None:
        period = _number(config, rule.every, rule.default, location, least=1)
        return (index + rule.shift) % period == _number(config, rule.at, rule.at_default, location)
    if rule.below is not None:
        return index < _number(config, rule.below, rule.default, location)
    if rule.numbered_in is not None:
        numbers = config.get(rule.numbered_in)
        if numbers is not None and not (isinstance(numbers, list) and all(type(number) is int for number in numbers)):
            raise InvalidInput(
                f"{location}: {rule.numbered_in}", found=f"{numbers!r:.80}", expected="a list of layer numbers"
            )
        return index in (numbers or ())
    if rule.enabled is not None:
        return bool(config.get(rule.enabled, rule.default))
    if rule.given is not None:
        return config.get(rule.given) is not None
    return bool(kinds[str(rule.kind)] == rule.equals)


def _number(config: Mapping[str, Any], key: str | int, default: Any, location: str, least: int = 0) -> int:
    """Return ``key`` if it is a number, otherwise its value in the configuration."""
    if isinstance(key, int):
        return key
    value = config.get(key)
    if value is None:
        value = default
    if type(value) is not int or value < least:
        raise InvalidInput(f"{location}: {key}", found=f"{value!r:.80}", expected=f"a whole number of at least {least}")
    return value
