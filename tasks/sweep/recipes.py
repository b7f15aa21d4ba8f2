"""Enumerate the recipes of a sweep, rewrite their relative paths, and format them for saving."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mergegate.merge_core.architecture import stacks
from mergegate.tasks.checkpoints import PinnedCheckpoint
from mergegate.tasks.sweep.settings import SweepSettings
from mergegate.tasks.sweep.space import make_space

_REFERENCES = ("model", "base_model", "source_model", "tokenizer_source", "source")


def enumerate_recipes(recipe: Mapping[str, Any], settings: SweepSettings) -> Iterator[dict[str, Any]]:
    """Yield variants of the start recipe that differ from it in one coordinate each.

    There is one variant for each choice of a coordinate other than its start value. The start recipe and its variants
    together name everything that a candidate can be made of.

    Args:
        recipe: Recipe with placeholders for the coordinates.
        settings: Settings of the sweep.
    """
    # The real number of layers is not needed here. One layer per group is enough to write the recipe.
    layers = max(free.layers or 1 for free in settings.parameters.values())
    space = make_space(recipe, settings, layers, "recipe")
    for coordinate in space.coordinates:
        for choice in coordinate.free.choices:
            if choice != space.start[coordinate.name]:
                yield space.recipe_of({**space.start, coordinate.name: choice})


def reference_parent(parents: Sequence[PinnedCheckpoint]) -> str:
    """Return the parent that changes are measured from: the base or, without a base, the first parent."""
    return next((parent.name for parent in parents if parent.is_base), parents[0].name)


def relocate_recipe(recipe: Mapping[str, Any], before: Path, now: Path) -> dict[str, Any]:
    """Return ``recipe`` with relative paths rewritten from the directory ``before`` to the directory ``now``.

    Only paths of directories that exist relative to ``before`` are rewritten.
    """

    def relocate_reference(text: str) -> str:
        model, plus, adapter = text.partition("+")
        return relocate_path(model) + plus + (relocate_path(adapter) if adapter else "")

    def relocate_path(text: str) -> str:
        if not text or Path(text).is_absolute() or not (before / text).is_dir():
            return text
        return os.path.relpath((before / text).absolute(), now.absolute())

    def relocate(node: Any, key: str = "") -> Any:
        if isinstance(node, Mapping):
            return {name: relocate(value, str(name)) for name, value in node.items()}
        if isinstance(node, (list, tuple)):
            return [relocate(item, key) for item in node]
        return relocate_reference(node) if isinstance(node, str) and key in (*_REFERENCES, "path") else node

    return {name: relocate(value, str(name)) for name, value in recipe.items()}


def count_layers(names: Iterable[str]) -> int | None:
    """Return the number of layers of a model, based on the names of its tensors.

    If the model has several stacks of layers, return the number of layers in the deepest stack, because gradients run
    along it. Return None if the model has no layers.
    """
    return max(stacks(names).values(), default=None)


def recipe_text(recipe: Mapping[str, Any], comment: str) -> str:
    """Return the recipe as YAML, with a comment above it that states its origin."""
    lines = "\n".join(textwrap.wrap(comment, 118, initial_indent="# ", subsequent_indent="# "))
    return (
        lines
        + "\n"
        + yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True, default_flow_style=None, width=100)
    )
