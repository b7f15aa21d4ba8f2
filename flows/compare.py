"""Compare any two checkpoints on a profile's evidence: judge checkpoint B as if it were a merge of A.

::

    mergegate compare models/today models/candidate --profile profiles/nightly.yaml

A comparison uses the stages of a release and their store, so results of a release are reused. Every guard
of the profile compares B with A. The flow does not merge or publish anything.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Literal

from prefect import flow
from prefect.client.schemas.objects import State

from mergegate.flows.attempt import assess_merge
from mergegate.flows.outcome import RunOutcome, conclude_flow, name_run, reported_outcome, within_limits
from mergegate.flows.preflight import kind_demands, pin_profile_evidence
from mergegate.flows.profile import Profile, load_profile
from mergegate.merge_core.architecture import kind_of_directory
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.base.runners import open_runner
from mergegate.tasks.base.stage import store, versions
from mergegate.tasks.models.checkpoints import (
    ResolvedCheckpoint,
    apply_adapters,
    fetch_weights,
    find_checkpoint,
    pin_checkpoints,
)
from mergegate.tasks.preflight import kind_findings, stored_dtypes
from mergegate.tasks.quality.evaluation import join_parts, pin_data
from mergegate.tasks.quality.gate import distinct_guards
from mergegate.tasks.release.report import Library, ReportContent, ReportedModel, write_report

_LIBRARIES = ("mergegate", "torch", "transformers", "lm-eval")
_ROLES: tuple[Literal["parent", "merge"], ...] = ("parent", "merge")  # the second checkpoint is judged


@flow(name="compare", flow_run_name=name_run)
def compare(reference: str, candidate: str, profile: Path | Profile) -> State[RunOutcome]:
    """Judge ``candidate`` against ``reference`` on the evidence of a profile.

    Args:
        reference: Checkpoint to compare with: a directory, or ``org/name@revision``.
        candidate: Checkpoint to judge.
        profile: Profile file, relative to the project directory, or a parsed profile. Its recipe and target are
            ignored.
    """
    name = _comparison_name(Path(reference).name, Path(candidate).name)
    story = partial(make_comparison, reference, candidate)
    return conclude_flow(lambda: within_limits(story, load_profile(profile, needs_recipe=False)), name)


def make_comparison(reference: str, candidate: str, profile: Profile) -> RunOutcome:
    """Measure both checkpoints, let the gate judge the candidate, and write the report.

    Invalid input raises its error.
    """
    checkpoints = find_checkpoints(reference, candidate)
    reference_name, candidate_name = (model.name for model in checkpoints)
    if not (profile.perplexity or profile.evaluate):
        raise InvalidInput(
            f"profile {profile.name}", found="it has no evidence to compare with", expected="perplexity or evaluate"
        )
    if profile.evaluate:
        guards = (guard.model_copy(update={"guarded_by": reference_name}) for guard in profile.evaluate.tasks)
        tasks = distinct_guards(guards)  # guards that differed only in their reference are now identical
        profile = profile.model_copy(update={"evaluate": profile.evaluate.model_copy(update={"tasks": tasks})})
    demands = kind_demands(profile, is_comparison=True)
    for model in checkpoints:
        for finding in kind_findings(kind_of_directory(model.directory), demands, model.name):
            raise finding.refusal()
    evidence = pin_profile_evidence(profile, checkpoints[:1], store().hashes, stored_dtypes(checkpoints))
    # A comparison may find that both checkpoints are the same.
    evidence = evidence._replace(
        tasks=tuple(pin_data(task, evidence.scoring.time_limit) for task in evidence.tasks),
        accepted_copies=(reference_name,),
    )

    fetch_weights(checkpoints, store().hashes)
    models = apply_adapters(pin_checkpoints(checkpoints, store().hashes))

    with open_runner(profile.runner) as runner:
        assessment = assess_merge(models[1], models[:1], None, evidence, runner=runner)
    verdict = assessment.verdict.value

    content = ReportContent(
        name=_comparison_name(models[0].name, models[1].name),
        method=f"compared by profile {profile.name}",
        models=tuple(
            ReportedModel(
                name=model.name,
                role=role,
                ref=model.ref,
                revision=model.revision,
                digest=model.digest,
                scores=join_parts(scores) if (scores := assessment.scores.get(model.name)) else None,
                likelihoods=text.value if (text := assessment.likelihoods.get(model.name)) else None,
            )
            for model, role in zip(models, _ROLES, strict=True)
        ),
        verdict=verdict,
        scoring=assessment.evidence.scoring if profile.evaluate else None,
        asked=profile.evaluate.prompts_by_task if profile.evaluate else {},
        windows=assessment.evidence.windows,
        computed=assessment.evidence.computed,
        files=(),
        versions=tuple(Library(name=name, version=version) for name, version in versions(*_LIBRARIES).items()),
        reproduce=(f"mergegate compare {models[0].ref} {models[1].ref} --profile PROFILE",),
    )
    outcome = reported_outcome(content, write_report(content), None)
    verb = "passes" if verdict.publishable else "does not pass"
    reasons = () if verdict.publishable else verdict.reasons
    return outcome.model_copy(
        update={"message": f"{candidate_name} {verb} against {reference_name}", "reasons": reasons}
    )


def find_checkpoints(reference: str, candidate: str) -> tuple[ResolvedCheckpoint, ResolvedCheckpoint]:
    """Find both checkpoints without reading them, and give them distinct names.

    Raises:
        InvalidInput: A checkpoint is neither a local directory nor a reachable repository.
    """
    checkpoints = [find_checkpoint(text) for text in (reference, candidate)]
    # The last path component is ambiguous. Use the full reference, or the role.
    if checkpoints[0].name == checkpoints[1].name:
        names = (reference, candidate) if reference != candidate else (f"{reference} (reference)", candidate)
        checkpoints = [model.model_copy(update={"name": name}) for model, name in zip(checkpoints, names, strict=True)]
    return checkpoints[0], checkpoints[1]


def _comparison_name(reference: str, candidate: str) -> str:
    """Return the name of a comparison, in characters that are valid in a file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{candidate}-against-{reference}")
