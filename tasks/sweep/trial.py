"""A trial: from a recipe to what its merge scores, in the process that holds models.

Nothing is written: the parents stay open, the network stays where it is, what is asked stays as tokens; a candidate is
merged tensor by tensor into the network (``network``) and answers (``questions``). The numbers are those of the bytes
that the engine would write for the same recipe and seed::

    setting = TrialSetting(parents=pinned, sets={"search": TrialSet(tasks=...)}, asked=..., scoring=Scoring())
    scores = score_trial(setting, TrialRequest(recipe={"merge_method": "ties", ...}, set="search"))
    scores.sheet[Asked("reverse", "log_likelihood")]            # one number a document

It does not matter which process is asked, nor what it was asked before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mergegate.merge_core import Checkpoint, MergePlan, load_recipe, plan_merge
from mergegate.merge_core.architecture.experts import match_experts
from mergegate.merge_core.errors import ChangedInput, DiskRefused, InvalidInput, MergegateError, suggest
from mergegate.merge_core.methods import PASSTHROUGH
from mergegate.merge_core.recipe import CalibrationRequest, InputMeasurements
from mergegate.tasks.checkpoints import (
    OutOfModelMemory,
    PinnedCheckpoint,
    TellProgress,
    call_model_process,
    files_fingerprint,
    on_unload,
    tokenizer_digest,
    torch_threads,
)
from mergegate.tasks.evaluation import EvalTask, Scoring, tokenize_task
from mergegate.tasks.perplexity import HeldOutText, WindowSettings, read_held_out
from mergegate.tasks.stage import versions
from mergegate.tasks.store import digest
from mergegate.tasks.sweep.network import (
    CandidateMergeSettings,
    CandidateNetwork,
    Change,
    Stopwatch,
    network_from_files,
    structure_of,
)
from mergegate.tasks.sweep.search_documents import SearchDocuments
from mergegate.tasks.sweep.trials import TEXT, AskedSet, MetricKey, Sheet, TrialRequest, TrialScores

if TYPE_CHECKING:
    from mergegate.tasks.checkpoints import Model

_VERSION = 1  # to be raised when a trial means something else than before
_KEPT_QUESTIONS = 4  # sets of documents that are kept as tokens, for one tokenizer each


@dataclass(frozen=True)
class TrialSet:
    """The documents of one set.

    Args:
        tasks: Each with the documents of this set only.
        text: Held-out text, with the documents of this set only; None: it is not asked.
        text_documents: How many of those are read.
    """

    tasks: tuple[EvalTask, ...] = ()
    text: HeldOutText | None = None
    text_documents: int = 0

    def size(self, task: str) -> int:
        """Documents of a task, or of the text."""
        found = {one.name: one.documents or 0 for one in self.tasks}
        return self.text_documents if task == TEXT else found[task]


@dataclass(frozen=True)
class TrialSetting:
    """What all trials of a study have in common.

    Args:
        parents: Every checkpoint that a candidate may name.
        sets: What is asked, by set.
        asked: The numbers that are wanted of each document, in every set.
        scoring: As in the evaluation stage; its dtype is that of the network. Only for the backend ``hf``.
        windows: How held-out text is read; its dtype is not used.
        device: Of the network.
        merge_device: Where candidates are computed.
        seed: Of the random masks of a merge.
        base: Name of the parent that the size of a change is measured from; empty: it is not measured.
        looks: Where documents are cut into batches when no rule says otherwise: equal to that of the rules, a candidate
            gets the same last place with and without one.
        threads: That merge and score.
        measured: What parents show on their texts, for methods that ask.
    """

    parents: tuple[PinnedCheckpoint, ...]
    sets: Mapping[AskedSet, TrialSet]
    asked: tuple[MetricKey, ...]
    scoring: Scoring
    windows: WindowSettings = field(default_factory=WindowSettings)
    device: str = "cpu"
    merge_device: str = "cpu"
    seed: int = 0
    base: str = ""
    looks: tuple[float, ...] = (1.0,)
    threads: int = 1
    measured: Mapping[CalibrationRequest, InputMeasurements] = field(default_factory=dict)

    def as_it_is(self, name: str) -> TrialRequest:
        """A parent, with its adapter if it has one, as a candidate.

        Args:
            name: Of one of the parents.

        Raises:
            InvalidInput: There is no such parent.
        """
        return TrialRequest({"merge_method": PASSTHROUGH.name, "models": [{"model": _parent(self, name).ref}]})

    def digest(self) -> str:
        """Of all that decides a score, but for the candidate: 64 hex digits. Threads are not in it."""
        return digest(
            {
                "version": _VERSION,
                "parents": {parent.ref: parent for parent in self.parents},
                "sets": {name: [one.tasks, one.text] for name, one in self.sets.items()},
                "asked": [list(asked) for asked in self.asked],
                "scoring": self.scoring,
                "windows": self.windows,
                "device": self.device,
                "merge": [self.merge_device, self.seed],
                "base": self.base,
                "looks": self.looks,
                **(
                    {"measured": [[*what, one.digest] for what, one in sorted(self.measured.items())]}
                    if self.measured
                    else {}
                ),
                "versions": versions("torch", "transformers", "lm_eval", "numba"),
            }
        )


def score_trial(setting: TrialSetting, request: TrialRequest) -> TrialScores:
    """Merge a candidate in memory and ask it.

    Returns:
        What it scored; or, where this merge cannot be made or gives no finite numbers, the problem.

    Raises:
        InvalidInput: The documents cannot be asked; the process died.
        Refused: It took longer than ``scoring.time_limit``; the disk is full; a parent was changed.
    """
    began = time.perf_counter()
    found = call_model_process(
        _score,
        (setting, request),
        where="a trial of the sweep",
        time_limit=setting.scoring.time_limit,
    )
    seconds = dict(found.seconds)
    seconds["overhead"] = max(0.0, time.perf_counter() - began - sum(seconds.values()))
    sheet = {asked: np.frombuffer(numbers, np.float64) for asked, numbers in found.numbers}
    return TrialScores(sheet, found.dropped, found.change, seconds, found.problem)


def _parent(setting: TrialSetting, name: str) -> PinnedCheckpoint:
    names = {parent.name: parent for parent in setting.parents}
    if name not in names:
        raise InvalidInput(
            "sweep", found=f"no parent called {name!r}", expected=", ".join(names), remedy=suggest(name, names)
        )
    return names[name]


@dataclass(frozen=True)
class TrialAnswer:
    """``TrialScores`` as they travel between processes: plain data only."""

    numbers: tuple[tuple[MetricKey, bytes], ...] = ()  # float64
    dropped: bool = False
    change: float = float("nan")
    seconds: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""


# From here on: in the process that holds models.


def _score(setting: TrialSetting, request: TrialRequest, on_progress: TellProgress) -> TrialAnswer:
    place = _place_for(setting)
    answer = place.score(request, Stopwatch(lambda: on_progress(0, 1)))
    place.require_same_parents()
    return answer


class _Place:
    """What is kept from one trial of a study to the next."""

    def __init__(self, setting: TrialSetting) -> None:
        if setting.scoring.backend != "hf":
            raise InvalidInput(
                "sweep",
                found=f"evaluate.backend: {setting.scoring.backend}",
                expected="hf: a trial's network is in memory, where transformers asks it",
            )
        self.setting = setting
        self._state = files_fingerprint(setting.parents)
        self._checkpoints: dict[str, Checkpoint] = {}
        self._change = Change(_parent(setting, setting.base).open()) if setting.base else None
        self._how = CandidateMergeSettings(setting.seed, setting.merge_device, setting.threads)
        self._beside: dict[Path, str] = {}
        self._questions: dict[tuple[object, ...], SearchDocuments] = {}
        self.network: CandidateNetwork | None = None
        self._reading: tuple[object, ...] = ()  # how the network reads text

    def require_same_parents(self) -> None:
        """Raise ChangedInput if anything was done to a file of a parent since this place was made."""
        if files_fingerprint(self.setting.parents) != self._state:
            _forget()
            raise ChangedInput(
                "sweep: the parents",
                found="a file was changed while trials were scored",
                expected="what was pinned when the run began",
                remedy="run again",
            )

    def score(self, request: TrialRequest, watch: Stopwatch) -> TrialAnswer:
        """The candidate's numbers, or its problem."""
        try:
            change = self._fill(request, watch)
        except (DiskRefused, ChangedInput, OutOfModelMemory):
            self.network = None
            raise
        except MergegateError as problem:
            return TrialAnswer(seconds=watch.seconds, problem=str(problem))
        network = self.network
        assert network is not None, "it was filled"
        looks = request.race.looks if request.race else self.setting.looks
        with watch.on("questions"):
            questions = self._questions_for(network, request.set, looks)
        sheet: Sheet = {}
        dropped = False
        with watch.on("score"), torch_threads(network.loaded, self.setting.threads):
            for look, sheet in enumerate(questions.ask(network.loaded, watch.alive)):
                broken = next((asked for asked, numbers in sheet.items() if not np.isfinite(numbers).all()), None)
                if broken is not None:
                    where = broken.task or "held-out text"
                    found = f"{where}: {broken.measure} is no finite number for some documents"
                    return TrialAnswer(change=change, seconds=watch.seconds, problem=found)
                if request.race is not None and request.race.is_hopeless(sheet, look):
                    dropped = look < len(looks) - 1
                    break
        numbers = tuple((asked, values.tobytes()) for asked, values in sheet.items())
        return TrialAnswer(numbers, dropped, change, watch.seconds)

    def _fill(self, request: TrialRequest, watch: Stopwatch) -> float:
        """Have the merge of ``request`` in the network; the relative size of its change."""
        with watch.on("plan"):
            plan = self._plan(request)
            structure = structure_of(plan, self._beside)
        kept = self.network
        if kept is not None and kept.structure == structure and kept.fill(plan, self._how, watch, self._change):
            return self._change.relative if self._change else float("nan")
        del kept
        self.network = None  # its memory is needed for the next one
        setting = self.setting
        runs_code = any(parent.runs_code for parent in setting.parents if parent.ref == str(plan.recipe.donor))
        self.network = network_from_files(
            plan, structure, self._how, setting.scoring.dtype, setting.device, runs_code, watch
        )
        loaded = self.network.loaded
        template = getattr(loaded.tokenizer, "chat_template", None)
        self._reading = (tokenizer_digest(loaded.tokenizer), template, loaded.context)
        if self._change:
            with watch.on("change"):
                self._change.measure(plan, self._how)
            return self._change.relative
        return float("nan")

    def _plan(self, request: TrialRequest) -> MergePlan:
        where = f"{request.directory / 'sweep' if request.directory else 'sweep'}: recipe"
        recipe = load_recipe(request.recipe, where=where)
        if recipe.output is not None:
            raise InvalidInput(recipe.where, found="a recipe that makes an adapter", expected="one that makes a model")
        if recipe.texts:
            if unread := next(
                (asked for asked in recipe.calibration_requests if asked not in self.setting.measured), None
            ):
                raise InvalidInput(
                    f"{recipe.where}: {unread.model}",
                    found=f"{unread.text}, which was not read for {recipe.merge_method} in this way",
                    expected="texts that were read before the search",
                    remedy="search over methods, or over how texts are read, not over both",
                )
            measured = {asked.model: self.setting.measured[asked] for asked in recipe.calibration_requests}
            recipe = replace(recipe, measured=measured)
        by_ref = {parent.ref: parent for parent in self.setting.parents}
        tables = {}
        for reference in map(str, recipe.references()):
            if reference not in self._checkpoints:
                if reference not in by_ref:
                    raise InvalidInput(
                        recipe.where,
                        found=f"{reference}, which is not among the parents of the sweep",
                        expected="models that were resolved when it began",
                    )
                self._checkpoints[reference] = by_ref[reference].open()
            tables[reference] = self._checkpoints[reference]
        matched = match_experts(recipe, tables)
        return plan_merge(matched.recipe, matched.checkpoints)

    def _questions_for(self, network: CandidateNetwork, which: AskedSet, looks: tuple[float, ...]) -> SearchDocuments:
        wanted = (*self._reading, which, looks)
        if wanted not in self._questions:
            while len(self._questions) >= _KEPT_QUESTIONS:
                del self._questions[next(iter(self._questions))]
            self._questions[wanted] = _pose(self.setting, which, looks, network)
        self._questions[wanted] = found = self._questions.pop(wanted)
        return found


def _pose(
    setting: TrialSetting, which: AskedSet, looks: tuple[float, ...], network: CandidateNetwork
) -> SearchDocuments:
    chosen, loaded = setting.sets[which], network.loaded
    every = {task.name: task for task in chosen.tasks}
    tasks = {}
    for name in dict.fromkeys(asked.task for asked in setting.asked if asked.task != TEXT):
        if name not in every:
            raise InvalidInput("sweep", found=f"task {name} without documents for the {which}", expected="some")
        tokens = any(asked.task == name and asked.measure != "metric" for asked in setting.asked)
        tasks[name] = tokenize_task(every[name], setting.scoring, loaded, tokens=tokens)
    text = None
    if any(asked.task == TEXT for asked in setting.asked):
        if chosen.text is None:
            raise InvalidInput(
                "sweep", found=f"no held-out text for the {which}", expected="perplexity: {documents: ...}"
            )
        model: Model = setting.parents[0]
        text = read_held_out(loaded, model, chosen.text, setting.windows)
    return SearchDocuments(setting.asked, tasks, text, looks)


_place: _Place | None = None


def _place_for(setting: TrialSetting) -> _Place:
    global _place
    if _place is None or _place.setting != setting:
        _place = None  # first: two networks need not fit side by side
        _place = _Place(setting)
    return _place


def _forget() -> None:
    global _place
    _place = None


def _let_go() -> None:
    """Somebody else needs the memory; what is asked stays."""
    if _place is not None:
        _place.network = None


on_unload(_let_go)
