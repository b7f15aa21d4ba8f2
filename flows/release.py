"""A release, from recipe to publication: the whole product on one page.

::

    mergegate run profiles/demo.yaml                                       # on this machine, no server
    prefect deployment run release/release -p profile=profiles/demo.yaml   # on a worker; the same flow, the same store

Every stage is cached by what goes into it: a run after a crash goes on where it was, a run with nothing new ends in
seconds, a changed threshold runs only the gate. Whatever refuses says where, what was found and what to do.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows.attempt import AlreadyReleased, Attempt, ClearedCandidate, FailedMerge
from flows.candidates import Candidate
from flows.judging import assess_merge, compare_answers, ensemble_of
from flows.outcome import (
    RunOutcome,
    already_released,
    report_content,
    reported_outcome,
    show_in_prefect,
    stopped_outcome,
)
from flows.profile import Evidence, Profile, load_profile
from merge_core.errors import MergegateError, Refused
from tasks.checkpoints import PinnedRecipe, ResolvedCheckpoint, fetch_weights, pin_checkpoints, resolve_all_parents
from tasks.explain import explain_merge
from tasks.gate import needs_champion
from tasks.merge import merge, merged_model, numerics
from tasks.preflight import check_compatibility, header_digests, require_machine
from tasks.preflight.licenses import AncestorLookup, check_licenses, hub_ancestors, license_table, read_licenses
from tasks.publish import publish
from tasks.publish.targets import check_target
from tasks.releases import find_champion
from tasks.report import write_report
from tasks.serve import check_server, serve_models
from tasks.stage import ProgressLog, announce, is_watched, store, watched_by


@flow(name="release")
def release(profile: Path | Profile) -> State[RunOutcome]:
    """Make a verified release of a merge, or say clearly why not.

    Args:
        profile: A profile file, relative to the project, or a whole profile.
    """
    with nullcontext() if is_watched() else watched_by(ProgressLog(get_run_logger())):
        try:
            outcome = make_release(load_profile(profile))
        except MergegateError as error:
            outcome = stopped_outcome(error)
    show_in_prefect(outcome, profile.name if isinstance(profile, Profile) else profile.stem)
    if outcome.exit_code:
        return Failed(name="Refused", message=outcome.message, data=outcome)
    return Completed(name=outcome.status.title().replace(" ", ""), message=outcome.message, data=outcome)


def make_release(profile: Profile) -> RunOutcome:
    """The story. Raises whatever a check refuses; what the gate refuses comes back with its report."""
    # All that can be wrong with target, recipe, remedies or evidence is found before any weight is read.
    check_target(profile.publish, profile.root)
    check_server(profile.serve, profile.root)
    candidates = profile.candidates()
    parents = resolve_all_parents([candidate.recipe for candidate in candidates])
    evidence = profile.pin_evidence(parents[0], store().hashes)
    ask = hub_ancestors()
    examined = [examine(candidate, found, profile, ask) for candidate, found in zip(candidates, parents, strict=True)]

    attempt, earlier = first_that_passes(examined, profile, evidence)
    if isinstance(attempt, AlreadyReleased):
        return already_released(profile.name, attempt)

    content = report_content(profile, attempt, earlier)
    report = write_report(content)
    if not (attempt.is_good and profile.publish):
        return reported_outcome(content, report, None)
    released = publish(
        profile.publish,
        profile.root,
        content,
        attempt.pinned,
        numerics(profile.merge),
        attempt.examined.license,
        attempt.merged,
        report,
        expected_head=attempt.expected_head,
    )
    return reported_outcome(content, report, released)


def examine(
    candidate: Candidate, found: tuple[ResolvedCheckpoint, ...], profile: Profile, ask: AncestorLookup
) -> ClearedCandidate:
    """See that the parents may be merged, and judged as the profile says: guards, licences, compatibility, machine."""
    profile.check_references(found)
    use, table = profile.checks.license.use(profile.name), license_table(profile.checks.license, profile.root)
    license = check_licenses(read_licenses(found, table, ask), use, table, profile.checks.license.accepted)
    compatibility = check_compatibility(candidate.recipe, header_digests(found), found)
    require_machine(compatibility.value, found, numerics(profile.merge).where)
    return ClearedCandidate(candidate, found, license)


def first_that_passes(
    examined: list[ClearedCandidate], profile: Profile, evidence: Evidence
) -> tuple[Attempt | AlreadyReleased, list[Attempt | FailedMerge]]:
    """The first recipe whose merge passes the gate, else the last one; and what was tried before it."""
    tried: list[Attempt | AlreadyReleased | FailedMerge] = []
    for one in examined:
        if tried:
            announce(f"remedy {len(tried)}: {one.candidate.remedy}")
        tried.append(make_attempt(one, profile, evidence))
        if tried[-1].is_good:
            break
    *earlier, last = tried
    if isinstance(last, FailedMerge):
        raise last.refusal
    return last, [one for one in earlier if not isinstance(one, AlreadyReleased)]


def make_attempt(
    examined: ClearedCandidate, profile: Profile, evidence: Evidence
) -> Attempt | AlreadyReleased | FailedMerge:
    """Fetch what is not here, merge, measure, judge, explain."""
    recipe = examined.candidate.recipe
    fetch_weights(examined.found, store().hashes)
    pinned = PinnedRecipe(recipe, pin_checkpoints(examined.found, store().hashes))
    try:
        merged = merge(pinned, numerics(profile.merge))
    except Refused as refusal:
        return FailedMerge(examined, refusal)
    model = merged_model(merged)
    champion = None
    if needs_champion(evidence.guards):
        champion = find_champion(profile.publish, profile.root, model, store().hashes)
        if champion and champion.digest == model.digest:
            return AlreadyReleased(examined, champion.directory)
    judged = assess_merge(model, pinned.parents, champion, evidence)
    verdict = judged.verdict.value
    explanation = explain_merge(pinned, model, examined.candidate.document, verdict, judged.scores, evidence.tasks)
    together = ensemble_of(pinned.parents, evidence)
    head = champion.head if champion else None
    attempt = Attempt(examined, pinned, merged, judged, explanation, ensemble=together, expected_head=head)
    # A judge costs money and a server minutes: only for what would otherwise be published.
    if attempt.is_good and evidence.answers:
        attempt = replace(attempt, answers=compare_answers(model, pinned.parents, evidence.answers))
    if attempt.is_good and profile.serve:
        attempt = replace(attempt, served=serve_models(profile.serve, profile.root, model, pinned.parents))
    return attempt
