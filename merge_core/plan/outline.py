"""Which tensors the result has: their names, and the name under which each source knows them.

Three cases. Whole models: the donor's tensors. Slices: layers are cut and renumbered. What stands before the layers
(embeddings) comes from the first slice, what stands after them (norm, head) from the last, and what stands beside them
(towers for images and sound, and what joins them to the text) whole from the first. An empty slice gives only that.
Modules: each part of the network is one of the two, on its own tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mergegate.merge_core.architecture import (
    is_optional,
    layer_count,
    main_depth,
    main_stack,
    parse_layer_place,
    positions_outside_layers,
    prediction_tensors,
    stacks,
)
from mergegate.merge_core.checkpoint import Checkpoint
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.recipe import Module, Recipe, Slice, Source

# What the peer's architecture tables call parts whose tensor names say it otherwise.
_ALSO_CALLED = {
    "text_decoder": ("language_model", "text_model", "decoder"),
    "text": ("language_model", "text_model", "decoder"),
    "vision_tower": ("vision_model", "visual", "vision"),
    "vision": ("vision_model", "visual", "vision_tower"),
}


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """An output tensor before its inputs are matched.

    Args:
        name: Its name.
        module: Part of the network that it belongs to.
        cut: Slice that it belongs to.
        source_names: Its name in each of the slice's sources.
        t: Position along the layers, 0 to 1, where gradients are evaluated; 0 outside the layers.
    """

    name: str
    module: Module
    cut: Slice
    source_names: tuple[str, ...]
    t: float


def outline(recipe: Recipe, donor: Checkpoint, checkpoints: Mapping[str, Checkpoint]) -> list[OutputSpec]:
    """All output tensors.

    Raises:
        InvalidInput: A module that does not exist, a part that no module covers.
    """
    specs = []
    for module, stack, names in _parts(recipe, donor):
        if is_sliced(module):
            chosen = stack or main_stack(donor, f"{recipe.where}: slices")
            specs += _sliced(module, chosen, names, donor, checkpoints)
        else:
            specs += _whole(module, names)
    return specs


def is_sliced(module: Module) -> bool:
    """Whether the module's layers are cut (``slices``), or whole models are merged."""
    return any(source.layers is not None for cut in module.slices for source in cut.sources)


def sliced_module(recipe: Recipe, donor: Checkpoint) -> Module | None:
    """The module whose slices decide the config's number of layers; None when layers keep their places.

    Raises:
        InvalidInput: A part other than the main stack of layers is sliced: its depth would not be in the config.
    """
    for module, stack, _ in _parts(recipe, donor):
        if not is_sliced(module):
            continue
        if stack is not None and stack != main_stack(donor, f"{recipe.where}: modules"):
            raise InvalidInput(
                f"{recipe.where}: modules.{module.name}.slices",
                found=f"slices of {stack}",
                expected="slices of the text layers only",
                remedy="use 'models' for this part",
            )
        return module
    return None


def _parts(recipe: Recipe, donor: Checkpoint) -> list[tuple[Module, str | None, list[str]]]:
    """Each module with its stack of layers (None: all there are) and its tensors."""
    if recipe.modules[0].name is None:
        return [(recipe.modules[0], None, list(donor.tensors))]
    found = stacks(donor.tensors)
    chosen = {module.name: _stack_of(module, found, f"{recipe.where}: modules") for module in recipe.modules}
    prefixes = {name: stack.rsplit(".", 1)[0] + "." if "." in stack else "" for name, stack in chosen.items()}
    for stack in found:
        if not any(stack.startswith(prefix) for prefix in prefixes.values()):
            raise InvalidInput(
                f"{recipe.where}: modules",
                found=f"nothing about {stack}",
                expected="a module for every stack of layers",
                remedy=f"add a module named {stack.rsplit('.', 2)[-2] if stack.count('.') else stack!r}",
            )
    # What is in no module's part of the tree (heads, projections) goes with the main layers.
    main = [name for name, stack in chosen.items() if found[stack] == layer_count(donor.config)]
    home = main[0] if main else recipe.modules[-1].name
    owned: dict[str | None, list[str]] = {module.name: [] for module in recipe.modules}
    for tensor in donor.tensors:
        fitting = [name for name, prefix in prefixes.items() if tensor.startswith(prefix)]
        owned[max(fitting, key=lambda name: len(prefixes[name])) if fitting else home].append(tensor)
    return [(module, chosen[module.name], owned[module.name]) for module in recipe.modules]


def _stack_of(module: Module, found: Mapping[str, int], where: str) -> str:
    if module.name == "default" and len(found) == 1:  # the peer's name for the only part of a plain language model
        return next(iter(found))
    names = (str(module.name), *_ALSO_CALLED.get(str(module.name), ()))
    for name in names:
        fitting = [stack for stack in found if stack == name or name in stack.split(".")]
        if len(fitting) == 1:
            return fitting[0]
    known = sorted({part for stack in found for part in stack.split(".")} - {"model", "layers", "blocks", "block"})
    raise InvalidInput(
        f"{where}.{module.name}",
        found=f"no part of the network with that name; layers are in {', '.join(found) or 'nothing'}",
        expected="a module of this network",
        remedy=suggest(str(module.name), known) if known else "use 'models'",
    )


def _whole(module: Module, names: Sequence[str]) -> list[OutputSpec]:
    (cut,) = module.slices
    depth = stacks(names)
    specs = []
    for name in names:
        at = parse_layer_place(name)
        t = _position(at.index, depth[at.stack]) if at else 0.0
        specs.append(OutputSpec(name, module, cut, (name,) * len(cut.sources), t))
    return specs


def _sliced(
    module: Module, stack: str, names: Sequence[str], donor: Checkpoint, checkpoints: Mapping[str, Checkpoint]
) -> list[OutputSpec]:
    first, last = module.slices[0], module.slices[-1]
    kept = [name for name in names if (at := parse_layer_place(name)) is None or at.stack != stack]
    whole = keeps_predictions(module, stack, checkpoints)
    if not whole:
        predictions = prediction_tensors(donor)
        kept = [name for name in kept if name not in predictions]
    places = _places(kept, module, stack, donor)
    specs = [_outside(name, module, first) for name in kept if places[name] == "before"]
    parts = {str(source.model): _layer_parts(checkpoints[str(source.model)], stack) for source in _sources(module)}
    layer = 0
    for cut in module.slices:
        ranges = [source.layers or (0, 0) for source in cut.sources]
        count = ranges[0][1] - ranges[0][0]
        for index in range(count):
            for part in parts[str(cut.sources[0].model)][ranges[0][0] + index]:
                known_as = tuple(f"{stack}.{start + index}.{part}" for start, _ in ranges)
                specs.append(OutputSpec(f"{stack}.{layer}.{part}", module, cut, known_as, _position(index, count)))
            layer += 1
    if whole:
        behind = main_depth(donor, stack)
        for name in names:
            at = parse_layer_place(name)
            if at is not None and at.stack == stack and at.index >= behind:
                specs.append(_outside(name, module, last))
    specs += [_outside(name, module, last) for name in kept if places[name] == "after"]
    specs += [_outside(name, module, first) for name in kept if places[name] == "beside"]
    return specs


def keeps_predictions(module: Module, stack: str, checkpoints: Mapping[str, Checkpoint]) -> bool:
    """Return whether layers that predict further tokens fit the result: they need the states of all layers before.

    They stay if every layer keeps its number, and are left out of every other stack. Empty slices move no layer.
    """
    number = 0
    for cut in module.slices:
        start, end = cut.sources[0].layers or (0, 0)
        if any(source.layers is None or (source.layers[0] != number and start < end) for source in cut.sources):
            return False
        number += end - start
    models = {str(source.model) for source in _sources(module)}
    return all(main_depth(checkpoints[model], stack) == number for model in models)


def _outside(name: str, module: Module, cut: Slice) -> OutputSpec:
    return OutputSpec(name, module, cut, (name,) * len(cut.sources), 0.0)


def _places(names: Sequence[str], module: Module, stack: str, donor: Checkpoint) -> dict[str, str]:
    """Before, after or beside the layers.

    Raises:
        InvalidInput: Nobody knows, and it matters: the first slice is of other models than the last.
    """
    places: dict[str, str] = dict(positions_outside_layers(names, stack, donor))
    ends = {tuple(source.model for source in cut.sources) for cut in (module.slices[0], module.slices[-1])}
    for name, place in places.items():
        if place != "unknown":
            continue
        if len(ends) > 1 and not is_optional(name):
            raise InvalidInput(
                f"{module.slices[0].where}: {name}",
                found="neither its name nor its family says whether it stands before or after the layers",
                expected="a tensor of the embeddings, or of the norm and head",
                remedy="begin and end with slices of the same models, or merge whole models ('models')",
            )
        places[name] = "after"
    return places


def _sources(module: Module) -> list[Source]:
    return [source for cut in module.slices for source in cut.sources]


def _layer_parts(checkpoint: Checkpoint, stack: str) -> list[list[str]]:
    """For every layer of a stack the parts (``mlp.up_proj.weight``) it has."""
    parts: list[list[str]] = [[] for _ in range(stacks(checkpoint.tensors).get(stack, 0))]
    for name in checkpoint.tensors:
        at = parse_layer_place(name)
        if at is not None and at.stack == stack:
            parts[at.index].append(at.part)
    return parts


def _position(index: int, count: int) -> float:
    return index / (count - 1) if count > 1 else 1.0
