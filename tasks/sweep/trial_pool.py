"""Run the search and the confirmation of a sweep on the workers of a runner, with scores from the ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mergegate.merge_core.errors import Refused
from mergegate.tasks.checkpoints import files_fingerprint
from mergegate.tasks.evaluation import call_with_task_data, clusters_in_order
from mergegate.tasks.runners import Runner
from mergegate.tasks.stage import require_pinned, store
from mergegate.tasks.sweep.confirmation import Confirmation, NothingToConfirm, confirm, reason_not_to_confirm
from mergegate.tasks.sweep.confirmation_power import ConfirmationPower, confirmation_power
from mergegate.tasks.sweep.ledger import Ledger, score_once
from mergegate.tasks.sweep.objective import HAND_WRITTEN, TEXT, ScoresByMetric
from mergegate.tasks.sweep.search import SearchProblem, score_hand_written, search
from mergegate.tasks.sweep.soup import confirm_soup, search_soup
from mergegate.tasks.sweep.study import SearchProgress, Study, Trial, TrialRequest, TrialScores
from mergegate.tasks.sweep.trial import TrialSetting, score_trial


@dataclass(frozen=True)
class PreparedSearch:
    """Search that can start, because its inputs exist, are pinned and passed all checks.

    Args:
        problem: Space, settings and objective of the search.
        method: Description of the searched merge, such as 'ties of 2 over base'.
        directory: Directory to which relative paths in recipes refer.
        setting: Settings that all trials share.
        gate_documents: Number of documents of each gate task that the sweep does not use.
    """

    problem: SearchProblem
    method: str
    directory: Path
    setting: TrialSetting
    gate_documents: Mapping[str, int]

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

    Args:
        search: Search to run.
        runner: Runner that scores candidates.
        ledger: Store of scored trials.
        workers: Number of parallel workers, for the cost of the search.
    """

    def __init__(self, search: PreparedSearch, runner: Runner, ledger: Ledger, workers: int) -> None:
        self._search, self._runner, self._ledger, self._workers = search, runner, ledger, workers
        self._fingerprint = ""  # fingerprint of the parents' files when their hashes last matched the pinned ones

    def power(self) -> ConfirmationPower:
        """Score the hand-written recipes, and forecast the gains that the confirmation can detect.

        Raises:
            Refused: A hand-written recipe cannot be scored.
        """
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
        """Search until the budget is used up.

        Args:
            on_progress: Callback after each newly scored trial and after each generation.
            on_generation: Callback after each generation, with all trials so far. Default: do nothing.

        Raises:
            Refused: A hand-written recipe, or a parent that a constraint names, has no score.
        """
        problem = self._search.problem
        references = dict.fromkeys(limit.reference for limit in problem.objective.limits)
        names = [name for name in references if name != HAND_WRITTEN]
        requests = [self._search.setting.parent_request(name) for name in names]
        tables = self._score_tables(requests, "sweep.constraints")
        run = search if problem.soup is None else search_soup
        return run(
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
        if study.best is None:
            return NothingToConfirm(why="the search has no candidate")
        winner, reference = score(study.best, study.reference)
        return confirm(study, winner, reference, clusters)

    def _score_tables(self, requests: Sequence[TrialRequest], location: str) -> list[ScoresByMetric]:
        results = score_once(requests, self._score_all, self._ledger, directory=self._search.directory)
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
