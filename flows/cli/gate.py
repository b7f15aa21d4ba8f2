"""``mergegate gate``: judge results that lm-eval has already written. No model is run, nothing is published.

::

    mergegate gate merge=out/merge reverser=out/reverser shifter=out/shifter --profile profiles/demo.yaml
    mergegate gate merge=out/merge reference=out/parent --profile profiles/demo.yaml

Each directory is the output of ``lm_eval run --output_path`` for one model, with ``--log_samples``. The guards are
those of the profile (including ``best parent`` and ``champion``), and the rule is that of the stage ``gate``. A single
``reference`` replaces every model that a guard names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from mergegate.flows.outcome import RunOutcome
from mergegate.flows.profile import Profile, load_profile
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.tasks.evaluation import (
    SCORES_FILE,
    ResultsFile,
    Scores,
    TaskResults,
    find_results,
    is_file_name,
    join_parts,
    precision_differences,
    read_definition,
    read_task,
    require_same_conditions,
    score_table,
    write_document_scores,
)
from mergegate.tasks.gate import GateVerdict, Guard, distinct_guards, gate, reference_models
from mergegate.tasks.report import ReportContent, ReportedModel
from mergegate.tasks.store import Artifact, digest

MERGE, REFERENCE = "merge", "reference"


def gate_results(entries: Sequence[str], profile_file: Path, console: Console) -> RunOutcome:
    """Judge results on disk with the guards of a profile.

    Args:
        entries: ``NAME=DIRECTORY`` of each model: ``merge``, and ``reference`` or the models that the guards name.

    Raises:
        InvalidInput: A model is missing or named twice, or results are invalid or not comparable.
    """
    profile = load_profile(profile_file)
    if profile.evaluate is None:
        raise InvalidInput(
            f"{profile_file}: evaluate", found="no task that is guarded", expected="evaluate: {tasks: [...]}"
        )
    directories = _parse_directories(entries)
    guards = _guards(profile.evaluate.tasks, profile.root, f"{profile_file}: evaluate.tasks", directories)
    results = _read(guards, {name: find_results(directory) for name, directory in directories.items()})
    for guard, name in ((judged, name) for judged in guards for name in reference_models(judged, directories, MERGE)):
        where = f"{guard.task}: {MERGE} against {name}"
        ours, theirs = results[name, guard.task], results[MERGE, guard.task]
        require_same_conditions(ours, theirs, where)
        for difference in precision_differences(ours, theirs):
            console.print(f"! {where}: {difference}: this alone can move scores by tenths of a point", style="yellow")
    if profile.perplexity:
        console.print("! perplexity is not judged: lm-eval's output has none of the held-out text", style="yellow")
    with TemporaryDirectory(prefix="mergegate-gate-") as scratch:
        scores = _as_artifacts(results, Path(scratch))
        verdict = gate.work(guards, scores, {}, None, profile.evaluate.gate_rule, MERGE)
        return _outcome(profile, verdict, scores, directories)


def _parse_directories(entries: Sequence[str]) -> dict[str, Path]:
    directories: dict[str, Path] = {}
    for entry in entries:
        name, equals, directory = entry.partition("=")
        if not (name and equals and directory):
            raise InvalidInput(
                entry, found="no model and directory", expected="NAME=DIRECTORY, such as merge=out/merge"
            )
        if name in directories:
            raise InvalidInput(entry, found=f"a second directory for {name}", expected="one a model")
        directories[name] = Path(directory)
    if MERGE not in directories:
        raise InvalidInput(
            "RESULTS",
            found=f"no results of the merge, only of {', '.join(directories)}",
            expected=f"{MERGE}=DIRECTORY",
            remedy=suggest(MERGE, directories),
        )
    if len(directories) < 2:
        raise InvalidInput("RESULTS", found="only the merge", expected=f"{REFERENCE}=DIRECTORY, or its parents by name")
    return directories


def _guards(written: Sequence[Guard], root: Path, where: str, directories: Mapping[str, Path]) -> tuple[Guard, ...]:
    """Return the guards with lm-eval's task names, each compared with results that exist."""
    references = set(directories) - {MERGE}
    alone = references == {REFERENCE}
    guards = []
    for position, guard in enumerate(written):
        if not alone and not reference_models(guard, directories, MERGE):
            raise InvalidInput(
                f"{where}[{position}].guarded_by",
                found=f"{guard.guarded_by!r}, of which no results are given",
                expected=f"{guard.guarded_by}=DIRECTORY, or {REFERENCE}=DIRECTORY alone for all guards",
                remedy=suggest(guard.guarded_by, references),
            )
        is_file = is_file_name(guard.task)
        task = read_definition((root / guard.task).absolute()).name if is_file else guard.task
        reference = REFERENCE if alone else guard.guarded_by
        guards.append(guard.model_copy(update={"task": task, "guarded_by": reference}))
    return distinct_guards(guards)


def _read(guards: Sequence[Guard], files: Mapping[str, Sequence[ResultsFile]]) -> dict[tuple[str, str], TaskResults]:
    """Read the results by model and task: the merge on every task, each reference on the tasks that it guards."""
    results: dict[tuple[str, str], TaskResults] = {}
    for guard in guards:
        field = None if guard.cluster_by == "task" else guard.cluster_by
        for name in (*reference_models(guard, files, MERGE), MERGE):
            result = results.get((name, guard.task))
            if result is None or field is not None:  # two guards of a task agree on the field, or one has none
                results[name, guard.task] = read_task(files[name], guard.task, field)
    return results


def _as_artifacts(results: Mapping[tuple[str, str], TaskResults], scratch: Path) -> dict[str, list[Artifact[Scores]]]:
    """Convert the results to artifacts of the stage ``evaluate``, so that the same gate judges both."""
    scores: dict[str, list[Artifact[Scores]]] = {}
    for number, ((model, task), result) in enumerate(results.items()):
        directory = scratch / str(number)
        directory.mkdir()
        write_document_scores(directory / SCORES_FILE, result.outcomes)
        value = Scores(
            model=model,
            tasks=score_table(task, result.outcomes),
            lm_eval_version=result.conditions.lm_eval_version,
        )
        content = digest([list(outcome) for outcome in result.outcomes])
        scores.setdefault(model, []).append(Artifact("evaluate", content, content, value, directory, {}))
    return scores


def _outcome(
    profile: Profile,
    verdict: GateVerdict,
    scores: Mapping[str, Sequence[Artifact[Scores]]],
    directories: Mapping[str, Path],
) -> RunOutcome:
    ordered = [*(name for name in scores if name != MERGE), MERGE]
    content = ReportContent(
        name=profile.name,
        method="results of lm-eval",
        recipe="",
        models=tuple(_reported(name, directories[name], scores[name]) for name in ordered),
        licence="",
        obligations=(),
        verdict=verdict,
        files=(),
        versions=(),
        reproduce=(),
    )
    if verdict.publishable:
        return RunOutcome(status="passed", message=f"{profile.name} passed the gate", content=content)
    why = "\n".join(verdict.reasons)
    return RunOutcome(status="refused", message=f"{profile.name} does not pass the gate\n{why}", content=content)


def _reported(name: str, directory: Path, parts: Sequence[Artifact[Scores]]) -> ReportedModel:
    return ReportedModel(
        name=name,
        role="merge" if name == MERGE else "parent",
        ref=str(directory),
        digest=digest([part.digest for part in parts]),
        licence="",
        scores=join_parts(parts),
    )
