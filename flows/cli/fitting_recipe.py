"""Find the first recipe that fits some models, according to their headers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mergegate.flows.cli.profile_draft import RecipeDraft, recipe_drafts
from mergegate.flows.cli.recipe_parents import clear_recipe
from mergegate.merge_core import load_recipe
from mergegate.merge_core.errors import MergegateError
from mergegate.merge_core.recipe import expand_user_path
from mergegate.tasks.checkpoints import ResolvedCheckpoint


def model_in_recipe(parent: ResolvedCheckpoint, out: Path) -> object:
    """Return a model as written in a recipe in ``out``, with relative directories."""

    def relative(text: str) -> str:
        directory = expand_user_path(text)
        if not directory.is_dir():
            return text
        path = Path(os.path.relpath(directory.absolute(), out)).as_posix()
        return path if path.startswith(".") else f"./{path}"

    if parent.adapter is not None:
        model, _, adapter = parent.ref.partition("+")
        return f"{relative(model)}+{relative(adapter)}"
    path = relative(parent.ref)
    return {"model": {"path": path}} if parent.revision is None and ("@" in path or "+" in path) else path


def fitting_recipe(
    method: str, models: Sequence[object], out: Path, name: str
) -> tuple[RecipeDraft, tuple[ResolvedCheckpoint, ...]]:
    """Return the first draft that fits according to the headers, and its parents.

    Args:
        method: Merge method to use. Empty: any.
        models: The base, then the models, as written in a recipe in ``out``.
        out: Directory of the recipe, which relative paths in ``models`` start from.
        name: Name of the recipe in messages.

    Raises:
        MergegateError: No draft fits. The error is that of the first draft.
    """
    base, *tuned = models
    problems: list[MergegateError] = []
    for draft in recipe_drafts(base, tuned, method):
        recipe = replace(load_recipe(dict(draft.recipe), location=f"the recipe of {name}"), directory=out)
        try:
            cleared = clear_recipe(recipe)
        except MergegateError as error:
            problems.append(error)
            continue
        parents = cleared.opened.values()
        # Often the fine-tunes share one chat template and the base has none.
        templates = Counter(template for parent in parents if (template := parent.chat_template) is not None)
        most_common = [count for _, count in templates.most_common(2)]
        has_one_template = len(most_common) == 1 or (len(most_common) == 2 and most_common[0] > most_common[1])
        if has_one_template and any(finding.where.endswith(": chat template") for finding in cleared.findings):
            draft = draft.with_chat_template()
        # The dtype of most weights, limited to dtypes of a recipe.
        sizes: Counter[str] = Counter()
        for parent in parents:
            for tensor in parent.tensors.values():
                if tensor.dtype.torch_name in ("bfloat16", "float16", "float32"):
                    sizes[tensor.dtype.torch_name] += tensor.nbytes
        dtype = sizes.most_common(1)[0][0] if sizes else "float32"
        return replace(draft, recipe={**draft.recipe, "dtype": dtype}), cleared.parents
    raise problems[0]
