"""Where candidates are scored: each once, by whoever is free, and kept.

What is pure (what to ask for next, what a score means, whether a gain is one) lies elsewhere; here it meets a runner
and the ledger.
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
    """A search that can begin: everything is here, pinned, and allowed.

    Args:
        method: What is searched: 'ties of 2 over base'.
        directory: What paths in recipes are relative to.
        hand_written: The recipes that people wrote; the first is the one with the holes at their start values.
        setting: What all trials have in common.
        for_the_gate: Documents of each task that no trial and no confirmation sees, as far as the gate asks them.
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
        """Documents by set and task."""
        found: dict[str, dict[str, int]] = {}
        for name, chosen in self.setting.sets.items():
            tasks = [task.name for task in chosen.tasks] + ([TEXT] if chosen.text else [])
            found[name] = {task: chosen.size(task) for task in tasks}
        tasks = list(found["search"])
        return {**found, "gate": {task: self.for_the_gate[task] for task in tasks if task in self.for_the_gate}}


class TrialPool:
    """Who does the work of a search, and where it is kept.

    Args:
        runner: Scores candidates.
        ledger: Has those that were scored.
        workers: Side by side; money is counted for each.
    """

    def __init__(self, search: PreparedSearch, runner: Runner, ledger: Ledger, workers: int) -> None:
        self._search, self._runner, self._ledger, self._workers = search, runner, ledger, workers
        self._believed = ""  # state of the parents' files when their hashes were last seen to be the pinned ones

    def power(self) -> ConfirmationPower:
        """What the confirmation will be able to show; scores the hand-written recipes on the documents of the search.

        Raises:
            Refused: One of them cannot be scored.
        """
        search, asked = self._search, self._search.setting.sets["confirmation"]
        scored = score_hand_written(search.hand_written, self._score_all, self._ledger, search.directory)
        documents = {one: asked.size(one.task) for one in search.objective.asked}
        sheets = [scores.sheet for scores in scored]
        return confirmation_power(search.objective, sheets, documents, search.settings.confidence)

    def search_all(
        self,
        on_progress: Callable[[SearchProgress], None],
        on_generation: Callable[[Sequence[Trial]], object] = lambda trials: None,
    ) -> Study:
        """Search until the budget is used.

        Args:
            on_generation: Called with all trials so far.

        Raises:
            Refused: A hand-written recipe, or a parent that a constraint names, has no score.
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
        """The one test on documents that no trial saw; that there is nothing to be tested.

        Raises:
            Refused: The winner, or what it is held against, has no score there.
        """
        nothing = reason_not_to_confirm(study)
        if nothing is not None or study.best is None:
            return nothing or NothingToConfirm(why="there is no candidate")
        recipes = [study.recipes[trial.number] for trial in (study.best, study.reference)]
        requests = [TrialRequest(recipe, set="confirmation", directory=self._search.directory) for recipe in recipes]
        winner, reference = self._sheets(requests, "the confirmation")
        return confirm(study, winner, reference, self._clusters())

    def _clusters(self) -> dict[MetricKey, Sequence[str]]:
        """Of terms whose documents belong together, what each document of the confirmation belongs to."""
        setting = self._search.setting
        tasks = {task.name: task for task in setting.sets["confirmation"].tasks}
        return {
            term.asked: clusters_in_child(tasks[term.asked.task], term.cluster_by, setting.scoring.seed)
            for term in self._search.objective.terms
            if term.cluster_by is not None
        }

    def _references(self) -> dict[str, Sheet]:
        """What the parents that constraints compare with got on the documents of the search."""
        names = self._search.objective.guards
        requests = [self._search.setting.as_it_is(name) for name in names]
        return dict(zip(names, self._sheets(requests, "sweep.constraints"), strict=True))

    def _sheets(self, requests: Sequence[TrialRequest], where: str) -> list[Sheet]:
        scored = score_once(requests, self._score_all, self._ledger, directory=self._search.directory)
        for scores in scored:
            if scores.problem:
                raise Refused(f"sweep: {where}", found=f"no score: {scores.problem}", expected="a number a document")
        return [scores.sheet for scores in scored]

    def _score_all(self, requests: Sequence[TrialRequest]) -> Iterator[tuple[int, TrialScores | Exception]]:
        """Score candidates; nothing is believed unless the parents are still what was pinned when it comes."""
        parents = self._search.setting.parents
        for number, result in self._runner.each(partial(score_trial, self._search.setting), requests):
            if (
                state := files_fingerprint(parents)
            ) != self._believed:  # hashes are asked for only then: a trial is short
                require_pinned(parents, store().hashes)
                self._believed = state
            yield number, result
