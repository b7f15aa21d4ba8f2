"""Publish a merge that passed, then its quantized variants, after manual approval if the profile requires it.

The merge comes first, because its variants depend on its release. mergegate publishes each entry of the profile's
``variants`` to its own place, completely or not at all. If one place fails, it publishes the others, and the outcome
names the failed one. Running again publishes only that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from mergegate.flows.attempt import Assessment, Attempt
from mergegate.flows.outcome.report_content import without_variants
from mergegate.flows.outcome.run_outcome import PublishedVariants, RunOutcome, reported_outcome
from mergegate.flows.prefect_api import require_decision
from mergegate.flows.profile import Profile
from mergegate.merge_core.errors import CannotDecide, MergegateError, finding_of
from mergegate.tasks.base.stage import Verdict, store
from mergegate.tasks.base.store import Artifact
from mergegate.tasks.merge import compare_with_parents, merged_model, numerics
from mergegate.tasks.quality.gate import RecordedEvidence, record_evidence, verdict_record
from mergegate.tasks.quality.perplexity import pin_documents
from mergegate.tasks.release.publish import (
    DatasetFacts,
    MergeRelease,
    PassedVariant,
    PendingRelease,
    PublicNames,
    Release,
    ReleaseParts,
    VariantParts,
    describe_merge,
    joint_digest,
    pending_release,
    publish,
    published_merge,
    release_digest,
    require_approved,
    variant_content,
)
from mergegate.tasks.release.publish.targets import PublishTarget
from mergegate.tasks.release.report import Report, ReportContent


class _Place(NamedTuple):
    """Release of one entry of ``variants``, with the target that it is published to."""

    target: PublishTarget
    parts: VariantParts
    expected_head: str | None


def publish_attempt(
    profile: Profile,
    target: PublishTarget,
    attempt: Attempt,
    content: ReportContent,
    report: Artifact[Report],
    names: PublicNames,
) -> RunOutcome:
    """Publish a merge that passed and its variants that passed, and return the outcome of the run.

    If the merge is the current release, only its variants are published. A reviewer approves all of it as one.
    """
    root, current = profile.root, attempt.released
    of_merge = without_variants(content, attempt, names)
    parts: ReleaseParts | None = None
    merge: MergeRelease | None = None  # None if there are no variants, which depend on it
    if current is None:
        parts = _merge_parts(profile, attempt, of_merge, names)
        if attempt.variants:
            merge = describe_merge(target, root, parts)
    else:
        merge = published_merge(target, profile.name, current.directory)
    places = _variant_places(profile, target, attempt, of_merge, merge, names) if merge else ()

    def find_pending() -> PendingRelease:
        if parts:
            own = pending_release(target, root, parts)
        else:
            assert merge  # the current release
            own = PendingRelease(merge.version, merge.sums, True)
        return own.with_variants([pending_release(place.target, root, place.parts) for place in places])

    def publish_now(approved_digest: str | None = None) -> RunOutcome:
        digest = approved_digest
        if merge:
            # Write the files of every release first. If one of them is not valid, nothing is published.
            digest = release_digest(target, root, parts) if parts else merge.sums
            digests = [digest, *(release_digest(place.target, root, place.parts) for place in places)]
            require_approved(profile.name, joint_digest(digests), approved_digest)
        if parts:
            release = publish(target, root, parts, expected_head=attempt.expected_head, approved_digest=digest)
        else:
            assert current
            assert merge
            release = Release(profile.name, merge.version, current.location, "", new=False)
        return _publish_variants(profile, target, places, release, reported_outcome(content, report, release))

    if target.approval_settings is None:
        return publish_now()
    # All expensive work is done and stored. A run that waits for approval holds no resources and continues from this
    # point.
    unpublished = reported_outcome(content, report, None)
    decision = require_decision(target.approval_settings, content, unpublished.report, find_pending)
    if decision is None:
        return publish_now()
    if decision.waits:
        return unpublished.model_copy(update={"status": "passed", "message": decision.text()})
    if not decision.publish:
        refusal = {"message": f"{decision.version} is not released", "reasons": (decision.text(),)}
        return unpublished.model_copy(update={"status": "refused", **refusal})
    outcome = publish_now(approved_digest=decision.digest)
    return outcome.model_copy(update={"reasons": (decision.text(), *outcome.reasons)})


def _merge_parts(profile: Profile, attempt: Attempt, content: ReportContent, names: PublicNames) -> ReleaseParts:
    """Return the parts of the merge's release. ``content`` says nothing about its variants."""
    evidence = _record(attempt.assessment, attempt.verdicts[1:], names)
    return ReleaseParts(
        content,
        attempt.pinned,
        numerics(profile.merge),
        attempt.cleared.license,
        attempt.merged,
        evidence,
        names,
        _held_out(profile, content, names),
        compare_with_parents.build(merged_model(attempt.merged, attempt.pinned), attempt.pinned.parents).value,
    )


def _held_out(profile: Profile, content: ReportContent, names: PublicNames) -> DatasetFacts | None:
    """Return name and digest of the held-out text, or None if no model has read one."""
    if profile.perplexity is None or content.windows is None:
        return None
    text = pin_documents(profile.perplexity, profile.root, store().hashes)
    return DatasetFacts(names.rename_text(str(profile.perplexity.documents)), "perplexity", text.sha256)


def _variant_places(
    profile: Profile,
    target: PublishTarget,
    attempt: Attempt,
    content: ReportContent,
    merge: MergeRelease,
    names: PublicNames,
) -> tuple[_Place, ...]:
    """Return the releases of variants: one for each entry of the profile with at least one variant that passed."""
    places = []
    for settings in profile.variants:
        variants = [variant for variant in attempt.variants if variant.settings == settings]
        passed = tuple(
            PassedVariant(variant.verdict.type, variant.artifact, _record(variant.assessment, (), names))
            for variant in variants
            if variant.verdict.publishable and variant.artifact and variant.assessment
        )
        if passed:
            suffix = settings.place_suffix
            verdicts = names.apply(tuple(variant.verdict for variant in variants))
            about = variant_content(content, f"{merge.name}-{suffix}", merge, verdicts)
            inputs = (attempt.pinned, attempt.cleared.license, names)
            held_out = _held_out(profile, about, names)
            places.append(
                _Place(
                    target.for_variants(suffix),
                    VariantParts(about, settings, passed, merge, *inputs, held_out),
                    attempt.variant_heads.get(suffix),
                )
            )
    return tuple(places)


def _record(
    assessment: Assessment, further_verdicts: Sequence[Verdict], names: PublicNames
) -> Artifact[RecordedEvidence]:
    """Return the evidence of a verdict, from which anyone can decide again."""
    inputs, likelihoods = assessment.gate_inputs, assessment.likelihoods
    further = {name: artifact for name, artifact in likelihoods.items() if name not in inputs.likelihoods}
    return record_evidence(
        names.apply(verdict_record(inputs, assessment.verdict.value, further_verdicts, further)),
        names.apply(inputs.scores),
        names.apply({**inputs.likelihoods, **further}),
    )


def _publish_variants(
    profile: Profile, target: PublishTarget, places: Sequence[_Place], merge: Release, outcome: RunOutcome
) -> RunOutcome:
    """Publish the variants of a published merge, and return the outcome of the run with them.

    ``outcome`` is that of the merge. If one place fails, mergegate still publishes the others.
    """
    published: list[PublishedVariants] = []
    problems: dict[str, MergegateError] = {}
    for place in places:
        parts = place.parts
        try:
            release = publish(place.target, profile.root, parts, expected_head=place.expected_head)
        except MergegateError as error:
            problems[parts.name] = error
            if isinstance(error, CannotDecide):  # The disk is full or a time limit expired: other places would fail.
                break
            continue
        types = tuple(variant.type for variant in parts.passed)
        published.append(
            PublishedVariants(
                format=parts.content.variants[0].format,
                types=types,
                version=release.version,
                location=release.location,
                new=release.new,
            )
        )
    update: dict[str, object] = {"variants": tuple(published)}
    with suppress(MergegateError):  # Everything is published, and these sentences are only additional.
        update["reasons"] = _kept_places(profile, target, places, merge)
    new_types = [variant_type for each in published if each.new for variant_type in each.types]
    if new_types and not merge.new:
        update |= {"status": "released", "message": f"released {', '.join(new_types)} of {merge.name} {merge.version}"}
    if problems:
        failed = next(iter(problems.values()))
        verb = "is released" if merge.new else "was released before"
        reasons = tuple(f"{name} is not published: {error.where}: {error.found}" for name, error in problems.items())
        again = "Run again to publish the missing variants."
        update |= {
            "status": failed.status,
            "message": f"{merge.name} {merge.version} {verb}, but not all of its variants",
            "reasons": (*reasons, again),
            "stopped_by": finding_of(failed),
        }
    return outcome.model_copy(update=update)


def _kept_places(profile: Profile, target: PublishTarget, places: Sequence[_Place], merge: Release) -> tuple[str, ...]:
    """Return a sentence for each place that keeps the variants of an earlier merge, because no new variant passed."""
    published = {place.parts.settings.place_suffix for place in places}
    return tuple(
        f"{merge.name}-{suffix} keeps its earlier release, because no variant of {merge.version} passed"
        for suffix in (settings.place_suffix for settings in profile.variants)
        if suffix not in published and target.for_variants(suffix).current_head(profile.root) is not None
    )


def variant_heads(profile: Profile) -> Mapping[str, str]:
    """Return the head of the current release in each place of variants, by suffix, as ``Attempt.variant_heads``."""
    if profile.publish is None:
        return {}
    suffixes = [settings.place_suffix for settings in profile.variants]
    heads = {suffix: profile.publish.for_variants(suffix).current_head(profile.root) for suffix in suffixes}
    return {suffix: head for suffix, head in heads.items() if head is not None}
