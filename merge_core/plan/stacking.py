"""Build the config of a merge of slices, and check that layers of one kind have the same tensors.

If two layers of one kind have different tensors, mergegate's description of the model family is incomplete: something
unknown decides the difference, and it could decide differently after the layers are renumbered.
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
from mergegate.merge_core.recipe import Recipe


def config_of_slices(
    recipe: Recipe, donor: Checkpoint, checkpoints: Mapping[str, Checkpoint]
) -> tuple[dict[str, Any], list[Finding]] | None:
    """Return the config of a result with cut layers and findings about it, or None for a merge of whole models.

    Raises:
        InvalidInput: A layer does not exist, or its meaning would change or is unknown at its new position.
    """
    module = sliced_module(recipe, donor)
    if module is None:
        return None
    location = f"{recipe.location}: slices"
    stack = main_stack(donor, location)
    models = {str(source.model) for cut in module.slices for source in cut.sources}
    depths = {model: main_depth(checkpoints[model], stack) for model in models}
    layers: list[tuple[LayerOrigin, ...]] = []
    for cut in module.slices:
        ranges = [(str(source.model), *(source.layers or (0, 0))) for source in cut.sources]
        for model, _, end in ranges:
            if end > depths[model]:
                raise InvalidInput(
                    f"{cut.location}: layer_range of {model}",
                    found=f"end {end}",
                    expected=f"at most {depths[model]} layers",
                )
        _, start, end = ranges[0]
        for index in range(end - start):
            origins = (
                LayerOrigin(model, checkpoints[model].config, first + index, depths[model])
                for model, first, _ in ranges
            )
            layers.append(tuple(origins))
    warnings = []
    if not keeps_predictions(module, stack, checkpoints):
        for model in dict.fromkeys(str(source.model) for cut in module.slices for source in cut.sources):
            if predictions := sorted(prediction_tensors(checkpoints[model])):
                finding = Finding(
                    "warn",
                    f"{model}: {predictions[0]}",
                    found=f"the result does not get the layers for multi-token prediction ({len(predictions)} tensors)",
                    expected="the preceding layers as they were trained",
                    remedy="nothing to do; if a server should draft tokens with these layers, merge whole models",
                )
                warnings.append(finding)
    config = stacked_config(donor.config, layers, location, dropped=bool(warnings))
    if not keeps_layer_positions(layers):
        for model in dict.fromkeys(origin.model for origins in layers for origin in origins):
            _check_kinds(model, checkpoints[model], stack)
    return config, warnings


def differing_kinds(donor_name: str, donor: Checkpoint, model: str, parent: Checkpoint) -> Iterator[Finding]:
    """Yield a finding if layers with the same number in two whole models compute different things."""
    donor_part, parent_part = text_part(donor.config), text_part(parent.config)
    if donor_part.family is None or donor_part.family != parent_part.family or donor_part.family.refused is not None:
        return
    try:
        stack = main_stack(donor, donor_name)
        depth = main_depth(donor, stack)
        if main_depth(parent, stack) != depth:
            return
        for index in range(depth):
            donor_kinds = layer_kinds(donor_part, index, depth, f"{donor_name}: config.json")
            for name, value in layer_kinds(parent_part, index, depth, f"{model}: config.json").items():
                if donor_kinds[name] != value:
                    keys = next(kind.keys for kind in donor_part.family.kinds if kind.name == name)
                    yield Finding(
                        "warn",
                        f"{model}: config.json: {', '.join(keys)}",
                        found=f"{name} of layer {index} is {value}",
                        expected=f"{donor_kinds[name]}, as in {donor_name}, whose config the result gets",
                        remedy="make sure that the models compute the same function of their weights",
                    )
                    return
    except InvalidInput as error:
        yield Finding("warn", error.where, error.found, error.expected, error.remedy)


def _check_kinds(model: str, checkpoint: Checkpoint, stack: str) -> None:
    """Raise InvalidInput if layers of one kind have different tensors."""
    part, depth = text_part(checkpoint.config), main_depth(checkpoint, stack)
    shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in range(depth)]
    for name, tensor in checkpoint.tensors.items():
        at = parse_layer_place(name)
        if at is not None and at.stack == stack and at.index < depth and not is_optional(name):
            shapes[at.index][at.part] = tensor.shape
    first_index: dict[str, int] = {}
    for index, tensors in enumerate(shapes):
        kinds = layer_kinds(part, index, depth, f"{model}: config.json")
        same_kind = first_index.setdefault(repr(kinds), index)
        if shapes[same_kind] != tensors:
            differing_part = min(dict(shapes[same_kind].items() ^ tensors.items()))
            description = ", ".join(f"{name} {value}" for name, value in kinds.items()) or "of the same kind"
            raise InvalidInput(
                f"{model}: {stack}.{index}.{differing_part}",
                found=f"layer {same_kind} has a different tensor here, although both layers are {description}",
                expected="the same tensors in all layers of a kind",
                remedy="merge whole models ('models'), because mergegate does not know how these layers differ",
            )
