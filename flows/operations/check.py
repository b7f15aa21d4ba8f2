"""Find every problem of a profile or a recipe before any weight is read, and plan the run of the profile.

The plan has the calls of stages that a run would execute, and how long they take on this machine. The time of a call is
that of its last execution on this machine, or else a rough estimate (``tasks.preflight.machine``). No weights are read
and no model is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console

from mergegate.flows.attempt import JudgedMerge, conversion_texts, sweep_candidates
from mergegate.flows.candidates import recipe_of_file
from mergegate.flows.operations.console import print_findings, printed_text
from mergegate.flows.operations.merge import plan_recipe
from mergegate.flows.operations.plan import machine_rates
from mergegate.flows.operations.run import convert_evolve
from mergegate.flows.preflight import (
    ClearedCandidate,
    Preflight,
    Problems,
    TaskExample,
    check_recipe,
    preflight_profile,
)
from mergegate.flows.profile import Profile, is_recipe, load_profile
from mergegate.merge_core import Finding
from mergegate.merge_core.engine.forecast import Rates
from mergegate.merge_core.errors import EXIT_CODES, MergegateError, Status
from mergegate.merge_core.parsing import open_buffered
from mergegate.merge_core.system import cores_of_process, system_memory
from mergegate.merge_core.wording import format_count, format_duration, format_roughly
from mergegate.tasks.base.stage import WorkRequired, dry_pass, home, nearest_directory, runtime, store
from mergegate.tasks.merge import (
    calibration_stage_name,
    find_prepared_recipe,
    merge,
    merged_model,
    numerics,
    router_needs,
    statistics_needs,
)
from mergegate.tasks.models.checkpoints import Model, PinnedRecipe, QuantizedModel, find_pinned_checkpoints
from mergegate.tasks.preflight import (
    AROUND,
    STARTING,
    Evidence,
    NetworkSize,
    PromptLoad,
    evaluation_seconds,
    evidence_for_variant,
    merge_seconds,
    plan_interim_looks,
)
from mergegate.tasks.quality.evaluation import (
    EvalTask,
    count_missing_documents,
    estimate_document_cost,
    find_backend,
    known_scores,
    measured_seconds,
)
from mergegate.tasks.quality.gate import CHAMPION, JudgedSample, read_samples, sample_start
from mergegate.tasks.quality.perplexity import perplexity
from mergegate.tasks.quality.serve import Check
from mergegate.tasks.quality.variants import VariantFormat
from mergegate.tasks.release.publish.targets import CredentialUse
from mergegate.tasks.release.report import read_history


class CheckReport(BaseModel):
    """Findings about a profile or recipe, as ``mergegate check`` prints them.

    Attributes:
        status: ``passed`` if no finding blocks a run, ``invalid`` or ``refused`` if one does.
        file: Checked file, or the name of the profile.
        remarks: All findings, worst first. A finding with the severity ``block`` would end a run.
        summary: One line per successful check.
        examples: One document of each task, as each parent reads it.
        seconds: Estimated duration of a run on this machine. None if unknown.
        rough: Whether the duration is a guess from sizes and a short measurement.
        credentials: Credentials with which the release and its variants would be published, without any secret.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    status: Status = Field(exclude=True)
    file: str
    remarks: tuple[Finding, ...]
    summary: tuple[str, ...]
    examples: tuple[TaskExample, ...] = ()
    seconds: float | None = None
    rough: bool = False
    credentials: tuple[CredentialUse, ...] = ()

    @property
    def exit_code(self) -> int:
        """Exit code of ``mergegate check``: 0 if no finding blocks a run."""
        return EXIT_CODES[self.status]

    @property
    def passed(self) -> bool:
        """Whether no finding blocks a run."""
        return self.status == "passed"

    def __str__(self) -> str:
        return printed_text(lambda console: print_findings(self.remarks, self, console))


def check_file(file: Path | Profile, console: Console) -> CheckReport:
    """Check a profile, a recipe file or mergekit-evolve's YAML without reading any weight.

    Raises:
        InvalidInput: The file cannot be read or is not valid.
    """
    problems, planned = Problems(stop_at_once=False), None
    if isinstance(file, Path) and is_recipe(file):
        check_recipe(recipe_of_file(file), file.parent, file.stem, problems)
    elif (profile := load_profile(convert_evolve(file, console) if isinstance(file, Path) else file)).sweep is None:
        preflight = preflight_profile(profile, problems)
        if (planned := plan_run(profile, preflight, problems.examples)) and planned.open_stages:
            problems.summary.append(f"time: {planned.time()}")
        if planned and (extension := planned.extension()):
            problems.summary.append(f"time: {extension[0].lower()}{extension[1:]}")
    else:
        candidates = sweep_candidates(profile)
        preflight_profile(profile, problems, candidates.searched, candidates.by_hand)
    return CheckReport(
        status=problems.status,
        file=str(file) if isinstance(file, Path) else file.name,
        remarks=problems.worst_first(),
        summary=tuple(dict.fromkeys(problems.summary)),
        examples=tuple(problems.examples),
        seconds=planned.seconds if planned else None,
        rough=bool(planned and planned.rough),
        credentials=tuple(problems.credentials),
    )


MERGE = "merge"
T = TypeVar("T")  # result of a call of stages
_LONG_PROMPT = 500.0  # tokens per document if no example is available
_BYTES_PER_TOKEN = 4.0  # of English text, with current vocabularies
_STARTING_QUANTIZER = 20.0  # seconds, most of them for imports
_MEASURED_LINES = 200  # documents of a held-out text whose length is measured
_WEIGHTS = (".safetensors", ".bin")


@dataclass(frozen=True)
class PlannedStage:
    """A call of a stage in the planned run.

    ``missing`` is the number of documents to evaluate, or 1 for any other stage that is not cached. ``seconds`` is the
    expected duration, or None if it is unknown. It is ``rough`` if it follows from sizes instead of an earlier call.
    """

    stage: str
    subject: str
    cached: bool
    missing: int = 0
    seconds: float | None = None
    rough: bool = False


@dataclass(frozen=True)
class PlannedRun:
    """All expensive calls of a run, up to the first interim look of each task.

    ``further_documents`` is the largest number of documents that the run evaluates after the first look, over all
    models, if the gate stays inconclusive. ``further_seconds`` is the time for them. It is None if it is unknown.
    """

    stages: tuple[PlannedStage, ...]
    further_documents: int = 0
    further_seconds: float | None = None

    @property
    def open_stages(self) -> tuple[PlannedStage, ...]:
        """Stages that are not cached."""
        return tuple(stage for stage in self.stages if not stage.cached)

    @property
    def rough(self) -> bool:
        """Whether the duration of any open stage is a rough estimate."""
        return any(stage.rough for stage in self.open_stages)

    @property
    def seconds(self) -> float | None:
        """Total duration of all open stages. None if any of them is unknown."""
        durations = [stage.seconds for stage in self.open_stages if stage.seconds is not None]
        if len(durations) < len(self.open_stages):
            return None
        starting = STARTING * any(stage.stage != MERGE for stage in self.open_stages)
        return sum(durations) + (starting + AROUND if self.rough else 0.0)

    def time(self) -> str:
        """Describe the total duration, for example ``about 3 h, first run here``."""
        seconds, rough_seconds = self.seconds, sum(stage.seconds or 0.0 for stage in self.open_stages if stage.rough)
        if seconds is None:
            return "unknown, because these stages have not run here yet"
        if not self.rough:
            return f"about {format_duration(seconds)}, as in the last run"
        if rough_seconds > seconds / 10:
            never = (
                "first run here" if all(stage.rough for stage in self.open_stages) else "first run of some stages here"
            )
            return f"about {format_roughly(seconds)}, {never}"
        return f"about {format_roughly(seconds)}"

    def sentence(self) -> str:
        """Describe how many stages must run, and how long they take."""
        if self.open_stages:
            head = f"{len(self.open_stages)} of {len(self.stages)} expensive stages must run; time: {self.time()}"
        elif self.further_documents:
            head = f"all {len(self.stages)} expensive stages are cached, up to the first look of the gate"
        else:
            head = f"all {len(self.stages)} expensive stages are cached, so a run has nothing to do"
        return ". ".join(filter(None, (head, self.extension())))

    def extension(self) -> str:
        """Describe the documents after the first look, or return an empty string if there are none."""
        if not self.further_documents:
            return ""
        seconds = "" if self.further_seconds is None else f", about {format_roughly(self.further_seconds)}"
        documents = format_count(self.further_documents, "more document")
        return f"While the gate is inconclusive, the run evaluates up to {documents} over all models{seconds}"


def plan_run(profile: Profile, ready: Preflight, examples: Sequence[TaskExample]) -> PlannedRun | None:
    """Plan the run of the profile's own recipe, or return None if its checks refuse it.

    ``ready`` is the result of the preflight. ``examples`` are the prompts of one document of each task, one per parent.
    """
    cleared = next((item for item in ready.cleared if item.candidate is profile.candidates()[0]), None)
    if cleared is None or ready.evidence is None or cleared.compatibility.value.blocking():
        return None
    estimate = _Estimate(cleared, ready.evidence, tuple(examples))
    evidence, stages = ready.evidence, []
    last_seconds: dict[str, float] = {}  # per call of a stage, in its last execution
    for record in read_history(home() / "reports").records:
        if record.profile == profile.name:
            last_seconds |= {
                stage.name: stage.seconds / (stage.calls - stage.cached)
                for stage in record.stages
                if stage.calls > stage.cached
            }
    parents = find_pinned_checkpoints(cleared.parents, store().hashes)
    by_name = {parent.name: parent for parent in parents}
    is_complete = len(parents) == len(cleared.parents) and not any(parent.adapter for parent in parents)
    by_ref = {parent.ref: parent for parent in parents}
    written = cleared.candidate.recipe
    recipe = find_prepared_recipe(written, by_ref.__getitem__, numerics(profile.merge)) if is_complete else None
    pinned = PinnedRecipe(recipe or written, parents)
    if reading := calibration_stage_name(written):
        stages.append(_planned_stage(reading, "", 0 if recipe else 1, last_seconds.get(reading), estimate.measuring))
    if written.router_repair:
        stages.append(
            _planned_stage("routers", "", 0 if recipe else 1, last_seconds.get("routers"), estimate.repairing)
        )
    merged = merge.find(pinned, numerics(profile.merge)) if recipe else None
    stages.append(_planned_stage(MERGE, "", 0 if merged else 1, last_seconds.get(MERGE), estimate.merging))
    models: dict[str, Model | None] = {
        parent.name: by_name.get(parent.name) if is_complete else None
        for parent in cleared.parents
        if parent.ref not in evidence.unmeasured
    }
    models[MERGE] = merged_model(merged, pinned) if merged else None
    if evidence.documents is not None and evidence.windows is not None:
        for name, model in models.items():
            cached = model and perplexity.find(model, evidence.documents, evidence.windows, runtime())
            measured = last_seconds.get("perplexity")
            stages.append(_planned_stage("perplexity", name, 0 if cached else 1, measured, estimate.reading))
    further, further_seconds = 0, list[float | None]()
    sampled: list[EvalTask] = []  # with the sample that this run judges
    compared = {guard.task for guard in evidence.guards if guard.guarded_by == CHAMPION} if evidence.resample else set()
    for task in evidence.tasks:
        if task.data is None:
            continue  # the findings explain why it could not be counted
        if task.name in compared:  # the next sample, as far as it is known without the champion
            history = tuple(
                use.model_copy(update={"champion": ""}) for use in read_samples(task, evidence.scoring.seed)
            )
            digest = model.digest if (model := models[MERGE]) else "not merged yet"
            start = sample_start(
                history, JudgedSample(merge=digest), task.documents or 1, task.first_look(evidence.scoring)
            )
            task = task.model_copy(update={"sample_start": start})
        sampled.append(task)
        looks = plan_interim_looks(task, evidence)
        first, last = looks[0], looks[-1]
        cached_scores = {
            name: known_scores(model, task, evidence.scoring, runtime()) if model else ()
            for name, model in models.items()
        }
        document_seconds = measured_seconds([scores for parts in cached_scores.values() for scores in parts])
        for name, scores in cached_scores.items():
            missing = count_missing_documents(task, evidence.scoring, first, scores)
            measured = document_seconds * missing if document_seconds is not None else last_seconds.get("evaluate")
            estimated = estimate.scoring(task, missing)
            stages.append(_planned_stage("evaluate", f"{name}, {task.name}", missing, measured, estimated))
            if more := count_missing_documents(task, evidence.scoring, last, scores) - missing:
                further += more
                further_seconds.append(
                    document_seconds * more if document_seconds is not None else estimate.scoring(task, more)
                )
    judged = evidence._replace(tasks=tuple(sampled))
    model = models[MERGE]
    merge_to_judge = JudgedMerge(profile, judged, model, parents) if model else None
    for settings in profile.variants:
        with suppress(MergegateError):  # the findings explain what is wrong with its settings
            own = evidence_for_variant(settings, judged, profile.root)
            stages += _variant_stages(settings, own, merge_to_judge, estimate, last_seconds)
    known_seconds = [seconds for seconds in further_seconds if seconds is not None]
    all_known = len(known_seconds) == len(further_seconds)
    return PlannedRun(tuple(stages), further, sum(known_seconds) if all_known else None)


def _planned_stage(
    stage: str, subject: str, missing: int, measured_s: float | None, estimated_s: float | None
) -> PlannedStage:
    if not missing:
        return PlannedStage(stage, subject, cached=True)
    rough = measured_s is None and estimated_s is not None
    return PlannedStage(stage, subject, False, missing, estimated_s if rough else measured_s, rough)


def _variant_stages(
    settings: VariantFormat,
    evidence: Evidence,
    merge: JudgedMerge | None,
    estimate: _Estimate,
    last_seconds: Mapping[str, float],
) -> list[PlannedStage]:
    """Return the calls for the variants of one entry. ``merge`` is None if the merge is not in the store."""
    conversion, stages = None, []
    if merge:
        root = merge.profile.root
        conversion = _in_store(lambda: (settings.convert(merge.model, partial(conversion_texts, merge), root),))
        if conversion and conversion[0] and conversion[0].value.problems:
            return []  # a wrong conversion is the verdict on all of them
    for variant_type in settings.variant_types:
        found = _in_store(partial(_open_variant, settings, variant_type, merge)) if merge and conversion else None
        model, checks = found or (None, ())
        seconds = last_seconds.get("variant")
        stages.append(_planned_stage("variant", variant_type, 0 if model else 1, seconds, estimate.quantizing))
        if any(check.outcome == "fail" for check in checks):
            continue  # a damaged variant is not evaluated
        if evidence.documents is not None and evidence.windows is not None:
            cached = model and perplexity.find(model, evidence.documents, evidence.windows, runtime())
            seconds = last_seconds.get("perplexity")
            stages.append(_planned_stage("perplexity", variant_type, 0 if cached else 1, seconds, estimate.reading))
        for task in evidence.tasks:
            if task.data is None:
                continue
            scores = known_scores(model, task, evidence.scoring_of(model), runtime()) if model else ()
            first_look = plan_interim_looks(task, evidence)[0]
            missing = count_missing_documents(task, evidence.scoring, first_look, scores)
            subject, seconds = f"{variant_type}, {task.name}", last_seconds.get("evaluate")
            stages.append(_planned_stage("evaluate", subject, missing, seconds, estimate.scoring(task, missing)))
    return stages


def _open_variant(
    settings: VariantFormat, variant_type: str, merge: JudgedMerge
) -> tuple[QuantizedModel, Sequence[Check]]:
    artifact = settings.build(merge.model, variant_type, merge.profile.root)
    model = settings.open(merge.model, variant_type, artifact)
    return model, settings.inspect(model)


def _in_store(call: Callable[[], T]) -> T | None:
    """Return the result of ``call``, or None if one of its stages is not in the store or refuses the variant."""
    try:
        with dry_pass():
            return call()
    except (WorkRequired, MergegateError):
        return None


class _Estimate:
    """Estimates for calls that never ran here. The first estimate measures the machine."""

    def __init__(
        self, cleared_candidate: ClearedCandidate, evidence: Evidence, examples: Sequence[TaskExample]
    ) -> None:
        self._cleared, self._evidence, self._examples = cleared_candidate, evidence, examples
        compatibility = cleared_candidate.compatibility.value
        self._size = NetworkSize(compatibility.largest_parameters, compatibility.largest_bytes, compatibility.tensors)

    @cached_property
    def _rates(self) -> Rates | None:
        files = [
            parent.directory / name
            for parent in self._cleared.parents
            for name in parent.deciding
            if name.endswith(_WEIGHTS) and (parent.directory / name).is_file()
        ]
        try:
            rates = machine_rates(files, nearest_directory(home()), cores_of_process(), runtime().device, None)
        except MergegateError:  # other checks report a disk that cannot be written
            return None
        return rates if rates and rates.products else None

    @property
    def merging(self) -> float | None:
        """Seconds of the merge. None for an adapter, whose decomposition cannot be estimated."""
        compatibility = self._cleared.compatibility.value
        if self._rates is None or self._cleared.candidate.recipe.output is not None:
            return None
        return merge_seconds(compatibility.bytes_read, compatibility.bytes_written, self._rates)

    @property
    def quantizing(self) -> float | None:
        """Seconds to quantize the merge: about those to read and write it, and to start the quantizer."""
        return None if (merging := self.merging) is None else merging + _STARTING_QUANTIZER

    @property
    def measuring(self) -> float | None:
        """Seconds of the calibration statistics before the merge."""
        _, plan = plan_recipe(self._cleared.candidate.recipe)
        needs, memory = statistics_needs(plan, store().hashes), system_memory()
        if self._rates is None or needs is None or memory is None:
            return None
        return needs.seconds(self._rates, memory.available // 2)

    @property
    def repairing(self) -> float | None:
        """Seconds of the router repair, without the first merge."""
        _, plan = plan_recipe(self._cleared.candidate.recipe)
        needs = router_needs(plan, store().hashes)
        return needs.seconds(self._rates) if needs and self._rates else None

    @cached_property
    def reading(self) -> float | None:
        """Seconds that one model needs for the held-out text."""
        windows, text = self._evidence.windows, self._evidence.documents
        if self._rates is None or windows is None or text is None:
            return None
        # Estimate the length of the text from its first lines and its size.
        with open_buffered(text.path) as file:
            lines = [len(line) for line in islice(file, _MEASURED_LINES) if line.strip()]
        mean_bytes = sum(lines) / len(lines) if lines else 1.0
        documents = text.path.stat().st_size / mean_bytes if lines else 1.0
        documents = documents if windows.documents is None else min(documents, windows.documents)
        previews = [example.preview for example in self._examples if example.preview.tokens]
        sizes = sum(len(preview.prompt.encode()) for preview in previews)
        bytes_per_token = max(sizes / sum(preview.tokens for preview in previews), 0.5) if sizes else _BYTES_PER_TOKEN
        tokens = documents * mean_bytes / bytes_per_token
        load = PromptLoad(max(documents, tokens / windows.max_length), tokens, batch=windows.batch_size)
        return evaluation_seconds(self._size, load, self._rates)

    def scoring(self, task: EvalTask, documents: int) -> float | None:
        """Return the seconds that one model needs for ``documents`` of a task. None for a server elsewhere."""
        scoring = self._evidence.scoring
        if not documents or self._rates is None or not find_backend(scoring.backend).loads_here:
            return None
        cost = estimate_document_cost(task)
        requests = cost.readings * documents
        tokens_per_prompt = _LONG_PROMPT
        if preview := next((example.preview for example in self._examples if example.task == task.name), None):
            tokens_per_prompt = preview.tokens * (1 + len(preview.answer) / max(len(preview.prompt), 1))
        tokens, written = requests * tokens_per_prompt, cost.written * documents
        return evaluation_seconds(self._size, PromptLoad(requests, tokens, written, scoring.batch_size), self._rates)
