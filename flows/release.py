"""Release a merge, from recipe to publication: the story of the whole product on one page.

The flow runs on this machine without a server, or on a Prefect worker with the same store::

    mergegate run profiles/demo.yaml
    prefect deployment run release/release -p profile=profiles/demo.yaml

1. ``preflight_profile`` checks everything that can be checked before any weight is read.
2. ``try_candidates`` tries the recipe, then its remedies, until a merge passes.
3. ``make_attempt`` merges one candidate, measures it, judges it and explains the verdict. If the merge passed, it also
   builds and judges its quantized variants.
4. ``publish_attempt`` publishes the merge that passed, after manual approval if the profile requires it.

Every stage is cached by the content of its inputs. A run after a crash resumes where the last one stopped, a run with
nothing new ends in seconds, and after a change of a threshold only the gate runs again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from prefect import flow
from prefect.client.schemas.objects import State

from mergegate.flows.attempt import (
    AlreadyReleased,
    Assessment,
    Attempt,
    FailedMerge,
    FurtherJudgment,
    JudgedMerge,
    assess_merge,
    distance_from_passing,
    judge_answers,
    judge_variants,
    proposed_remedy,
    serve_merge,
    with_tuned_candidate,
)
from mergegate.flows.outcome import (
    RunOutcome,
    conclude_flow,
    name_run,
    public_names,
    publish_attempt,
    report_content,
    reported_outcome,
    run_dry_pass,
    variant_heads,
    within_limits,
)
from mergegate.flows.preflight import ClearedCandidate, Problems, preflight_profile
from mergegate.flows.profile import Profile, RemedyChoice, load_profile, profile_name
from mergegate.merge_core.errors import Refused
from mergegate.tasks.base.runners import Runner, RunnerSettings, open_runner
from mergegate.tasks.base.stage import announce, require_work_allowed, runtime, store
from mergegate.tasks.base.store import Artifact
from mergegate.tasks.merge import merge, merged_model, numerics, prepare_recipe, select_named_parents, with_new_routers
from mergegate.tasks.models.checkpoints import (
    PinnedCheckpoint,
    PinnedRecipe,
    apply_adapters,
    fetch_weights,
    pin_checkpoints,
)
from mergegate.tasks.preflight import Evidence, with_next_samples
from mergegate.tasks.quality.gate import JudgedSample, needs_champion, record_sample, unselected_scores
from mergegate.tasks.quality.perplexity import Likelihoods, ensemble_likelihoods
from mergegate.tasks.release.explain import Explanation, explain_merge
from mergegate.tasks.release.publish.releases import load_released_model
from mergegate.tasks.release.report import write_report

# Judgments of a merge that passed the gate, in order. After a refusal, the others are skipped. A judge costs money and
# a server costs minutes, so they run only for a merge that would be published.
JUDGMENTS: tuple[FurtherJudgment, ...] = (judge_answers, serve_merge)


@flow(name="release", flow_run_name=name_run)
def release(
    profile: Path | Profile,
    overrides: tuple[str, ...] = (),
    publish: bool = True,
    remedy: RemedyChoice | None = None,
) -> State[RunOutcome]:
    """Release a verified merge, or explain why there is no release.

    Args:
        profile: Profile file, relative to the project directory, or a parsed profile.
        overrides: Profile settings to override in this run, for example 'evaluate.documents=200'.
        publish: Whether to publish a merge that passes, if the profile has a target.
        remedy: Remedies to try after the gate refuses: the list in the profile ('written'), or also remedies that
            mergegate proposes after a refusal ('auto'). Default: the setting in the profile.
    """
    story = partial(make_release, publishing=publish)
    return conclude_flow(
        lambda: within_limits(story, load_profile(profile, overrides).with_remedies(remedy)),
        profile_name(profile),
        overrides,
    )


def run_release_dry_pass(
    profile: Path | Profile, overrides: tuple[str, ...], publish: bool, remedy: RemedyChoice | None
) -> RunOutcome | None:
    """Return the outcome of :func:`release` if there is no work to do, otherwise None.

    This takes about a second, without Prefect, so that a scheduled run with nothing new costs almost nothing.
    """

    def story() -> RunOutcome:
        loaded = load_profile(profile, overrides).with_remedies(remedy)
        if loaded.runner.kind != "local":
            require_work_allowed("ask a cluster")
        local = loaded.model_copy(update={"runner": RunnerSettings()})
        return within_limits(partial(make_release, publishing=publish), local)

    return run_dry_pass(story, "release", profile_name(profile), overrides)


def make_release(
    profile: Profile,
    judgments: Sequence[FurtherJudgment] = JUDGMENTS,
    *,
    publishing: bool = True,
) -> RunOutcome:
    """Check, attempt and publish a release, and return the outcome of the run.

    A check that refuses raises its error. If the gate refuses, the outcome contains the report.
    """
    with open_runner(profile.runner) as runner:
        # Find every problem with the target, recipe, remedies and evidence before any weight is read.
        preflight = preflight_profile(profile, Problems(stop_at_once=True))
        assert preflight.evidence is not None  # otherwise the preflight would have raised its problem

        attempt, attempts = try_candidates(
            with_tuned_candidate(preflight.cleared, profile, runner),
            profile,
            preflight.evidence,
            judgments,
            runner,
            limit=len(preflight.cleared) + profile.max_further_attempts,
        )
    if isinstance(attempt, AlreadyReleased):
        page = attempt.release.directory / "report.html"
        return RunOutcome(
            status="nothing new",
            message=f"nothing new: {attempt.release.version} is released",
            version=attempt.release.version,
            location=attempt.release.location,
            report=page if page.is_file() else None,
        )

    names = public_names(profile, attempt, attempts)
    content = report_content(profile, attempt, attempts, names)
    report = write_report(content)
    if not (attempt.is_good and profile.publish and publishing):
        outcome = reported_outcome(content, report, None)
        if attempt.released and not attempt.is_good:
            message = f"{content.name} {attempt.released.version} is released without a variant that is required"
            return outcome.model_copy(update={"message": message})
        return outcome
    return publish_attempt(profile, profile.publish, attempt, content, report, names)


def try_candidates(
    candidates: Iterator[ClearedCandidate],
    profile: Profile,
    evidence: Evidence,
    judgments: Sequence[FurtherJudgment],
    runner: Runner,
    *,
    limit: int,
) -> tuple[Attempt | AlreadyReleased, list[Attempt | FailedMerge]]:
    """Return the attempt that passes, or else the one that came closest, and all attempts in order.

    Try first ``candidates``, then remedies that mergegate proposes after the refusals, if the profile allows them.
    ``limit`` is the maximum number of attempts. All together have the error rate of one.
    """
    attempts: list[Attempt | AlreadyReleased | FailedMerge] = []
    proposals = (proposed_remedy(_judged_or_failed(attempts), profile) for _ in range(profile.max_proposed_remedies))
    for cleared in chain(candidates, proposals):
        if cleared is None:
            break  # No remedy is left.
        if attempts:
            announce(f"remedy {len(attempts)}: {cleared.candidate.remedy}")
        # A merge could pass by chance. All attempts together must not do so more often than a single one.
        rule = evidence.rule.for_attempt(len(attempts) + 1, limit)
        attempts.append(make_attempt(cleared, profile, evidence._replace(rule=rule), judgments, runner))
        if attempts[-1].is_good:
            break
        if isinstance(attempt := attempts[-1], Attempt) and (tasks := attempt.assessment.evidence.tasks):
            evidence = evidence._replace(tasks=tasks, resample=False)  # all attempts share the documents of the first
    last = attempts[-1]
    if last.is_good and not isinstance(last, FailedMerge):
        return last, _judged_or_failed(attempts)
    judged = [attempt for attempt in attempts if isinstance(attempt, Attempt)]
    if not judged:
        assert isinstance(last, FailedMerge)  # an existing release would have ended the loop
        raise last.refusal
    return min(judged, key=distance_from_passing), _judged_or_failed(attempts)


def _judged_or_failed(attempts: Sequence[Attempt | AlreadyReleased | FailedMerge]) -> list[Attempt | FailedMerge]:
    """Return the attempts that were not released before."""
    return [attempt for attempt in attempts if not isinstance(attempt, AlreadyReleased)]


def make_attempt(
    cleared_candidate: ClearedCandidate,
    profile: Profile,
    evidence: Evidence,
    judgments: Sequence[FurtherJudgment],
    runner: Runner,
) -> Attempt | AlreadyReleased | FailedMerge:
    """Fetch missing weights, then merge, measure, judge and explain one candidate."""
    recipe = cleared_candidate.candidate.recipe
    fetch_weights(cleared_candidate.parents, store().hashes)
    parents = pin_checkpoints(cleared_candidate.parents, store().hashes, profile.checks.code.trusted)
    by_ref = {parent.ref: parent for parent in parents}
    recipe = prepare_recipe(recipe, by_ref.__getitem__, in_flow=True)
    try:
        recipe = with_new_routers(recipe, by_ref.__getitem__, numerics(profile.merge), lambda stage: stage)
        pinned = PinnedRecipe(recipe, parents)
        merged = merge.after(cleared_candidate.license, cleared_candidate.compatibility)(
            pinned, numerics(profile.merge)
        )
    except Refused as refusal:
        return FailedMerge(cleared_candidate, refusal)
    model = merged_model(merged, pinned)
    champion = anchor = None
    heads: Mapping[str, str] = {}
    if needs_champion(evidence.guards):
        heads = variant_heads(profile)
        champion = load_released_model(profile.publish, profile.root, model, store().hashes)
        if champion and champion.complete and champion.digest == model.digest and not profile.variants:
            return AlreadyReleased(cleared_candidate, champion)
    if champion:
        evidence = with_next_samples(evidence, model.digest, champion.digest, champion.samples)
    if champion and evidence.rule.anchor:
        anchor = load_released_model(profile.publish, profile.root, model, store().hashes, evidence.rule.anchor)
        anchor = anchor if anchor and anchor.digest != champion.digest else None
    # The merge reads adapters separately. To load a model for evaluation, its adapter must be applied first.
    parents = apply_adapters(select_named_parents(recipe, pinned.parents))
    adapted = model if isinstance(model, PinnedCheckpoint) else None
    model = apply_adapters([adapted])[0] if adapted else model
    assessment = assess_merge(model, parents, champion, evidence, anchor, runner)
    _record_samples(assessment, model.digest, champion.digest if champion else "")
    judged = JudgedMerge(profile, assessment.evidence, model, parents, adapted)
    explanation = _explain_attempt(cleared_candidate, pinned, judged, assessment, evidence)
    ensemble = _measure_ensemble(parents, evidence)
    # A merge that is the current release passed all judgments before. Only its variants are judged now.
    released = champion if champion and champion.complete and champion.digest == model.digest else None
    verdicts = [assessment.verdict.value.as_verdict()]
    for judgment in () if released else judgments:
        if all(verdict.publishable for verdict in verdicts):
            verdict = judgment(judged)
            verdicts += [verdict] if verdict else []
    is_good = released or all(verdict.publishable for verdict in verdicts)
    variants = judge_variants(judged, runner) if is_good else ()
    return Attempt(
        cleared_candidate,
        pinned,
        merged,
        assessment,
        explanation,
        tuple(verdicts),
        ensemble=ensemble,
        expected_head=champion.head if champion else None,
        variant_heads=heads,
        variants=variants,
        released=released,
        sample_notes=unselected_scores(
            evidence.guards,
            assessment.scores.get(champion.name, ()),
            assessment.evidence.tasks,
            champion.samples,
        )
        if champion and champion.digest != model.digest
        else (),
    )


def _record_samples(assessment: Assessment, merge_digest: str, champion_digest: str) -> None:
    """Record which documents have judged the merge, so that the next merge is judged on others."""
    for task in assessment.evidence.tasks:
        guards = assessment.verdict.value.guards
        if guard := next((guard for guard in guards if guard.task == task.name), None):
            use = {"start": guard.sample_start, "documents": guard.documents_asked or guard.n}
            sample = JudgedSample(merge=merge_digest, champion=champion_digest, **use)
            record_sample(task, assessment.evidence.scoring.seed, sample)


def _explain_attempt(
    cleared_candidate: ClearedCandidate,
    pinned_recipe: PinnedRecipe,
    judged_merge: JudgedMerge,
    assessment: Assessment,
    evidence: Evidence,
) -> Explanation:
    # All task vectors of a training run would be read again, so only the first and the last checkpoint explain it.
    first = {window.checkpoints[0] for window in cleared_candidate.candidate.windows}
    parents = (
        parent for parent in judged_merge.parents if parent.ref in first or parent.ref not in evidence.unmeasured
    )
    adapted_recipe = replace(pinned_recipe, parents=tuple(parents))
    document, gate = cleared_candidate.candidate.document, assessment.verdict.value
    return explain_merge(adapted_recipe, judged_merge.model, document, gate, assessment.scores, evidence.tasks)


def _measure_ensemble(parents: Sequence[PinnedCheckpoint], evidence: Evidence) -> Artifact[Likelihoods] | None:
    """Return the likelihoods of the held-out text under all parents together, if the profile asks for them."""
    members = tuple(parent for parent in parents if not parent.is_base)
    if evidence.ensemble and evidence.documents is not None and evidence.windows is not None and len(members) > 1:
        return ensemble_likelihoods(members, evidence.documents, evidence.windows, runtime())
    return None
