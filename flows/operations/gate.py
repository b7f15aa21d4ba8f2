"""Judge results that lm-eval or inspect_ai has already written, with the guards of a profile. No model is run.

Each directory has the results of one model: the output of ``lm_eval run --output_path`` with ``--log_samples``, or logs
of inspect_ai. The content of the files tells the format. The guards of the profile (including ``best parent`` and
``champion``) judge the results by the rule of the stage ``gate``. If ``reference`` is the only other model, every guard
compares with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from mergegate.flows.outcome import RunOutcome
from mergegate.flows.profile import Profile, load_profile
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.tasks.base.store import Artifact, digest
from mergegate.tasks.quality.evaluation import (
    SCORES_FILE,
    Scores,
    TaskResults,
    find_results,
    is_file_name,
    join_parts,
    precision_differences,
    read_task,
    require_same_conditions,
    score_table,
    task_tree,
    write_document_scores,
)
from mergegate.tasks.quality.gate import GatePlan, Guard, distinct_guards, gate, reference_models
from mergegate.tasks.release.report import ReportContent, ReportedModel

MERGE, REFERENCE = "merge", "reference"


def load_guards(source: Path | Profile) -> tuple[Profile, str]:
    """Return a profile and its location in messages. Raise InvalidInput if it is not valid or has no guards."""
    profile = load_profile(source, needs_recipe=False)
    location = f"profile {profile.name}" if isinstance(source, Profile) else str(source)
    if profile.evaluate is None:
        raise InvalidInput(
            f"{location}: evaluate", found="it is missing, so there are no guards", expected="evaluate: {tasks: [...]}"
        )
    return profile, location


def judge_results(
    directories: Mapping[str, Path], profile: Profile, profile_location: str, console: Console
) -> RunOutcome:
    """Judge results on disk with the guards of a profile.

    ``directories`` has the directory with the results of each model. The names are ``merge``, and either ``reference``
    or the models that the guards compare with. The profile and its location are those of ``load_guards``.

    Raises:
        InvalidInput: A model is missing, or results are invalid or not comparable.
    """
    assert profile.evaluate is not None
    _require_models(directories)
    guards = _guards(profile.evaluate.tasks, profile.root, f"{profile_location}: evaluate.tasks", directories)

    # The merge needs results of every task, a reference only of the tasks whose guards compare with it.
    files = {name: find_results(directory) for name, directory in directories.items()}
    results: dict[tuple[str, str], TaskResults] = {}
    for guard in guards:
        field = None if guard.cluster_by == "task" else guard.cluster_by
        for name in (*reference_models(guard, files, MERGE), MERGE):
            result = results.get((name, guard.task))
            if result is None or field is not None:  # two guards of a task agree on the field, or one has none
                results[name, guard.task] = read_task(files[name], guard.task, field)
    for guard, name in ((judged, name) for judged in guards for name in reference_models(judged, directories, MERGE)):
        location = f"{guard.task}: {MERGE} against {name}"
        reference, merge = results[name, guard.task], results[MERGE, guard.task]
        require_same_conditions(reference, merge, location)
        for difference in precision_differences(reference, merge):
            warning = f"! {location}: {difference}; this difference alone can move scores by tenths of a point"
            console.print(warning, style="yellow")
    if profile.perplexity:
        console.print("! perplexity is not judged, because this command compares tasks only", style="yellow")
    for warning in dict.fromkeys(warning for result in results.values() for warning in result.warnings):
        console.print(f"! {warning}", style="yellow")
    with TemporaryDirectory(prefix="mergegate-gate-") as scratch:
        # Convert the results to artifacts of the stage "evaluate", which the gate judges.
        scores: dict[str, list[Artifact[Scores]]] = {}
        for number, ((model, task), result) in enumerate(results.items()):
            part = Path(scratch, str(number))
            part.mkdir()
            write_document_scores(part / SCORES_FILE, result.outcomes)
            value = Scores(model=model, tasks=score_table(task, result.outcomes), lm_eval_version=result.version)
            content_digest = digest([list(outcome) for outcome in result.outcomes])
            artifact = Artifact("evaluate", content_digest, content_digest, value, part, {})
            scores.setdefault(model, []).append(artifact)
        verdict = gate.work(guards, scores, {}, None, GatePlan(profile.evaluate.gate_rule, MERGE))
        models = [
            ReportedModel(
                name=name,
                role="merge" if name == MERGE else "parent",
                ref=str(directories[name]),
                digest=digest([part.digest for part in scores[name]]),
                licence="",
                scores=join_parts(scores[name]),
            )
            for name in (*(name for name in scores if name != MERGE), MERGE)
        ]
    content = ReportContent(
        name=profile.name,
        method=f"results of {' and '.join(sorted({result.format for result in results.values()}))}",
        recipe="",
        models=tuple(models),
        licence="",
        obligations=(),
        verdict=verdict,
        files=(),
        versions=(),
        reproduce=(),
    )
    if verdict.publishable:
        return RunOutcome(status="passed", message=f"{profile.name} passed the gate", content=content)
    message = f"{profile.name} does not pass the gate"
    return RunOutcome(status="refused", message=message, reasons=verdict.reasons, content=content)


def _require_models(directories: Mapping[str, Path]) -> None:
    """Raise InvalidInput unless there are results of the merge and of another model."""
    if MERGE not in directories:
        raise InvalidInput(
            "RESULTS",
            found=f"no results of the merge, only of {', '.join(directories)}",
            expected=f"{MERGE}=DIRECTORY",
            remedy=suggest(MERGE, directories),
        )
    if len(directories) < 2:
        raise InvalidInput(
            "RESULTS", found="only results of the merge", expected=f"also {REFERENCE}=DIRECTORY, or its parents by name"
        )


def _guards(
    profile_guards: Sequence[Guard], root: Path, location: str, directories: Mapping[str, Path]
) -> tuple[Guard, ...]:
    """Return guards with task names as in the results. Raise InvalidInput if results of a reference are missing."""
    references = set(directories) - {MERGE}
    alone = references == {REFERENCE}
    guards = []
    for position, guard in enumerate(profile_guards):
        if guard.built_in is not None:
            raise InvalidInput(
                f"{location}[{position}].task",
                found=f"a {guard.built_in.kind} task, which only mergegate itself scores",
                expected="tasks of lm-eval or inspect_ai",
                remedy="judge the merge with mergegate run or mergegate compare, or remove the guard",
            )
        if not alone and not reference_models(guard, directories, MERGE):
            raise InvalidInput(
                f"{location}[{position}].guarded_by",
                found=f"no results of {guard.guarded_by!r}",
                expected=f"{guard.guarded_by}=DIRECTORY, or {REFERENCE}=DIRECTORY alone for all guards",
                remedy=suggest(guard.guarded_by, references),
            )
        is_file = is_file_name(guard.task)
        task = task_tree(guard.task, root).name if is_file else guard.task
        reference = REFERENCE if alone else guard.guarded_by
        guards.append(guard.model_copy(update={"task": task, "guarded_by": reference}))
    return distinct_guards(guards)
