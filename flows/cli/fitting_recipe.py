"""Find the first recipe draft that fits a set of models, according to their headers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mergegate.flows.candidates import expand_training_runs
from mergegate.flows.cli.profile_draft import RecipeDraft, ThinkingDraft, recipe_drafts, run_drafts
from mergegate.flows.operations.merge import clear_recipe
from mergegate.merge_core import Checkpoint, load_recipe
from mergegate.merge_core.architecture import ModelKind, find_kind, text_part
from mergegate.merge_core.checkpoint import find_thinking
from mergegate.merge_core.checkpoint.vocabulary import read_vocabulary
from mergegate.merge_core.errors import MergegateError
from mergegate.merge_core.recipe import expand_user_path
from mergegate.tasks.checkpoints import ResolvedCheckpoint

_THINKING_BUDGET = 8192  # tokens of a thought and an answer, unless that is more than half of the model's context


class FittingRecipe(NamedTuple):
    """A recipe draft with its parents, the kind of the merge, and the settings for the first thinking model.

    ``summary`` describes the recipe, whose training run is expanded.
    """

    draft: RecipeDraft
    parents: tuple[ResolvedCheckpoint, ...]
    kind: ModelKind
    thinking: ThinkingDraft | None
    summary: str


def fitting_recipe(method: str, models: Sequence[ResolvedCheckpoint] | str, out: Path, name: str) -> FittingRecipe:
    """Return the first draft that fits the models.

    ``models`` starts with the base, or it is the path, the pattern or the revisions of a training run. An empty
    ``method`` allows any method. Paths in the recipe are relative to ``out``. ``name`` is the name of the recipe in
    messages.

    Raises:
        MergegateError: No draft fits. The error is that of the first draft.
    """

    def relative(text: str) -> str:
        directory = expand_user_path(text)
        if not directory.is_dir():
            return text
        path = Path(os.path.relpath(directory.absolute(), out)).as_posix()
        return path if path.startswith(".") else f"./{path}"

    written: list[object] = []  # the models as the recipe names them
    for model in () if isinstance(models, str) else models:
        if model.adapter is not None:
            merged, _, adapter = model.ref.partition("+")
            written.append(f"{relative(merged)}+{relative(adapter)}")
        else:
            path = relative(model.ref)
            is_ambiguous = model.revision is None and ("@" in path or "+" in path)
            written.append({"model": {"path": path}} if is_ambiguous else path)
    problems: list[MergegateError] = []
    if isinstance(models, str):
        is_on_hub = "@" in models and not expand_user_path(models).exists()
        is_local = not is_on_hub and not expand_user_path(models).is_absolute()
        drafts = run_drafts(Path(os.path.relpath(models, out)).as_posix() if is_local else models, method)
    else:
        drafts = recipe_drafts(written[0], written[1:], method)
    for draft in drafts:
        location = f"the recipe of {name}"
        (plain,) = expand_training_runs([draft.recipe], out, location).documents
        recipe = replace(load_recipe(dict(plain), location=location), directory=out)
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
            why = "The chat template is that of most models. Without this setting, the result would get the base's."
            draft = RecipeDraft({**draft.recipe, "chat_template": "auto"}, f"{draft.why}\n# {why}")
        # The dtype of most weights, limited to dtypes of a recipe.
        sizes: Counter[str] = Counter()
        for parent in parents:
            for tensor in parent.tensors.values():
                if tensor.dtype.torch_name in ("bfloat16", "float16", "float32"):
                    sizes[tensor.dtype.torch_name] += tensor.nbytes
        dtype = sizes.most_common(1)[0][0] if sizes else "float32"
        thinking = next(
            filter(None, (_thinking_draft(parent, cleared.opened[parent.ref]) for parent in cleared.parents)), None
        )
        kind = find_kind(cleared.plan.config, cleared.plan.companions)
        draft = replace(draft, recipe={**draft.recipe, "dtype": dtype})
        return FittingRecipe(draft, cleared.parents, kind, thinking if kind.is_causal else None, recipe.summary())
    raise problems[0]


def _thinking_draft(parent: ResolvedCheckpoint, checkpoint: Checkpoint) -> ThinkingDraft | None:
    """Return the settings for a merged model that thinks, or None if it does not."""
    vocabulary = read_vocabulary(checkpoint.companions) if checkpoint.chat_template and parent.is_merged else None
    if vocabulary is None or (template := find_thinking(checkpoint.chat_template, vocabulary.ids)) is None:
        return None
    context = text_part(checkpoint.config).config.get("max_position_embeddings")
    half = context // 2 if isinstance(context, int) else _THINKING_BUDGET
    return ThinkingDraft(parent.name, template, max(1, min(_THINKING_BUDGET, half)))
