"""Pin the tasks and texts of a sweep by content, and split their documents into sets."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.evaluation import DocumentSplits, EvalTask, SetName, pin_data, pin_sound_tasks
from mergegate.tasks.perplexity import HeldOutText, WindowSettings, read_distinct
from mergegate.tasks.sweep.settings import SweepSettings
from mergegate.tasks.sweep.study import SearchedSet
from mergegate.tasks.sweep.trial import TrialSet


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

    ``windows`` limits the number of documents of the held-out text. For ``time_limit`` and for errors, see
    ``pin_data``.
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
