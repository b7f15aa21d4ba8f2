"""Draft a recipe and a profile for ``mergegate init``, and find the first recipe that fits the models.

``profile.yaml.j2`` next to this file is the profile with its comments. This module writes no files.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from mergegate.flows.candidates import expand_training_runs
from mergegate.flows.operations.merge import clear_recipe
from mergegate.merge_core import Checkpoint, load_recipe
from mergegate.merge_core.architecture import TEXT_GENERATOR, ModelKind, find_kind, text_part
from mergegate.merge_core.checkpoint import ThinkingTemplate, find_thinking
from mergegate.merge_core.checkpoint.vocabulary import read_vocabulary
from mergegate.merge_core.errors import MergegateError
from mergegate.merge_core.methods import Method, find_method, merge_methods
from mergegate.merge_core.parsing import flow_yaml
from mergegate.merge_core.recipe import expand_user_path
from mergegate.tasks.models.checkpoints import ResolvedCheckpoint
from mergegate.tasks.preflight import EXAMPLES, describe_judging

SCHEMA_LINE = "# yaml-language-server: $schema={}\n"
_THINKING_BUDGET = 8192  # tokens of a thought and an answer, unless that is more than half of the model's context

# Benchmark names in model cards, the most specific first. The lm-eval task has the same name or follows the sign.
_CLAIMS = (
    "gsm8k mmlu_pro mmlu hellaswag winogrande arc_challenge ai2_arc=arc_challenge arc_easy piqa "
    "truthful=truthfulqa_mc2 ifeval boolq openbookqa sciq lambada=lambada_openai"
)


@dataclass(frozen=True)
class RecipeDraft:
    """A recipe that may fit the models. ``why`` is the comment above the recipe, which gives the reasons for it."""

    recipe: Mapping[str, Any]
    why: str


@dataclass(frozen=True)
class GuardDraft:
    """A task of the profile. If it has a ``problem``, it cannot run here and is only written as a comment."""

    task: str | Mapping[str, str]  # the settings of a built-in task
    guarded_by: str
    why: str
    problem: str = ""
    prompt_settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ThinkingDraft:
    """Settings for evaluating the thinking model ``name``, whose thoughts and answers may have ``budget`` tokens."""

    name: str
    template: ThinkingTemplate
    budget: int

    def prompt_settings(self, generates_answers: bool) -> dict[str, Any]:
        """Return the prompt settings of a guard. Tasks that score given answers leave no room for a thought."""
        return {"gen_kwargs": {"max_gen_toks": self.budget}} if generates_answers else {"apply_chat_template": False}


@dataclass(frozen=True)
class LicenseDraft:
    """The license section of a profile, and the doubts about licenses that the user must still settle."""

    purpose: str
    visibility: str
    declared: Mapping[str, str]  # license by parent
    doubts: tuple[str, ...] = ()
    accepted: Mapping[str, str] | None = None


@dataclass(frozen=True)
class ProfileDraft:
    """Content of the starter profile for a new project.

    ``documents`` is the path of the held-out text relative to the profile, or empty. ``is_sample`` tells whether that
    text is mergegate's own sample. ``kind`` is that of the merge.
    """

    name: str
    recipe: str
    license: LicenseDraft
    documents: str
    is_sample: bool
    guards: tuple[GuardDraft, ...]
    release: str
    schema: str
    thinking: ThinkingDraft | None = None
    kind: ModelKind = TEXT_GENERATOR

    @property
    def is_judged(self) -> bool:
        """Whether the profile has evidence, so that it may publish the merge."""
        return bool(self.documents) or self.has_tasks

    @property
    def has_tasks(self) -> bool:
        """Whether a task of the profile can run here."""
        return any(not guard.problem for guard in self.guards)

    @property
    def without_tasks(self) -> str:
        """Consequence of a profile without tasks."""
        if self.documents:
            return "the gate checks only the perplexity, so a merge that lost a skill is released."
        return "nothing judges the merge, so it is not published."


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


def recipe_drafts(base: object, models: Sequence[object], method: str) -> Iterator[RecipeDraft]:
    """Yield recipes in order of preference. The caller checks which one fits.

    Args:
        base: The base, as written in a recipe.
        models: The models, as written in a recipe.
        method: Merge method to use. Empty: any.

    Raises:
        InvalidInput: The method does not exist.
    """
    if method:
        chosen_method = find_method(method, "--method")
        plain = _recipe(chosen_method.name, base if chosen_method.base != "ordinary" else None, models)
        yield RecipeDraft(plain, f"{chosen_method.name}: {chosen_method.summary}")
        return
    if len(models) == 1:
        halfway = _recipe(_first_choice("ordinary").name, None, [base, *models])
        yield RecipeDraft(halfway, "One fine-tune: the mean of it and its base keeps more of the base's skills.")
        yield RecipeDraft(
            {**halfway, "tokenizer": {"source": "union"}},
            "One fine-tune, averaged with its base. The tokenizers differ, so rows are matched by token.",
        )
        return
    first_method = _first_choice("required")
    differences = _recipe(first_method.name, base, models)
    reader = next(candidate for candidate in merge_methods().values() if candidate.traits.reads_text)
    method_does = (
        f"# {first_method.name} {first_method.traits.first_draft}.\n"
        f"# mergegate tune finds its scale. {reader.name} needs no scale, but a text for each model\n"
        "# (docs/how-to/choose-a-method.md)."
    )
    reason = "so the difference from the base is what each model learned"
    yield RecipeDraft(differences, f"All tensors have the base's shapes, {reason}.\n{method_does}")
    yield RecipeDraft(
        {**differences, "tokenizer": {"source": "union"}},
        f"The models have the base's layers, {reason}.\n{method_does}\n"
        "# The tokenizers differ, so rows are matched by token, and all tokens are kept.",
    )
    average = _recipe(_first_choice("ordinary").name, None, models)
    why = "The models fit each other, but not the base, so they are averaged with equal weights."
    yield RecipeDraft(average, why)
    yield RecipeDraft({**average, "tokenizer": {"source": "union"}}, f"{why} Rows are matched by token.")


def run_drafts(run: str, method: str) -> Iterator[RecipeDraft]:
    """Yield the recipe of a training run, as it is written in a recipe. Empty ``method``: the mean.

    Raises:
        InvalidInput: The method does not exist.
    """
    chosen = {"merge_method": find_method(method, "--method").name} if method else {}
    why = (
        "It averages the newest checkpoints of a training run. Each run of the profile finds new ones.\n"
        "# Other windows and schedules: docs/how-to/merge-a-training-run.md"
    )
    yield RecipeDraft({**chosen, "run": run, "window": 8, "schedule": "mean"}, why)


def _first_choice(base: str) -> Method:
    """Return the method of a first recipe. ``base`` is how the method treats its base: ``required`` or ``ordinary``."""
    return next(method for method in merge_methods().values() if method.traits.first_draft and method.base == base)


def _recipe(name: str, base: object | None, models: Sequence[object]) -> dict[str, Any]:
    method = find_method(name, "method")
    share = round(1 / len(models), 4)
    values = {"weight": share if method.base == "ordinary" else 1.0, "density": 0.5, "t": 0.5}
    per_model: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    for parameter in method.parameters:
        if parameter.name in values:
            (shared if parameter.scope == "shared" else per_model)[parameter.name] = values[parameter.name]
    entries = [{"model": model, **({"parameters": dict(per_model)} if per_model else {})} for model in models]
    return {
        "merge_method": name,
        **({"base_model": base} if base is not None else {}),
        "models": entries,
        **({"parameters": shared} if shared else {}),
    }


def claimed_tasks(card: Mapping[str, object]) -> tuple[str, ...]:
    """Return lm-eval's tasks for the benchmarks in a model card: in its model index, its datasets and its tags."""
    words: list[str] = []
    index = card.get("model-index")
    for entry in index if isinstance(index, list) else []:
        results = entry.get("results") if isinstance(entry, Mapping) else None
        for result in results if isinstance(results, list) else []:
            dataset = result.get("dataset") if isinstance(result, Mapping) else None
            if isinstance(dataset, Mapping):
                words += [str(dataset.get(key, "")) for key in ("type", "name", "config")]
    for key in ("datasets", "tags"):
        listed = card.get(key)
        words += [str(word) for word in (listed if isinstance(listed, list) else [listed])]
    tasks: dict[str, None] = {}
    for word in words:
        spelled = word.lower().replace(" ", "_").replace("-", "_")
        tasks |= dict.fromkeys(
            [claim.rpartition("=")[2] for claim in _CLAIMS.split() if claim.partition("=")[0] in spelled][:1]
        )
    return tuple(tasks)


def profile_text(draft: ProfileDraft) -> str:
    """Return the profile as YAML with comments."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {"yaml": flow_yaml, "line": _line}
    example = EXAMPLES[draft.kind.task_forms[0] if draft.kind.task_forms else "text"]
    judging = "" if draft.kind.reads_text else f"{draft.kind.noun}, {describe_judging(draft.kind)}"
    return environment.get_template("profile.yaml.j2").render(draft=draft, example=example, judging=judging)


def _line(text: str) -> str:
    """Fit untrusted text into one line of a comment."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())[:300]
