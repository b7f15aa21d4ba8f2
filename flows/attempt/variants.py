"""Build the quantized variants of a merge, and judge each in its own runtime with the merge as the reference.

The merge has passed all of its own judgments. Each variant is a release of its own, so the gate decides about each one
at the full confidence of the profile: a profile with three bad variants publishes one of them more often than a profile
with a single bad one does. A failure to build or check a variant is the verdict on it. It does not end the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mergegate.flows.attempt.assessment import Assessment, assess_merge
from mergegate.flows.attempt.attempt import JudgedMerge, JudgedVariant
from mergegate.flows.profile import Profile
from mergegate.merge_core.errors import CannotDecide, InvalidInput, MergegateError, suggest
from mergegate.tasks.evaluation import CountLimit, TokenizerSource, task_prompts
from mergegate.tasks.gate import Guard
from mergegate.tasks.merge import MERGED
from mergegate.tasks.perplexity import read_distinct
from mergegate.tasks.preflight import Evidence
from mergegate.tasks.runners import Runner
from mergegate.tasks.serve import Check
from mergegate.tasks.stage import Outcome, announce
from mergegate.tasks.store import Artifact, StoredValue
from mergegate.tasks.variants import (
    ConversionCheck,
    VariantFormat,
    VariantGuard,
    VariantRecord,
    VariantSettings,
    VariantVerdict,
)

_TEXTS = 200  # held-out documents, and documents of each task, with which a conversion is compared


def judge_variants(merge: JudgedMerge, runner: Runner | None = None) -> tuple[JudgedVariant, ...]:
    """Build and judge all variants in the profile, in order.

    Args:
        merge: Merge that passed all of its own judgments. Its evidence names the documents that judged it, so its
            scores on them are in the store.
        runner: Runner that measures. Default: this process, one model after another.

    Raises:
        CannotDecide: The disk is full, a time limit has expired, or a file changed.
    """
    judged: list[JudgedVariant] = []
    texts = conversion_texts(merge) if merge.profile.variants else ()
    for settings in merge.profile.variants:
        conversion, problem = _convert(settings, merge, texts)
        for variant_type in settings.variant_types:
            refusal = problem if conversion is None else next(iter(conversion.value.problems), "")
            variant = (
                _conclude(settings, variant_type, refusal)
                if refusal
                else _judge_variant(settings, variant_type, merge, runner)
            )
            if conversion is not None:
                update = {"conversion": conversion.value}
                variant = replace(variant, verdict=variant.verdict.model_copy(update=update))
            if variant.verdict.outcome != "pass":
                announce(f"variant {variant_type}: {variant.verdict.outcome}: {variant.verdict.reasons[0]}")
            judged.append(variant)
    return tuple(judged)


def evidence_for_variant(profile: Profile, settings: VariantSettings, evidence: Evidence) -> Evidence:
    """Return the evidence that judges a variant: that of its merge, with the merge as the only reference.

    Without guards of its own, a variant has one for each task of the release that has a guard that counts.

    Raises:
        InvalidInput: A guard names a task that the release does not evaluate, a limit contradicts another one or has no
            effect, or nothing would judge the variant.
    """
    location = f"profile {profile.name}: variants[{profile.variants.index(settings)}]"
    own_guards, limits = settings.guards, evidence.limits
    by_task: dict[str, Guard] = {}
    for guard in (*(guard for guard in evidence.guards if not guard.advisory), *evidence.guards):
        by_task.setdefault(guard.task, guard)
    names = {task.name: task.name for task in evidence.tasks}
    for own in own_guards:  # a profile may name a task by its file
        path = (profile.root / own.task).absolute()
        if named := [task.name for task in evidence.tasks if path == task.definition]:
            names[own.task] = named[0]
        if own.task not in names:
            raise InvalidInput(
                f"{location}.guards",
                found=f"{own.task!r}, which the release does not evaluate",
                expected="a task in evaluate.tasks",
                remedy=suggest(own.task, names) or "add it to evaluate.tasks",
            )
    if not own_guards:
        counted = dict.fromkeys(guard.task for guard in evidence.guards if not guard.advisory)
        own_guards = tuple(VariantGuard(task=name) for name in counted)
    guards = []
    for own in own_guards:
        guard = by_task[names[own.task]]
        max_drop = next((value for value in (own.max_drop, settings.max_drop) if value is not None), None)
        margin = own.margin if own.margin is not None or own.max_drop is not None else settings.margin
        if max_drop is None:
            max_drop, margin = guard.max_drop, guard.margin if margin is None else margin
        if margin is not None and margin < max_drop:
            raise InvalidInput(
                f"{location}: guard on {guard.task}",
                found=f"a margin of {margin:g} points",
                expected=f"at least max_drop ({max_drop:g} points)",
                remedy="set max_drop of the variant, too",
            )
        update = {"guarded_by": MERGED, "advisory": False, "max_drop": max_drop, "margin": margin}
        changed = guard.model_copy(update=update)
        # The limit of one task in a suite may not be smaller than its margin.
        too_small = guard.limit is not None and guard.limit < changed.upper_limit
        guards.append(changed.model_copy(update={"limit": None}) if too_small else changed)
    if settings.max_increase is not None:
        if limits is None:
            raise InvalidInput(
                f"{location}.max_increase",
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
        guards=tuple(guards),
        rule=evidence.rule.model_copy(update={"reference": "all", "anchor": None}),
        limits=limits.model_copy(update={"reference": "all"}) if limits else None,
        ensemble=False,
        answers=None,
        accepted_copies=(MERGED,),  # A good variant answers as the merge does.
    )


def conversion_texts(merge: JudgedMerge) -> tuple[str, ...]:
    """Return texts that the models are measured on: held-out documents, then prompts of the tasks with an answer."""
    evidence, model = merge.evidence, merge.model
    texts: list[str] = []
    if evidence.documents and evidence.windows:
        most = min(_TEXTS, evidence.windows.documents or _TEXTS)
        texts += [document.text for document in read_distinct(evidence.documents, most).documents]
    source = TokenizerSource(name=model.name, directory=model.tokenizer_directory, digest=model.digest)
    limit = CountLimit(seconds=evidence.scoring.time_limit)
    for task in evidence.tasks:
        texts += task_prompts.build(task, evidence.scoring, source, _TEXTS, limit).value.texts
    return tuple(dict.fromkeys(texts))


def _convert(
    settings: VariantFormat, merge: JudgedMerge, texts: Sequence[str]
) -> tuple[StoredValue[ConversionCheck] | None, str]:
    """Compare the unquantized form of a format with the merge. Return the result, or the reason why there is none."""
    try:
        return settings.convert(merge.model, texts, merge.profile.root), ""
    except CannotDecide:
        raise
    except MergegateError as error:
        return None, _sentence(error)


def _judge_variant(
    settings: VariantFormat, variant_type: str, merge: JudgedMerge, runner: Runner | None
) -> JudgedVariant:
    """Build one variant, check its files, evaluate it, and let the runtime that will serve it answer."""
    profile, reference = merge.profile, merge.model.model_copy(update={"name": MERGED})
    artifact: Artifact[VariantRecord] | None = None
    assessment: Assessment | None = None
    checks: tuple[Check, ...] = ()
    problem = backend = ""
    try:
        artifact = settings.build(merge.model, variant_type, profile.root)
        model = settings.open(merge.model, variant_type, artifact).model_copy(update={"name": variant_type})
        checks = tuple(settings.inspect(model))
        if not any(check.outcome == "fail" for check in checks):
            evidence = evidence_for_variant(profile, settings, merge.evidence)
            assessment, backend = assess_merge(model, (reference,), None, evidence, runner=runner), model.backend
            if assessment.verdict.value.publishable:
                checks += tuple(settings.smoke(model, profile.serve, profile.root))
    except CannotDecide:
        raise
    except MergegateError as error:
        problem = _sentence(error)
    variant = _conclude(settings, variant_type, problem, artifact, checks, assessment)
    return replace(variant, verdict=variant.verdict.model_copy(update={"backend": backend}))


def _conclude(
    settings: VariantFormat,
    variant_type: str,
    problem: str,
    artifact: Artifact[VariantRecord] | None = None,
    checks: tuple[Check, ...] = (),
    assessment: Assessment | None = None,
) -> JudgedVariant:
    """Return the verdict that follows from everything that is known about a variant. Each failure counts."""
    gate = assessment.verdict.value if assessment else None
    failures = [problem] if problem else []
    failures += [_failure(check) for check in checks if check.outcome == "fail"]
    outcome: Outcome = "fail" if failures or gate is None else gate.outcome
    verdict = VariantVerdict(
        format=settings.format,
        type=variant_type,
        required=settings.required,
        outcome=outcome,
        publishable=not failures and gate is not None and gate.publishable,
        reasons=(*failures, *(gate.reasons if gate else ())),
        record=artifact.value if artifact else None,
        checks=checks,
        gate=gate,
        digest=artifact.digest if artifact else "",
    )
    return JudgedVariant(settings, verdict, artifact, assessment)


def _failure(check: Check) -> str:
    return f"{check}; expected: {check.expected}" if check.expected else str(check)


def _sentence(error: MergegateError) -> str:
    return f"{error.where}: {error.found}" + (f"; expected: {error.expected}" if error.expected else "")
