"""Find the first recipe that fits some models, according to their headers."""

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
    """Find a model. A directory with an adapter is applied to the base."""
    path = expand_user_path(text)
    is_adapter = (path / "adapter_config.json").is_file() and not (path / "config.json").is_file()
    return find_checkpoint(f"{base}+{text}" if is_adapter else text)


def written_in(parent: ResolvedCheckpoint, out: Path) -> object:
    """Return a model as written in a recipe in ``out``, with relative directories."""
    if parent.adapter is not None:
        model, _, adapter = parent.ref.partition("+")
        return f"{_relative(model, out)}+{_relative(adapter, out)}"
    path = _relative(parent.ref, out)
    return {"model": {"path": path}} if parent.revision is None and ("@" in path or "+" in path) else path


def _relative(text: str, out: Path) -> str:
    directory = expand_user_path(text)
    if not directory.is_dir():
        return text
    path = Path(os.path.relpath(directory.absolute(), out)).as_posix()
    return path if path.startswith(".") else f"./{path}"


def fitting_recipe(
    method: str, written: Sequence[object], out: Path, name: str
) -> tuple[RecipeDraft, str, tuple[ResolvedCheckpoint, ...]]:
    """Return the first draft that fits according to the headers, the dtype of most weights, and its parents.

    Args:
        method: Merge method to use. Empty: any.
        written: The base, then the models, as written in a recipe in ``out``.
        name: Name of the recipe in messages.

    Raises:
        MergegateError: No draft fits. The error is that of the first draft.
    """
    base, *models = written
    problems: list[MergegateError] = []
    for draft in recipe_drafts(base, models, method):
        recipe = replace(load_recipe(dict(draft.recipe), location=f"the recipe of {name}"), directory=out)
        try:
            cleared = clear_recipe(recipe)
        except MergegateError as error:
            problems.append(error)
            continue
        loses_template = any(finding.where.endswith(": chat template") for finding in cleared.findings)
        if loses_template and _has_one_template(cleared.opened.values()):
            draft = with_template(draft)
        return draft, _dtype(cleared.opened.values()), cleared.parents
    raise problems[0]


def _has_one_template(parents: Iterable[Checkpoint]) -> bool:
    """Return whether one chat template is the most common. Often the fine-tunes share one and the base has none."""
    templates = Counter(template for parent in parents if (template := parent.chat_template) is not None)
    leading = [count for _, count in templates.most_common(2)]
    return len(leading) == 1 or (len(leading) == 2 and leading[0] > leading[1])


def _dtype(parents: Iterable[Checkpoint]) -> str:
    """Return the dtype of most bytes, limited to dtypes that a recipe can name. Default: float32."""
    sizes: Counter[str] = Counter()
    for parent in parents:
        for tensor in parent.tensors.values():
            if tensor.dtype.torch_name in ("bfloat16", "float16", "float32"):
                sizes[tensor.dtype.torch_name] += tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else "float32"
