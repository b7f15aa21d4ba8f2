"""Slices, checked against their parents: what config.json must say, and that layers of one kind have the same tensors.

That the kinds which the configuration tells apart explain the tensors is the proof that its family was described
rightly: where two layers of one kind have different tensors, something decides that nobody has described, and it would
decide anew in another place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mergegate.merge_core.architecture import (
    LayerOrigin,
    is_optional,
    keeps_layer_positions,
    layer_kinds,
    main_depth,
    main_stack,
    parse_layer_place,
    prediction_tensors,
    stacked_config,
    text_part,
)
from mergegate.merge_core.checkpoint import Checkpoint
from mergegate.merge_core.errors import Finding, InvalidInput
from mergegate.merge_core.plan.outline import keeps_predictions, sliced_module
from mergegate.merge_core.recipe import Module, Recipe


def config_of_slices(
    recipe: Recipe, donor: Checkpoint, checkpoints: Mapping[str, Checkpoint]
) -> tuple[dict[str, Any], list[Finding]] | None:
    """The result's config where layers are cut, and what is to be said of it; None for whole models.

    Raises:
        InvalidInput: A layer that does not exist; layers that would mean something else in their new places, or of
            which nobody knows what they mean.
    """
    module = sliced_module(recipe, donor)
    if module is None:
        return None
    where = f"{recipe.where}: slices"
    stack = main_stack(donor, where)
    layers = list(_layers(module, stack, checkpoints))
    kept = keeps_predictions(module, stack, checkpoints)
    left_out = [] if kept else _left_out(module, checkpoints)
    config = stacked_config(donor.config, layers, where, dropped=bool(left_out))
    if not keeps_layer_positions(layers):
        for model in dict.fromkeys(one.model for origins in layers for one in origins):
            _check_kinds(model, checkpoints[model], stack)
    return config, left_out


def differing_kinds(donor: str, first: Checkpoint, model: str, other: Checkpoint) -> Iterator[Finding]:
    """Layers of whole models with one number that compute different things."""
    mine, theirs = text_part(first.config), text_part(other.config)
    if mine.family is None or mine.family != theirs.family or mine.family.refused is not None:
        return
    try:
        stack = main_stack(first, donor)
        depth = main_depth(first, stack)
        if main_depth(other, stack) != depth:
            return
        for index in range(depth):
            ours = layer_kinds(mine, index, depth, f"{donor}: config.json")
            for name, value in layer_kinds(theirs, index, depth, f"{model}: config.json").items():
                if ours[name] != value:
                    keys = next(kind.keys for kind in mine.family.kinds if kind.name == name)
                    yield Finding(
                        "warn",
                        f"{model}: config.json: {', '.join(keys)}",
                        found=f"{name} of layer {index} is {value}",
                        expected=f"{ours[name]}, as in {donor}, whose config the result gets",
                        remedy="make sure that the models compute the same function of their weights",
                    )
                    return
    except InvalidInput as error:
        yield Finding("warn", error.where, error.found, error.expected, error.remedy)


def _layers(module: Module, stack: str, checkpoints: Mapping[str, Checkpoint]) -> Iterator[tuple[LayerOrigin, ...]]:
    models = {str(source.model) for cut in module.slices for source in cut.sources}
    depths = {model: main_depth(checkpoints[model], stack) for model in models}
    for cut in module.slices:
        ranges = [(str(source.model), *(source.layers or (0, 0))) for source in cut.sources]
        for model, _, end in ranges:
            if end > depths[model]:
                raise InvalidInput(
                    f"{cut.where}: layer_range of {model}",
                    found=f"end {end}",
                    expected=f"at most {depths[model]} layers",
                )
        _, start, end = ranges[0]
        for index in range(end - start):
            yield tuple(
                LayerOrigin(model, checkpoints[model].config, first + index, depths[model])
                for model, first, _ in ranges
            )


def _left_out(module: Module, checkpoints: Mapping[str, Checkpoint]) -> list[Finding]:
    models = dict.fromkeys(str(source.model) for cut in module.slices for source in cut.sources)
    found = []
    for model in models:
        predictions = sorted(prediction_tensors(checkpoints[model]))
        if predictions:
            found.append(
                Finding(
                    "warn",
                    f"{model}: {predictions[0]}",
                    found=f"layers that predict further tokens ({len(predictions)} tensors): left out",
                    expected="the layers before them as they were trained",
                    remedy="nothing to do, unless a server is to draft tokens with them: then merge whole models",
                )
            )
    return found


def _check_kinds(model: str, checkpoint: Checkpoint, stack: str) -> None:
    """That layers of one kind have the same tensors.

    Raises:
        InvalidInput: They have not.
    """
    part, depth = text_part(checkpoint.config), main_depth(checkpoint, stack)
    has: list[dict[str, tuple[int, ...]]] = [{} for _ in range(depth)]
    for name, tensor in checkpoint.tensors.items():
        at = parse_layer_place(name)
        if at is not None and at.stack == stack and at.index < depth and not is_optional(name):
            has[at.index][at.part] = tensor.shape
    seen: dict[str, int] = {}
    for index, tensors in enumerate(has):
        kinds = layer_kinds(part, index, depth, f"{model}: config.json")
        same = seen.setdefault(repr(kinds), index)
        if has[same] != tensors:
            named = min(dict(has[same].items() ^ tensors.items()))
            said = ", ".join(f"{name} {value}" for name, value in kinds.items()) or "of the one kind that is described"
            raise InvalidInput(
                f"{model}: {stack}.{index}.{named}",
                found=f"not what layer {same} has, although both are {said}",
                expected="the same tensors in all layers of a kind",
                remedy="merge whole models ('models'): what tells these layers apart is not in what is known of them",
            )
