"""Collect everything that a run found out about an attempt, as one frozen value for the report page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mergegate.flows.attempt import Attempt, FailedMerge, open_remedies
from mergegate.flows.profile import Profile
from mergegate.merge_core import Recipe
from mergegate.tasks.base.stage import Section, combine_verdicts, versions
from mergegate.tasks.base.store import StoredValue
from mergegate.tasks.merge import MERGED
from mergegate.tasks.quality.evaluation import join_parts
from mergegate.tasks.quality.gate import GateVerdict
from mergegate.tasks.quality.judge import JudgeVerdict
from mergegate.tasks.quality.serve import ServedModels
from mergegate.tasks.quality.variants import VariantVerdict
from mergegate.tasks.release.publish import PublicNames, recipe_paths, released_kind, stored_files
from mergegate.tasks.release.report import (
    Library,
    MergedFile,
    ReportContent,
    ReportedAttempt,
    ReportedModel,
    ReportedPlace,
    ReportedServing,
    StoredArtifact,
    recipe_diff,
)

# Evidence with a section of its own on the page. For all other verdicts, the page shows their generic section.
_DRAWN = (GateVerdict, JudgeVerdict, ServedModels, VariantVerdict)
LIBRARIES = ("mergegate", "torch", "transformers", "lm-eval", "safetensors")


def public_names(profile: Profile, attempt: Attempt, attempts: Sequence[Attempt | FailedMerge]) -> PublicNames:
    """Return the public names that replace local paths in everything that a run publishes.

    The local paths are in the recipes of all ``attempts`` of the run, in the profile and in its overrides.
    """
    cleared = attempt.cleared
    others = [other.cleared for other in attempts if other is not attempt]
    paths = [path for other in others for path in recipe_paths(other.candidate.recipe)]
    paths += [str(path) for other in others for parent in other.parents for path in parent.directories]
    paths += cleared.license.value.all_names
    for variant in attempt.variants:  # a reason may name a file in the store
        if variant.artifact:
            paths += [str(variant.artifact.directory / name) for name in variant.artifact.files]
    # Every absolute path that the profile or an override names.
    values: list[Any] = [profile.model_dump(), *(override.partition("=")[2] for override in profile.overrides)]
    while values:
        value = values.pop()
        if isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, (list, tuple)):
            values += value
        elif isinstance(value, Path | str) and str(value).startswith(("/", "~/")):
            with suppress(OSError, RuntimeError, ValueError):  # the text cannot be a path
                if Path(value).expanduser().exists():
                    paths.append(str(value))
    return PublicNames.from_recipe(cleared.candidate.recipe, cleared.parents, profile.root, paths)


def report_content(
    profile: Profile, attempt: Attempt, attempts: Sequence[Attempt | FailedMerge], names: PublicNames
) -> ReportContent:
    """Return everything that a run found out about an attempt, for the report, the card and the final table.

    ``attempts`` are all attempts of the run, in order, including this one. ``names`` replaces the local paths of models
    and texts by public names.
    """
    parent_names = {parent.ref: parent.name for parent in attempt.pinned.parents}
    license, merged, assessed = attempt.cleared.license.value, attempt.merged, attempt.assessment
    related = tuple(f"{relation.summary}." for relation in license.undeclared)

    def measurements(name: str) -> dict[str, object]:
        scores = join_parts(assessed.scores[name]) if assessed.scores.get(name) else None
        likelihoods = assessed.likelihoods[name].value if name in assessed.likelihoods else None
        return {"scores": scores, "likelihoods": likelihoods}

    verdict = assessed.verdict.value.model_copy(update=attempt.verdict._asdict())
    parents = [
        ReportedModel(
            name=parent.name,
            role="base" if parent.is_base else "parent",
            ref=parent.ref,
            revision=parent.revision,
            digest=parent.digest,
            licence=license.licenses[parent.name],
            **measurements(parent.name),
        )
        for parent in attempt.pinned.parents
    ]
    merge_model = ReportedModel(
        name=MERGED,
        role="merge",
        ref=profile.name,
        digest=merged.digest,
        licence=license.result,
        **measurements(MERGED),
    )
    # The store entries of the evidence, in the order in which they were created.
    artifacts: list[tuple[StoredValue[Any], str]] = [
        (attempt.cleared.license, ""),
        (merged, ""),
        *((artifact, name) for name, artifact in assessed.likelihoods.items()),
        *((part, f"{name}, {part.value.tasks[0].task}") for name, parts in assessed.scores.items() for part in parts),
        (assessed.verdict, ""),
        *([(attempt.ensemble, "")] if attempt.ensemble else []),
    ]
    change = attempt.cleared.candidate.change
    # Remedies that were already refused are left out. Each one is written as a change of the profile's own recipe.
    remedies = tuple(
        remedy.model_copy(update={"change": {**change, **remedy.change}})
        if change and remedy.kind == "recipe"
        else remedy
        for remedy in open_remedies(attempt, attempts)
    )
    # A stable sort puts the base first and keeps the others in recipe order.
    parents.sort(key=lambda model: model.role != "base")
    documents = (*attempt.pinned.recipe.steps, attempt.pinned.recipe)
    distances = {ref: distance for document in documents for ref, distance in (document.distances or {}).items()}
    windows = attempt.cleared.candidate.windows
    runs = tuple(replace(run, checkpoints=tuple(parent_names[ref] for ref in run.checkpoints)) for run in windows)
    method = attempt.pinned.recipe.summary()
    if runs and not attempt.pinned.recipe.steps:
        method = f"{attempt.pinned.recipe.summary('checkpoint')}, {runs[0].steps}"
    content = ReportContent(
        name=profile.name,
        method=method,
        kind=released_kind(merged.directory, attempt.pinned.parents),
        recipe=names.rename_yaml(attempt.cleared.candidate.text),
        recipe_warnings=recipe_warnings(attempt.cleared.candidate.recipe),
        models=(*parents, merge_model),
        runs=runs,
        licence=license.result,
        obligations=tuple(f"{item.text} ({', '.join(item.because)})" for item in license.combination.obligations),
        verdict=verdict,
        scoring=assessed.evidence.scoring if profile.evaluate else None,
        asked=profile.evaluate.prompts_by_task if profile.evaluate else {},
        windows=assessed.evidence.windows,
        computed=assessed.evidence.computed,
        places=tuple(
            ReportedPlace(
                name=parent_names[ref], length=distance.length, apart=distance.apart, left_out=distance.left_out
            )
            for ref, distance in distances.items()
        ),
        files=tuple(MergedFile(name=f.name, size=f.size, sha256=f.sha256) for f in stored_files(merged)),
        versions=tuple(Library(name=name, version=version) for name, version in versions(*LIBRARIES).items()),
        # The page of a refused merge shows its recipe above.
        reproduce=(
            "mergegate verify RELEASE --verdict    # decide again from the outcomes in evidence/, without a model",
            "mergegate reproduce RELEASE           # merge again, and compare the weights byte by byte",
        )
        if verdict.publishable
        else (f"mergegate merge recipe.yaml OUT --seed {profile.merge.seed}",),
        explanation=attempt.explanation.model_copy(update={"remedies": remedies}),
        attempts=tuple(
            ReportedAttempt(
                recipe=each.cleared.candidate.summary,
                change=each.cleared.candidate.remedy,
                outcome=each.outcome,
                reason=each.reason,
                digest=each.merged.digest if isinstance(each, Attempt) else "",
                diff=recipe_diff(attempts[0].cleared.candidate.document, each.cleared.candidate.document),
            )
            for each in (attempts if len(attempts) > 1 else ())
        ),
        judge=attempt.evidence_of(JudgeVerdict),
        variants=tuple(variant.verdict for variant in attempt.variants),
        experts=merged.value.experts,
        routers=merged.value.routers,
        ensemble=attempt.ensemble.value if attempt.ensemble else None,
        **_serving(attempt.evidence_of(ServedModels)),
        artifacts=tuple(
            StoredArtifact(stage=artifact.stage, subject=subject, key=artifact.key) for artifact, subject in artifacts
        ),
        overrides=profile.overrides,
        sections=(
            *([Section(title="Documents", sentences=attempt.sample_notes)] if attempt.sample_notes else []),
            *([Section(title="Undeclared ancestors", sentences=related)] if related else []),
            *(verdict.section for verdict in attempt.verdicts if not isinstance(verdict.evidence, _DRAWN)),
        ),
    )
    return names.apply(content)


def without_variants(content: ReportContent, attempt: Attempt, names: PublicNames) -> ReportContent:
    """Return the content without variants, for the release of the merge.

    The release does not depend on its variants, so a profile may add one later without releasing the merge again.
    """
    if not content.variants:
        return content
    verdict = content.verdict.model_copy(update=names.apply(combine_verdicts(attempt.verdicts)._asdict()))
    return content.model_copy(update={"variants": (), "verdict": verdict})


def recipe_warnings(recipe: Recipe) -> tuple[str, ...]:
    """Return the warnings about a recipe without the path of its file: a release must not reveal local paths."""
    return tuple(
        f"{finding.where.removeprefix(document.location).removeprefix(': ')}: {finding.found}; {finding.remedy}"
        for document in (*recipe.steps, recipe)
        for finding in document.findings
    )


def _serving(models: ServedModels | None) -> dict[str, Any]:
    if models is None:
        return {}
    verdict = models.verdict
    return {
        "server": verdict.server,
        "served_as": verdict.way,
        "served": verdict.checks,
        "serving": (
            *(
                ReportedServing(name=name, measured=parent.measured, problem=parent.problem)
                for name, parent in models.parents.items()
            ),
            ReportedServing(name=MERGED, measured=verdict.measured),
        ),
    }
