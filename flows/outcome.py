"""How a run ends: one frozen value for the command line, for ``--json`` and for Prefect's own pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

from prefect import get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from pydantic import BaseModel, ConfigDict

from flows.attempt import AlreadyReleased, Attempt, FailedMerge
from flows.profile import Profile
from merge_core.errors import InvalidInput, MergegateError, Refused
from merge_core.store import Artifact, StoredValue, refusing_disk, state_directory, write_state
from tasks.evaluation import join_parts
from tasks.explain import Explanation, untried
from tasks.gate import GateVerdict
from tasks.judge import JudgeVerdict
from tasks.merge import MERGED
from tasks.publish import Release, stored_files
from tasks.report import (
    Library,
    MergedFile,
    Report,
    ReportContent,
    ReportedAttempt,
    ReportedCheck,
    ReportedJudge,
    ReportedModel,
    ReportedServing,
    StoredArtifact,
    SweepContent,
    as_markdown,
    render,
    render_sweep,
    sweep_content,
)
from tasks.serve import ServedModels
from tasks.stage import (
    LostArtifact,
    Outcome,
    ProgressLog,
    announce,
    home,
    is_watched,
    keep_quota,
    noted_run,
    store_quota,
    versions,
    watched_by,
)
from tasks.sweep import Confirmation, ConfirmationPower, PreparedSearch, Study, Unconfirmed, parameter_importances

RunStatus = Literal["released", "nothing new", "passed", "refused", "invalid"]

_EXIT_CODES: dict[RunStatus, int] = {"released": 0, "nothing new": 0, "passed": 0, "invalid": 2, "refused": 3}
# Verdicts that the page draws in its own way; of all others it shows the section.
_DRAWN = (GateVerdict, JudgeVerdict, ServedModels)
_LIBRARIES = ("mergegate", "torch", "transformers", "lm-eval", "safetensors")


class RunOutcome(BaseModel):
    """The end of a run: what came out, or why nothing did."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    status: RunStatus
    message: str  # what a person reads first
    version: str | None = None
    location: Path | str | None = None  # of the release: a directory, or an address
    report: Path | None = None  # the page about it
    content: ReportContent | None = None  # the evidence, where the run got so far
    sweep: SweepContent | None = None  # of a sweep: the search and its confirmation

    @property
    def exit_code(self) -> int:
        """0 released or nothing new, 2 invalid input, 3 refused by a check or the gate."""
        return _EXIT_CODES[self.status]


def stopped_outcome(error: MergegateError) -> RunOutcome:
    """The end of a run that a check refused, or whose input could not mean anything."""
    return RunOutcome(status="refused" if isinstance(error, Refused) else "invalid", message=str(error))


def concluded(make: Callable[[], RunOutcome], name: str) -> State[RunOutcome]:
    """The end of a flow: what ``make`` returns, or what it refuses, as Prefect's state and on its pages.

    Args:
        make: The story of the flow. Stages that it runs are watched by Prefect's log, unless somebody watches already.
        name: Of the profile.
    """
    with nullcontext() if is_watched() else watched_by(ProgressLog(get_run_logger())):
        try:
            with refusing_disk(home()):
                outcome = _noted(make, name)
        except MergegateError as error:
            outcome = stopped_outcome(error)
    show_in_prefect(outcome, name)
    if outcome.exit_code:
        return Failed(name="Refused", message=outcome.message, data=outcome)
    return Completed(name=outcome.status.title().replace(" ", ""), message=outcome.message, data=outcome)


def _noted(make: Callable[[], RunOutcome], name: str) -> RunOutcome:
    """The outcome of a run whose use of the store is noted: nobody removes what it needs, now or until the next one.
    At its end the store is brought below its quota."""
    store_quota()  # a setting that means nothing is said before anything is done
    with noted_run(name) as run:
        try:
            outcome = _once_more_if_lost(make)
        except MergegateError as error:
            outcome = stopped_outcome(error)
        if run is not None:
            judged = outcome.exit_code == 0 or outcome.content is not None or outcome.sweep is not None
            run.end(outcome.status, judged=judged)
            keep_quota()
    return outcome


def _once_more_if_lost(make: Callable[[], RunOutcome]) -> RunOutcome:
    """What was removed from the store between two stages is made again, as it would be by the next run."""
    try:
        return make()
    except LostArtifact as lost:
        announce(f"{lost.where}: gone from the store; the run begins again and makes what is missing")
        return make()


def reported_outcome(content: ReportContent, report: Artifact[Report], release: Release | None) -> RunOutcome:
    """The end of a run that reached the gate. Without a release it was refused, or nothing was to be published."""
    page = _keep_page(content, report)
    if release is None:
        if content.verdict.publishable:
            return RunOutcome(status="passed", message=f"{content.name} passed the gate", report=page, content=content)
        why = "\n".join((*content.verdict.reasons, *_to_try(content)))
        return RunOutcome(
            status="refused", message=f"{content.name} is not released\n{why}", report=page, content=content
        )
    what = (
        f"released {release.name} {release.version}" if release.new else f"nothing new: {release.version} is released"
    )
    return RunOutcome(
        status="released" if release.new else "nothing new",
        message=what,
        version=release.version,
        location=release.location,
        report=page,
        content=content,
    )


def _to_try(content: ReportContent) -> tuple[str, ...]:
    """The remedy with the strongest reason, for whoever reads no further than the terminal."""
    remedies = content.explanation.remedies if content.explanation else ()
    return tuple(f"to try: {remedy.text()}: {remedy.reason}" for remedy in remedies[:1])


def already_released(name: str, attempt: AlreadyReleased) -> RunOutcome:
    """The end of a run whose merge is what is released today, in a profile that holds merges against that."""
    location = attempt.location
    return RunOutcome(
        status="nothing new",
        message=f"nothing new: {location.name} is released",
        version=location.name,
        location=location,
        report=page if (page := location / "report.html").is_file() else None,
    )


def show_in_prefect(outcome: RunOutcome, name: str) -> None:
    """Keep the end of the run as a Markdown artifact of the Prefect run, where its UI shows it."""
    from prefect.artifacts import create_markdown_artifact

    text = as_markdown(outcome.content) if outcome.content else f"## ✗ {name}\n\n```\n{outcome.message}\n```\n"
    if outcome.report:
        text += f"\nReport: `{outcome.report}`\n"
    key = "".join(character if character.isalnum() else "-" for character in f"release-{name}".lower())
    create_markdown_artifact(text, key=key, description=outcome.message.splitlines()[0])


def report_content(profile: Profile, attempt: Attempt, earlier: Sequence[Attempt | FailedMerge]) -> ReportContent:
    """All that was found out about an attempt, as the report, the card and the final table want it.

    Args:
        earlier: What was tried before it and refused.
    """
    license, merged, assessed = attempt.cleared.license.value, attempt.merged, attempt.assessment

    def measured(name: str) -> dict[str, object]:
        together = join_parts(assessed.scores[name]) if assessed.scores.get(name) else None
        likelihoods = assessed.likelihoods[name].value if name in assessed.likelihoods else None
        return {"scores": together, "likelihoods": likelihoods}

    parents = [
        ReportedModel(
            name=parent.name,
            role="base" if parent.is_base else "parent",
            ref=parent.ref,
            revision=parent.revision,
            digest=parent.digest,
            licence=license.licenses[parent.name],
            **measured(parent.name),
        )
        for parent in attempt.pinned.parents
    ]
    itself = ReportedModel(
        name=MERGED, role="merge", ref=profile.name, digest=merged.digest, licence=license.result, **measured(MERGED)
    )
    parents.sort(key=lambda model: model.role != "base")  # stable: the base first, the others as the recipe has them
    return ReportContent(
        name=profile.name,
        method=attempt.pinned.recipe.summary(),
        recipe=attempt.cleared.candidate.text,
        models=(*parents, itself),
        licence=license.result,
        obligations=tuple(f"{item.text} ({', '.join(item.because)})" for item in license.combination.obligations),
        verdict=assessed.verdict.value.joined_by(attempt.verdict),
        scoring=profile.evaluate.scoring if profile.evaluate else None,
        windows=profile.perplexity.windows if profile.perplexity else None,
        files=tuple(MergedFile(name=f.name, size=f.size, sha256=f.sha256) for f in stored_files(merged)),
        versions=tuple(Library(name=name, version=version) for name, version in versions(*_LIBRARIES).items()),
        reproduce=(f"mergegate merge recipe.yaml OUT --seed {profile.merge.seed}",),
        explanation=_with_untried(attempt, earlier),
        attempts=tuple(_tried(one) for one in (*earlier, attempt)) if earlier else (),
        judge=_reported(attempt.evidence_of(JudgeVerdict)),
        experts=merged.value.experts,
        ensemble=attempt.ensemble.value if attempt.ensemble else None,
        **_serving(attempt.evidence_of(ServedModels)),
        artifacts=_artifacts(attempt),
        sections=tuple(one.section for one in attempt.verdicts if not isinstance(one.evidence, _DRAWN)),
    )


def _with_untried(attempt: Attempt, earlier: Sequence[Attempt | FailedMerge]) -> Explanation:
    """The explanation, proposing no recipe that this run has refused already."""
    recipe = attempt.cleared.candidate.document
    if recipe is None:
        return attempt.explanation
    tried = [document for one in (*earlier, attempt) if (document := one.cleared.candidate.document) is not None]
    return attempt.explanation.model_copy(update={"remedies": untried(attempt.explanation.remedies, recipe, tried)})


def _serving(served: ServedModels | None) -> dict[str, Any]:
    if served is None:
        return {}
    verdict = served.verdict
    return {
        "server": verdict.server,
        "served_as": verdict.way,
        "served": tuple(ReportedCheck(**check.model_dump()) for check in verdict.checks),
        "serving": (
            *(
                ReportedServing(name=name, measured=parent.measured, problem=parent.problem)
                for name, parent in served.parents.items()
            ),
            ReportedServing(name=MERGED, measured=verdict.measured),
        ),
    }


def _reported(answers: JudgeVerdict | None) -> ReportedJudge | None:
    if answers is None:
        return None
    fields = answers.model_dump(include=set(ReportedJudge.model_fields))
    return ReportedJudge(model=answers.judge, **fields)


def _tried(attempt: Attempt | FailedMerge) -> ReportedAttempt:
    candidate = attempt.cleared.candidate
    outcome: Outcome
    if isinstance(attempt, FailedMerge):
        outcome, reason, digest = "fail", str(attempt.refusal.found), ""
    else:
        verdict = attempt.verdict
        outcome, reason, digest = verdict.outcome, next(iter(verdict.reasons), ""), attempt.merged.digest
    return ReportedAttempt(
        recipe=candidate.recipe.summary(), change=candidate.remedy, outcome=outcome, reason=reason, digest=digest
    )


def _artifacts(attempt: Attempt) -> tuple[StoredArtifact, ...]:
    """Where the evidence lies in the store, in the order in which it was made."""
    assessed = attempt.assessment
    found: list[tuple[StoredValue[Any], str]] = [
        (attempt.cleared.license, ""),
        (attempt.merged, ""),
        *((artifact, name) for name, artifact in assessed.likelihoods.items()),
        *((part, f"{name}, {part.value.tasks[0].task}") for name, parts in assessed.scores.items() for part in parts),
        (assessed.verdict, ""),
        *([(attempt.ensemble, "")] if attempt.ensemble else []),
    ]
    return tuple(StoredArtifact(stage=one.stage, subject=subject, key=one.key) for one, subject in found)


def sweep_report(
    profile: Profile,
    search: PreparedSearch,
    study: Study,
    verdict: Confirmation | Unconfirmed,
    power: ConfirmationPower,
) -> SweepContent:
    """All that was found out by a sweep, as its page and the final table want it."""
    shares: Mapping[str, float] = {}
    try:
        told = parameter_importances(study)
        shares, why_none = told.shares, told.why_none
    except InvalidInput as error:
        why_none = f"{error.found}: {error.remedy}"
    return sweep_content(
        study,
        verdict,
        name=profile.name,
        method=search.method,
        power=power,
        sizes=search.sizes(),
        runner=str(profile.runner),
        importances=shares,
        no_importances=why_none,
        reproduce=("mergegate sweep PROFILE",),
        versions=tuple(f"{name} {version}" for name, version in versions(*_LIBRARIES).items()),
    )


def keep_sweep(content: SweepContent) -> Path:
    """The page of a sweep, where a person looks for it: the latest of each profile, by name."""
    page = home() / "reports" / f"{content.name}.sweep.html"
    state_directory(page.parent, private=True)
    write_state(page, render_sweep(content).encode())
    return page


def _keep_page(content: ReportContent, report: Artifact[Report]) -> Path:
    """The page where a person looks for it: the latest report of each profile, by name.

    It is that of the release, and where the model was served, what a machine took for that as well.
    """
    page = home() / "reports" / f"{content.name}.html"
    state_directory(page.parent, private=True)
    write_state(page, render(content).encode() if content.served else (report.directory / "report.html").read_bytes())
    return page
