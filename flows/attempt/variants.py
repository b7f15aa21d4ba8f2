"""Build the quantized variants of a merge, and judge each in its own runtime with the merge as the reference.

The merge has passed all of its own judgments. Each variant is a release of its own, so the gate decides about each one
at the full confidence of the profile: a profile with three bad variants publishes one of them more often than a profile
with a single bad one does. A failure to build or check a variant is the verdict on it. It does not end the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

from mergegate.flows.attempt.assessment import Assessment, assess_merge
from mergegate.flows.attempt.attempt import JudgedMerge, JudgedVariant
from mergegate.merge_core.errors import CannotDecide, MergegateError
from mergegate.tasks.base.runners import Runner
from mergegate.tasks.base.stage import announce
from mergegate.tasks.base.store import Artifact, StoredValue
from mergegate.tasks.merge import MERGED
from mergegate.tasks.models.checkpoints import QuantizedModel
from mergegate.tasks.preflight import evidence_for_variant
from mergegate.tasks.quality.evaluation import CountLimit, TokenizerSource, task_prompts
from mergegate.tasks.quality.perplexity import read_distinct
from mergegate.tasks.quality.serve import Check
from mergegate.tasks.quality.variants import ConversionCheck, VariantFormat, VariantRecord, VariantVerdict

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
    texts = cache(partial(conversion_texts, merge))  # not every format converts
    for settings in merge.profile.variants:
        conversion, problem = _convert(settings, merge, texts)
        for variant_type in settings.variant_types:
            refusal = problem if conversion is None else next(iter(conversion.value.problems), "")
            variant = _judge_variant(settings, variant_type, merge, runner, refusal)
            if conversion is not None:
                update = {"conversion": conversion.value}
                variant = replace(variant, verdict=variant.verdict.model_copy(update=update))
            if variant.verdict.outcome != "pass":
                announce(f"variant {variant_type}: {variant.verdict.outcome}: {variant.verdict.reasons[0]}")
            judged.append(variant)
    return tuple(judged)


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
    settings: VariantFormat, merge: JudgedMerge, texts: Callable[[], Sequence[str]]
) -> tuple[StoredValue[ConversionCheck] | None, str]:
    """Compare the unquantized form of a format with the merge. Return the result, or the reason why there is none."""
    try:
        return settings.convert(merge.model, texts, merge.profile.root), ""
    except CannotDecide:
        raise
    except MergegateError as error:
        return None, _sentence(error)


def _judge_variant(
    settings: VariantFormat, variant_type: str, merge: JudgedMerge, runner: Runner | None, problem: str
) -> JudgedVariant:
    """Build one variant, check its files, evaluate it, and let the runtime that will serve it answer.

    A ``problem`` of the conversion is the verdict on all variants of the format, so none of them is built.
    """
    profile, reference = merge.profile, merge.model.model_copy(update={"name": MERGED})
    artifact: Artifact[VariantRecord] | None = None
    model: QuantizedModel | None = None
    assessment: Assessment | None = None
    checks: tuple[Check, ...] = ()
    try:
        if not problem:
            artifact = settings.build(merge.model, variant_type, profile.root)
            model = settings.open(merge.model, variant_type, artifact).model_copy(update={"name": variant_type})
            checks = tuple(settings.inspect(model))
        if model and not any(check.outcome == "fail" for check in checks):
            evidence = evidence_for_variant(settings, merge.evidence, profile.root)
            assessment = assess_merge(model, (reference,), None, evidence, runner=runner)
            if assessment.verdict.value.publishable:
                checks += tuple(settings.smoke(model, profile.serve, profile.root))
    except CannotDecide:
        raise
    except MergegateError as error:
        problem = _sentence(error)
    gate = assessment.verdict.value if assessment else None
    failures = [problem] if problem else []
    failures += [_failure(check) for check in checks if check.outcome == "fail"]
    verdict = VariantVerdict(
        format=settings.format,
        type=variant_type,
        required=settings.required,
        outcome="fail" if failures or gate is None else gate.outcome,
        publishable=not failures and gate is not None and gate.publishable,
        reasons=(*failures, *(gate.reasons if gate else ())),
        backend=model.backend if model and gate else "",
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
