"""The first recipe that fits some models: how they are written in it, what the headers let through, the dtype."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from mergegate.flows.cli.profile_draft import RecipeDraft, recipe_drafts, with_template
from mergegate.flows.cli.recipe_parents import clear_recipe
from mergegate.merge_core import Checkpoint, load_recipe
from mergegate.merge_core.errors import MergegateError
from mergegate.merge_core.recipe import expand_user_path
from mergegate.tasks.checkpoints import ResolvedCheckpoint, find_checkpoint


def named_model(text: str, base: str) -> ResolvedCheckpoint:
    """A model; a directory with an adapter is one that is applied to the base."""
    place = expand_user_path(text)
    is_adapter = (place / "adapter_config.json").is_file() and not (place / "config.json").is_file()
    return find_checkpoint(f"{base}+{text}" if is_adapter else text)


def written_in(parent: ResolvedCheckpoint, out: Path) -> object:
    """A model as a recipe in ``out`` writes it: directories relative to that."""
    if parent.adapter is not None:
        model, _, adapter = parent.ref.partition("+")
        return f"{_relative(model, out)}+{_relative(adapter, out)}"
    path = _relative(parent.ref, out)
    return {"model": {"path": path}} if parent.revision is None and ("@" in path or "+" in path) else path


def _relative(text: str, out: Path) -> str:
    place = expand_user_path(text)
    if not place.is_dir():
        return text
    path = Path(os.path.relpath(place.absolute(), out)).as_posix()
    return path if path.startswith(".") else f"./{path}"


def fitting_recipe(
    method: str, written: Sequence[object], out: Path, name: str
) -> tuple[RecipeDraft, str, tuple[ResolvedCheckpoint, ...]]:
    """The first draft that the headers let through, the dtype in which most of the weights are, and its parents.

    Args:
        method: The only one that is wanted; empty: any.
        written: The base, then the models, as a recipe in ``out`` writes them.
        name: What messages call the recipe by.

    Raises:
        MergegateError: what is wrong with the first draft, where none fits.
    """
    base, *models = written
    problems: list[MergegateError] = []
    for draft in recipe_drafts(base, models, method):
        recipe = replace(load_recipe(dict(draft.recipe), where=f"the recipe of {name}"), directory=out)
        try:
            cleared = clear_recipe(recipe)
        except MergegateError as error:
            problems.append(error)
            continue
        loses_template = any(finding.where.endswith(": chat template") for finding in cleared.findings)
        if loses_template and _has_one_template(cleared.opened.values()):
            draft = with_template(draft)
        return draft, _dtype(cleared.opened.values()), cleared.found
    raise problems[0]


def _has_one_template(parents: Iterable[Checkpoint]) -> bool:
    """Whether one chat template leads among them: a base mostly has none, and its fine-tunes share one."""
    found = Counter(template for parent in parents if (template := parent.chat_template) is not None)
    leading = [count for _, count in found.most_common(2)]
    return len(leading) == 1 or (len(leading) == 2 and leading[0] > leading[1])


def _dtype(parents: Iterable[Checkpoint]) -> str:
    """That of most bytes, of those that a recipe can name; float32 where none is."""
    sizes: Counter[str] = Counter()
    for parent in parents:
        for tensor in parent.tensors.values():
            if tensor.dtype.torch_name in ("bfloat16", "float16", "float32"):
                sizes[tensor.dtype.torch_name] += tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else "float32"
