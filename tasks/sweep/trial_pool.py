"""Run a search on workers: score each candidate once and record it in the ledger.

This module connects the pure parts of the sweep (samplers, scores, confirmation) with a runner and the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mergegate.merge_core.errors import Refused
from mergegate.tasks.checkpoints import files_fingerprint
from mergegate.tasks.evaluation import clusters_in_child
from mergegate.tasks.runners import Runner
from mergegate.tasks.stage import require_pinned, store
from mergegate.tasks.sweep.batch import score_once
from mergegate.tasks.sweep.confirmation import Confirmation, NothingToConfirm, confirm, reason_not_to_confirm
from mergegate.tasks.sweep.confirmation_power import ConfirmationPower, confirmation_power
from mergegate.tasks.sweep.ledger import Ledger
from mergegate.tasks.sweep.objective import Objective
from mergegate.tasks.sweep.search import score_hand_written, search
from mergegate.tasks.sweep.settings import SweepSettings
from mergegate.tasks.sweep.space import Space
from mergegate.tasks.sweep.study import HandWritten, SearchProgress, Study
from mergegate.tasks.sweep.trial import TrialSetting, score_trial
from mergegate.tasks.sweep.trials import TEXT, MetricKey, Sheet, Trial, TrialRequest, TrialScores


@dataclass(frozen=True)
class PreparedSearch:
    """A search that can start: all inputs exist, are pinned, and are allowed.

    Args:
        method: Description of the searched merge, such as 'ties of 2 over base'.
        directory: Directory that paths in recipes are relative to.
        hand_written: Hand-written recipes. The first is the searched recipe with its start values.
        setting: Settings that all trials share.
        for_the_gate: Number of documents of each gate task that neither trials nor the confirmation use.
    """

    settings: SweepSettings
    method: str
    directory: Path
    space: Space
    objective: Objective
    hand_written: tuple[HandWritten, ...]
    setting: TrialSetting
    for_the_gate: Mapping[str, int]

    def sizes(self) -> dict[str, dict[str, int]]:
        """Return the number of documents by set and task."""
        counts: dict[str, dict[str, int]] = {}
        for name, trial_set in self.setting.sets.items():
            tasks = [task.name for task in trial_set.tasks] + ([TEXT] if trial_set.text else [])
            counts[name] = {task: trial_set.size(task) for task in tasks}
        tasks = list(counts["search"])
        return {**counts, "gate": {task: self.for_the_gate[task] for task in tasks if task in self.for_the_gate}}


class TrialPool:
    """Run the stages of a search on workers.

    Args:
        runner: Runner that scores candidates.
        ledger: Store of scored trials.
        workers: Number of parallel workers. Each one is paid for.
    """

    def __init__(self, search: PreparedSearch, runner: Runner, ledger: Ledger, workers: int) -> None:
        self._search, self._runner, self._ledger, self._workers = search, runner, ledger, workers
        self._believed = ""  # fingerprint of the parents' files when their hashes last matched the pinned ones

    def power(self) -> ConfirmationPower:
        """Forecast the gains that the confirmation can detect.

        This scores the hand-written recipes on the documents of the search.

        Raises:
            Refused: A hand-written recipe cannot be scored.
        """
        search, trial_set = self._search, self._search.setting.sets["confirmation"]
        scored = score_hand_written(search.hand_written, self._score_all, self._ledger, search.directory)
        documents = {key: trial_set.size(key.task) for key in search.objective.asked}
        sheets = [scores.sheet for scores in scored]
        return confirmation_power(search.objective, sheets, documents, search.settings.confidence)

    def search_all(
        self,
        on_progress: Callable[[SearchProgress], None],
        on_generation: Callable[[Sequence[Trial]], object] = lambda trials: None,
    ) -> Study:
        """Search until the budget is used up.

        Args:
            on_progress: Callback after each newly scored trial and after each generation.
            on_generation: Callback after each generation, with all trials so far.

        Raises:
            Refused: A hand-written recipe has no score, or a parent that a constraint names has none.
        """
        return search(
            self._search.space,
            self._search.settings,
            self._score_all,
            self._ledger,
            objective=self._search.objective,
            hand_written=self._search.hand_written,
            references=self._references(),
            workers=self._workers,
            on_progress=on_progress,
            on_generation=on_generation,
        )

    def confirm(self, study: Study) -> Confirmation | NothingToConfirm:
        """Test the winner on documents that no trial saw, or return why there is nothing to test.

        Raises:
            Refused: The winner or its reference has no score on these documents.
        """
        nothing = reason_not_to_confirm(study)
        if nothing is not None or study.best is None:
            return nothing or NothingToConfirm(why="there is no candidate")
        recipes = [study.recipes[trial.number] for trial in (study.best, study.reference)]
        requests = [TrialRequest(recipe, set="confirmation", directory=self._search.directory) for recipe in recipes]
        winner, reference = self._sheets(requests, "the confirmation")
        return confirm(study, winner, reference, self._clusters())

    def _clusters(self) -> dict[MetricKey, Sequence[str]]:
        """Return the cluster of each confirmation document, for every term with ``cluster_by``."""
        setting = self._search.setting
        tasks = {task.name: task for task in setting.sets["confirmation"].tasks}
        return {
            term.asked: clusters_in_child(tasks[term.asked.task], term.cluster_by, setting.scoring.seed)
            for term in self._search.objective.terms
            if term.cluster_by is not None
        }

    def _references(self) -> dict[str, Sheet]:
        """Return the scores of the parents that constraints compare with, on the documents of the search."""
        names = self._search.objective.guards
        requests = [self._search.setting.as_it_is(name) for name in names]
        return dict(zip(names, self._sheets(requests, "sweep.constraints"), strict=True))

    def _sheets(self, requests: Sequence[TrialRequest], location: str) -> list[Sheet]:
        scored = score_once(requests, self._score_all, self._ledger, directory=self._search.directory)
        for scores in scored:
            if scores.problem:
                raise Refused(f"sweep: {location}", found=f"no score: {scores.problem}", expected="a number a document")
        return [scores.sheet for scores in scored]

    def _score_all(self, requests: Sequence[TrialRequest]) -> Iterator[tuple[int, TrialScores | Exception]]:
        """Score candidates, and reject a result unless the parents still match their pinned hashes when it arrives."""
        parents = self._search.setting.parents
        for number, result in self._runner.each(partial(score_trial, self._search.setting), requests):
            # Compare hashes only if the fingerprint changed, because hashing can take longer than a trial.
            if (state := files_fingerprint(parents)) != self._believed:
                require_pinned(parents, store().hashes)
                self._believed = state
            yield number, result
