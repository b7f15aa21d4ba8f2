"""What families of networks do with the number of a layer: facts as data, one JSON file a family in ``families/``.

A family that nobody has described has no facts, and nothing is guessed for it: whole models need none, because no
layer leaves its place, and slices are refused. So a description only adds.

A file says for which ``model_type`` it speaks, where that can be looked up (``source``), and which *kinds* a layer can
be of: sliding or full attention, dense or with experts, and so on. A kind is read from a list with an entry a layer,
else by a rule from the layer's number. :mod:`~merge_core.architecture.layer_kinds` reads them,
:mod:`~merge_core.architecture.stacking` writes them for other layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mergegate.merge_core.checkpoint import TEXT_PARTS

_DIRECTORY = Path(__file__).parent / "families"
_DEFAULTS = Path(__file__).parent / "defaults.json"  # Generated from transformers by tests/merge_core/test_meaning.py.


@dataclass(frozen=True)
class LayerCondition:
    """One thing that is asked of a layer's number ``i`` and the configuration. Exactly one question is set.

    Args:
        every: ``(i + shift) % every == at``; a key of the configuration, or a number.
        below: ``i < below``; a key.
        numbered_in: ``i`` is in the list of layer numbers under this key.
        enabled: The key's value counts as true.
        given: The key is there and not null.
        kind: The layer's kind of this name equals ``equals``.
        default: The key's value where the configuration has none.
        at: See ``every``; a number, or a key with ``at_default``.
        negated: The answer is turned round.
    """

    every: str | int | None = None
    below: str | None = None
    numbered_in: str | None = None
    enabled: str | None = None
    given: str | None = None
    kind: str | None = None
    equals: Any = None
    default: Any = None
    shift: int = 0
    at: str | int = 0
    at_default: int = 0
    negated: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the configuration that it reads."""
        asked = (self.every, self.below, self.numbered_in, self.enabled, self.given, self.at)
        return tuple(key for key in asked if isinstance(key, str))


@dataclass(frozen=True)
class Clause:
    """``value`` for a layer of which all of ``when`` is true; with ``by_number`` no two layers are of one kind."""

    value: Any
    when: tuple[LayerCondition, ...] = ()
    by_number: bool = False


@dataclass(frozen=True)
class Form:
    """A way to write down which layers are of the kind ``of``, for families that read no list of kinds.

    Args:
        of: The value that is written; every other layer is of another.
        numbers: Key of a list of the numbers of those layers.
        first: Key that holds how many they are, where they are the first ones.
        period: Key of a period; with ``offset`` the key of the number that the first has.
        also: Other keys, and the values that they must hold for it.
    """

    of: Any
    numbers: str | None = None
    first: str | None = None
    period: str | None = None
    offset: str | None = None
    also: tuple[tuple[str, Any], ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that it writes."""
        return tuple(key for key in (self.numbers, self.first, self.period, self.offset, *dict(self.also)) if key)


@dataclass(frozen=True)
class LayerKind:
    """One respect in which layers of a family differ.

    Args:
        name: What it is called in messages.
        listed_in: Key of a list with one entry a layer; it decides where it is set.
        spelt_in: Key of a text with one letter a layer.
        required: Whether the list must be there.
        rule: What decides otherwise: the first clause that fits.
        write: How it can be written, beside the list.
    """

    name: str
    listed_in: str | None = None
    spelt_in: str | None = None
    required: bool = False
    rule: tuple[Clause, ...] = ()
    write: tuple[Form, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the configuration that have to do with it, the most telling ones first."""
        read = [key for clause in self.rule for condition in clause.when for key in condition.keys]
        written = [key for form in self.write for key in form.keys]
        return tuple(dict.fromkeys(key for key in (self.listed_in, self.spelt_in, *read, *written) if key))


@dataclass(frozen=True)
class Family:
    """What is known of a family.

    Args:
        model_types: Values of ``model_type`` that it speaks for.
        source: Where that can be looked up.
        kinds: In what its layers differ; empty where all are alike.
        text: For networks of several parts: key of the text part's configuration, and the family it is of where it
            does not say.
        text_optional: Whether older configurations hold the text part's settings at the top.
        before: Parts of names, beside the usual ones, of what stands before the layers.
        after: The same of what stands after them.
        predictions: First parts of names of layers that predict further tokens, beside the network.
        prediction_keys: Keys that count layers of that use behind the last one.
        depth_of: Keys of lists or texts whose length is the number of layers, where no key counts them.
        layouts: Renamings of the beginnings of tensor names, each from an older layout to a newer one.
        ignored: Keys that sound as if they had to do with layers, and have not.
        refused: ``(keys, reason)`` for families whose layers cannot be cut.
    """

    model_types: tuple[str, ...]
    source: str
    kinds: tuple[LayerKind, ...] = ()
    text: tuple[str, str] | None = None
    text_optional: bool = False
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    predictions: tuple[str, ...] = ()
    prediction_keys: tuple[str, ...] = ()
    depth_of: tuple[str, ...] = ()
    layouts: tuple[tuple[tuple[str, str], ...], ...] = ()
    ignored: tuple[str, ...] = ()
    refused: tuple[str, str] | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the configuration that it knows the meaning of."""
        own = (*self.ignored, *self.prediction_keys, *self.depth_of)
        return (*own, *(key for kind in self.kinds for key in kind.keys))


@dataclass(frozen=True)
class FamilyDefaults:
    """What transformers assumes for a ``model_type``.

    Args:
        values: Default of each key that the family reads.
        names: Other spellings of keys.
        rope: Default parameters of rotary positions, by type of layer where those differ. None: the family has none.
        derived: Keys whose default follows from other keys in a way that is not known here.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    rope: Mapping[str, Any] | None = None
    derived: tuple[str, ...] = ()


@dataclass(frozen=True)
class TextPart:
    """The part of a configuration that the main layers follow.

    Args:
        key: Where it stands; None: at the top.
        config: What it says.
        family: Description of its family. None: it has none, or the network around it has none.
        usual: ``model_type`` where ``config`` does not state the one of the language model.
    """

    key: str | None
    config: Mapping[str, Any]
    family: Family | None
    usual: str | None = None

    @property
    def model_type(self) -> object:
        """``model_type`` of the language model."""
        return self.usual or self.config.get("model_type")


def described_families() -> tuple[Family, ...]:
    """All that have been described."""
    return tuple(_read(path) for path in sorted(_DIRECTORY.glob("*.json")))


def find_family(config: Mapping[str, Any]) -> Family | None:
    """The family of a configuration by its ``model_type``; None where nobody has described it."""
    named = config.get("model_type")
    return _by_type().get(named) if isinstance(named, str) else None


def text_part(config: Mapping[str, Any]) -> TextPart:
    """Return the part of ``config`` that the main stack of layers follows, with what is known of it."""
    family = find_family(config)
    if family is None or family.text is None:
        key = next((key for key in TEXT_PARTS if isinstance(config.get(key), Mapping)), None)
        if family is None and key is not None:  # A container that has no description.
            return TextPart(key, config[key], None)
        return TextPart(None, config, family)
    key, usual = family.text
    part = config.get(key)
    if not isinstance(part, Mapping):
        if family.text_optional:
            return TextPart(None, config, family, usual)
        return TextPart(key, {}, _by_type()[usual], usual)
    if "model_type" in part:
        return TextPart(key, part, find_family(part))
    return TextPart(key, part, _by_type()[usual], usual)


def family_defaults(model_type: object) -> FamilyDefaults | None:
    """Return the defaults of a family, or None if they are not known."""
    entry = _defaults().get(model_type) if isinstance(model_type, str) else None
    return FamilyDefaults(**entry) if entry is not None else None


@cache
def _by_type() -> dict[str, Family]:
    return {name: family for family in described_families() for name in family.model_types}


@cache
def _read(path: Path) -> Family:
    # Our own file: a word that is misspelt in it ends in TypeError, in the test that reads them all.
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    text, refused = content.pop("text", None), content.pop("refused", None)
    words: dict[str, Any] = {
        "source": content.pop("source"),
        "model_types": tuple(content.pop("model_types")),
        "kinds": tuple(_kind(**kind) for kind in content.pop("kinds")),
        "layouts": tuple(tuple((old, new) for old, new in layout) for layout in content.pop("layouts", ())),
        **{key: tuple(value) for key, value in content.items()},
    }
    return Family(
        text=(text["part"], text["model_type"]) if text else None,
        text_optional=bool(text and text.get("optional")),
        refused=(refused["key"], refused["reason"]) if refused else None,
        **words,
    )


def _kind(rule: Sequence[Mapping[str, Any]] = (), write: Sequence[Mapping[str, Any]] = (), **rest: Any) -> LayerKind:
    clauses, forms = (_clause(**clause) for clause in rule), (_form(**form) for form in write)
    return LayerKind(rule=tuple(clauses), write=tuple(forms), **rest)


def _form(also: Mapping[str, Any] | None = None, **rest: Any) -> Form:
    return Form(also=tuple((also or {}).items()), **rest)


def _clause(when: Sequence[Mapping[str, Any]] = (), **rest: Any) -> Clause:
    return Clause(when=tuple(LayerCondition(**condition) for condition in when), **rest)


@cache
def _defaults() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_DEFAULTS.read_text("utf-8"))
    return content
