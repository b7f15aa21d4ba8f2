"""What a merge and its parents are measured on, pinned by content, and the rules that judge it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mergegate.merge_core.architecture import dtype_in
from mergegate.merge_core.errors import InvalidInput, MergegateError, suggest
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.parsing import read_json
from mergegate.tasks.checkpoints import ResolvedCheckpoint
from mergegate.tasks.evaluation import (
    EvalTask,
    Scoring,
    find_backend,
    require_declared_mean,
    require_effect,
    require_examples,
    resolve_prompt_settings,
)
from mergegate.tasks.gate import (
    EvaluateSettings,
    GateRule,
    Guard,
    check_guards,
    comparable_parents,
    pin_tasks,
    with_anchor,
)
from mergegate.tasks.judge import JudgePrompts, JudgeSettings, pin_prompts
from mergegate.tasks.perplexity import DriftLimits, HeldOutText, PerplexitySettings, WindowSettings, pin_documents


class JudgeQuestions(NamedTuple):
    """What a judge is asked, pinned by content, and how."""

    prompts: JudgePrompts
    settings: JudgeSettings


class Evidence(NamedTuple):
    """What the merge and its parents are measured on, pinned by content, and the rules that judge it."""

    tasks: tuple[EvalTask, ...] = ()
    scoring: Scoring = Scoring()
    guards: tuple[Guard, ...] = ()
    rule: GateRule = GateRule()
    documents: HeldOutText | None = None
    windows: WindowSettings | None = None
    limits: DriftLimits | None = None
    ensemble: bool = False
    answers: JudgeQuestions | None = None
    computed: str = ""  # why models are computed in another format than they are stored in; empty where they are not


def check_references(
    evaluate: EvaluateSettings | None,
    perplexity: PerplexitySettings | None,
    judge: JudgeSettings | None,
    parents: Sequence[ResolvedCheckpoint],
) -> None:
    """See that every guard, perplexity and the judge compare the merge with a model that there is.

    Raises:
        InvalidInput: naming the first that does not, with a suggestion.
    """
    names = [parent.name for parent in parents]
    check_guards(evaluate.tasks if evaluate else (), names)
    for section, settings in (("evaluate", evaluate), ("perplexity", perplexity)):
        if settings:
            comparable_parents(settings.reference, names, names, f"{section}.reference")
    if judge and judge.guarded_by not in names:
        raise InvalidInput(
            "judge.guarded_by",
            found=f"{judge.guarded_by!r}, which is no model of this merge",
            expected="the name of a parent",
            remedy=suggest(judge.guarded_by, names),
        )


def pin_evidence(
    evaluate: EvaluateSettings | None,
    perplexity: PerplexitySettings | None,
    judge: JudgeSettings | None,
    root: Path,
    hashes: HashMemo,
) -> Evidence:
    """Tasks, documents and prompts by content; relative paths are relative to ``root``.

    Raises:
        InvalidInput: for a task or a file that is not there.
    """
    evidence = Evidence()
    if evaluate:
        guards, tasks = pin_tasks(evaluate.tasks, root, hashes, evaluate.data, evaluate.allow_code)
        for guard in evaluate.tasks:
            require_effect(guard.task, guard.own, root)
            require_declared_mean(guard.task, guard.mean_over, root)
        for task in tasks:
            require_examples(task, resolve_prompt_settings(task.asked, evaluate).num_fewshot)
        evidence = evidence._replace(
            tasks=tasks, scoring=evaluate.scoring, guards=with_anchor(guards, evaluate.anchor), rule=evaluate.gate_rule
        )
    if perplexity:
        evidence = evidence._replace(
            documents=pin_documents(perplexity, root, hashes),
            windows=perplexity.windows,
            limits=perplexity.limits,
            ensemble=perplexity.ensemble,
        )
    if judge:
        evidence = evidence._replace(answers=JudgeQuestions(pin_prompts(judge, root, hashes), judge))
    return evidence


def with_supported_dtype(evidence: Evidence, stored: Collection[str], without_units: Collection[str]) -> Evidence:
    """``evidence`` with ``auto`` meaning float32, for all models alike, where one of them is stored in a format that
    this machine cannot compute in. What is loaded elsewhere, by a server, is as it was.

    Args:
        stored: Formats of the models that are measured.
        without_units: Formats that are converted here for each sum: slower than float32, and no more precise.
    """
    slow = sorted(set(stored) & set(without_units))
    if not slow:
        return evidence
    scoring, windows, answers = evidence.scoring, evidence.windows, evidence.answers
    wide: dict[str, str] = {"dtype": "float32"}
    changed: dict[str, Any] = {}
    if scoring.dtype == "auto" and find_backend(scoring.backend).loads_here:
        changed["scoring"] = scoring.model_copy(update=wide)
    if windows and windows.dtype == "auto":
        changed["windows"] = windows.model_copy(update=wide)
    if answers and answers.settings.dtype == "auto":
        changed["answers"] = answers._replace(settings=answers.settings.model_copy(update=wide))
    why = f"computed in float32: this processor has no units for {' and '.join(slow)}, in which models are stored"
    is_told = evidence.tasks or changed.keys() - {"scoring"}  # not of tasks that nobody asks
    return evidence._replace(**changed, computed=why if changed and is_told else "")


def stored_dtypes(models: Sequence[ResolvedCheckpoint]) -> frozenset[str]:
    """Formats of models, as a loader takes them from their configurations; of one that has none nothing is said."""
    found = set()
    for model in models:
        with suppress(MergegateError):  # whoever loads it says what is wrong with it
            found.add(dtype_in(read_json(model.directory / "config.json")))
    return frozenset(found - {""})
