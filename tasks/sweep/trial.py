"""Run a trial: merge a candidate in memory and score it, in the model process.

Between trials the parents stay open, the network stays in memory, and the documents stay tokenized. A candidate is
merged tensor by tensor into the network (:mod:`network`) and scored on the documents (:mod:`search_documents`). Only a
candidate that cannot be copied into the network, such as the first of its structure, is written to a temporary
directory. The scores equal those of the checkpoint that the engine would write for the same recipe and seed::

    setting = TrialSetting(parents=pinned, sets={"search": TrialSet(tasks=...)}, metric_keys=..., scoring=Scoring())
    scores = score_trial(setting, TrialRequest(recipe={"merge_method": "ties", ...}, document_set="search"))
    scores.table[MetricKey("reverse", "log_likelihood")]        # one number per document

The result does not depend on which process runs the trial or on earlier trials.
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
from mergegate.merge_core.errors import CannotDecide, ChangedInput, InvalidInput, MergegateError, suggest
from mergegate.merge_core.methods import PASSTHROUGH
from mergegate.merge_core.recipe import CalibrationRequest, InputMeasurements
from mergegate.tasks.checkpoints import (
    CallNeeds,
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
    BaseDistance,
    CandidateNetwork,
    NetworkSettings,
    Stopwatch,
    load_network,
    structure_digest,
)
from mergegate.tasks.sweep.objective import TEXT, MetricKey, ScoresByMetric
from mergegate.tasks.sweep.search_documents import SearchDocuments
from mergegate.tasks.sweep.study import SearchedSet, TrialRequest, TrialScores

if TYPE_CHECKING:
    from mergegate.tasks.checkpoints import Model

_VERSION = 1  # increment when the meaning of a trial changes
_MAX_TOKENIZED_SETS = 4  # largest number of tokenized document sets in memory, one tokenizer each


@dataclass(frozen=True)
class TrialSet:
    """Documents of one set.

    Args:
        tasks: Tasks, restricted to the documents of this set.
        text: Held-out text, restricted to the documents of this set. Default: none.
        text_documents: Number of documents of the text that are read.
    """

    tasks: tuple[EvalTask, ...] = ()
    text: HeldOutText | None = None
    text_documents: int = 0

    def size(self, task: str) -> int:
        """Return the number of documents of a task, or of the text if ``task`` is ``TEXT``."""
        sizes = {item.name: item.documents or 0 for item in self.tasks}
        return self.text_documents if task == TEXT else sizes[task]


@dataclass(frozen=True)
class TrialSetting:
    """Settings that all trials of a study share.

    Args:
        parents: Every checkpoint that a candidate may name.
        sets: Documents by name of the set.
        metric_keys: Metrics to compute for each document, in every set.
        scoring: Scoring settings of the evaluation stage. Only the backend ``hf`` is supported.
        windows: Window settings for held-out text, of which the dtype is ignored.
        device: Device of the network.
        merge_device: Device on which candidates are merged.
        seed: Seed of the random masks of a merge.
        base: Name of the parent from which the change of a candidate is measured. Default: changes are not measured.
        looks: Shares of the documents in separate batches, for trials without a race. With the shares of the races, a
            candidate gets bit-identical scores with and without a race.
        threads: Number of threads for merging and scoring.
        measured: Calibration measurements of the parents, for methods that use them.
    """

    parents: tuple[PinnedCheckpoint, ...]
    sets: Mapping[SearchedSet, TrialSet]
    metric_keys: tuple[MetricKey, ...]
    scoring: Scoring
    windows: WindowSettings = field(default_factory=WindowSettings)
    device: str = "cpu"
    merge_device: str = "cpu"
    seed: int = 0
    base: str = ""
    looks: tuple[float, ...] = (1.0,)
    threads: int = 1
    measured: Mapping[CalibrationRequest, InputMeasurements] = field(default_factory=dict)

    def parent_request(self, name: str) -> TrialRequest:
        """Return a request to score the parent ``name`` itself, with its adapter if it has one.

        Raises:
            InvalidInput: There is no parent of that name.
        """
        return TrialRequest({"merge_method": PASSTHROUGH.name, "models": [{"model": _parent(self, name).ref}]})

    def digest(self) -> str:
        """Return a digest of everything except the candidate that determines a score: 64 hex digits."""
        return digest(
            {
                "version": _VERSION,
                "parents": {parent.ref: parent for parent in self.parents},
                "sets": {name: [item.tasks, item.text] for name, item in self.sets.items()},
                "asked": [list(key) for key in self.metric_keys],
                "scoring": self.scoring,
                "windows": self.windows,
                "device": self.device,
                "merge": [self.merge_device, self.seed],
                "base": self.base,
                "looks": self.looks,
                **(
                    {"measured": [[*request, item.digest] for request, item in sorted(self.measured.items())]}
                    if self.measured
                    else {}
                ),
                "versions": versions("torch", "transformers", "lm_eval", "numba"),
            }
        )


def score_trial(setting: TrialSetting, request: TrialRequest) -> TrialScores:
    """Merge a candidate in memory and return its scores, or a problem if it is refused or its scores are not finite.

    Raises:
        InvalidInput: The documents cannot be evaluated, or the process died.
        Refused: The trial exceeded ``scoring.time_limit``, the disk is full, or a parent was changed.
    """
    began = time.perf_counter()
    answer = call_model_process(
        _score,
        (setting, request),
        location="a trial of the sweep",
        needs=CallNeeds(time_limit=setting.scoring.time_limit),
    )
    seconds = dict(answer.seconds)
    seconds["overhead"] = max(0.0, time.perf_counter() - began - sum(seconds.values()))
    table = {key: np.frombuffer(numbers, np.float64) for key, numbers in answer.numbers}
    return TrialScores(table, answer.dropped, answer.change, seconds, answer.problem)


def _parent(setting: TrialSetting, name: str) -> PinnedCheckpoint:
    names = {parent.name: parent for parent in setting.parents}
    if name not in names:
        raise InvalidInput(
            "sweep",
            found=f"{name!r}, which is not the name of a parent",
            expected=", ".join(names),
            remedy=suggest(name, names),
        )
    return names[name]


@dataclass(frozen=True)
class TrialAnswer:
    """``TrialScores`` as plain data, to be sent from the model process."""

    numbers: tuple[tuple[MetricKey, bytes], ...] = ()  # float64
    dropped: bool = False
    change: float = float("nan")
    seconds: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""


# Everything below runs in the model process.


def _score(setting: TrialSetting, request: TrialRequest, on_progress: TellProgress) -> TrialAnswer:
    global _workspace
    if _workspace is None or _workspace.setting != setting:
        _workspace = None  # free the old network first, because two may not fit into memory
        _workspace = _Workspace(setting)
    answer = _workspace.score(request, Stopwatch(lambda: on_progress(0, 1)))
    if files_fingerprint(setting.parents) != _workspace.fingerprint:
        _workspace = None
        raise ChangedInput(
            "sweep: the parents",
            found="a file changed while trials were scored",
            expected="the files that were pinned when the run began",
            remedy="run again",
        )
    return answer


class _Workspace:
    """Open parents, network and tokenized documents, which all trials of a study share."""

    def __init__(self, setting: TrialSetting) -> None:
        if setting.scoring.backend != "hf":
            raise InvalidInput(
                "sweep",
                found=f"evaluate.backend: {setting.scoring.backend}",
                expected="evaluate.backend: hf, because transformers evaluates the network in memory",
            )
        self.setting = setting
        self.fingerprint = files_fingerprint(setting.parents)
        self.network: CandidateNetwork | None = None
        self._checkpoints: dict[str, Checkpoint] = {}
        self._distance = BaseDistance(_parent(setting, setting.base).open()) if setting.base else None
        self._network_settings = NetworkSettings(
            setting.seed, setting.merge_device, setting.threads, setting.scoring.dtype, setting.device
        )
        self._file_digests: dict[Path, str] = {}
        self._documents: dict[tuple[object, ...], SearchDocuments] = {}
        self._text_key: tuple[object, ...] = ()  # identifies how the network reads text

    def score(self, request: TrialRequest, watch: Stopwatch) -> TrialAnswer:
        """Return the candidate's scores, or its problem."""
        try:
            network = self._fill_network(request, watch)
        except (CannotDecide, OutOfModelMemory):
            self.network = None
            raise
        except MergegateError as problem:
            return TrialAnswer(seconds=watch.seconds, problem=str(problem))
        change = self._distance.relative if self._distance else float("nan")
        looks = request.race.looks if request.race else self.setting.looks
        with watch.measure("questions"):
            documents = self._tokenized_documents(network, request.document_set, looks)
        table: ScoresByMetric = {}
        dropped = False
        with watch.measure("score"), torch_threads(network.loaded, self.setting.threads):
            for look, table in enumerate(documents.evaluate(network.loaded, watch.alive)):
                invalid = next((key for key, numbers in table.items() if not np.isfinite(numbers).all()), None)
                if invalid is not None:
                    source = invalid.task or "held-out text"
                    problem_text = f"{source}: {invalid.measure} is not a finite number for some documents"
                    return TrialAnswer(change=change, seconds=watch.seconds, problem=problem_text)
                if request.race is not None and request.race.should_drop(table, look):
                    dropped = look < len(looks) - 1
                    break
        numbers = tuple((key, values.tobytes()) for key, values in table.items())
        return TrialAnswer(numbers, dropped, change, watch.seconds)

    def _fill_network(self, request: TrialRequest, watch: Stopwatch) -> CandidateNetwork:
        """Return a network with the weights of the candidate."""
        with watch.measure("plan"):
            plan = self._plan(request)
            structure = structure_digest(plan, self._file_digests)
        if (
            self.network is not None
            and self.network.structure == structure
            and self.network.fill(plan, self._network_settings, watch, self._distance)
        ):
            return self.network
        self.network = None  # free its memory before the next network is loaded
        runs_code = any(parent.runs_code for parent in self.setting.parents if parent.ref == str(plan.recipe.donor))
        self.network = load_network(plan, structure, self._network_settings, runs_code, watch)
        loaded = self.network.loaded
        template = getattr(loaded.tokenizer, "chat_template", None)
        self._text_key = (tokenizer_digest(loaded.tokenizer), template, loaded.context)
        if self._distance:
            with watch.measure("change"):
                self._distance.measure(plan, self._network_settings)
        return self.network

    def _plan(self, request: TrialRequest) -> MergePlan:
        location = f"{request.directory / 'sweep' if request.directory else 'sweep'}: recipe"
        recipe = load_recipe(request.recipe, location=location)
        if recipe.output is not None:
            raise InvalidInput(recipe.location, found="a recipe for an adapter", expected="a recipe for a model")
        if recipe.texts:
            measured = {}
            for calibration in recipe.calibration_requests:
                if calibration not in self.setting.measured:
                    raise InvalidInput(
                        f"{recipe.location}: {calibration.model}",
                        found=f"{calibration.text}, which was not read in the way that {recipe.merge_method} requires",
                        expected="texts that were read before the search",
                        remedy="search over methods, or over how texts are read, but not over both",
                    )
                measured[calibration.model] = self.setting.measured[calibration]
            recipe = replace(recipe, measured=measured)
        by_ref = {parent.ref: parent for parent in self.setting.parents}
        for reference in map(str, recipe.references()):
            if reference not in self._checkpoints:
                if reference not in by_ref:
                    raise InvalidInput(
                        recipe.location,
                        found=f"{reference}, which is not among the parents of the sweep",
                        expected="models that were resolved when the sweep began",
                    )
                self._checkpoints[reference] = by_ref[reference].open()
        tables = {reference: self._checkpoints[reference] for reference in map(str, recipe.references())}
        matched = match_experts(recipe, tables)
        return plan_merge(matched.recipe, matched.checkpoints)

    def _tokenized_documents(
        self, network: CandidateNetwork, set_name: SearchedSet, looks: tuple[float, ...]
    ) -> SearchDocuments:
        """Return the documents of a set, tokenized for the network, from the cache if possible."""
        cache_key = (*self._text_key, set_name, looks)
        if cache_key in self._documents:
            self._documents[cache_key] = self._documents.pop(cache_key)  # the most recently used set is last
            return self._documents[cache_key]
        while len(self._documents) >= _MAX_TOKENIZED_SETS:
            del self._documents[next(iter(self._documents))]
        setting, loaded = self.setting, network.loaded
        trial_set = setting.sets[set_name]
        tasks_by_name = {task.name: task for task in trial_set.tasks}
        tasks = {}
        for name in dict.fromkeys(key.task for key in setting.metric_keys if key.task != TEXT):
            if name not in tasks_by_name:
                raise InvalidInput(
                    "sweep", found=f"task {name} without documents for the {set_name}", expected="at least one document"
                )
            needs_tokens = any(key.task == name and key.measure != "metric" for key in setting.metric_keys)
            tasks[name] = tokenize_task(tasks_by_name[name], setting.scoring, loaded, tokens=needs_tokens)
        text = None
        if any(key.task == TEXT for key in setting.metric_keys):
            if trial_set.text is None:
                raise InvalidInput(
                    "sweep", found=f"no held-out text for the {set_name}", expected="perplexity: {documents: ...}"
                )
            model: Model = setting.parents[0]
            text = read_held_out(loaded, model, trial_set.text, setting.windows)
        self._documents[cache_key] = SearchDocuments(setting.metric_keys, tasks, text, looks)
        return self._documents[cache_key]


_workspace: _Workspace | None = None


def _free_network() -> None:
    """Free the memory of the network, but not that of the tokenized documents."""
    if _workspace is not None:
        _workspace.network = None


on_unload(_free_network)
