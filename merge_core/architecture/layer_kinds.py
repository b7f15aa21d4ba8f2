"""Of which kind each layer of a network is, from its configuration and the layer's number.

A kind is what the same number means in another place: layer 3 of a parent that becomes layer 7 of the result must be
of the kind there that it was here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mergegate.merge_core.architecture.families import (
    Clause,
    LayerCondition,
    LayerKind,
    TextPart,
    described_families,
    family_defaults,
)
from mergegate.merge_core.errors import InvalidInput

# Keys that sound as if a layer's number decided something.
_TELLING = re.compile(
    r"(?:^|_)(?:pattern|interval|period|offset|every|freq|first_k|step|indices|idxs?|ids)(?:_|$)"
    r"|layers?_(?:types?|block_type|ids?|idxs?|indices|list|map)|block_types?$|_layers$|per_layer|layer_index"
)
# Those that count layers, or sound alike by chance: time steps, dropout, initialisation, tokens, sides of an image.
_HARMLESS = re.compile(
    r"^num_(?:hidden_)?layers$|^n_layers?$|time_step|drop|init|token|vision|image|video|audio|spatial|norm_eps|^num_.*_layers$"
    r"|mrope|quantiz|position|^use_|chunk|label"
)


def layer_kinds(part: TextPart, index: int, depth: int, where: str) -> dict[str, Any]:
    """Name of each respect in which layers of the family differ → what layer ``index`` is.

    Args:
        part: Configuration and family.
        index: The layer's number.
        depth: Number of layers.
        where: What messages call the configuration.

    Raises:
        InvalidInput: A key has a value that cannot mean anything, a list too few entries.
    """
    found: dict[str, Any] = {}
    for kind in part.family.kinds if part.family else ():
        found[kind.name] = _kind(kind, part.config, index, depth, found, where)
    return found


def undescribed_key(part: TextPart, depth: int) -> str | None:
    """Return a key that may say something about single layers and that the family's description does not know.

    Such a key is recognized by its name (``..._pattern``, ``..._interval``, ``layer_types``) or its shape (a list with
    ``depth`` entries). A value that is unset, false, or a period of one says the same of every layer.
    """
    known = {*(part.family.keys if part.family else ()), *_leftovers(part)}
    for key, value in part.config.items():
        if key in known or key.startswith("_") or value is None or value is False or value in (0, 1) or value == []:
            continue
        if _HARMLESS.search(key):
            continue
        listed = isinstance(value, list) and len(value) == depth > 2 and key != "architectures"
        numbered = isinstance(value, Mapping) and bool(value) and all(str(one).isdecimal() for one in value)
        if listed or numbered or _TELLING.search(key):
            return key
    return None


def _leftovers(part: TextPart) -> set[str]:
    """Return keys that have no effect on single layers in this family, although they have one in others.

    Derived configuration classes write them: a ``max_window_layers`` where no window slides, or a number that another
    family reads and transformers does not read in this one.
    """
    config, defaults = part.config, family_defaults(part.model_type)
    inert = set() if config.get("use_sliding_window") and config.get("sliding_window") else {"max_window_layers"}
    if defaults is not None and not config.get("auto_map"):
        elsewhere = {key for family in described_families() for key in family.keys}
        inert |= {key for key in elsewhere - defaults.values.keys() if isinstance(config.get(key), int)}
    return inert


def _kind(
    kind: LayerKind, config: Mapping[str, Any], index: int, depth: int, found: Mapping[str, Any], where: str
) -> Any:
    if kind.listed_in is not None and config.get(kind.listed_in):
        return _entry(config, kind.listed_in, list, index, depth, where)
    if kind.spelt_in is not None and config.get(kind.spelt_in):
        return _entry(config, kind.spelt_in, str, index, depth, where)
    if kind.required:
        raise InvalidInput(
            f"{where}: {kind.listed_in}", found="nothing", expected=f"a list with {depth} entries, one a layer"
        )
    for clause in kind.rule:
        if all(_holds(one, config, index, found, where) != one.negated for one in clause.when):
            return _value(clause, index)
    return None


def _value(clause: Clause, index: int) -> Any:
    return (clause.value, index) if clause.by_number else clause.value


def _entry(config: Mapping[str, Any], key: str, shape: type, index: int, depth: int, where: str) -> Any:
    value = config[key]
    if not isinstance(value, shape) or len(value) < depth:  # type: ignore[arg-type]  # it has a length where it is one
        found = f"{len(value)} entries" if isinstance(value, shape) else type(value).__name__  # type: ignore[arg-type]
        raise InvalidInput(f"{where}: {key}", found=found, expected=f"one for each of {depth} layers")
    return value[index]  # type: ignore[index]


def _holds(one: LayerCondition, config: Mapping[str, Any], index: int, found: Mapping[str, Any], where: str) -> bool:
    if one.every is not None:
        period = one.every if isinstance(one.every, int) else _number(config, one.every, one.default, where, least=1)
        at = one.at if isinstance(one.at, int) else _number(config, one.at, one.at_default, where)
        return (index + one.shift) % period == at
    if one.below is not None:
        return index < _number(config, one.below, one.default, where)
    if one.numbered_in is not None:
        numbers = config.get(one.numbered_in)
        if numbers is not None and not (isinstance(numbers, list) and all(type(number) is int for number in numbers)):
            raise InvalidInput(
                f"{where}: {one.numbered_in}", found=f"{numbers!r:.80}", expected="a list of numbers of layers"
            )
        return index in (numbers or ())
    if one.enabled is not None:
        return bool(config.get(one.enabled, one.default))
    if one.given is not None:
        return config.get(one.given) is not None
    return bool(found[str(one.kind)] == one.equals)


def _number(config: Mapping[str, Any], key: str, default: Any, where: str, least: int = 0) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if type(value) is not int or value < least:
        raise InvalidInput(f"{where}: {key}", found=f"{value!r:.80}", expected=f"a whole number from {least}")
    return value
