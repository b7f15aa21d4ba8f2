"""A release, from recipe to publication: the whole product on one page.

::

    mergegate run profiles/demo.yaml                                       # on this machine, no server
    prefect deployment run release/release -p profile=profiles/demo.yaml   # on a worker; the same flow, the same store

Every stage is cached by what goes into it: a run after a crash resumes where it left off, a run with nothing new ends
in seconds, a changed threshold runs only the gate. Whatever refuses says where, what was found and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from prefect import flow
from prefect.client.schemas.objects import State

from mergegate.flows.attempt import (
    AlreadyReleased,
    Attempt,
    FailedMerge,
    FurtherJudgement,
    JudgedMerge,
    assess_merge,
    judge_answers,
    measure_ensemble,
    proposed_remedy,
    serve_merge,
    tuned_remedy,
)
from mergegate.flows.outcome import (
    RunOutcome,
    already_released_outcome,
    conclude_flow,
    name_run,
    profile_name,
    public_names,
    report_content,
    reported_outcome,
    run_dry_pass,
    within_limits,
)
from mergegate.flows.prefect_api import require_decision
from mergegate.flows.preflight import ClearedCandidate, Problems, preflight_profile
from mergegate.flows.profile import Profile, RemedyChoice, load_profile
from mergegate.merge_core.errors import ChangedInput, DiskRefused, Refused
from mergegate.tasks.checkpoints import PinnedCheckpoint, PinnedRecipe, apply_adapters, fetch_weights, pin_checkpoints
from mergegate.tasks.explain import explain_merge
from mergegate.tasks.gate import needs_champion
from mergegate.tasks.merge import (
    merge,
    merged_model,
    numerics,
    optimizer_state,
    optimizer_steps,
    prepare_recipe,
    select_named_parents,
)
from mergegate.tasks.preflight import Evidence
from mergegate.tasks.publish import PublicNames, ReleaseParts, pending_release, publish, state_license_files
from mergegate.tasks.publish.releases import find_anchor, find_champion
from mergegate.tasks.publish.targets import Target
from mergegate.tasks.report import Report, ReportContent, write_report
from mergegate.tasks.runners import Runner, RunnerSettings, open_runner
from mergegate.tasks.stage import announce, require_work_allowed, store
from mergegate.tasks.store import Artifact

# What else is asked of a merge that passed the gate, in this order, each while nothing before it says no. A judge costs
# money and a server minutes: only for what would otherwise be published.
JUDGEMENTS: tuple[FurtherJudgement, ...] = (judge_answers, serve_merge)


@flow(name="release", flow_run_name=name_run)
def release(
    profile: Path | Profile,
    overrides: tuple[str, ...] = (),
    publish: bool = True,
    remedy: RemedyChoice | None = None,
) -> State[RunOutcome]:
    """Make a verified release of a merge, or say clearly why not.

    Args:
        profile: A profile file, relative to the project, or a whole profile.
        overrides: What this run is told otherwise: 'evaluate.documents=200'.
        publish: Whether what passes is published, where the profile says; else the run ends before that.
        remedy: What is tried when the gate refuses: the remedies that the profile lists ('written'); after them also
            what the refusal itself proposes ('auto'); absent: as the profile says.
    """
    make = partial(make_release, publishing=publish)
    return conclude_flow(
        lambda: within_limits(make, load_profile(profile, overrides).remedied(remedy)), profile_name(profile), overrides
    )


def run_release_dry_pass(
    profile: Path, overrides: tuple[str, ...], publish: bool, remedy: RemedyChoice | None
) -> RunOutcome | None:
    """What :func:`release` would come to, told by the same story, if it had nothing to do; else None. In a second, and
    without Prefect: a quiet night costs nothing."""

    def make() -> RunOutcome:
        read = load_profile(profile, overrides).remedied(remedy)
        if read.runner.kind != "local":
            require_work_allowed("ask a cluster")
        here = read.model_copy(update={"runner": RunnerSettings()})
        return within_limits(partial(make_release, publishing=publish), here)

    return run_dry_pass(make, "release", profile_name(profile), overrides)


def make_release(
    profile: Profile,
    judgements: Sequence[FurtherJudgement] = JUDGEMENTS,
    *,
    publishing: bool = True,
) -> RunOutcome:
    """The story. Raises whatever a check refuses; what the gate refuses comes back with its report."""
    with open_runner(profile.runner) as runner:
        # All that can be wrong with target, recipe, remedies or evidence is found before any weight is read.
        ready = preflight_profile(profile, Problems(stop_at_once=True))
        assert ready.evidence is not None  # or its problem had been raised

        attempt, earlier = try_candidates(
            add_tuned_candidate(ready.cleared, profile, runner),
            profile,
            ready.evidence,
            judgements,
            runner,
            most=len(ready.cleared) + bool(profile.tuning) + profile.proposed,
        )
    if isinstance(attempt, AlreadyReleased):
        return already_released_outcome(profile.name, attempt)

    names = public_names(profile, attempt, earlier)
    content = report_content(profile, attempt, earlier, names)
    report = write_report(content)
    if not (attempt.is_good and profile.publish and publishing):
        return reported_outcome(content, report, None)
    return publish_attempt(profile, profile.publish, attempt, content, report, names)


def add_tuned_candidate(
    cleared: Sequence[ClearedCandidate], profile: Profile, runner: Runner
) -> Iterator[ClearedCandidate]:
    """What somebody wrote, the recipe and its remedies; then, where the profile says so, its best scale."""
    yield from cleared
    if profile.tuning and (found := tuned_remedy(cleared[0], profile, runner)):
        yield found


def try_candidates(
    ahead: Iterator[ClearedCandidate],
    profile: Profile,
    evidence: Evidence,
    judgements: Sequence[FurtherJudgement],
    runner: Runner,
    *,
    most: int,
) -> tuple[Attempt | AlreadyReleased, list[Attempt | FailedMerge]]:
    """The first recipe whose merge passes the gate, else the last one; and what was tried before it.

    Args:
        ahead: What is tried first; after it, remedies that follow from the refusals.
        most: How many are tried at most.
    """
    tried: list[Attempt | AlreadyReleased | FailedMerge] = []
    while len(tried) < most and (one := next(ahead, None) or proposed_remedy(_refused(tried), profile)):
        if tried:
            announce(f"remedy {len(tried)}: {one.candidate.remedy}")
        # Each could pass by chance: together they must not do so more often than one.
        rule = evidence.rule.for_attempt(len(tried) + 1, most)
        tried.append(make_attempt(one, profile, evidence._replace(rule=rule), judgements, runner))
        if tried[-1].is_good:
            break
    *earlier, last = tried
    if isinstance(last, FailedMerge):
        raise last.refusal
    return last, _refused(earlier)


def _refused(tried: Sequence[Attempt | AlreadyReleased | FailedMerge]) -> list[Attempt | FailedMerge]:
    return [one for one in tried if not isinstance(one, AlreadyReleased)]


def make_attempt(
    cleared: ClearedCandidate,
    profile: Profile,
    evidence: Evidence,
    judgements: Sequence[FurtherJudgement],
    runner: Runner,
) -> Attempt | AlreadyReleased | FailedMerge:
    """Fetch what is not here, merge, measure, judge, explain."""
    recipe = cleared.candidate.recipe
    fetch_weights(cleared.found, store().hashes)
    parents = pin_checkpoints(cleared.found, store().hashes, profile.checks.code.trusted)
    by_ref = {parent.ref: parent for parent in parents}
    recipe = prepare_recipe(recipe, by_ref.__getitem__, in_flow=True)
    pinned = PinnedRecipe(recipe, parents)
    try:
        merged = merge.after(cleared.license, cleared.compatibility)(pinned, numerics(profile.merge))
    except (ChangedInput, DiskRefused):
        raise  # It says nothing about the recipe: no remedy of it helps.
    except Refused as refusal:
        return FailedMerge(cleared, refusal)
    model = merged_model(merged, pinned)
    champion = anchor = None
    if needs_champion(evidence.guards):
        champion = find_champion(profile.publish, profile.root, model, store().hashes)
        if champion and champion.complete and champion.digest == model.digest:
            return AlreadyReleased(cleared, champion)
    if champion:
        anchor = find_anchor(profile.publish, profile.root, evidence.rule.anchor, model, store().hashes)
        anchor = anchor if anchor and anchor.digest != champion.digest else None
    # The merge reads adapters as they are; what loads a model needs it whole.
    parents = apply_adapters(select_named_parents(recipe, pinned.parents))
    adapted = model if isinstance(model, PinnedCheckpoint) else None
    model = apply_adapters([adapted])[0] if adapted else model
    assessment = assess_merge(model, parents, champion, evidence, anchor, runner)
    gate = assessment.verdict.value
    whole = replace(pinned, parents=parents)
    explanation = explain_merge(whole, model, cleared.candidate.document, gate, assessment.scores, evidence.tasks)
    together = measure_ensemble(parents, evidence)
    verdicts = [gate.as_verdict()]
    for judgement in judgements:
        if all(verdict.publishable for verdict in verdicts):
            verdict = judgement(JudgedMerge(profile, evidence, model, parents, adapted))
            verdicts += [verdict] if verdict else []
    return Attempt(
        cleared,
        pinned,
        merged,
        assessment,
        explanation,
        tuple(verdicts),
        ensemble=together,
        expected_head=champion.head if champion else None,
    )


def publish_attempt(
    profile: Profile,
    target: Target,
    attempt: Attempt,
    content: ReportContent,
    report: Artifact[Report],
    names: PublicNames,
) -> RunOutcome:
    """Publish what passed; with a person's yes, where the profile asks for one."""
    license, numeric = attempt.cleared.license, numerics(profile.merge)
    state = None
    if optimizer_steps(attempt.pinned):  # for the next round
        state = optimizer_state(attempt.pinned, numeric, state_license_files(attempt.pinned.parents, license.value))
    parts = ReleaseParts(content, attempt.pinned, numeric, license, attempt.merged, report, state, names)

    def released(approved: str | None = None) -> RunOutcome:
        made = publish(target, profile.root, parts, expected_head=attempt.expected_head, approved=approved)
        return reported_outcome(content, report, made)

    if target.asks is None:
        return released()
    # All that costs is done and kept: a run that waits for a person holds nothing, and goes on from here.
    unpublished = reported_outcome(content, report, None)
    find_pending = partial(pending_release, target, profile.root, parts)
    decision = require_decision(target.asks, content, unpublished.report, find_pending)
    if decision is None:
        return released()
    if not decision.publish:
        return unpublished.model_copy(update={"status": decision.status, "message": decision.sentence()})
    outcome = released(approved=decision.digest)
    return outcome.model_copy(update={"message": f"{outcome.message}\n{decision.sentence()}"})
