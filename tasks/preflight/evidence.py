"""Pin the evidence for a run by content: tasks, documents and prompts, and the rules that judge the merge.

Calibration texts must not overlap with the documents that judge the merge. A merge that is fitted to these documents
would pass for abilities that it does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from mergegate.merge_core import Recipe
from mergegate.merge_core.architecture import dtype_in
from mergegate.merge_core.errors import Finding, InvalidInput, MergegateError, suggest
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.parsing import read_json
from mergegate.tasks.base.store import digest
from mergegate.tasks.merge import MERGED, pin_calibration_texts
from mergegate.tasks.models.checkpoints import Model, QuantizedModel, ResolvedCheckpoint, expect_inputs
from mergegate.tasks.quality.evaluation import (
    CalibrationTexts,
    ContaminatedDocuments,
    EvalTask,
    SampleUse,
    Scoring,
    find_backend,
    find_occurring,
    require_declared_mean,
    require_effect,
    require_examples,
    resolve_prompt_settings,
)
from mergegate.tasks.quality.gate import (
    CHAMPION,
    LAST_CHECKPOINT,
    EvaluateSettings,
    GateRule,
    Guard,
    JudgedSample,
    check_guards,
    comparable_parents,
    pin_tasks,
    read_samples,
    sample_start,
    with_anchor,
)
from mergegate.tasks.quality.judge import JudgePrompts, JudgeSettings, pin_prompts, read_prompts
from mergegate.tasks.quality.perplexity import (
    DriftLimits,
    HeldOutText,
    PerplexitySettings,
    WindowSettings,
    pin_documents,
    read_distinct,
    read_texts,
)
from mergegate.tasks.quality.variants import VariantFormat, VariantGuard, VariantSettings


class JudgeQuestions(NamedTuple):
    """Prompts for the judge, pinned by content, with the judge's settings."""

    prompts: JudgePrompts
    settings: JudgeSettings


class Evidence(NamedTuple):
    """Pinned data that the merge and its parents are evaluated on, and the rules that judge the merge."""

    tasks: tuple[EvalTask, ...] = ()
    scoring: Scoring = Scoring()
    guards: tuple[Guard, ...] = ()
    rule: GateRule = GateRule()
    documents: HeldOutText | None = None
    windows: WindowSettings | None = None
    limits: DriftLimits | None = None
    ensemble: bool = False
    answers: JudgeQuestions | None = None
    resample: bool = True  # whether each new merge is judged on other documents (see ``with_next_samples``)
    # Reason why models are computed in another format than they are stored in; empty if they are not.
    computed: str = ""
    accepted_copies: tuple[str, ...] = ()  # Names of the parents that the merge may copy.
    # References of the parents that nothing compares with: the earlier checkpoints of a training run.
    unmeasured: frozenset[str] = frozenset()

    def scoring_of(self, model: Model) -> Scoring:
        """Return the settings with which ``model`` is scored. A quantized model has a backend of its own."""
        return self.scoring.for_backend(model.backend) if isinstance(model, QuantizedModel) else self.scoring


class Comparisons(NamedTuple):
    """Sections of a profile that compare the merge with other models."""

    evaluate: EvaluateSettings | None
    perplexity: PerplexitySettings | None
    judge: JudgeSettings | None

    def with_last_checkpoint(self, name: str) -> Comparisons:
        """Return the sections with ``last checkpoint`` replaced by the name of that parent."""

        def rename(reference: str) -> str:
            return name if reference == LAST_CHECKPOINT else reference

        def rename_all(reference: str | tuple[str, ...]) -> str | tuple[str, ...]:
            return rename(reference) if isinstance(reference, str) else tuple(map(rename, reference))

        evaluate, perplexity, judge = self
        if evaluate:
            tasks = tuple(guard.model_copy(update={"guarded_by": rename(guard.guarded_by)}) for guard in evaluate.tasks)
            evaluate = evaluate.model_copy(update={"tasks": tasks, "reference": rename_all(evaluate.reference)})
        if perplexity:
            perplexity = perplexity.model_copy(update={"reference": rename_all(perplexity.reference)})
        if judge:
            judge = judge.model_copy(update={"guarded_by": rename(judge.guarded_by)})
        return Comparisons(evaluate, perplexity, judge)

    def names(self) -> frozenset[str]:
        """Return the references that the sections name, including those that are not names of parents."""
        guards = {guard.guarded_by for guard in self.evaluate.tasks} if self.evaluate else set()
        guards |= {self.judge.guarded_by} if self.judge else set()
        for settings in (self.evaluate, self.perplexity):
            if settings:
                guards |= {settings.reference} if isinstance(settings.reference, str) else set(settings.reference)
        return frozenset(guards)


def check_references(
    evaluate: EvaluateSettings | None,
    perplexity: PerplexitySettings | None,
    judge: JudgeSettings | None,
    parents: Sequence[ResolvedCheckpoint],
) -> None:
    """Check that all guards, the perplexity check and the judge compare with an existing model."""
    names = [parent.name for parent in parents]
    check_guards(evaluate.tasks if evaluate else (), names)
    for section, settings in (("evaluate", evaluate), ("perplexity", perplexity)):
        if settings:
            comparable_parents(settings.reference, names, names, f"{section}.reference")
    if judge and judge.guarded_by not in names:
        raise InvalidInput(
            "judge.guarded_by",
            found=f"{judge.guarded_by!r}, which is not a model in this merge",
            expected="the name of a parent",
            remedy=suggest(judge.guarded_by, names),
        )


def pin_evidence(
    evaluate: EvaluateSettings | None,
    perplexity: PerplexitySettings | None,
    judge: JudgeSettings | None,
    root: Path,
    hashes: HashMemo,
) -> Evidence:
    """Pin tasks, documents and prompts by content. Relative paths are relative to ``root``.

    Raises:
        InvalidInput: A task or a file is missing.
    """
    evidence = Evidence()
    if perplexity:  # first, because pinning tasks ends a pass that must not hash new files
        expect_inputs((root / perplexity.documents).absolute())
    if evaluate:
        guards, tasks = pin_tasks(evaluate.tasks, root, hashes, evaluate.data, evaluate.allow_code)
        for guard in (guard for guard in evaluate.tasks if guard.built_in is None):
            require_effect(guard.task, guard.own_prompt_settings, root, evaluate)
            require_declared_mean(guard.task, guard.mean_over, root)
        for task in tasks:
            require_examples(task, resolve_prompt_settings(task.prompt_settings, evaluate).num_fewshot)
        evidence = evidence._replace(
            tasks=tasks,
            scoring=evaluate.scoring,
            guards=with_anchor(guards, evaluate.anchor),
            rule=evaluate.gate_rule,
            resample=evaluate.resample,
        )
    if perplexity:
        evidence = evidence._replace(
            documents=pin_documents(perplexity, root, hashes),
            windows=perplexity.windows,
            limits=perplexity.limits,
            ensemble=perplexity.ensemble,
        )
    if judge:
        evidence = evidence._replace(answers=JudgeQuestions(pin_prompts(judge, root, hashes), judge))
    return evidence


def with_next_samples(
    evidence: Evidence, merge: str, champion: str = "", selecting: Mapping[str, SampleUse] = MappingProxyType({})
) -> Evidence:
    """Select the documents that judge a merge: those after the documents that judged the merge before it.

    This applies to tasks with a guard against the champion and more documents than the first look. All other tasks, and
    all tasks before the first release, keep the sample at the beginning of their order. See ``sample_record``.

    Args:
        evidence: Evidence with pinned data.
        merge: Digest of the merge.
        champion: Digest of the champion. Empty: there is no release yet. If it is that of the merge, whose publication
            was interrupted, the documents in ``selecting`` judge it again.
        selecting: Documents that selected the champion, by task (``ReleasedModel.samples``).
    """
    if not (evidence.resample and champion):
        return evidence
    compared = {guard.task for guard in evidence.guards if guard.guarded_by == CHAMPION}
    tasks = []
    for task in evidence.tasks:
        start = 0
        if task.documents and task.name in compared:
            use, first = selecting.get(task.name, SampleUse()), task.first_look(evidence.scoring)
            judged = JudgedSample(merge=merge, champion=champion, **use.model_dump())
            history = (judged,) if merge == champion else read_samples(task, evidence.scoring.seed)
            start = sample_start(history, judged, task.documents, first)
        tasks.append(task.model_copy(update={"sample_start": start}))
    return evidence._replace(tasks=tuple(tasks))


def evidence_for_variant(settings: VariantFormat, evidence: Evidence, root: Path) -> Evidence:
    """Return the evidence that judges a variant: that of its merge, with the merge as the only reference.

    Without guards in ``settings``, each task of the release whose guard is not advisory has one. ``root`` is
    the directory of the profile.

    Raises:
        InvalidInput: A guard names a task that the release does not evaluate, a limit contradicts another one or has no
            effect, or nothing would judge the variant.
    """
    location = f"variants: {', '.join(settings.variant_types)}"
    requests, limits = settings.guards, evidence.limits
    by_task: dict[str, Guard] = {}
    for guard in (*(guard for guard in evidence.guards if not guard.advisory), *evidence.guards):
        by_task.setdefault(guard.task, guard)
    names = {task.name: task.name for task in evidence.tasks}
    for request in requests:  # a profile may name a task by its file
        path = (root / request.task).absolute()
        if named := [task.name for task in evidence.tasks if path == task.definition]:
            names[request.task] = named[0]
        if request.task not in names:
            raise InvalidInput(
                f"{location}: guards",
                found=f"{request.task!r}, which the release does not evaluate",
                expected="a task in evaluate.tasks",
                remedy=suggest(request.task, names) or "add it to evaluate.tasks",
            )
    if not requests:
        counted = dict.fromkeys(guard.task for guard in evidence.guards if not guard.advisory)
        requests = tuple(VariantGuard(task=name) for name in counted)
    guards = tuple(_variant_guard(by_task[names[request.task]], request, settings, location) for request in requests)
    if settings.max_increase is not None:
        if limits is None:
            raise InvalidInput(
                f"{location}: max_increase",
                found="a limit on the perplexity, which this profile does not measure",
                expected="a section 'perplexity'",
                remedy="add perplexity, or remove max_increase",
            )
        warn = min(limits.warn_increase, settings.max_increase)
        limits = limits.model_copy(update={"max_increase": settings.max_increase, "warn_increase": warn})
    if not guards and limits is None:
        raise InvalidInput(
            location,
            found="no guard and no perplexity, so nothing would judge the variant",
            expected="a task whose guard is not advisory, guards of the variant, or perplexity",
        )
    judged = {guard.task for guard in guards}
    return evidence._replace(
        tasks=tuple(task for task in evidence.tasks if task.name in judged),
        guards=guards,
        rule=evidence.rule.model_copy(update={"reference": "all", "anchor": None}),
        limits=limits.model_copy(update={"reference": "all"}) if limits else None,
        ensemble=False,
        answers=None,
        accepted_copies=(MERGED,),  # A good variant answers as the merge does.
    )


def _variant_guard(guard: Guard, request: VariantGuard, settings: VariantFormat, location: str) -> Guard:
    """Return the guard of a variant on a task: ``guard``, with the merge as its reference and the variant's limits."""
    max_drop = request.max_drop if request.max_drop is not None else settings.max_drop
    margin = request.margin if request.margin is not None or request.max_drop is not None else settings.margin
    if max_drop is None:
        max_drop, margin = guard.max_drop, guard.margin if margin is None else margin
    if margin is not None and margin < max_drop:
        raise InvalidInput(
            f"{location}: guard on {guard.task}",
            found=f"a margin of {margin:g} points",
            expected=f"at least max_drop ({max_drop:g} points)",
            remedy="set a larger margin or a smaller max_drop",
        )
    update = {"guarded_by": MERGED, "advisory": False, "max_drop": max_drop, "margin": margin}
    changed = guard.model_copy(update=update)
    # The limit of one task in a suite may not be smaller than its margin.
    too_small = guard.limit is not None and guard.limit < changed.upper_limit
    return changed.model_copy(update={"limit": None}) if too_small else changed


def with_supported_dtype(evidence: Evidence, model_dtypes: Collection[str], without_units: Collection[str]) -> Evidence:
    """Replace dtype ``auto`` by float32 for all models, if this machine cannot compute in the format of one of them.

    Models that a server loads elsewhere are not affected. ``model_dtypes`` holds the storage formats of the evaluated
    models. ``without_units`` holds the formats that this machine converts for each sum, which is slower than float32
    and no more precise.
    """
    slow = sorted(set(model_dtypes) & set(without_units))
    if not slow:
        return evidence
    scoring, windows, answers = evidence.scoring, evidence.windows, evidence.answers
    wide: dict[str, str] = {"dtype": "float32"}
    changed: dict[str, Any] = {}
    if scoring.dtype == "auto" and find_backend(scoring.backend).loads_here:
        changed["scoring"] = scoring.model_copy(update=wide)
    if windows and windows.dtype == "auto":
        changed["windows"] = windows.model_copy(update=wide)
    if answers and answers.settings.dtype == "auto":
        changed["answers"] = answers._replace(settings=answers.settings.model_copy(update=wide))
    reason = f"computed in float32: this processor has no units for {' and '.join(slow)}, in which models are stored"
    is_relevant = evidence.tasks or changed.keys() - {"scoring"}  # Scoring does not matter without tasks.
    return evidence._replace(**changed, computed=reason if changed and is_relevant else "")


def stored_dtypes(models: Sequence[ResolvedCheckpoint]) -> frozenset[str]:
    """Return the storage formats that the models' configurations declare."""
    dtypes = set()
    for model in models:
        with suppress(MergegateError):  # The loader reports problems of the model.
            dtypes.add(dtype_in(read_json(model.directory / "config.json")))
    return frozenset(dtypes - {""})


def collect_calibration_texts(recipe: Recipe, hashes: HashMemo) -> CalibrationTexts | None:
    """Return all texts that the models in ``recipe`` read during the merge, or None if there are none."""
    contents: list[str] = []
    pinned: list[tuple[HeldOutText, int]] = []
    for document in (*recipe.steps, recipe):
        for _, text in pin_calibration_texts(document, hashes):
            pinned.append((text, document.reading.documents))
            contents += [content for _, content in read_texts(text, document.reading.documents)]
    return CalibrationTexts(digest=digest(pinned), texts=tuple(contents)) if pinned else None


def collect_variant_texts(variants: Sequence[VariantSettings], root: Path, hashes: HashMemo) -> CalibrationTexts | None:
    """Return all texts that the quantizers of ``variants`` read, or None if there are none."""
    calibrations = [each for variant in variants if (each := variant.pin_calibration(root, hashes))]
    if not calibrations:
        return None
    return CalibrationTexts(
        digest=digest([(each.text, each.samples) for each in calibrations]),
        texts=tuple(document for each in calibrations for document in each.documents()),
    )


def overlap_findings(
    texts: CalibrationTexts,
    evidence: Evidence,
    documents_of: Callable[[EvalTask, CalibrationTexts], ContaminatedDocuments],
    subject: str = "merge",
) -> Iterator[Finding]:
    """Yield a blocking finding for each task, held-out text and set of judge prompts that calibration texts contain.

    ``documents_of`` is ``evaluation.find_contaminated_documents`` or a replacement. ``subject`` names the model
    that the texts change: a merge or a variant.
    """

    def overlap(location: str, shared_count: int, documents: int, first: str) -> Finding:
        return Finding(
            "block",
            location,
            found=f"{shared_count:,} of {documents:,} documents also occur in the calibration texts: {first[:60]!r}",
            expected=f"evaluation documents that the {subject} was not fitted to",
            remedy="remove them from the calibration texts, or evaluate on other documents",
        )

    if evidence.documents and evidence.windows:
        distinct = read_distinct(evidence.documents, evidence.windows.documents).documents
        held_out = [document.text for document in distinct]
        if found := find_occurring([(text, "") for text in held_out], texts.texts):
            yield overlap("perplexity.documents", len(found), len(held_out), held_out[found[0]].strip())
    if evidence.answers:
        prompts = [" ".join(prompt.turns) for prompt in read_prompts(*evidence.answers.prompts)]
        if found := find_occurring([(prompt, "") for prompt in prompts], texts.texts):
            yield overlap("judge.prompts", len(found), len(prompts), prompts[found[0]].strip())
    for task in evidence.tasks:
        contaminated = documents_of(task, texts)
        if contaminated.read:
            yield overlap(f"task {task.name}", contaminated.read, contaminated.documents, contaminated.first)
