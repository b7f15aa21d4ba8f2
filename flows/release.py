"""A release, from recipe to publication: the whole product on one page.

::

    mergegate run profiles/demo.yaml                                       # on this machine, no server
    prefect deployment run release/release -p profile=profiles/demo.yaml   # on a worker; the same flow, the same store

Every stage is cached by what goes into it: a run after a crash goes on where it was, a run with nothing new ends in
seconds, a changed threshold runs only the gate. Whatever refuses says where, what was found and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows.outcome import Outcome, judged, report_content, show_in_prefect, stopped
from flows.profile import Evidence, Profile, load_profile
from flows.progress import LogLines
from merge_core.errors import MergegateError
from merge_core.store import Artifact
from tasks.compat import check_compatibility, metadata, require_disk
from tasks.evaluate import Scores, evaluate
from tasks.gate import drift, gate
from tasks.licenses.check import check_licenses, license_table, read_licenses
from tasks.merge import merge, merged_model, numerics
from tasks.model import Model
from tasks.perplexity import Likelihoods, perplexity
from tasks.pin import PinnedRecipe, find_parents, pin
from tasks.publish.release import publish
from tasks.report import write_report
from tasks.runtime import runtime
from tasks.stage import store
from tasks.watching import is_watched, watched_by


@flow(name="release")
def release(profile: Path | Profile) -> State[Outcome]:
    """Make a verified release of a merge, or say clearly why not.

    Args:
        profile: A profile file, relative to the project, or a whole profile.
    """
    with nullcontext() if is_watched() else watched_by(LogLines(get_run_logger())):
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
    broken = evidence.limits and drift(likelihoods, evidence.limits, evidence.rule.confidence).broken
    scores = {} if broken else run_tasks(models, evidence)
    verdict = gate(evidence.guards, scores, likelihoods, evidence.limits, evidence.rule)

    content = report_content(profile, pinned, licence.value, merged, scores, likelihoods, verdict.value)
    report = write_report(content)
    if not (verdict.value.publishable and profile.publish):
        return judged(content, report, None)
    released = publish(profile.publish, profile.root, content, pinned, profile.merge.seed, licence, merged, report)
    return judged(content, report, released)


def measure_perplexity(models: Sequence[Model], evidence: Evidence) -> dict[str, Artifact[Likelihoods]]:
    """Likelihoods of the held-out text by model; empty when the profile names no text."""
    documents, windows = evidence.documents, evidence.windows
    if documents is None or windows is None:
        return {}
    return {model.name: perplexity(model, documents, windows, runtime()) for model in models}


def run_tasks(models: Sequence[Model], evidence: Evidence) -> dict[str, list[Artifact[Scores]]]:
    """Scores of every task by model; parents come from the store from the second night on."""
    return {
        model.name: [evaluate(model, task, evidence.scoring, runtime()) for task in evidence.tasks] for model in models
    }
