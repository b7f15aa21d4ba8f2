"""Recipes of a sweep as people keep them: every choice once, and paths that are right wherever the file lies."""

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
    """The hand-written recipe with another choice in one place, for each choice: together they name all that a
    candidate can be made of.

    Args:
        recipe: With its holes open.
    """
    # As many layers as there are groups are enough to write it down.
    layers = max(free.layers or 1 for free in settings.parameters.values())
    space = make_space(recipe, settings, layers, "recipe")
    for coordinate in space.coordinates:
        for choice in coordinate.free.among:
            if choice != space.start[coordinate.name]:
                yield space.recipe_of({**space.start, coordinate.name: choice})


def reference_parent(parents: Sequence[PinnedCheckpoint]) -> str:
    """The parent that the size of a change is measured from: the base, or where there is none the first."""
    return next((parent.name for parent in parents if parent.is_base), parents[0].name)


def relocate_recipe(recipe: Mapping[str, Any], before: Path, now: Path) -> dict[str, Any]:
    """``recipe`` with relative paths of directories that lie at ``before`` rewritten for a file in ``now``."""

    def moved(text: str) -> str:
        model, plus, adapter = text.partition("+")
        return path(model) + plus + (path(adapter) if adapter else "")

    def path(text: str) -> str:
        if not text or Path(text).is_absolute() or not (before / text).is_dir():
            return text
        return os.path.relpath((before / text).absolute(), now.absolute())

    def look(node: Any, key: str = "") -> Any:
        if isinstance(node, Mapping):
            return {name: look(value, str(name)) for name, value in node.items()}
        if isinstance(node, (list, tuple)):
            return [look(item, key) for item in node]
        return moved(node) if isinstance(node, str) and key in (*_REFERENCES, "path") else node

    return {name: look(value, str(name)) for name, value in recipe.items()}


def count_layers(names: Iterable[str]) -> int | None:
    """Layers of the model that has tensors of these names; of several stacks the deepest, which is what gradients run
    along. None: it has none."""
    return max(stacks(names).values(), default=None)


def recipe_text(recipe: Mapping[str, Any], comment: str) -> str:
    """The recipe as YAML, with a line above that says where it comes from."""
    lines = "\n".join(textwrap.wrap(comment, 118, initial_indent="# ", subsequent_indent="# "))
    return (
        lines
        + "\n"
        + yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True, default_flow_style=None, width=100)
    )
