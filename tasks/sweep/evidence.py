"""What a sweep asks about, pinned by content, and how its documents are divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.evaluation import DocumentSplits, EvalTask, SetName, pin_data, pin_sound_tasks, require_examples
from mergegate.tasks.perplexity import HeldOutText, WindowSettings, read_texts
from mergegate.tasks.sweep.settings import SweepSettings
from mergegate.tasks.sweep.trial import TrialSet
from mergegate.tasks.sweep.trials import AskedSet


class SweepEvidence(NamedTuple):
    """Tasks and held-out text of a sweep.

    Args:
        names: What lm-eval calls each task, by what the profile says.
        tasks: Each once, whole.
        divisions: By lm-eval's name.
        text: Held-out text, where it is searched on.
        text_division: Of that text.
    """

    names: Mapping[str, str]
    tasks: tuple[EvalTask, ...]
    divisions: Mapping[str, DocumentSplits]
    text: HeldOutText | None
    text_division: DocumentSplits

    def tasks_of(self, name: SetName) -> tuple[EvalTask, ...]:
        """The tasks with the documents of one set only. Their data are not looked at yet."""
        return tuple(self._only(task, name) for task in self.tasks)

    def text_of(self, name: SetName) -> HeldOutText | None:
        """The held-out documents of one set."""
        return self.text and self.text.model_copy(update={"only": self.text_division.of(name)})

    def left_for_the_gate(self, tasks: Sequence[EvalTask]) -> tuple[EvalTask, ...]:
        """``tasks`` without the documents that the sweep looks at."""
        searched = {task.name: task.digest for task in self.tasks}
        return tuple(
            self._only(task, "gate") if searched.get(task.in_lm_eval) == task.digest else task for task in tasks
        )

    def _only(self, task: EvalTask, name: SetName) -> EvalTask:
        return task.model_copy(update={"only": self.divisions[task.in_lm_eval].of(name), "data_digest": None})


def trial_sets(evidence: SweepEvidence, windows: WindowSettings, time_limit: float | None) -> dict[AskedSet, TrialSet]:
    """What trials are asked, and what the confirmation asks: with the data of each task pinned as they are now.

    Raises:
        InvalidInput, Refused: as ``pin_data``.
    """
    names: tuple[AskedSet, ...] = ("search", "confirmation")
    found: dict[AskedSet, TrialSet] = {}
    for name in names:
        text = evidence.text_of(name)
        found[name] = TrialSet(
            tasks=tuple(pin_data(task, time_limit) for task in evidence.tasks_of(name)),
            text=text,
            text_documents=len(read_texts(text, windows.documents)) if text else 0,
        )
    return found


def pin_sweep(
    settings: SweepSettings,
    text: HeldOutText | None,
    guarded: Mapping[str, str | None],
    root: Path,
    hashes: HashMemo,
    data: Path | None = None,
    num_fewshot: int | None = None,
) -> SweepEvidence:
    """All tasks of objective and constraints by content; relative paths are relative to ``root``.

    Args:
        text: The held-out documents of ``perplexity``; None where the profile has none.
        guarded: What keeps documents together for the gate, by task as the profile says it.
        data: Directory with datasets, relative to ``root`` (``evaluate.data``); None: the Hub.
        num_fewshot: Examples that the profile wants; None: as each task says.

    Raises:
        InvalidInput: for a task that is not there, lacks its data or cannot be asked, one name for two definitions, two
            that disagree on which documents of a task belong together, or an objective on held-out text where there is
            none.
    """
    together: dict[str, str | None] = {}
    for index, term in enumerate(settings.objective):
        if term.task is None:
            continue
        known = together.get(term.task) or guarded.get(term.task)
        if term.cluster_by and known not in (None, term.cluster_by):
            raise InvalidInput(
                f"sweep.objective[{index}].cluster_by",
                found=f"{term.cluster_by!r}, and {known!r} elsewhere for the same task",
                expected="one field for all that is asked of a task",
            )
        together[term.task] = term.cluster_by or known
    for constraint in settings.constraints:
        together.setdefault(constraint.task, guarded.get(constraint.task))
    searches_text = any(term.task is None for term in settings.objective)
    if searches_text and text is None:
        raise InvalidInput(
            "sweep.objective",
            found="a term without a task, and no 'perplexity'",
            expected="a task, or perplexity.documents as held-out text",
        )

    def division(field: str | None) -> DocumentSplits:
        sizes = settings.documents
        return DocumentSplits(search=sizes.search, confirmation=sizes.confirmation, seed=sizes.seed, together=field)

    names: dict[str, str] = {}
    tasks: dict[str, EvalTask] = {}
    for written, task in pin_sound_tasks(together, root, hashes, data, where="sweep").items():
        require_examples(task, num_fewshot)
        if tasks.setdefault(task.name, task).digest != task.digest:
            raise InvalidInput(
                f"sweep: {written}",
                found=f"calls itself {task.name!r}, as does another task of this sweep",
                expected="a name of its own under 'task'",
            )
        names[written] = task.name
    return SweepEvidence(
        names=names,
        tasks=tuple(tasks.values()),
        divisions={names[written]: division(field) for written, field in together.items()},
        text=text if searches_text else None,
        text_division=division(None),
    )
