"""From a search that is over, and its confirmation, to what the page says of them. A pure function of values."""

from __future__ import annotations

import math
from collections.abc import Mapping

import yaml

from mergegate.tasks.report.sweep.content import (
    HeldOut,
    ReportedBudget,
    ReportedConfirmation,
    ReportedObjective,
    ReportedParameter,
    ReportedRacing,
    ReportedSet,
    SweepContent,
)
from mergegate.tasks.report.sweep.search_line import SearchStatus, search_line
from mergegate.tasks.sweep import (
    TEXT,
    Confirmation,
    ConfirmationPower,
    NothingToConfirm,
    SearchProgress,
    Study,
    Term,
    doubling_shares,
)

_TITLES = {
    "exact": "exact match",
    "probability": "probability of the right answer",
    "log_likelihood": "log-likelihood of the answers",
    "entropy": "certainty about the answers (minus the entropy)",
    "metric": "metric",
}
_UNITS = {
    "exact": ("points", 100.0),
    "probability": ("points", 100.0),
    "log_likelihood": ("nats a token", 1.0),
    "entropy": ("nats", 1.0),
}
_PARTS = ("merge", "load", "score")  # of a trial, in their order
_BY_GENERATION = ("cma", "nsga2")


def sweep_content(
    study: Study,
    confirmation: Confirmation | NothingToConfirm,
    *,
    name: str,
    method: str,
    power: ConfirmationPower | None = None,
    sizes: Mapping[str, Mapping[str, int]] | None = None,
    runner: str = "local",
    recipe: str = "",
    importances: Mapping[str, float] | None = None,
    no_importances: str = "",
    reproduce: tuple[str, ...] = (),
    versions: tuple[str, ...] = (),
) -> SweepContent:
    """What the page of a sweep says.

    Args:
        name: Of the profile.
        method: 'ties of 2 over base'.
        power: What the confirmation would find.
        sizes: Documents by set (``search``, ``confirmation``, ``gate``) and task.
        recipe: The winner's as it is written down; empty: as YAML of its values, if it was confirmed.
        importances: By name of a coordinate, together 1.
        no_importances: Why there are none.
    """
    test = confirmation if isinstance(confirmation, Confirmation) else None
    settings = study.settings
    if not recipe and test is not None and test.confirmed and test.winner in study.recipes:
        recipe = yaml.safe_dump(dict(study.recipes[test.winner]), sort_keys=False, default_flow_style=None, width=100)
    known = importances or {}
    return SweepContent(
        name=name,
        method=method,
        ending=" ".join(part for part in (_stopped(study), _unconfirmed(confirmation)) if part),
        parameters=tuple(
            ReportedParameter(
                name=one.name,
                type=one.free.type,
                low=one.low,
                high=one.high,
                among=one.free.among,
                start=one.free.start,
                importance=known.get(one.name),
            )
            for one in study.coordinates
        ),
        objectives=_objectives(study),
        constraints=_constraints(study),
        trials=study.trials,
        winner=study.best.number if study.best else None,
        reference=study.reference.number,
        front=tuple(trial.number for trial in study.front),
        held_out=_held_out(study, test) if test else (),
        confirmation=_confirmation(test) if test else None,
        power=f"Said before the sweep: {power.sentence()}." if power else "",
        sets=_sets(sizes or {}),
        racing=_racing(study),
        budget=ReportedBudget(
            trials=settings.budget.trials,
            hours=settings.budget.hours,
            cost=settings.budget.cost,
            spent_hours=study.seconds.get("wall", 0.0) / 3600,
            spent_cost=study.spent,
        ),
        no_importances=no_importances,
        recipe=recipe,
        sampler=settings.sampler,
        seed=settings.seed,
        population=study.population if settings.sampler in _BY_GENERATION else None,
        runner=runner,
        seconds_by_part=tuple((part, study.seconds[part]) for part in _PARTS if part in study.seconds),
        reproduce=reproduce,
        versions=versions,
    )


def _objectives(study: Study) -> tuple[ReportedObjective, ...]:
    """One for all terms, in the unit that they share, or one for each."""
    terms = study.objective.terms
    if study.objective.several:
        return tuple(_objective((term,)) for term in terms)
    return (_objective(terms),)


def _objective(terms: tuple[Term, ...]) -> ReportedObjective:
    titles = {_title(term) for term in terms}
    unit, factor = _UNITS.get(terms[0].asked.measure, ("", 1.0))
    if len({_UNITS.get(term.asked.measure) for term in terms}) > 1:
        unit, factor = "", 1.0
    if len(titles) == 1 and len(terms) == 1:
        of = f" of {terms[0].asked.task}" if terms[0].asked.task != TEXT else ""
        return ReportedObjective(title=f"{_title(terms[0])}{of}", unit=unit, factor=factor)
    named = tuple(
        _named(term, titled=len(titles) > 1, weighed=len({one.weight for one in terms}) > 1) for term in terms
    )
    return ReportedObjective(
        title=titles.pop() if len(titles) == 1 else "weighted mean", terms=named, unit=unit, factor=factor
    )


def _title(term: Term) -> str:
    if term.asked.task == TEXT:
        return "log-likelihood of the held-out text"
    return term.asked.metric or _TITLES[term.asked.measure]


def _named(term: Term, *, titled: bool, weighed: bool) -> str:
    name = term.asked.task or "the held-out text"
    said = [_title(term)] * (titled and term.asked.task != TEXT) + [f"weight {term.weight:.2g}"] * weighed
    return f"{name} ({', '.join(said)})" if said else name


def _constraints(study: Study) -> tuple[str, ...]:
    found = []
    for limit in study.objective.limits:
        unit, factor = _UNITS.get(limit.asked.measure, ("", 1.0))
        most = f"{factor * limit.max_drop:g} {unit}".strip()
        title = limit.asked.metric or _TITLES[limit.asked.measure]
        found.append(
            f"On {limit.asked.task or 'the held-out text'} a candidate may be at most {most} ({title}) below "
            f"{limit.reference or 'the hand-written recipe'}."
        )
    return tuple(found)


def _confirmation(test: Confirmation) -> ReportedConfirmation:
    return ReportedConfirmation(
        confirmed=test.confirmed,
        gain=test.gain,
        low=test.low,
        high=test.high,
        p=test.p_value,
        confidence=test.confidence,
        documents=test.documents,
    )


def _held_out(study: Study, test: Confirmation) -> tuple[HeldOut, ...]:
    """Of winner and reference, with what the search subtracted from each for the size of its change: else searched and
    held-out score would not be the same thing."""
    scores = {trial.number: trial.scores for trial in study.trials if trial.number in (test.winner, test.reference)}
    if study.objective.several:
        winner = tuple(term.winner for term in test.terms)
        reference = tuple(term.reference for term in test.terms)
    else:
        winner = (test.held_out - (test.searched - scores[test.winner][0]),)
        reference = (test.held_out_reference - (test.searched_reference - scores[test.reference][0]),)
    return HeldOut(trial=test.reference, scores=reference), HeldOut(trial=test.winner, scores=winner)


def _sets(sizes: Mapping[str, Mapping[str, int]]) -> tuple[ReportedSet, ...]:
    tasks = dict.fromkeys(task for counts in sizes.values() for task in counts)
    return tuple(
        ReportedSet(
            task=task or "held-out text",
            search=sizes.get("search", {}).get(task, 0),
            confirmation=sizes.get("confirmation", {}).get(task, 0),
            gate=sizes.get("gate", {}).get(task),
        )
        for task in tasks
    )


def _racing(study: Study) -> ReportedRacing:
    rule = study.settings.racing
    if rule.rule == "none" or study.objective.several:
        return ReportedRacing(rule="none")
    if rule.rule == "halving":
        return ReportedRacing(rule="halving")
    return ReportedRacing(rule="paired", error=rule.error, looks=doubling_shares(rule.first))


def _stopped(study: Study) -> str:
    if study.stopped == "trials":
        return ""
    tried = f"after {len(study.trials)} of {study.settings.budget.trials} trials"
    return f"Its time was up {tried}." if study.stopped == "hours" else f"Its money was spent {tried}."


def _unconfirmed(confirmation: Confirmation | NothingToConfirm) -> str:
    if isinstance(confirmation, Confirmation):
        return ""
    return f"{confirmation.why[:1].upper()}{confirmation.why[1:]}."


def sweep_line(progress: SearchProgress, width: int) -> str:
    """The line that a person watches while it searches, in at most ``width`` characters."""
    status = SearchStatus(
        done=progress.scored,
        total=progress.budget,
        best=math.nan if progress.best is None else progress.best,
        hand_written=math.nan if progress.hand_written is None else progress.hand_written,
        seconds_left=progress.seconds_left,
    )
    return search_line(status, width)
