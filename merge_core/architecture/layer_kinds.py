"""Derive the kind of each layer of a network from its configuration and the layer number.

A layer that moves must keep its kind: if layer 3 of a parent becomes layer 7 of the merge, layer 7 must be of the kind
that layer 3 has in the parent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mergegate.merge_core.architecture.families import (
    LayerCondition,
    LayerKind,
    TextPart,
    described_families,
    family_defaults,
)
from mergegate.merge_core.errors import InvalidInput

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

    Raises:
        InvalidInput: A key has an invalid value, or a list has fewer than ``depth`` entries.
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
    if kind.listed_in is not None and config.get(kind.listed_in):
        return _entry(config, kind.listed_in, list, index, depth, location)
    if kind.spelt_in is not None and config.get(kind.spelt_in):
        return _entry(config, kind.spelt_in, str, index, depth, location)
    if kind.required:
        raise InvalidInput(
            f"{location}: {kind.listed_in}", found="no value", expected=f"a list with {depth} entries, one per layer"
        )
    for clause in kind.rule:
        if all(_holds(condition, config, index, kinds, location) != condition.negated for condition in clause.when):
            return (clause.value, index) if clause.by_number else clause.value
    return None


def _entry(config: Mapping[str, Any], key: str, shape: type, index: int, depth: int, location: str) -> Any:
    value = config[key]
    if not isinstance(value, shape) or len(value) < depth:  # type: ignore[arg-type]  # ``shape`` is list or str.
        found = f"{len(value)} entries" if isinstance(value, shape) else type(value).__name__  # type: ignore[arg-type]
        raise InvalidInput(f"{location}: {key}", found=found, expected=f"an entry for each of the {depth} layers")
    return value[index]  # type: ignore[index]


def _holds(
    rule: LayerCondition, config: Mapping[str, Any], index: int, kinds: Mapping[str, Any], location: str
) -> bool:
    """Return whether a condition is true for layer ``index``. The caller applies ``negated``."""
    if rule.every is not None:
        period = (
            rule.every if isinstance(rule.every, int) else _number(config, rule.every, rule.default, location, least=1)
        )
        remainder = rule.at if isinstance(rule.at, int) else _number(config, rule.at, rule.at_default, location)
        return (index + rule.shift) % period == remainder
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


def _number(config: Mapping[str, Any], key: str, default: Any, location: str, least: int = 0) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if type(value) is not int or value < least:
        raise InvalidInput(f"{location}: {key}", found=f"{value!r:.80}", expected=f"a whole number of at least {least}")
    return value
