"""What a merge and its parents are measured on, pinned by content, and the rules that judge it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from merge_core.errors import InvalidInput, suggest
from merge_core.store import HashMemo
from tasks.checkpoints import ResolvedCheckpoint
from tasks.evaluation import EvalTask, Scoring, asking_of, require_effect, require_examples, require_own_mean
from tasks.gate import EvaluateSettings, GateRule, Guard, check_guards, comparable_parents, pin_tasks, with_anchor
from tasks.judge import JudgePrompts, JudgeSettings, pin_prompts
from tasks.perplexity import DriftLimits, HeldOutText, PerplexitySettings, WindowSettings, pin_documents


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
            require_own_mean(guard.task, guard.mean_over, root)
        for task in tasks:
            require_examples(task, asking_of(task.asked, evaluate).num_fewshot)
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
