"""List the tensors of the result, with the name of each in every source, and write the config of a merge of slices.

There are three cases:

- Whole models: the result has the donor's tensors.
- Slices: layers are cut and renumbered. Tensors before the layers (embeddings) come from the first slice, and tensors
  after them (norm, head) from the last. Parts next to the layers, such as towers for images and sound and their
  projections, come unchanged from the first slice. A slice with no layers provides only these outer tensors.
- Modules: each part of the network is one of the two cases above, with its own tensors.

If any merged model has an output head of its own, so does the result. For a model that ties its head, the embedding is
merged as the head. This equals untying the models first and then merging them, and does not depend on their order. The
result is tied only if all models are. When a checkpoint is opened, its stored bytes decide whether its head is its own
(:mod:`merge_core.checkpoint.checkpoint`).

Layers of one kind must have the same tensors. If they differ, mergegate's description of the model family is
incomplete: something unknown decides the difference, and it could decide differently after the layers are renumbered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mergegate.merge_core.architecture import (
    LayerOrigin,
    has_own_head,
    is_base_class,
    is_embedding,
    is_head,
    is_optional,
    keeps_layer_positions,
    layer_count,
    layer_kinds,
    main_depth,
    main_stack,
    parse_layer_place,
    positions_outside_layers,
    prediction_tensors,
    stacked_config,
    stacks,
    text_part,
)
from mergegate.merge_core.checkpoint import Checkpoint, ties_embeddings, with_tie
from mergegate.merge_core.errors import Finding, InvalidInput, suggest
from mergegate.merge_core.recipe import Module, Recipe, Slice

# mergekit's architecture tables call these parts by names that differ from the tensor names.
_ALIASES = {
    "text_decoder": ("language_model", "text_model", "decoder"),
    "text": ("language_model", "text_model", "decoder"),
    "vision_tower": ("vision_model", "visual", "vision"),
    "vision": ("vision_model", "visual", "vision_tower"),
}


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """An output tensor before its inputs are matched."""

    name: str  # name in the result
    module: Module  # part of the network that the tensor belongs to
    cut: Slice  # slice that the tensor belongs to
    source_names: tuple[str, ...]  # name of the tensor in each of the slice's sources
    # Position along the layers, from 0 to 1, at which parameter gradients are evaluated. 0 outside the layers.
    t: float


def with_head(
    recipe: Recipe, donor: Checkpoint, checkpoints: Mapping[str, Checkpoint]
) -> tuple[Checkpoint, list[Finding]]:
    """Return ``donor`` with the head and the tie flag that the result needs, and findings about heads that are lost.

    If a merged model has a head of its own and the donor has none, the donor's embedding becomes its head, under the
    name that the head has in the other model. If the donor has no matching embedding, the head is lost. If no model has
    a head of its own, the donor has no tie flag and another model is flagged as tied, the result is flagged as tied.
    """
    if has_own_head(donor):
        return donor, []
    names = dict.fromkeys(str(source.model) for source in recipe.sources)
    if ties_embeddings(donor.config) is None and any(ties_embeddings(checkpoints[name].config) for name in names):
        donor = replace(donor, config=with_tie(donor.config, value=True))
    untied = [] if is_base_class(donor.class_name) else [name for name in names if has_own_head(checkpoints[name])]
    tables = [tensor for tensor in donor.tensors.values() if is_embedding(tensor.name)]
    for name in untied:
        head = next(tensor for tensor in checkpoints[name].tensors if is_head(tensor))
        table = donor.tensors.get(head) or (tables[0] if len(tables) == 1 else None)
        if table is not None and table.name in checkpoints[name].tensors:
            tensors = {**donor.tensors, head: replace(table, name=head)}
            return replace(donor, tensors=tensors, config=with_tie(donor.config, value=False)), []
    return donor, [
        Finding(
            "block",
            f"{name}: config.json: tie_word_embeddings",
            found="the model has an output head of its own",
            expected=f"an embedding in {donor.directory.name} that can replace the head",
            remedy=f"set base_model: {name}",
        )
        for name in untied
    ]


def outline(recipe: Recipe, donor: Checkpoint, checkpoints: Mapping[str, Checkpoint]) -> list[OutputSpec]:
    """Return the specs of all output tensors."""
    specs: list[OutputSpec] = []
    for module, stack, names in _split_modules(recipe, donor):
        if is_sliced(module):
            layer_stack = stack or main_stack(donor, f"{recipe.location}: slices")
            specs += _sliced_specs(module, layer_stack, names, donor, checkpoints)
            continue
        (cut,), depths = module.slices, stacks(names)
        for name in names:
            at = parse_layer_place(name)
            t = _position(at.index, depths[at.stack]) if at else 0.0
            specs.append(OutputSpec(name, module, cut, (name,) * len(cut.sources), t))
    return specs


def is_sliced(module: Module) -> bool:
    """Return whether the module cuts layers (``slices``) instead of merging whole models."""
    return any(source.layers is not None for cut in module.slices for source in cut.sources)


def _split_modules(recipe: Recipe, donor: Checkpoint) -> list[tuple[Module, str | None, list[str]]]:
    """Return each module with its stack of layers (None for all stacks) and its tensors."""
    if recipe.modules[0].name is None:
        return [(recipe.modules[0], None, list(donor.tensors))]
    depths = stacks(donor.tensors)
    stack_by_module: dict[str | None, str] = {}
    for module in recipe.modules:
        names = (str(module.name), *_ALIASES.get(str(module.name), ()))
        candidates = [[stack for stack in depths if stack == name or name in stack.split(".")] for name in names]
        if module.name == "default":  # mergekit's name for the only part of a plain language model.
            candidates.insert(0, list(depths))
        own_stacks = next((found for found in candidates if len(found) == 1), None)
        if own_stacks is None:
            parts = {part for stack in depths for part in stack.split(".")} - {"model", "layers", "blocks", "block"}
            raise InvalidInput(
                f"{recipe.location}: modules.{module.name}",
                found=f"no part of the network has this name; layers are in {', '.join(depths) or 'no part'}",
                expected="the name of a part of this network",
                remedy=suggest(str(module.name), parts) or "use 'models'",
            )
        owner = next((name for name, stack in stack_by_module.items() if stack == own_stacks[0]), None)
        if owner is not None:
            raise InvalidInput(
                f"{recipe.location}: modules.{module.name}",
                found=f"it selects {own_stacks[0]}, which the module {owner} already selects",
                expected="one module for each stack of layers",
                remedy="remove one of the two modules, or rename it after another part of the network",
            )
        stack_by_module[module.name] = own_stacks[0]
    prefixes = {name: stack.rsplit(".", 1)[0] + "." if "." in stack else "" for name, stack in stack_by_module.items()}
    for stack in depths:
        if not any(stack.startswith(prefix) for prefix in prefixes.values()):
            raise InvalidInput(
                f"{recipe.location}: modules",
                found=f"no module contains {stack}",
                expected="a module for every stack of layers",
                remedy=f"add a module named {stack.rsplit('.', 2)[-2] if stack.count('.') else stack!r}",
            )
    # Tensors outside every module's subtree (heads, projections) belong to the module with the main layers.
    main = [name for name, stack in stack_by_module.items() if depths[stack] == layer_count(donor.config)]
    default_module = main[0] if main else recipe.modules[-1].name
    tensors_by_module: dict[str | None, list[str]] = {module.name: [] for module in recipe.modules}
    for tensor in donor.tensors:
        matching = [name for name, prefix in prefixes.items() if tensor.startswith(prefix)]
        owner = max(matching, key=lambda name: len(prefixes[name])) if matching else default_module
        tensors_by_module[owner].append(tensor)
    return [(module, stack_by_module[module.name], tensors_by_module[module.name]) for module in recipe.modules]


def _sliced_specs(
    module: Module, stack: str, names: Sequence[str], donor: Checkpoint, checkpoints: Mapping[str, Checkpoint]
) -> list[OutputSpec]:
    first, last = module.slices[0], module.slices[-1]
    outer_names = [name for name in names if (at := parse_layer_place(name)) is None or at.stack != stack]
    with_predictions = keeps_predictions(module, stack, checkpoints)
    if not with_predictions:
        predictions = prediction_tensors(donor)
        outer_names = [name for name in outer_names if name not in predictions]
    # A tensor of unknown position counts as after the layers if the first and the last slice have the same models.
    positions: dict[str, str] = dict(positions_outside_layers(outer_names, stack, donor))
    end_models = {tuple(source.model for source in cut.sources) for cut in (first, last)}
    for name in [name for name, position in positions.items() if position == "unknown"]:
        if len(end_models) > 1 and not is_optional(name):
            raise InvalidInput(
                f"{first.location}: {name}",
                found="neither its name nor its family shows whether it is before or after the layers",
                expected="a tensor of the embeddings, the norm or the head",
                remedy="use the same models in the first and last slice, or merge whole models ('models')",
            )
        positions[name] = "after"
    specs = [_outer_spec(name, module, first) for name in outer_names if positions[name] == "before"]
    parts: dict[str, dict[int, list[str]]] = {}  # Parts of each layer, such as ``mlp.up_proj.weight``, by model.
    for model in {str(cut.sources[0].model) for cut in module.slices}:
        parts[model] = defaultdict(list)
        for name in checkpoints[model].tensors:
            if (at := parse_layer_place(name)) is not None and at.stack == stack:
                parts[model][at.index].append(at.part)
    layer = 0
    for cut in module.slices:
        ranges = [source.layers or (0, 0) for source in cut.sources]
        count = ranges[0][1] - ranges[0][0]
        for index in range(count):
            for part in parts[str(cut.sources[0].model)][ranges[0][0] + index]:
                source_names = tuple(f"{stack}.{start + index}.{part}" for start, _ in ranges)
                specs.append(OutputSpec(f"{stack}.{layer}.{part}", module, cut, source_names, _position(index, count)))
            layer += 1
    if with_predictions:
        depth = main_depth(donor, stack)
        for name in names:
            at = parse_layer_place(name)
            if at is not None and at.stack == stack and at.index >= depth:
                specs.append(_outer_spec(name, module, last))
    specs += [_outer_spec(name, module, last) for name in outer_names if positions[name] == "after"]
    specs += [_outer_spec(name, module, first) for name in outer_names if positions[name] == "beside"]
    return specs


def keeps_predictions(module: Module, stack: str, checkpoints: Mapping[str, Checkpoint]) -> bool:
    """Return whether the result can keep the layers for multi-token prediction.

    These layers need the states of all layers before them, so the result must have all layers under their old numbers.
    Empty slices move no layer.
    """
    number = 0
    for cut in module.slices:
        start, end = cut.sources[0].layers or (0, 0)
        if any(source.layers is None or (source.layers[0] != number and start < end) for source in cut.sources):
            return False
        number += end - start
    return all(main_depth(checkpoints[model], stack) == number for model in _models(module))


def _outer_spec(name: str, module: Module, cut: Slice) -> OutputSpec:
    return OutputSpec(name, module, cut, (name,) * len(cut.sources), 0.0)


def _models(module: Module) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(source.model) for cut in module.slices for source in cut.sources))


def _position(index: int, count: int) -> float:
    return index / (count - 1) if count > 1 else 1.0


def config_of_slices(
    recipe: Recipe, donor: Checkpoint, checkpoints: Mapping[str, Checkpoint]
) -> tuple[dict[str, Any], list[Finding]] | None:
    """Return the config of a result with cut layers and findings about it, or None for a merge of whole models.

    Raises:
        InvalidInput: A part other than the main stack of layers is sliced. The config would not reflect its depth. Or a
            layer does not exist, or its meaning would change or is unknown at its new position.
    """
    module, own_stack = next(
        ((module, stack) for module, stack, _ in _split_modules(recipe, donor) if is_sliced(module)), (None, None)
    )
    if module is None:
        return None
    if own_stack is not None and own_stack != main_stack(donor, f"{recipe.location}: modules"):
        raise InvalidInput(
            f"{recipe.location}: modules.{module.name}.slices",
            found=f"slices of {own_stack}",
            expected="slices of the text layers only",
            remedy="use 'models' for this part",
        )
    location = f"{recipe.location}: slices"
    stack = main_stack(donor, location)
    models = _models(module)
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
        for index in range(ranges[0][2] - ranges[0][1]):
            origins = ((model, checkpoints[model].config, first + index, depths[model]) for model, first, _ in ranges)
            layers.append(tuple(LayerOrigin(*origin) for origin in origins))
    are_lost = not keeps_predictions(module, stack, checkpoints)
    lost = {model: sorted(prediction_tensors(checkpoints[model])) if are_lost else [] for model in models}
    warnings = [
        Finding(
            "warn",
            f"{model}: {predictions[0]}",
            found=f"the result does not get the layers for multi-token prediction ({len(predictions)} tensors)",
            expected="the preceding layers as they were trained",
            remedy="nothing to do; if a server should draft tokens with these layers, merge whole models",
        )
        for model, predictions in lost.items()
        if predictions
    ]
    config = stacked_config(donor.config, layers, location, dropped=bool(warnings))
    if not keeps_layer_positions(layers):
        for model in dict.fromkeys(origin.model for origins in layers for origin in origins):
            _check_kinds(model, checkpoints[model], stack)
    return config, warnings


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
