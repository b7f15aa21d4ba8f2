"""From a search that is over to what its page says."""

from __future__ import annotations

import math
from collections.abc import Mapping

from merge_core.errors import InvalidInput
from tasks.report.sweep.content import (
    HeldOut,
    ReportedBudget,
    ReportedConfirmation,
    ReportedObjective,
    ReportedParameter,
    ReportedRacing,
    ReportedSet,
    SweepContent,
)
from tasks.report.sweep.search_line import SearchStatus, search_line
from tasks.stage import versions
from tasks.sweep import (
    TEXT,
    Confirmation,
    ConfirmationPower,
    Coordinate,
    Search,
    SearchProgress,
    Study,
    Term,
    Unconfirmed,
    parameter_importances,
    recipe_text,
    shares_after_looks,
)

_TITLES = {
    "exact": "greedy answers that are exactly right",
    "probability": "probability of the right answer",
    "log_likelihood": "log-likelihood of the right answers",
    "metric": "score",
}
_LIBRARIES = ("mergegate", "torch", "transformers", "lm-eval", "cmaes", "optuna")


def sweep_content(
    search: Search,
    study: Study,
    verdict: Confirmation | Unconfirmed,
    power: ConfirmationPower,
    name: str,
    runner: str,
) -> SweepContent:
    """Everything that stands on the page of a sweep that came to its end.

    Args:
        name: Of the profile.
        runner: Where trials were scored, in words.
    """
    told, why_none = _importances(study)
    tested = isinstance(verdict, Confirmation)
    return SweepContent(
        name=name,
        method=search.method,
        ending="" if isinstance(verdict, Confirmation) else f"{verdict.why[:1].upper()}{verdict.why[1:]}.",
        parameters=tuple(_parameter(one, told.get(one.name)) for one in study.coordinates),
        objectives=_objectives(study),
        constraints=tuple(
            f"{limit.asked.task}: {limit.asked.measure} at most {limit.max_drop:g} below "
            f"{limit.reference or 'the hand-written recipe'}"
            for limit in study.objective.limits
        ),
        trials=study.trials,
        winner=study.best.number if study.best else None,
        reference=study.reference.number,
        front=tuple(trial.number for trial in study.front),
        held_out=_held_out(verdict, study) if isinstance(verdict, Confirmation) else (),
        confirmation=_confirmation(verdict) if isinstance(verdict, Confirmation) else None,
        power=f"{power.sentence()}.",
        sets=_sets(search),
        racing=ReportedRacing(
            rule=study.settings.racing.rule,
            error=study.settings.racing.error if study.settings.racing.rule == "paired" else None,
            looks=shares_after_looks(study.settings.racing),
        ),
        budget=ReportedBudget(
            trials=study.settings.budget.trials,
            hours=study.settings.budget.hours,
            cost=study.settings.budget.cost,
            spent_hours=study.seconds["wall"] / 3600,
            spent_cost=study.spent,
        ),
        no_importances=why_none,
        recipe=recipe_text(study.recipes[study.best.number], f"Found by a sweep of {name}.") if study.best else "",
        sampler=study.settings.sampler,
        seed=study.settings.seed,
        population=study.population,
        runner=runner,
        seconds_by_part=tuple((part, seconds) for part, seconds in study.seconds.items() if part != "wall"),
        reproduce=(f"mergegate sweep {name}.yaml",) if tested else (),
        versions=tuple(f"{library} {version}" for library, version in _versions().items()),
    )


def sweep_line(progress: SearchProgress, width: int) -> str:
    """The line that a person watches while it searches."""
    status = SearchStatus(
        done=progress.scored,
        total=progress.budget,
        best=math.nan if progress.best is None else progress.best,
        hand_written=math.nan if progress.hand_written is None else progress.hand_written,
        generation=max(0, progress.generation + 1),
        seconds_left=progress.seconds_left,
    )
    return search_line(status, width)


def _importances(study: Study) -> tuple[Mapping[str, float], str]:
    try:
        found = parameter_importances(study)
    except InvalidInput as error:
        return {}, f"{error.found}."
    return found.shares, f"{found.why_none[:1].upper()}{found.why_none[1:]}." if found.why_none else ""


def _parameter(one: Coordinate, importance: float | None) -> ReportedParameter:
    category = one.free.type == "category"
    return ReportedParameter(
        name=one.name,
        type=one.free.type,
        low=0.0 if category else one.low,
        high=1.0 if category else one.high,
        among=one.free.among if category else (),
        start=one.free.start,
        importance=importance,
    )


def _objectives(study: Study) -> tuple[ReportedObjective, ...]:
    objective = study.objective
    if objective.several:
        return tuple(_reported([term]) for term in objective.terms)
    return (_reported(list(objective.terms)),)


def _reported(terms: list[Term]) -> ReportedObjective:
    measures = {term.asked.metric or _TITLES[term.asked.measure] for term in terms}
    likely = {term.asked.measure for term in terms} == {"log_likelihood"}
    shares = {term.asked.measure for term in terms} <= {"exact", "probability"}
    even = len({term.weight for term in terms}) == 1
    return ReportedObjective(
        title=measures.pop() if len(measures) == 1 else "weighted sum",
        terms=tuple(
            (term.asked.task or "the held-out text") + ("" if even else f" ({100 * term.weight:.0f} %)")
            for term in terms
        ),
        unit="nats a token" if likely else "points" if shares else "",
        factor=100.0 if shares else 1.0,
    )


def _held_out(verdict: Confirmation, study: Study) -> tuple[HeldOut, ...]:
    if study.objective.several:
        winner, reference = (
            tuple(term.winner for term in verdict.terms),
            tuple(term.reference for term in verdict.terms),
        )
    else:
        winner, reference = (verdict.held_out,), (verdict.held_out_reference,)
    return HeldOut(trial=verdict.winner, scores=winner), HeldOut(trial=verdict.reference, scores=reference)


def _confirmation(verdict: Confirmation) -> ReportedConfirmation:
    return ReportedConfirmation(
        confirmed=verdict.confirmed,
        gain=verdict.gain,
        low=verdict.low,
        high=verdict.high,
        p=verdict.p_value,
        confidence=verdict.confidence,
        documents=verdict.documents,
    )


def _sets(search: Search) -> tuple[ReportedSet, ...]:
    chosen = search.setting.sets
    tasks = [task.name for task in chosen["search"].tasks] + ([TEXT] if chosen["search"].text else [])
    return tuple(
        ReportedSet(
            task=name or "held-out text",
            search=chosen["search"].size(name),
            confirmation=chosen["confirmation"].size(name),
            gate=search.for_the_gate.get(name, 0),
        )
        for name in tasks
    )


def _versions() -> Mapping[str, str]:
    from importlib.metadata import PackageNotFoundError

    found: dict[str, str] = {}
    for library in _LIBRARIES:
        try:
            found |= versions(library)
        except PackageNotFoundError:  # an extra that this sweep did not need
            continue
    return found
