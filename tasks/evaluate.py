"""Evaluation: lm-eval scores of one model on one task, document by document, as a cached stage.

The unit of caching is one model and one task, so a task added to a profile costs only itself, and parents are evaluated
once, ever::

    guards, tasks = pin_tasks(settings.tasks, root, hashes)
    scores = {model.name: [evaluate(model, task, settings.scoring, runtime()) for task in tasks] for model in models}
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from merge_core.errors import InvalidInput
from merge_core.hashing import HashMemo
from merge_core.keys import NotInKey
from tasks import outcomes
from tasks.guards import GateRule, Guard
from tasks.model import Model
from tasks.runtime import Runtime
from tasks.scoring import Scoring as Scoring
from tasks.stage import StageValue, stage
from tasks.task_definition import EvalTask as EvalTask
from tasks.task_definition import pin_task as pin_task
from tasks.versions import versions
from tasks.watching import advance


class EvaluateSettings(Scoring, GateRule):
    """What is evaluated and how it is judged, in a profile under ``evaluate``."""

    tasks: tuple[Guard, ...] = Field(min_length=1)

    @property
    def scoring(self) -> Scoring:
        """The part that decides scores."""
        return Scoring.model_validate({name: getattr(self, name) for name in Scoring.model_fields})

    @property
    def rule(self) -> GateRule:
        """The part that judges them."""
        return GateRule(confidence=self.confidence, on_inconclusive=self.on_inconclusive)


class TaskScore(BaseModel):
    """Score of one task under one metric, in [0, 1] for accuracies, with the standard error of its mean."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    metric: str  # lm-eval's 'acc,none', 'exact_match,flexible-extract'
    n: int  # documents
    score: float
    stderr: float
    higher_is_better: bool


class Scores(StageValue):
    """Scores of one model. The artifact holds ``outcomes.parquet``, one row a document, task and metric:
    ``task, metric, doc_id, doc_hash, prompt_hash, target_hash, outcome``."""

    model: Annotated[str, NotInKey]
    tasks: tuple[TaskScore, ...]
    lm_eval_version: str

    def summary(self) -> str:
        return " · ".join(f"{score.task} {100 * score.score:.1f}" for score in self.tasks)


@stage("evaluate", version=1, subject="model")
def evaluate(out: Path, model: Model, task: EvalTask, scoring: Scoring, runtime: Runtime) -> Scores:
    """Score ``model`` on ``task``: a score for each metric, and ``outcomes.parquet`` with every document's.

    A group (``mmlu``) is scored as the mean over all of its documents.

    Raises:
        InvalidInput: when the model or the task's data cannot be loaded, or the task has no score by document.
    """
    from tasks.harness import score

    scored = score(model, task, scoring, runtime.device, lambda done, total: advance(done, total, "requests"))
    outcomes.write(out / outcomes.FILE, scored.outcomes)
    return Scores(
        model=model.name,
        tasks=tuple(
            _task_score(task.name, metric, [o.outcome for o in scored.outcomes if o.metric == metric], better)
            for metric, better in scored.higher_is_better.items()
        ),
        lm_eval_version=versions("lm_eval")["lm_eval"],
    )


def pin_tasks(guards: Sequence[Guard], root: Path, hashes: HashMemo) -> tuple[tuple[Guard, ...], tuple[EvalTask, ...]]:
    """All tasks of the guards, each once, and the guards in terms of the names that lm-eval calls those tasks.

    Raises:
        InvalidInput: as ``pin_task``; or when two definitions call themselves by one name.
    """
    written = {guard.task: pin_task(guard.task, root, hashes) for guard in guards}
    tasks: dict[str, EvalTask] = {}
    for text, task in written.items():
        if tasks.setdefault(task.name, task).digest != task.digest:
            raise InvalidInput(
                f"evaluate.tasks: {text}",
                found=f"calls itself {task.name!r}, as does another task of this profile",
                expected="a name of its own under 'task'",
            )
    renamed = tuple(guard.model_copy(update={"task": written[guard.task].name}) for guard in guards)
    return renamed, tuple(tasks.values())


def default_metric(metrics: Sequence[str]) -> str:
    """The metric that is judged when a guard names none: ``acc,none``; else what is leniently extracted from free
    answers (strict patterns measure format: a good model can score near zero); else the first."""
    if "acc,none" in metrics:
        return "acc,none"
    return next((metric for metric in metrics if metric.endswith(",flexible-extract")), metrics[0])


def _task_score(task: str, metric: str, values: Sequence[float], higher_is_better: bool) -> TaskScore:
    n = len(values)
    mean = sum(values) / n
    variance = sum((value - mean) ** 2 for value in values) / (n - 1) if n > 1 else 0.0
    return TaskScore(
        task=task,
        metric=metric,
        n=n,
        score=mean,
        stderr=(variance / n) ** 0.5,
        higher_is_better=higher_is_better,
    )
