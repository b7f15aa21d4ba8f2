"""A release, from recipe to publication: the whole product on one page.

::

    mergegate run profiles/demo.yaml                                       # on this machine, no server
    prefect deployment run release/release -p profile=profiles/demo.yaml   # on a worker; the same flow, the same store

Every stage is cached by what goes into it, so a run after a crash goes on where it was, a run with nothing new ends in
seconds, and a changed threshold runs only the gate. Whatever refuses, says where, what was found and what to do.
"""

from __future__ import annotations

from pathlib import Path

from prefect import flow
from prefect.states import Completed, Failed, State

from flows.outcome import Outcome, judged, report_content, show_in_prefect, stopped
from flows.profile import Profile, load_profile
from merge_core.errors import MergegateError
from tasks.compat import check_compatibility, metadata, require_disk
from tasks.evaluate import evaluate
from tasks.gate import gate, judge_drift
from tasks.licenses.check import check_licenses, license_table, read_licenses
from tasks.merge import merge, merged_model, numerics
from tasks.perplexity import perplexity
from tasks.pin import PinnedRecipe, find_parents, pin
from tasks.publish.release import publish
from tasks.report import write_report
from tasks.stage import store


@flow(name="release")
def release(profile: Path | Profile) -> State:
    """Make a verified release of a merge, or say clearly why not.

    Args:
        profile: A profile file, relative to the project, or a whole profile.
    """
    try:
        outcome = make_release(load_profile(profile))
    except MergegateError as error:
        outcome = stopped(error)
    show_in_prefect(outcome, profile.name if isinstance(profile, Profile) else profile.stem)
    if outcome.exit_code:
        return Failed(name="Refused", message=outcome.message, data=outcome)
    return Completed(name=outcome.status.title().replace(" ", ""), message=outcome.message, data=outcome)


def make_release(profile: Profile) -> Outcome:
    """The story. Raises whatever a check refuses; what the gate refuses comes back with its report."""
    recipe = profile.load_recipe()
    found = find_parents(recipe)
    evidence = profile.pin_evidence(found, store().hashes)

    use, table = profile.checks.license.use(profile.name), license_table(profile.checks.license, profile.root)
    licence = check_licenses(read_licenses(found, table), use, table, profile.checks.license.accepted)
    compatibility = check_compatibility(recipe, metadata(found), found)
    require_disk(compatibility.value)

    pinned = PinnedRecipe(recipe, pin(found, store().hashes))
    merged = merge(pinned, numerics(profile.merge))
    models = (*pinned.parents, merged_model(merged))

    # Perplexity takes seconds and sees a broken merge at once; then the costly tasks are not worth running.
    likelihoods = measure_perplexity(models, evidence)
    broken = merge_is_broken(likelihoods, evidence)
    scores = {} if broken else run_tasks(models, evidence)
    verdict = gate(evidence.rules, likelihoods, scores)

    content = report_content(profile, pinned, licence.value, merged, likelihoods, scores, verdict.value)
    report = write_report(content)
    if not (verdict.value.publishable and profile.publish):
        return judged(content, report, None)
    released = publish(profile.publish, profile.root, content, pinned, profile.merge.seed, licence, merged, report)
    return judged(content, report, released)
