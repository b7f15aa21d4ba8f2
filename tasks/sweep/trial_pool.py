"""Prepare the documents of a sweep, and run its search and its confirmation on the workers of a runner.

Tasks and texts are pinned by content, and their documents are split into sets. Scores come from the ledger if it has
them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.base.runners import Runner
from mergegate.tasks.base.stage import require_pinned, store
from mergegate.tasks.models.checkpoints import files_fingerprint
from mergegate.tasks.quality.evaluation import (
    DocumentSplits,
    EvalTask,
    SetName,
    call_with_task_data,
    clusters_in_order,
    pin_data,
    pin_sound_tasks,
)
from mergegate.tasks.quality.perplexity import HeldOutText, WindowSettings, read_distinct
from mergegate.tasks.sweep.confirmation import (
    Confirmation,
    ConfirmationPower,
    NothingToConfirm,
    confirm,
    confirm_soup,
    confirmation_power,
    reason_not_to_confirm,
)
from mergegate.tasks.sweep.objective import HAND_WRITTEN, TEXT, ScoresByMetric
from mergegate.tasks.sweep.search import SearchProblem, score_hand_written, search
from mergegate.tasks.sweep.settings import SweepSettings
from mergegate.tasks.sweep.study import (
    Ledger,
    SearchedSet,
    SearchProgress,
    Study,
    Trial,
    TrialRequest,
    TrialScores,
    score_once,
)
from mergegate.tasks.sweep.trial import TrialSet, TrialSetting, score_trial


class SweepEvidence(NamedTuple):
    """Pinned tasks and held-out text of a sweep, and the split of their documents into sets."""

    names: Mapping[str, str]  # Name of each task in lm-eval, by its name in the profile.
    tasks: tuple[EvalTask, ...]  # Tasks with all of their documents, without duplicates.
    splits: Mapping[str, DocumentSplits]  # By name of the task in lm-eval.
    text: HeldOutText | None  # None if the objective does not use it.
    text_splits: DocumentSplits

    def select_tasks(self, name: SetName) -> tuple[EvalTask, ...]:
        """Return the tasks restricted to the documents of one set, without reading their data."""
        return tuple(self._restrict(task, name) for task in self.tasks)

    def select_text(self, name: SetName) -> HeldOutText | None:
        """Return the held-out text restricted to the documents of one set."""
        return self.text and self.text.model_copy(update={"only": self.text_splits.of(name)})

    def gate_tasks(self, tasks: Sequence[EvalTask]) -> tuple[EvalTask, ...]:
        """Return the gate's ``tasks`` without the documents that the sweep uses."""
        searched = {task.name: task.digest for task in self.tasks}
        return tuple(
            self._restrict(task, "gate") if searched.get(task.in_lm_eval) == task.digest else task for task in tasks
        )

    def _restrict(self, task: EvalTask, name: SetName) -> EvalTask:
        return task.model_copy(update={"only": self.splits[task.in_lm_eval].of(name), "data_digest": None})


def trial_sets(
    evidence: SweepEvidence, windows: WindowSettings, time_limit: float | None
) -> dict[SearchedSet, TrialSet]:
    """Return the documents of the search and of the confirmation, with every task pinned to its data.

    ``windows`` limits the number of documents of the held-out text. ``pin_data`` explains ``time_limit``.
    """
    names: tuple[SearchedSet, ...] = ("search", "confirmation")
    sets: dict[SearchedSet, TrialSet] = {}
    for name in names:
        text = evidence.select_text(name)
        sets[name] = TrialSet(
            tasks=tuple(pin_data(task, time_limit) for task in evidence.select_tasks(name)),
            text=text,
            text_documents=len(read_distinct(text, windows.documents).documents) if text else 0,
        )
    return sets


def pin_sweep(
    settings: SweepSettings,
    text: HeldOutText | None,
    guarded_clusters: Mapping[str, str | None],
    root: Path,
    hashes: HashMemo,
    data: Path | None = None,
    code_tasks: Collection[str] = (),
) -> SweepEvidence:
    """Pin all tasks of the objective and the constraints, and split their documents into sets.

    Args:
        settings: Settings of the search.
        text: Held-out text of ``perplexity``. None if the profile has none.
        guarded_clusters: Cluster field of each task in its guard, by the task's name in the profile.
        root: Directory to which relative paths refer.
        hashes: Cache of file hashes.
        data: Directory of datasets, relative to ``root`` (``evaluate.data``). Default: the Hub.
        code_tasks: Tasks whose generated code may be run (``evaluate.allow_code``). A trial never runs code, so such a
            task is only searched by a measure that needs none.

    Raises:
        InvalidInput: A task does not exist, lacks its data or cannot be evaluated; two tasks share a name; two settings
            of a task have different cluster fields; or the objective uses held-out text that the profile lacks.
    """
    cluster_fields: dict[str, str | None] = {}
    for index, term in enumerate(settings.objective):
        if term.task is None:
            continue
        previous = cluster_fields.get(term.task) or guarded_clusters.get(term.task)
        if term.cluster_by and previous not in (None, term.cluster_by):
            raise InvalidInput(
                f"sweep.objective[{index}].cluster_by",
                found=f"{term.cluster_by!r}, and {previous!r} elsewhere for the same task",
                expected="the same field for all uses of a task",
            )
        cluster_fields[term.task] = term.cluster_by or previous
    for constraint in settings.constraints:
        cluster_fields.setdefault(constraint.task, guarded_clusters.get(constraint.task))
    uses = [
        *((term.task, term.measure) for term in settings.objective),
        *((constraint.task, constraint.measure) for constraint in settings.constraints),
    ]
    searches_text = any(term.task is None for term in settings.objective)
    if searches_text and text is None:
        raise InvalidInput(
            "sweep.objective",
            found="a term without a task, but no 'perplexity' section",
            expected="a task, or perplexity.documents as held-out text",
        )

    def make_splits(field: str | None) -> DocumentSplits:
        sizes = settings.documents
        return DocumentSplits(search=sizes.search, confirmation=sizes.confirmation, seed=sizes.seed, together=field)

    for name in dict.fromkeys(task for task, measure in uses if measure == "metric" and task in code_tasks):
        raise InvalidInput(
            f"sweep: {name}",
            found="the measure 'metric' of a task with generated code",
            expected="a measure that runs no code, because a sweep scores models in memory",
            remedy="use log_likelihood, probability or entropy",
        )
    names: dict[str, str] = {}
    tasks: dict[str, EvalTask] = {}
    for reference, task in pin_sound_tasks(cluster_fields, root, hashes, data, code_tasks, location="sweep").items():
        if tasks.setdefault(task.name, task).digest != task.digest:
            raise InvalidInput(
                f"sweep: {reference}",
                found=f"the name {task.name!r}, which another task of this sweep has too",
                expected="a different name under 'task'",
            )
        names[reference] = task.name
    return SweepEvidence(
        names=names,
        tasks=tuple(tasks.values()),
        splits={names[reference]: make_splits(field) for reference, field in cluster_fields.items()},
        text=text if searches_text else None,
        text_splits=make_splits(None),
    )


@dataclass(frozen=True)
class PreparedSearch:
    """Search that can start, because its inputs exist, are pinned and passed all checks."""

    problem: SearchProblem
    method: str  # description of the searched merge, such as 'ties of 2 over base'
    directory: Path  # to which relative paths in recipes refer
    setting: TrialSetting
    gate_documents: Mapping[str, int]  # documents of each gate task that the sweep does not use

    def sizes(self) -> dict[str, dict[str, int]]:
        """Return the number of documents by set and task."""
        counts: dict[str, dict[str, int]] = {}
        for name, trial_set in self.setting.sets.items():
            tasks = [task.name for task in trial_set.tasks] + ([TEXT] if trial_set.text else [])
            counts[name] = {task: trial_set.size(task) for task in tasks}
        tasks = list(counts["search"])
        return {**counts, "gate": {task: self.gate_documents[task] for task in tasks if task in self.gate_documents}}


class TrialPool:
    """Workers on which the steps of a sweep run: forecast, search and confirmation.

    ``workers`` is the number of parallel workers, for the cost of the search.
    """

    def __init__(self, search: PreparedSearch, runner: Runner, ledger: Ledger, workers: int) -> None:
        self._search, self._runner, self._ledger, self._workers = search, runner, ledger, workers
        self._fingerprint = ""  # fingerprint of the parents' files when their hashes last matched the pinned ones

    def power(self) -> ConfirmationPower:
        """Score the hand-written recipes, and forecast the gains that the confirmation can detect."""
        problem, trial_set = self._search.problem, self._search.setting.sets["confirmation"]
        results = score_hand_written(problem, self._score_all, self._ledger)
        documents = {key: trial_set.size(key.task) for key in problem.objective.metric_keys}
        tables = [scores.table for scores in results]
        return confirmation_power(problem.objective, tables, documents, problem.settings.confidence)

    def search_all(
        self,
        on_progress: Callable[[SearchProgress], None],
        on_generation: Callable[[Sequence[Trial]], object] = lambda trials: None,
    ) -> Study:
        """Search until the budget is used up. The callbacks are those of :func:`.search`.

        Raises:
            Refused: A hand-written recipe, or a parent that a constraint names, has no score.
        """
        problem = self._search.problem
        references = dict.fromkeys(limit.reference for limit in problem.objective.limits)
        names = [name for name in references if name != HAND_WRITTEN]
        requests = [self._search.setting.parent_request(name) for name in names]
        tables = self._score_tables(requests, "sweep.constraints")
        return search(
            replace(problem, references=dict(zip(names, tables, strict=True))),
            self._score_all,
            self._ledger,
            workers=self._workers,
            on_progress=on_progress,
            on_generation=on_generation,
        )

    def confirm(self, study: Study) -> Confirmation | NothingToConfirm:
        """Test the winner on documents that no trial used, if it beat the reference in the search.

        Raises:
            Refused: The winner, its reference or a soup has no score on these documents.
        """
        nothing = None if study.soup else reason_not_to_confirm(study)
        if nothing is not None:
            return nothing
        setting = self._search.setting

        def score(*trials: Trial) -> list[ScoresByMetric]:
            recipes = [study.recipes[trial.number] for trial in trials]
            requests = [TrialRequest(recipe, "confirmation", directory=self._search.directory) for recipe in recipes]
            return self._score_tables(requests, "the confirmation")

        tasks = {task.name: task for task in setting.sets["confirmation"].tasks}
        clusters = {
            term.key: call_with_task_data(
                tasks[term.key.task],
                clusters_in_order,
                (tasks[term.key.task], term.cluster_by, setting.scoring.seed),
                "its clusters",
                None,
            )
            for term in self._search.problem.objective.terms
            if term.cluster_by is not None
        }
        if study.soup:
            return confirm_soup(study, lambda trial: score(trial)[0], clusters)
        assert study.best is not None, "otherwise there is nothing to confirm"
        winner, reference = score(study.best, study.reference)
        return confirm(study, winner, reference, clusters)

    def _score_tables(self, requests: Sequence[TrialRequest], location: str) -> list[ScoresByMetric]:
        results = score_once(requests, self._score_all, self._ledger)
        for scores in results:
            if scores.problem:
                raise Refused(
                    f"sweep: {location}", found=f"no score: {scores.problem}", expected="one number per document"
                )
        return [scores.table for scores in results]

    def _score_all(self, requests: Sequence[TrialRequest]) -> Iterator[tuple[int, TrialScores | Exception]]:
        """Score candidates. When a result arrives, check that the parents still have their pinned hashes."""
        parents = self._search.setting.parents
        for number, result in self._runner.run_each(partial(score_trial, self._search.setting), requests):
            # Compare hashes only if the fingerprint changed, because hashing can take longer than a trial.
            if (fingerprint := files_fingerprint(parents)) != self._fingerprint:
                require_pinned(parents, store().hashes)
                self._fingerprint = fingerprint
            yield number, result
