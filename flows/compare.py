"""``mergegate compare``: any two checkpoints on a profile's evidence, B judged as a merge of A would be.

::

    mergegate compare models/today models/candidate --profile profiles/nightly.yaml

Perplexity, tasks, gate and report are the stages of a release, with its store: what a release has measured of either
checkpoint is not measured again. Every guard of the profile compares B with A. Nothing is merged or published.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from prefect import flow
from prefect.client.schemas.objects import State

from mergegate.flows.attempt import Assessment, assess_merge
from mergegate.flows.outcome import RunOutcome, conclude_flow, name_run, reported_outcome, within_limits
from mergegate.flows.profile import Profile, load_profile
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.checkpoints import (
    PinnedCheckpoint,
    ResolvedCheckpoint,
    apply_adapters,
    fetch_weights,
    find_checkpoint,
    pin_checkpoints,
)
from mergegate.tasks.evaluation import join_parts, pin_data
from mergegate.tasks.gate import distinct_guards
from mergegate.tasks.preflight import Evidence, stored_dtypes
from mergegate.tasks.report import Library, ReportContent, ReportedModel, write_report
from mergegate.tasks.runners import open_runner
from mergegate.tasks.stage import store, versions

_LIBRARIES = ("mergegate", "torch", "transformers", "lm-eval")


@flow(name="compare", flow_run_name=name_run)
def compare(reference: str, candidate: str, profile: Path | Profile) -> State[RunOutcome]:
    """Judge ``candidate`` against ``reference`` on the evidence of a profile.

    Args:
        reference: A checkpoint: a directory, or ``org/name@revision``.
        candidate: The checkpoint that is judged.
        profile: A profile file, relative to the project, or a whole profile. Its recipe and target play no part.
    """
    name = comparison_name(Path(reference).name, Path(candidate).name)
    return conclude_flow(
        lambda: within_limits(partial(make_comparison, reference, candidate), load_profile(profile)), name
    )


def make_comparison(reference: str, candidate: str, profile: Profile) -> RunOutcome:
    """The story of a release without merge and publication. Raises what is wrong with its input."""
    found = find_checkpoints(reference, candidate)
    against, judged_one = (model.name for model in found)
    evidence = pin_against(profile, found[0], stored_dtypes(found))
    fetch_weights(found, store().hashes)
    models = apply_adapters(pin_checkpoints(found, store().hashes))

    with open_runner(profile.runner) as runner:
        measured = assess_merge(models[1], models[:1], None, evidence, runner=runner)
    verdict = measured.verdict.value

    content = comparison_content(profile, models, measured)
    outcome = reported_outcome(content, write_report(content), None)
    message = f"{judged_one} passes against {against}"
    if not verdict.publishable:
        message = "\n".join((f"{judged_one} does not pass against {against}", *verdict.reasons))
    return outcome.model_copy(update={"message": message})


def find_checkpoints(reference: str, candidate: str) -> tuple[ResolvedCheckpoint, ResolvedCheckpoint]:
    """Both checkpoints, found but not read, under names that tell them apart.

    Raises:
        InvalidInput: for one that is neither a local directory nor a repository that can be reached.
    """
    found = [find_checkpoint(text) for text in (reference, candidate)]
    if found[0].name == found[1].name:  # the last component says no more; the whole reference does, or the role
        names = (reference, candidate) if reference != candidate else (f"{reference} (reference)", candidate)
        found = [model.model_copy(update={"name": name}) for model, name in zip(found, names, strict=True)]
    return found[0], found[1]


def pin_against(profile: Profile, reference: ResolvedCheckpoint, stored: Collection[str]) -> Evidence:
    """The profile's evidence by content, with every guard compared with ``reference``.

    Args:
        stored: Formats of the two models.

    Raises:
        InvalidInput: for a profile without evidence, or a task or file that is not there.
    """
    if not (profile.perplexity or profile.evaluate):
        raise InvalidInput(
            f"profile {profile.name}", found="no evidence to compare by", expected="perplexity or evaluate"
        )
    if profile.evaluate:
        guards = (guard.model_copy(update={"guarded_by": reference.name}) for guard in profile.evaluate.tasks)
        tasks = distinct_guards(guards)  # guards that differed in their reference alone are one now
        profile = profile.model_copy(update={"evaluate": profile.evaluate.model_copy(update={"tasks": tasks})})
    evidence = profile.pin_evidence((reference,), store().hashes, stored)
    return evidence._replace(tasks=tuple(pin_data(task, evidence.scoring.time_limit) for task in evidence.tasks))


def comparison_name(reference: str, candidate: str) -> str:
    """What a comparison is called: a file name, too."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{candidate}-against-{reference}")


def comparison_content(profile: Profile, models: Sequence[PinnedCheckpoint], measured: Assessment) -> ReportContent:
    """What the report page says of two checkpoints, the second of which is judged."""
    reference, candidate = models
    return ReportContent(
        name=comparison_name(reference.name, candidate.name),
        method=f"compared by profile {profile.name}",
        models=(_reported(reference, "parent", measured), _reported(candidate, "merge", measured)),
        verdict=measured.verdict.value,
        scoring=measured.evidence.scoring if profile.evaluate else None,
        asked=profile.evaluate.asked_alone if profile.evaluate else {},
        windows=measured.evidence.windows,
        computed=measured.evidence.computed,
        files=(),
        versions=tuple(Library(name=name, version=version) for name, version in versions(*_LIBRARIES).items()),
        reproduce=(f"mergegate compare {reference.ref} {candidate.ref} --profile PROFILE",),
    )


def _reported(model: PinnedCheckpoint, role: Literal["parent", "merge"], measured: Assessment) -> ReportedModel:
    scores, likelihoods = measured.scores.get(model.name), measured.likelihoods.get(model.name)
    return ReportedModel(
        name=model.name,
        role=role,
        ref=model.ref,
        revision=model.revision,
        digest=model.digest,
        scores=join_parts(scores) if scores else None,
        likelihoods=likelihoods.value if likelihoods else None,
    )
