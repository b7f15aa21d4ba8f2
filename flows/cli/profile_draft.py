"""Draft a first recipe and profile as commented text, for ``mergegate init``. This module has no side effects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mergegate.merge_core.architecture import TEXT_GENERATOR, ModelKind
from mergegate.merge_core.checkpoint import ThinkingTemplate
from mergegate.merge_core.methods import Method, find_method, merge_methods
from mergegate.merge_core.parsing import flow_yaml
from mergegate.tasks.preflight import EXAMPLES, describe_judging

NO_GUARDS = "the gate checks only the perplexity, so a merge that lost a skill is released."
NOT_JUDGED = "nothing judges the merge, so it is not published."
SCHEMA_LINE = "# yaml-language-server: $schema={}\n"

# Benchmark names in model cards, the most specific first, with the lm-eval task of each.
_CLAIMS = (
    ("gsm8k", "gsm8k"),
    ("mmlu-pro", "mmlu_pro"),
    ("mmlu_pro", "mmlu_pro"),
    ("mmlu", "mmlu"),
    ("hellaswag", "hellaswag"),
    ("winogrande", "winogrande"),
    ("arc-challenge", "arc_challenge"),
    ("arc_challenge", "arc_challenge"),
    ("ai2_arc", "arc_challenge"),
    ("arc-easy", "arc_easy"),
    ("arc_easy", "arc_easy"),
    ("piqa", "piqa"),
    ("truthful", "truthfulqa_mc2"),
    ("ifeval", "ifeval"),
    ("boolq", "boolq"),
    ("openbookqa", "openbookqa"),
    ("sciq", "sciq"),
    ("lambada", "lambada_openai"),
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

    def lines(self) -> Iterator[str]:
        """Yield the lines under ``evaluate``."""
        yield f"  # {_line(self.name)} is a thinking model. Only the text after its thought is scored.\n"
        yield "  chat_template: true\n"
        if self.template.has_switch:
            yield "  enable_thinking: true\n"
        if self.template.end:
            yield f"  think_end_token: {flow_yaml(self.template.end)}\n"


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
        return bool(self.documents) or any(not guard.problem for guard in self.guards)


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
    tasks = dict.fromkeys(
        next((task for needle, task in _CLAIMS if needle in word.lower().replace(" ", "-")), "") for word in words
    )
    return tuple(task for task in tasks if task)


def profile_text(draft: ProfileDraft) -> str:
    """Return the profile as YAML with comments."""
    license = draft.license
    lines = [
        SCHEMA_LINE.format(draft.schema),
        "# How the merge is released. Next: mergegate check, then mergegate run, with this file.\n",
        f"name: {flow_yaml(draft.name)}\n",
        f"recipe: {flow_yaml(draft.recipe)}\n",
        "\n",
        "checks:\n",
        "  # Use of the merge: commercial or research, public or private. The license of every parent must allow it.\n",
        *(f"  #   {_line(name)}: {_line(declared)}\n" for name, declared in license.declared.items()),
        *(f"  # doubt: {_line(doubt)}\n" for doubt in license.doubts),
    ]
    if license.doubts and not license.accepted:
        lines.append("  # To accept a doubt, write its subject: accepted: {SUBJECT: 'name: reason'}\n")
    accepted = f", accepted: {flow_yaml(dict(license.accepted))}" if license.accepted else ""
    lines.append(f"  license: {{purpose: {license.purpose}, visibility: {license.visibility}{accepted}}}\n\n")
    if draft.documents:
        lines.append(
            "# Text that no model was trained on, one document per line (500 or more are good). It shows within\n"
            "# seconds whether the merge is broken: a perplexity over 5 % above the better parent's fails.\n"
        )
        if draft.is_sample:
            lines.append("# These few lines are mergegate's sample. Replace them with a file of your own.\n")
        lines.append(f"perplexity: {{documents: {flow_yaml(draft.documents)}, max_increase: 5%}}\n")
    elif draft.kind.is_causal:
        lines.append("# A text that no model was trained on shows within seconds whether the merge is broken:\n")
        lines.append("# perplexity: {documents: data/held-out.jsonl, max_increase: 5%}\n")
    if not draft.kind.reads_text:
        lines.append(f"# The merge is {draft.kind.noun}, {describe_judging(draft.kind)}.\n")
        lines.append("# docs/explanation/kinds-of-models.md\n")
    lines.append(
        "\n# Skills to keep: a task (its name in lm-eval, or a file), the parent to compare the merge with on the\n"
        "# same documents, and the points that it may lose. docs/how-to/gate-on-your-own-task.md\n"
    )
    mark = "" if any(not guard.problem for guard in draft.guards) else "# "
    if mark:
        lines.append(f"# Without tasks, {NO_GUARDS if draft.documents else NOT_JUDGED}\n")
    lines.append(f"{mark}evaluate:\n")
    if draft.thinking:
        lines += [f"{mark}{line}" for line in draft.thinking.lines()]
    lines.append(f"{mark}  tasks:\n")
    for guard in draft.guards:
        if guard.problem:
            lines.append(f"#   left out: {_line(guard.problem)}\n")
        task, reference = flow_yaml(guard.task), flow_yaml(guard.guarded_by)
        comment = "# " if guard.problem or mark else ""
        own = "".join(f", {key}: {flow_yaml(value)}" for key, value in guard.prompt_settings.items())
        item = f"{comment}    - {{task: {task}, guarded_by: {reference}, max_drop: 3{own}}}"
        lines.append(f"{item}   # {_line(guard.why)}\n")
    if not draft.guards:
        lines.append(f"#    - {EXAMPLES[draft.kind.task_forms[0] if draft.kind.task_forms else 'text']}\n")
    lines += [
        "\n# Remedies to try in this order when the gate refuses: changes of the recipe, or other recipes.\n",
        "# remedies:\n#   - {density: 0.3}\n",
    ]
    if draft.kind.is_causal:
        lines += [
            "\n# Quantized variants, each judged against the merge and published next to it:\n",
            "# docs/how-to/release-quantized-variants.md\n",
            "# variants:\n#   - {format: gguf, types: [Q8_0, Q4_K_M]}\n",
        ]
    lines += [
        "\n# Target of a release that passes. Other targets: hub, s3, oci, mlflow (docs/explanation/publishing.md)\n",
        f"{'' if draft.is_judged else '# '}publish: {{to: directory, path: {flow_yaml(draft.release)}}}\n",
    ]
    return "".join(lines)


def _line(text: str) -> str:
    """Fit untrusted text into one line of a comment."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())[:300]
