"""What a night will make, call by call, and how long that will take on this machine.

How long: as it took when it was last made here; where that never happened, roughly (``tasks.preflight.duration``). No
weight is read, and no model is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

from mergegate.flows.cli.plan import machine_rates
from mergegate.flows.cli.recipe_parents import plan_recipe
from mergegate.flows.preflight import ClearedCandidate, Preflight, TaskExample
from mergegate.flows.profile import Profile
from mergegate.merge_core.engine import usable_cores
from mergegate.merge_core.engine.forecast import Rates
from mergegate.merge_core.errors import MergegateError
from mergegate.merge_core.parsing import open_buffered
from mergegate.merge_core.system import system_memory
from mergegate.merge_core.wording import format_duration, format_roughly
from mergegate.tasks.checkpoints import Model, PinnedRecipe, find_pinned_checkpoints
from mergegate.tasks.evaluation import (
    EvalTask,
    count_missing_documents,
    estimate_document_cost,
    find_backend,
    known_scores,
    measured_seconds,
)
from mergegate.tasks.merge import (
    calibration_stage_name,
    find_prepared_recipe,
    merge,
    merged_model,
    numerics,
    statistics_needs,
)
from mergegate.tasks.perplexity import perplexity
from mergegate.tasks.preflight import (
    AROUND,
    STARTING,
    Evidence,
    NetworkSize,
    PromptLoad,
    evaluation_seconds,
    merge_seconds,
    plan_interim_looks,
)
from mergegate.tasks.report import read_history
from mergegate.tasks.stage import home, nearest, runtime, store

MERGE = "merge"
_LONG_PROMPT = 500.0  # tokens of a document that nobody could look at
_BYTES_A_TOKEN = 4.0  # of English text, with the vocabularies of today
_LOOKED_AT = 200  # documents of a held-out text whose length is looked at
_WEIGHTS = (".safetensors", ".bin")


@dataclass(frozen=True)
class PlannedStage:
    """A call of a stage that the run would make.

    Attributes:
        missing: Documents of a task that have to be asked; 1 of another stage that is not cached.
        seconds: That it will take; None: not known.
        rough: Whether they follow from sizes, and not from a call that was made.
    """

    stage: str
    subject: str
    cached: bool
    missing: int = 0
    seconds: float | None = None
    rough: bool = False


@dataclass(frozen=True)
class PlannedRun:
    """All calls that cost something, up to the first look at each task."""

    stages: tuple[PlannedStage, ...]

    @property
    def left(self) -> tuple[PlannedStage, ...]:
        """What is to be made."""
        return tuple(one for one in self.stages if not one.cached)

    @property
    def rough(self) -> bool:
        """Whether any of the time is a guess."""
        return any(one.rough for one in self.left)

    @property
    def seconds(self) -> float | None:
        """Of all that is to be made; None where something of it is not known."""
        known = [one.seconds for one in self.left if one.seconds is not None]
        if len(known) < len(self.left):
            return None
        starting = STARTING * any(one.stage != MERGE for one in self.left)
        return sum(known) + (starting + AROUND if self.rough else 0.0)

    def time(self) -> str:
        """``about 3 h, never run here``."""
        seconds, guessed = self.seconds, sum(one.seconds or 0.0 for one in self.left if one.rough)
        if seconds is None:
            return "not known yet: no run has made them here"
        if not self.rough:
            return f"about {format_duration(seconds)}, as it took last time"
        if guessed > seconds / 10:
            never = "never run here" if all(one.rough for one in self.left) else "some of it never run here"
            return f"about {format_roughly(seconds)}, {never}"
        return f"about {format_roughly(seconds)}"

    def sentence(self) -> str:
        """What is cached, what is left, and how long that takes."""
        if not self.left:
            return f"all {len(self.stages)} stages that cost something are cached; nothing is made anew"
        head = f"{len(self.left)} of {len(self.stages)} stages that cost something are to be made"
        return f"{head}; time: {self.time()}"


def plan_night(profile: Profile, ready: Preflight, examples: Sequence[TaskExample]) -> PlannedRun | None:
    """What the profile's own recipe would take; None where its checks say no.

    Args:
        ready: What all checks found out.
        examples: A document of each task, as each parent reads it.
    """
    own = next((one for one in ready.cleared if one.candidate is profile.candidates()[0]), None)
    if own is None or ready.evidence is None or own.compatibility.value.blocking():
        return None
    guess = _Guess(own, ready.evidence, tuple(examples))
    return PlannedRun(tuple(_calls(profile, own, ready.evidence, guess)))


def _calls(profile: Profile, own: ClearedCandidate, evidence: Evidence, guess: _Guess) -> Iterator[PlannedStage]:
    took = _last_times(profile.name)
    parents = find_pinned_checkpoints(own.found, store().hashes)
    by_name = {parent.name: parent for parent in parents}
    whole = len(parents) == len(own.found) and not any(parent.adapter for parent in parents)
    by_ref = {parent.ref: parent for parent in parents}
    recipe = find_prepared_recipe(own.candidate.recipe, by_ref.__getitem__) if whole else None
    pinned = PinnedRecipe(recipe or own.candidate.recipe, parents)
    if reading := calibration_stage_name(own.candidate.recipe):
        yield _call(reading, "", 0 if recipe else 1, took.get(reading), guess.measuring)
    merged = merge.find(pinned, numerics(profile.merge)) if recipe else None
    yield _call(MERGE, "", 0 if merged else 1, took.get(MERGE), guess.merging)
    models: dict[str, Model | None] = {one.name: by_name.get(one.name) if whole else None for one in own.found}
    models[MERGE] = merged_model(merged, pinned) if merged else None
    if evidence.documents is not None and evidence.windows is not None:
        for name, model in models.items():
            there = model and perplexity.find(model, evidence.documents, evidence.windows, runtime())
            yield _call("perplexity", name, 0 if there else 1, took.get("perplexity"), guess.reading)
    for task in evidence.tasks:
        if task.data is None:
            continue  # the findings say why it could not be counted
        first = plan_interim_looks(task, evidence)[0]
        known = {
            name: known_scores(model, task, evidence.scoring, runtime()) if model else ()
            for name, model in models.items()
        }
        pace = measured_seconds([one for each in known.values() for one in each])
        for name, scores in known.items():
            missing = count_missing_documents(task, evidence.scoring, first, scores)
            measured = pace * missing if pace is not None else took.get("evaluate")
            yield _call("evaluate", f"{name}, {task.name}", missing, measured, guess.scoring(task, missing))


def _call(stage: str, subject: str, missing: int, measured: float | None, guessed: float | None) -> PlannedStage:
    if not missing:
        return PlannedStage(stage, subject, cached=True)
    rough = measured is None and guessed is not None
    return PlannedStage(stage, subject, False, missing, guessed if rough else measured, rough)


class _Guess:
    """How long calls take that were never made here. The machine is measured when that is first asked for."""

    def __init__(self, own: ClearedCandidate, evidence: Evidence, examples: Sequence[TaskExample]) -> None:
        self._own, self._evidence, self._examples = own, evidence, examples
        found = own.compatibility.value
        self._size = NetworkSize(found.largest_parameters, found.largest_bytes, found.tensors)

    @cached_property
    def _rates(self) -> Rates | None:
        files = [
            parent.directory / name
            for parent in self._own.found
            for name in parent.deciding
            if name.endswith(_WEIGHTS) and (parent.directory / name).is_file()
        ]
        try:
            rates = machine_rates(files, nearest(home()), usable_cores(), runtime().device, None)
        except MergegateError:  # a disk that cannot be written is what the other checks speak of
            return None
        return rates if rates and rates.products else None

    @property
    def merging(self) -> float | None:
        """Of the merge. Of an adapter nobody knows: decomposing takes most of it."""
        found = self._own.compatibility.value
        if self._rates is None or self._own.candidate.recipe.output is not None:
            return None
        return merge_seconds(found.bytes_read, found.bytes_written, self._rates)

    @property
    def measuring(self) -> float | None:
        """Of all that is measured of models before the merge."""
        _, plan = plan_recipe(self._own.candidate.recipe)
        needs, memory = statistics_needs(plan, store().hashes), system_memory()
        if self._rates is None or needs is None or memory is None:
            return None
        return needs.seconds(self._rates, memory.available // 2)

    @cached_property
    def reading(self) -> float | None:
        """Of the held-out text under one model."""
        windows, text = self._evidence.windows, self._evidence.documents
        if self._rates is None or windows is None or text is None:
            return None
        documents, size = _length_of(text.path, windows.documents)
        tokens = size / self._bytes_a_token
        asked = PromptLoad(max(documents, tokens / windows.max_length), tokens, batch=windows.batch_size)
        return evaluation_seconds(self._size, asked, self._rates)

    def scoring(self, task: EvalTask, documents: int) -> float | None:
        """Of so many documents of a task under one model; of a server that runs somewhere nobody knows."""
        scoring = self._evidence.scoring
        if not documents or self._rates is None or not find_backend(scoring.backend).loads_here:
            return None
        each = estimate_document_cost(task)
        requests = each.readings * documents
        tokens, written = requests * self._tokens_of(task), each.written * documents
        return evaluation_seconds(self._size, PromptLoad(requests, tokens, written, scoring.batch_size), self._rates)

    def _tokens_of(self, task: EvalTask) -> float:
        """Tokens of one prompt with its answer."""
        found = [one.preview for one in self._examples if one.task == task.name]
        if not found:
            return _LONG_PROMPT
        first = found[0]
        return first.tokens * (1 + len(first.answer) / max(len(first.prompt), 1))

    @property
    def _bytes_a_token(self) -> float:
        each = [one.preview for one in self._examples if one.preview.tokens]
        size, tokens = sum(len(one.prompt.encode()) for one in each), sum(one.tokens for one in each)
        return max(size / tokens, 0.5) if size else _BYTES_A_TOKEN


def _length_of(path: Path, most: int | None) -> tuple[float, float]:
    """Documents of a held-out text that will be read, and their bytes; from its first lines and its size."""
    with open_buffered(path) as file:
        lines = [len(line) for line in islice(file, _LOOKED_AT) if line.strip()]
    if not lines:
        return 1.0, 1.0
    size = path.stat().st_size
    each = sum(lines) / len(lines)
    documents = size / each if most is None else min(size / each, most)
    return documents, documents * each


def _last_times(profile: str) -> Mapping[str, float]:
    """Seconds that one call of a stage took when it was last made for the profile."""
    found: dict[str, float] = {}
    for record in read_history(home() / "reports").records:
        if record.profile == profile:
            found |= {
                one.name: one.seconds / (one.calls - one.cached) for one in record.stages if one.calls > one.cached
            }
    return found
