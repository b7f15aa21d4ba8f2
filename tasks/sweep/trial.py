"""Run a trial: merge a candidate in memory and score it, in the model process.

Between trials the parents stay open, the network stays in memory, and the documents stay tokenized. A candidate is
merged tensor by tensor into the network and scored on the documents (:mod:`search_documents`). The scores equal those
of the checkpoint that the engine would write for the same recipe and seed::

    setting = TrialSetting(parents=pinned, sets={"search": TrialSet(tasks=...)}, metric_keys=..., scoring=Scoring())
    scores = score_trial(setting, TrialRequest(recipe={"merge_method": "ties", ...}, document_set="search"))
    scores.table[MetricKey("reverse", "log_likelihood")]        # one number per document

The engine writes the first candidate of a structure to files, and transformers loads them. If every tensor of the
network equals a tensor of the files, later candidates with the same structure are merged and copied into the network
tensor by tensor. If a tensor differs (transformers computes it from others), or if a candidate has different values for
tensors that the network ties, every such candidate is written and loaded like the first. This is slower, but correct.

The result does not depend on which process runs the trial or on earlier trials.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mergegate.merge_core import (
    Checkpoint,
    EngineSettings,
    MergePlan,
    load_recipe,
    merge_tensors,
    merge_weights,
    plan_merge,
)
from mergegate.merge_core.architecture.experts import match_experts
from mergegate.merge_core.errors import CannotDecide, ChangedInput, InvalidInput, MergegateError, suggest
from mergegate.merge_core.files import sha256_file
from mergegate.merge_core.methods import PASSTHROUGH
from mergegate.merge_core.recipe import CalibrationRequest, InputMeasurements
from mergegate.tasks.base.stage import versions
from mergegate.tasks.base.store import digest
from mergegate.tasks.models.checkpoints import (
    CallNeeds,
    LoadedModel,
    Model,
    OutOfModelMemory,
    PinnedCheckpoint,
    TellProgress,
    call_model_process,
    files_fingerprint,
    load_private_model,
    on_unload,
    tokenizer_digest,
    torch_threads,
)
from mergegate.tasks.quality.evaluation import EvalTask, Scoring, tokenize_task
from mergegate.tasks.quality.perplexity import HeldOutText, WindowSettings, read_held_out
from mergegate.tasks.sweep.objective import TEXT, MetricKey, ScoresByMetric
from mergegate.tasks.sweep.search_documents import SearchDocuments
from mergegate.tasks.sweep.study import SearchedSet, TrialRequest, TrialScores

if TYPE_CHECKING:
    import torch

    from mergegate.tasks.models.checkpoints import Model


_VERSION = 1  # increment when the meaning of a trial changes
_MAX_TOKENIZED_SETS = 4  # largest number of tokenized document sets in memory, one tokenizer each


@dataclass(frozen=True)
class TrialSet:
    """Documents of one set: tasks and held-out text, restricted to this set."""

    tasks: tuple[EvalTask, ...] = ()
    text: HeldOutText | None = None
    text_documents: int = 0  # number of documents of the text that are read

    def size(self, task: str) -> int:
        """Return the number of documents of a task, or of the text if ``task`` is ``TEXT``."""
        sizes = {item.name: item.documents or 0 for item in self.tasks}
        return self.text_documents if task == TEXT else sizes[task]


@dataclass(frozen=True)
class TrialSetting:
    """Settings that all trials of a study share."""

    parents: tuple[PinnedCheckpoint, ...]  # every checkpoint that a candidate may name
    sets: Mapping[SearchedSet, TrialSet]
    metric_keys: tuple[MetricKey, ...]  # metrics to compute for each document, in every set
    scoring: Scoring  # settings of the evaluation stage; only the backend ``hf`` is supported
    windows: WindowSettings = field(default_factory=WindowSettings)  # for held-out text; their dtype is ignored
    device: str = "cpu"  # of the network
    merge_device: str = "cpu"  # on which candidates are merged
    seed: int = 0  # of the random masks of a merge
    base: str = ""  # name of the parent from which changes are measured; empty: they are not measured
    # Shares of the documents in separate batches, for trials without a race. With the shares of the races, a candidate
    # gets bit-identical scores with and without a race.
    looks: tuple[float, ...] = (1.0,)
    threads: int = 1  # for merging and scoring
    # Calibration measurements of the parents, for methods that use them.
    measured: Mapping[CalibrationRequest, InputMeasurements] = field(default_factory=dict)

    @property
    def merge_options(self) -> dict[str, Any]:
        """Arguments for :func:`merge_core.merge_tensors` and :func:`merge_core.merge_weights`.

        Compiled kernels take a third of the time of a small merge, and are reused for all later merges.
        """
        engine = EngineSettings(threads=self.threads, kernels="fused")
        return {"seed": self.seed, "device": self.merge_device, "settings": engine}

    def parent_request(self, name: str) -> TrialRequest:
        """Return a request to score the parent ``name`` itself, with its adapter if it has one."""
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
    scores, numbers = call_model_process(
        _score,
        (setting, request),
        location="a trial of the sweep",
        needs=CallNeeds(time_limit=setting.scoring.time_limit),
    )
    overhead = max(0.0, time.perf_counter() - began - sum(scores.seconds.values()))
    table = {key: np.frombuffer(values, np.float64) for key, values in numbers}
    return replace(scores, table=table, seconds={**scores.seconds, "overhead": overhead})


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


# Scores with an empty table, and its numbers (float64) as bytes, because the model process may send only plain data.
_PlainScores = tuple[TrialScores, tuple[tuple[MetricKey, bytes], ...]]


# Everything below runs in the model process.


class Stopwatch:
    """Wall time in seconds, by activity. ``alive`` is called after each, to show that a long trial is not dead."""

    def __init__(self, alive: Callable[[], None] = lambda: None) -> None:
        self.seconds: dict[str, float] = {}
        self.alive = alive

    @contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Add the time of the ``with`` block to ``activity``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[activity] = self.seconds.get(activity, 0.0) + time.perf_counter() - began
            self.alive()


def structure_digest(plan: MergePlan, digests: dict[Path, str]) -> str:
    """Return a digest of a merged model without its weights: its config, tensor shapes and other files.

    ``digests`` is a cache of the sha256 digests of these files, to which new ones are added.
    """
    file_digests = {}
    for name, source in plan.companions.sources.items():
        if isinstance(source, bytes):
            file_digests[name] = hashlib.sha256(source).hexdigest()
            continue
        path = source / name
        if path not in digests:
            digests[path] = sha256_file(path)
        file_digests[name] = digests[path]
    return digest(
        {
            "config": plan.config,
            "tensors": [
                [tensor.name, tensor.dtype.code, list(tensor.shape)] for shard in plan.shards for tensor in shard.stored
            ],
            "beside": file_digests,
        }
    )


@dataclass(frozen=True)
class CandidateNetwork:
    """Network with the weights of the last candidate."""

    loaded: LoadedModel
    structure: str  # digest from :func:`structure_digest`
    # Tensor of the network for each tensor of the candidate, by name. Empty if candidates cannot be copied.
    targets: Mapping[str, torch.Tensor]
    tied: frozenset[str]  # candidate tensors that share their network tensor with an earlier one and must equal it

    def fill(self, plan: MergePlan, setting: TrialSetting, watch: Stopwatch, distance: BaseDistance | None) -> bool:
        """Merge ``plan`` into the network, and return whether the merge fits. If not, the weights are unusable."""
        import torch

        if not self.targets:
            return False
        tensors = merge_tensors(plan, **setting.merge_options)
        if distance:
            distance.begin(plan)
        with torch.no_grad():
            while True:
                with watch.measure("merge"):
                    name, merged = next(tensors, ("", None))
                if merged is None:
                    return True
                with watch.measure("load"):
                    target = self.targets.get(name)
                    if name in self.tied:
                        if target is None or not torch.equal(target, merged.to(target)):
                            return False
                    elif target is not None:
                        target.copy_(merged)
                if distance:
                    with watch.measure("change"):
                        distance.add(name, merged)


class BaseDistance:
    """Measurement of a candidate's change: ``|merge - base| / |base|`` over all tensors that both have.

    ``base`` is the base checkpoint, with its adapter if it has one.
    """

    def __init__(self, base: Checkpoint) -> None:
        recipe = load_recipe({"merge_method": PASSTHROUGH.name, "models": [{"model": "base"}]})
        self._plan = plan_merge(recipe, {"base": base})
        self._shapes = {tensor.name: tensor.shape for shard in self._plan.shards for tensor in shard.stored}
        self._squares: dict[str, float] = {}  # squared norms of the base's tensors, by name
        self._base_square = self._change_square = 0.0

    def begin(self, plan: MergePlan) -> None:
        """Start a candidate. The base's tensors are read in the order of the candidate's."""
        self._base_square = self._change_square = 0.0
        stored = [tensor for shard in plan.shards for tensor in shard.stored]
        shared = [
            tensor.name
            for tensor in stored
            if tensor.dtype.kind == "float" and self._shapes.get(tensor.name) == tensor.shape
        ]
        self._common, self._base = set(shared), merge_tensors(self._plan, names=shared)

    def add(self, name: str, merged_tensor: torch.Tensor) -> None:
        """Add the next tensor of the candidate."""
        if name not in self._common:
            return
        before = next(self._base)[1].double()
        if name not in self._squares:
            self._squares[name] = float(before.square().sum())
        self._base_square += self._squares[name]
        self._change_square += float((merged_tensor.double() - before).square_().sum())

    def measure(self, plan: MergePlan, setting: TrialSetting) -> None:
        """Merge a candidate again, only to measure its change."""
        self.begin(plan)
        for name, merged in merge_tensors(plan, **setting.merge_options):
            self.add(name, merged)

    @property
    def relative(self) -> float:
        """Relative change of the last candidate. NaN if it has no tensor in common with the base."""
        return float((self._change_square / self._base_square) ** 0.5) if self._base_square else float("nan")


def load_network(
    plan: MergePlan, structure: str, setting: TrialSetting, runs_code: bool, watch: Stopwatch
) -> CandidateNetwork:
    """Write the merge of ``plan`` to a temporary directory, and load its network from there."""
    with tempfile.TemporaryDirectory(prefix="mergegate-trial-") as name:
        directory = Path(name)
        with watch.measure("write"):
            record = merge_weights(plan, directory, **setting.merge_options)
            for finding in record.findings:
                if finding.severity == "block":
                    raise finding.refusal()
        with watch.measure("load"):
            model = Model(name="candidate", digest=structure, directory=directory, runs_code=runs_code)
            loaded = load_private_model(model, dtype=setting.scoring.dtype, device=setting.device)
            targets, tied = _map_tensors(loaded, directory)
    return CandidateNetwork(loaded, structure, targets, tied)


def _map_tensors(loaded_model: LoadedModel, directory: Path) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
    """Return ``targets`` and ``tied`` of :class:`CandidateNetwork`.

    Both are empty unless every tensor of the network equals a tensor of the files.
    """
    import torch
    from safetensors import safe_open

    state: dict[str, torch.Tensor] = loaded_model.network.state_dict(keep_vars=False)
    targets: dict[str, torch.Tensor] = {}
    tied: set[str] = set()
    filled: set[tuple[int, int]] = set()  # address and size
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  # has keys() but cannot be iterated
                target = state.get(name)
                if target is None:
                    continue
                tensor = stored.get_tensor(name)
                if tensor.shape != target.shape or not torch.equal(tensor.to(target), target):
                    continue
                storage = (target.data_ptr(), target.numel())
                if storage in filled:
                    tied.add(name)
                filled.add(storage)
                targets[name] = target
    all_storages = {(tensor.data_ptr(), tensor.numel()) for tensor in state.values()}
    return (targets, frozenset(tied)) if filled == all_storages else ({}, frozenset())


def _score(setting: TrialSetting, request: TrialRequest, on_progress: TellProgress) -> _PlainScores:
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
        self._file_digests: dict[Path, str] = {}
        self._documents: dict[tuple[object, ...], SearchDocuments] = {}
        self._text_key: tuple[object, ...] = ()  # identifies how the network reads text

    def score(self, request: TrialRequest, watch: Stopwatch) -> _PlainScores:
        """Return the candidate's scores, or its problem."""
        try:
            network = self._fill_network(request, watch)
        except (CannotDecide, OutOfModelMemory):
            self.network = None
            raise
        except MergegateError as problem:
            return TrialScores({}, seconds=watch.seconds, problem=str(problem)), ()
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
                    return TrialScores({}, change=change, seconds=watch.seconds, problem=problem_text), ()
                if request.race is not None and request.race.should_drop(table, look):
                    dropped = look < len(looks) - 1
                    break
        numbers = tuple((key, values.tobytes()) for key, values in table.items())
        return TrialScores({}, dropped, change, watch.seconds), numbers

    def _fill_network(self, request: TrialRequest, watch: Stopwatch) -> CandidateNetwork:
        """Return a network with the weights of the candidate."""
        with watch.measure("plan"):
            plan = self._plan(request)
            structure = structure_digest(plan, self._file_digests)
        if (
            self.network is not None
            and self.network.structure == structure
            and self.network.fill(plan, self.setting, watch, self._distance)
        ):
            return self.network
        self.network = None  # free its memory before the next network is loaded
        runs_code = any(parent.runs_code for parent in self.setting.parents if parent.ref == str(plan.recipe.donor))
        self.network = load_network(plan, structure, self.setting, runs_code, watch)
        loaded = self.network.loaded
        template = getattr(loaded.tokenizer, "chat_template", None)
        self._text_key = (tokenizer_digest(loaded.tokenizer), template, loaded.context)
        if self._distance:
            with watch.measure("change"):
                self._distance.measure(plan, self.setting)
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
