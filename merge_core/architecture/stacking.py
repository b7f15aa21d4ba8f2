"""Write the configuration of a merge whose layers come from other positions in their parents.

Each layer must keep the kind that it has in its parent. mergegate first tries the donor's configuration unchanged. If
that would change the kind of a layer, it writes the kinds in a form that the family reads (a list, layer numbers, a
count of first layers, or a period) and reads the result back to verify it. If no form can express the kinds, the merge
is refused, and the message names the key.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mergegate.merge_core.architecture.conversions import container_text, without_predictions
from mergegate.merge_core.architecture.families import (
    Family,
    Form,
    LayerKind,
    TextPart,
    find_family,
    layer_kinds,
    text_part,
    undescribed_key,
)
from mergegate.merge_core.architecture.structure import LAYER_COUNT_KEYS, layer_count
from mergegate.merge_core.errors import InvalidInput


@dataclass(frozen=True)
class LayerOrigin:
    """Origin of a layer of the merge: layer ``index`` of the ``depth`` layers of ``model``, which has ``config``."""

    model: str
    config: Mapping[str, Any]
    index: int
    depth: int


Stack = Sequence[Sequence[LayerOrigin]]
_RESULT = "the result: config.json"
_KEEP_PATTERN = "slice so that the pattern of layer kinds stays the same, or merge whole models ('models')"


def keeps_layer_positions(layers: Stack) -> bool:
    """Return whether no layer is moved, removed or added, as in a merge of whole models."""
    return all(
        origin.index == number and origin.depth == len(layers)
        for number, origins in enumerate(layers)
        for origin in origins
    )


def check_described(config: Mapping[str, Any], depth: int, model: str) -> Family:
    """Return the description of the family of ``model``, a model whose layers will be moved."""
    part, location = text_part(config), f"{model}: config.json"
    if part.family is None:
        # In a network whose own use of layer numbers is known, the description of its text part is missing.
        text = container_text(config)
        is_inner = part.key is not None and (
            find_family(config) is not None or (text is not None and text[0] == part.key)
        )
        typed_config = part.config if is_inner else config
        raise InvalidInput(
            f"{location}: {f'{part.key}.' if is_inner else ''}model_type",
            found=f"{typed_config.get('model_type')!r}: mergegate does not know how this family uses layer numbers",
            expected="a family with a description in merge_core/architecture/families",
            remedy="merge whole models ('models'), which need no description",
        )
    family = part.family
    if family.refused is not None:
        keys, reason = family.refused
        raise InvalidInput(
            f"{location}: {keys}",
            found=f"layers of {part.config.get('model_type')} cannot be cut: {reason}",
            expected="layers that work at any position",
            remedy="merge whole models ('models')",
        )
    if family.depth_of and not any(part.config.get(key) for key in family.depth_of):
        raise InvalidInput(
            f"{location}: {', '.join(family.depth_of)}",
            found="no value",
            expected="the kind of each layer: without it, the library uses its own default",
            remedy="add the kinds of the layers to config.json",
        )
    # A network around the text part, which has no description of its own, may also have keys for layers of that part.
    outer = TextPart(None, config, None) if part.key is not None and find_family(config) is None else None
    for owner in filter(None, (part, outer)):
        if (key := undescribed_key(owner, depth)) is not None:
            raise InvalidInput(
                f"{location}: {key}",
                found=f"{owner.config[key]!r:.80}: mergegate does not know which layers this key affects",
                expected=f"keys in the description of {part.config.get('model_type')}",
                remedy="remove the key if it has no effect, or merge whole models ('models')",
            )
    return family


def _required_kinds(layers: Stack, location: str) -> list[dict[str, Any]]:
    required = []
    for origins in layers:
        kinds = [
            layer_kinds(text_part(origin.config), origin.index, origin.depth, f"{origin.model}: config.json")
            for origin in origins
        ]
        for origin, origin_kinds in zip(origins[1:], kinds[1:], strict=True):
            for name, value in kinds[0].items():
                if origin_kinds.get(name) != value:
                    first = origins[0]
                    key = _keys_of(text_part(origin.config).family, name)
                    raise InvalidInput(
                        f"{location}: layer {origin.index} of {origin.model}",
                        found=f"{name} {_format_kind(origin_kinds.get(name))} ({key})",
                        expected=f"{_format_kind(value)}, like layer {first.index} of {first.model}",
                        remedy="merge layers of the same kind",
                    )
        required.append(kinds[0])
    return required


def stacked_config(donor: Mapping[str, Any], layers: Stack, location: str, *, dropped: bool = False) -> dict[str, Any]:
    """Return the donor's configuration, adapted to a merge with ``layers``.

    ``dropped`` states that the merge omits the layers for multi-token prediction.

    Raises:
        InvalidInput: :func:`check_described` fails for a model, layers of different kinds or families would be
            combined, or no configuration that the family supports can describe these layers.
    """
    config: dict[str, Any] = copy.deepcopy(dict(donor))
    part = text_part(config)
    parents = {origin.model: origin for origins in layers for origin in origins}
    is_same_depth = layer_count(donor) == len(layers) or any(parent.config == donor for parent in parents.values())
    try:
        families = [check_described(parent.config, parent.depth, parent.model) for parent in parents.values()]
    except InvalidInput:
        if keeps_layer_positions(layers) and is_same_depth:
            return config  # Every layer keeps its number, so everything that depends on the number is unchanged.
        raise
    family = families[0]
    if any(parent_family != family for parent_family in (*families, part.family)):
        raise InvalidInput(
            f"{location}: model_type",
            found="layers of several families",
            expected="layers of one family",
            remedy="combine layers of models with the same architecture",
        )
    required = _required_kinds(layers, location)
    result = dict(part.config)
    count_keys = [key for key in LAYER_COUNT_KEYS if type(result.get(key)) is int]
    if not count_keys and not family.depth_of:
        count_keys = [LAYER_COUNT_KEYS[0]]  # So far, the depth was the library's default.
    result |= dict.fromkeys(count_keys, len(layers))
    if dropped:
        result = without_predictions(result)
    columns = {kind.name: [kinds[kind.name] for kinds in required] for kind in family.kinds}
    for kind in family.kinds:
        # Write all lists first, because the rule of one kind may depend on another kind.
        column = columns[kind.name]
        if kind.listed_in is not None and result.get(kind.listed_in) and None not in column:
            result[kind.listed_in] = list(column)
        are_letters = all(isinstance(value, str) and len(value) == 1 for value in column)
        if kind.spelt_in is not None and result.get(kind.spelt_in) and are_letters:
            result[kind.spelt_in] = "".join(column)
    for kind in family.kinds:
        result = _with_kind(result, part, kind, columns[kind.name], location)
    # Verify all kinds together, because settings for one property may affect another that reads the same keys.
    for index, kinds in enumerate(required):
        actual = layer_kinds(TextPart(part.key, result, family), index, len(required), _RESULT)
        for name, value in kinds.items():
            if actual[name] != value:
                raise InvalidInput(
                    f"{location}: {_keys_of(family, name)}",
                    found=f"layer {index} of the result would be {_format_kind(actual[name])}",
                    expected=f"{_format_kind(value)}, as in its parent",
                    remedy=_KEEP_PATTERN,
                )
    if part.key is not None:
        # Older files repeat the settings of the text part at the top level.
        repeated = {key: value for key, value in result.items() if key in config and part.config.get(key) != value}
        return {**config, **repeated, part.key: result}
    return result


def _with_kind(
    config: dict[str, Any], part: TextPart, kind: LayerKind, column: Sequence[Any], location: str
) -> dict[str, Any]:
    """Return ``config``, with as few changes as possible, such that layer ``i`` has the kind ``column[i]``."""
    for candidate in _candidates(config, kind, column):
        # Verify only this property, because the others are not written yet.
        candidate_part = TextPart(part.key, candidate, part.family)
        kinds = [layer_kinds(candidate_part, index, len(column), _RESULT)[kind.name] for index in range(len(column))]
        if kinds == list(column):
            break
    else:
        raise InvalidInput(
            f"{location}: {', '.join(kind.keys) or kind.name}",
            found=f"config.json cannot express '{kind.name}' for the {len(column)} layers of the result",
            expected=f"the kinds that the layers have in their parents: {', '.join(map(_format_kind, column))[:120]}",
            remedy=_KEEP_PATTERN,
        )
    # The list of kinds takes precedence over lists of layer numbers, but other software may read the layer numbers.
    stale_forms = [form for form in kind.write if form.numbers is not None and candidate.get(form.numbers) is not None]
    if kind.listed_in is None or not candidate.get(kind.listed_in):
        return candidate
    return {**candidate, **{str(form.numbers): _numbers(form, column) for form in stale_forms}}


def _numbers(form: Form, column: Sequence[Any]) -> list[int]:
    return [number for number, value in enumerate(column) if value == form.of]


def _candidates(config: dict[str, Any], kind: LayerKind, column: Sequence[Any]) -> Iterator[dict[str, Any]]:
    yield config
    if kind.listed_in is not None and None not in column:
        yield {**config, kind.listed_in: list(column)}
    for form in kind.write:
        for settings in _forms(form, _numbers(form, column), len(column)):
            yield {**config, **settings}


def _forms(form: Form, numbers: Sequence[int], depth: int) -> Iterator[dict[str, Any]]:
    """Yield candidate settings that mark the layers ``numbers`` of ``depth`` layers. The caller verifies them."""
    also = form.also
    if form.numbers is not None:
        yield {form.numbers: list(numbers), **also}
    if form.first is not None:
        yield {form.first: len(numbers), **also}
    if form.period is not None and (numbers or form.offset):
        # Two adjacent numbers determine the period. For a single layer, or none, any period beyond the depth works.
        first, beyond = (numbers[0], depth) if numbers else (depth, depth + 1)
        period = numbers[1] - first if len(numbers) > 1 else beyond
        yield {form.period: period, **({form.offset: first % period} if form.offset else {}), **also}


def _keys_of(family: Family | None, name: str) -> str:
    return ", ".join(key for kind in (family.kinds if family else ()) if kind.name == name for key in kind.keys)


def _format_kind(value: Any) -> str:
    return f"{value[0]} {value[1]}" if isinstance(value, tuple) else f"{value}"
