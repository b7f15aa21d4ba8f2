"""The configuration of a network whose layers come from other places: another depth, other numbers, the same kinds.

The rule, for every family: each layer of the result must be of the kind that it was of in its parent. The donor's
configuration is tried as it is; where it would make another kind of a layer, the kinds are written down in a form that
the family reads (a list, numbers of layers, a count of first layers, a period), and what was written is read again. If
no form says it, the merge is refused and the message names the key.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mergegate.merge_core.architecture.architecture import LAYER_COUNT_KEYS, layer_count
from mergegate.merge_core.architecture.families import Family, Form, LayerKind, TextPart, find_family, text_part
from mergegate.merge_core.architecture.layer_kinds import layer_kinds, undescribed_key
from mergegate.merge_core.errors import InvalidInput


@dataclass(frozen=True)
class LayerOrigin:
    """Where a layer of the result comes from: ``index`` of ``depth`` layers of the model ``model``."""

    model: str
    config: Mapping[str, Any]
    index: int
    depth: int


Stack = Sequence[Sequence[LayerOrigin]]


def keeps_layer_positions(layers: Stack) -> bool:
    """Whether every layer has the number that it had, and none is left out or added: whole models, cut and rejoined."""
    return all(
        one.index == number and one.depth == len(layers) for number, origins in enumerate(layers) for one in origins
    )


def check_described(config: Mapping[str, Any], depth: int, model: str) -> Family:
    """The family of a model whose layers change places.

    Args:
        config: Its configuration.
        depth: Number of its layers.
        model: What messages call it.

    Raises:
        InvalidInput: Nobody has described it, its layers cannot be cut, or its configuration has a key that may be
            about single layers and that the description does not know.
    """
    part, place = text_part(config), f"{model}: config.json"
    if part.family is None:
        # A family that is described does not describe the containers that it is used in.
        is_inner = part.key is not None and find_family(config) is not None
        named = part.config if is_inner else config
        raise InvalidInput(
            f"{place}: {f'{part.key}.' if is_inner else ''}model_type",
            found=f"{named.get('model_type')!r}: what depends on a layer's number there is not described",
            expected="a family that is described in merge_core/architecture/families",
            remedy="merge whole models ('models'): they need no description",
        )
    family = part.family
    if family.refused is not None:
        keys, reason = family.refused
        raise InvalidInput(
            f"{place}: {keys}",
            found=f"layers of {part.config.get('model_type')} cannot be cut: {reason}",
            expected="layers that mean the same in another place",
            remedy="merge whole models ('models')",
        )
    if family.depth_of and not any(part.config.get(key) for key in family.depth_of):
        raise InvalidInput(
            f"{place}: {', '.join(family.depth_of)}",
            found="nothing",
            expected="the kinds of the layers: without them the library takes some of its own",
            remedy="write down what the layers are",
        )
    if (key := undescribed_key(part, depth)) is not None:
        raise InvalidInput(
            f"{place}: {key}",
            found=f"{part.config[key]!r:.80}: what it says of single layers is not described",
            expected=f"keys that are known of {part.config.get('model_type')}",
            remedy="remove the key if it has no effect, or merge whole models ('models')",
        )
    return family


def _is_described(parent: LayerOrigin) -> bool:
    try:
        check_described(parent.config, parent.depth, parent.model)
    except InvalidInput:
        return False
    return True


def _wanted_kinds(layers: Stack, where: str) -> list[dict[str, Any]]:
    """The kinds that each layer of the result must be of: those that it has in its parents, which must agree.

    Raises:
        InvalidInput: Layers of different kinds would be merged into one.
    """
    wanted = []
    for origins in layers:
        kinds = [
            layer_kinds(text_part(one.config), one.index, one.depth, f"{one.model}: config.json") for one in origins
        ]
        for one, other in zip(origins[1:], kinds[1:], strict=True):
            for name, value in kinds[0].items():
                if other.get(name) != value:
                    first = origins[0]
                    key = _keys_of(text_part(one.config).family, name)
                    raise InvalidInput(
                        f"{where}: layer {one.index} of {one.model}",
                        found=f"{name} {_said(other.get(name))} ({key})",
                        expected=f"{_said(value)}, as layer {first.index} of {first.model} has it",
                        remedy="merge layers of one kind",
                    )
        wanted.append(kinds[0])
    return wanted


def stacked_config(donor: Mapping[str, Any], layers: Stack, where: str, *, dropped: bool = False) -> dict[str, Any]:
    """``donor`` for a network of ``layers``.

    Args:
        donor: Configuration to start from.
        layers: For each layer of the result, where it comes from in each of its parents.
        where: What messages call the recipe's slices.
        dropped: Whether layers that predict further tokens were left out.

    Raises:
        InvalidInput: As :func:`check_described` and :func:`_wanted_kinds`; or no form that the family reads can say of
            which kinds the layers are.
    """
    config: dict[str, Any] = copy.deepcopy(dict(donor))
    part = text_part(config)
    parents = {one.model: one for origins in layers for one in origins}
    same_depth = layer_count(donor) == len(layers) or any(one.config == donor for one in parents.values())
    if keeps_layer_positions(layers) and same_depth and not all(map(_is_described, parents.values())):
        return config  # No layer has another number, so whatever depends on it is as it was.
    families = [check_described(one.config, one.depth, one.model) for one in parents.values()]
    family = families[0]
    if any(other != family for other in (*families, part.family)):
        raise InvalidInput(
            f"{where}: model_type",
            found="layers of several families",
            expected="one family: only its own layers mean something to it",
            remedy="cut models of one architecture",
        )
    wanted = _wanted_kinds(layers, where)
    changed = _with_depth(dict(part.config), family, len(layers))
    if dropped:
        changed.update({key: 0 for key in family.prediction_keys if changed.get(key)})
    for kind in family.kinds:
        # All that are listed come first: a rule of one kind may ask for another.
        for candidate in _listed(changed, kind, [kinds[kind.name] for kinds in wanted]):
            changed = candidate
    for kind in family.kinds:
        column = [kinds[kind.name] for kinds in wanted]
        changed = _with_numbers(_with_kind(changed, part, kind, column, where), kind, column)
    _check(TextPart(part.key, changed, family), wanted, where)
    if part.key is not None:
        # Older files repeat the text's settings at the top.
        repeated = {key: value for key, value in changed.items() if key in config and part.config.get(key) != value}
        return {**config, **repeated, part.key: changed}
    return changed


def _with_depth(config: dict[str, Any], family: Family, depth: int) -> dict[str, Any]:
    counted = [key for key in LAYER_COUNT_KEYS if type(config.get(key)) is int]
    if not counted and not family.depth_of:
        counted = [LAYER_COUNT_KEYS[0]]  # The library's default was the depth until now.
    return {**config, **dict.fromkeys(counted, depth)}


def _with_kind(
    config: dict[str, Any], part: TextPart, kind: LayerKind, column: Sequence[Any], where: str
) -> dict[str, Any]:
    """``config`` that makes layer ``i`` of the kind ``column[i]``, changed as little as possible."""
    for candidate in _candidates(config, kind, column):
        # Of this kind alone: others are still to be written.
        if _reads(TextPart(part.key, candidate, part.family), kind, column):
            return candidate
    parents = f"the kinds that the layers have in their parents: {', '.join(map(_said, column))[:120]}"
    raise InvalidInput(
        f"{where}: {', '.join(kind.keys) or kind.name}",
        found=f"{kind.name} of the result's {len(column)} layers cannot be written in config.json",
        expected=parents,
        remedy="cut where the rhythm of the layers stays the same, or merge whole models ('models')",
    )


def _with_numbers(config: dict[str, Any], kind: LayerKind, column: Sequence[Any]) -> dict[str, Any]:
    """``config`` whose lists of layer numbers say what the list of kinds says, which decides; others may read them."""
    stale = [form for form in kind.write if form.numbers is not None and config.get(form.numbers) is not None]
    if kind.listed_in is None or not config.get(kind.listed_in):
        return config
    return {**config, **{str(form.numbers): _numbers(form, column) for form in stale}}


def _numbers(form: Form, column: Sequence[Any]) -> list[int]:
    return [number for number, value in enumerate(column) if value == form.of]


def _candidates(config: dict[str, Any], kind: LayerKind, column: Sequence[Any]) -> Iterator[dict[str, Any]]:
    yield config
    if kind.listed_in is not None and None not in column:
        yield {**config, kind.listed_in: list(column)}
    for form in kind.write:
        for written in _forms(form, _numbers(form, column), len(column)):
            yield {**config, **written}


def _listed(config: dict[str, Any], kind: LayerKind, column: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """``config`` with the entries of these layers in place of those that it has; nothing where it has none."""
    if kind.listed_in is not None and config.get(kind.listed_in) and None not in column:
        yield {**config, kind.listed_in: list(column)}
    letters = all(isinstance(one, str) and len(one) == 1 for one in column)
    if kind.spelt_in is not None and config.get(kind.spelt_in) and letters:
        yield {**config, kind.spelt_in: "".join(column)}


def _forms(form: Form, numbers: Sequence[int], depth: int) -> Iterator[dict[str, Any]]:
    """What could be written for "these of ``depth`` layers are of this kind"; whether it says so is seen after."""
    also = dict(form.also)
    if form.numbers is not None:
        yield {form.numbers: list(numbers), **also}
    if form.first is not None:
        yield {form.first: len(numbers), **also}
    if form.period is not None and (numbers or form.offset):
        # Two neighbours leave one period only; a single layer, or none, any that is longer than the network.
        first, beyond = (numbers[0], depth) if numbers else (depth, depth + 1)
        period = numbers[1] - first if len(numbers) > 1 else beyond
        yield {form.period: period, **({form.offset: first % period} if form.offset else {}), **also}


def _reads(part: TextPart, kind: LayerKind, column: Sequence[Any]) -> bool:
    depth = len(column)
    return all(
        layer_kinds(part, index, depth, "the result: config.json")[kind.name] == value
        for index, value in enumerate(column)
    )


def _check(part: TextPart, wanted: Sequence[Mapping[str, Any]], where: str) -> None:
    """What was written for one kind may have changed another, which is read from the same keys."""
    for index, kinds in enumerate(wanted):
        written = layer_kinds(part, index, len(wanted), "the result: config.json")
        for name, value in kinds.items():
            if written[name] != value:
                raise InvalidInput(
                    f"{where}: {_keys_of(part.family, name)}",
                    found=f"layer {index} of the result would be {_said(written[name])}",
                    expected=f"{_said(value)}, as in its parent",
                    remedy="cut where the rhythm of the layers stays the same, or merge whole models ('models')",
                )


def _keys_of(family: Family | None, name: str) -> str:
    return ", ".join(key for kind in (family.kinds if family else ()) if kind.name == name for key in kind.keys)


def _said(value: Any) -> str:
    return f"{value[0]} {value[1]}" if isinstance(value, tuple) else f"{value}"
