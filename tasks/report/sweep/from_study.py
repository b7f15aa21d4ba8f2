"""Convert a finished search and its confirmation to the content of the sweep's page. All functions are pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
from mergegate.tasks.sweep import (
    TEXT,
    Confirmation,
    ConfirmationPower,
    NothingToConfirm,
    Study,
    Term,
    cumulative_shares,
)

_TITLES = {
    "exact": "exact match",
    "probability": "probability of the correct answer",
    "log_likelihood": "log-likelihood of the answers",
    "entropy": "negative entropy of the answers",
    "metric": "metric",
}
_UNITS = {
    "exact": ("points", 100.0),
    "probability": ("points", 100.0),
    "log_likelihood": ("nats per token", 1.0),
    "entropy": ("nats", 1.0),
}
_PARTS = ("merge", "load", "score")  # parts of a trial, in order


@dataclass(frozen=True)
class SweepFacts:
    """Facts about a sweep that its search does not record.

    Attributes:
        name: Name of the profile.
        method: Subject of the search: 'ties of 2 over base'.
        power: Gain that the confirmation can detect.
        sizes: Number of documents by set (``search``, ``confirmation``, ``gate``) and task.
        runner: Description of the runner: 'local, 2 workers'.
        importances: Importance of each parameter by name. They add up to 1.
        no_importances: Reason why there are no importances.
        reproduce: Shell commands that reproduce the sweep.
        versions: Names and versions of the libraries.
    """

    name: str
    method: str
    power: ConfirmationPower | None = None
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    runner: str = "local"
    importances: Mapping[str, float] = field(default_factory=dict)
    no_importances: str = ""
    reproduce: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()


def sweep_content(study: Study, confirmation: Confirmation | NothingToConfirm, facts: SweepFacts) -> SweepContent:
    """Return the content of a sweep's page. ``facts`` adds what ``study`` does not record."""
    settings, ending, recipe, result = study.settings, [], "", None
    tested = confirmation if isinstance(confirmation, Confirmation) else None
    if study.stop_reason != "trials":
        budget = "time" if study.stop_reason == "hours" else "cost"
        tried = f"{len(study.trials)} of {settings.budget.trials} trials"
        ending.append(f"The {budget} budget ended the search after {tried}.")
    if isinstance(confirmation, NothingToConfirm):
        ending.append(f"{confirmation.why[:1].upper()}{confirmation.why[1:]}.")
    else:
        result = ReportedConfirmation(
            confirmed=confirmation.confirmed,
            gain=confirmation.gain,
            low=confirmation.low,
            high=confirmation.high,
            p=confirmation.p_value,
            confidence=confirmation.confidence,
            documents=confirmation.documents,
        )
        if confirmation.confirmed and confirmation.winner in study.recipes:
            winner = dict(study.recipes[confirmation.winner])
            recipe = yaml.safe_dump(winner, sort_keys=False, default_flow_style=None, width=100)
    terms, several, rule = study.objective.terms, study.objective.multi_objective, settings.racing
    racing = ReportedRacing(rule="none" if several or study.soup else rule.rule)
    if racing.rule == "paired":
        racing = ReportedRacing(rule="paired", error=rule.error, looks=cumulative_shares(rule))
    tasks = dict.fromkeys(task for counts in facts.sizes.values() for task in counts)
    search, confirmed, gate = (facts.sizes.get(name, {}) for name in ("search", "confirmation", "gate"))
    return SweepContent(
        name=facts.name,
        method=facts.method,
        ending=" ".join(ending),
        parameters=tuple(
            ReportedParameter(
                name=coordinate.name,
                type=coordinate.free.type,
                low=coordinate.low,
                high=coordinate.high,
                among=coordinate.free.choices,
                start=coordinate.free.start,
                importance=facts.importances.get(coordinate.name),
            )
            for coordinate in study.coordinates
        ),
        # All terms form one objective in their common unit, or each term is an objective.
        objectives=tuple(_objective((term,)) for term in terms) if several else (_objective(terms),),
        constraints=_constraints(study),
        trials=study.trials,
        winner=tested.winner if tested else study.best.number if study.best else None,
        reference=tested.reference if tested else study.reference.number,
        soup=confirmation.soup,
        front=tuple(trial.number for trial in study.front),
        held_out=_held_out(study, tested) if tested else (),
        confirmation=result,
        power=f"Forecast before the sweep: {facts.power.sentence()}." if facts.power else "",
        sets=tuple(
            ReportedSet(
                task=task or "held-out text",
                search=search.get(task, 0),
                confirmation=confirmed.get(task, 0),
                gate=gate.get(task),
            )
            for task in tasks
        ),
        racing=racing,
        budget=ReportedBudget(
            trials=len(study.trials) if study.soup else settings.budget.trials,
            hours=settings.budget.hours,
            cost=settings.budget.cost,
            spent_hours=study.seconds.get("wall", 0.0) / 3600,
            spent_cost=study.spent,
        ),
        no_importances=facts.no_importances,
        recipe=recipe,
        sampler=settings.sampler,
        seed=settings.seed,
        population=study.population if settings.sampler in ("cma", "nsga2") else None,
        runner=facts.runner,
        seconds_by_part=tuple((part, study.seconds[part]) for part in _PARTS if part in study.seconds),
        reproduce=facts.reproduce,
        versions=facts.versions,
    )


def _objective(terms: tuple[Term, ...]) -> ReportedObjective:
    titles = {_title(term) for term in terms}
    unit, factor = _UNITS.get(terms[0].key.measure, ("", 1.0))
    if len({_UNITS.get(term.key.measure) for term in terms}) > 1:
        unit, factor = "", 1.0
    if len(titles) == 1 and len(terms) == 1:
        suffix = f" of {terms[0].key.task}" if terms[0].key.task != TEXT else ""
        return ReportedObjective(title=f"{_title(terms[0])}{suffix}", unit=unit, factor=factor)
    texts = []
    for term in terms:
        details = [_title(term)] if len(titles) > 1 and term.key.task != TEXT else []
        details += [f"weight {term.weight:.2g}"] if len({item.weight for item in terms}) > 1 else []
        name = term.key.task or "the held-out text"
        texts.append(f"{name} ({', '.join(details)})" if details else name)
    title = titles.pop() if len(titles) == 1 else "weighted mean"
    return ReportedObjective(title=title, terms=tuple(texts), unit=unit, factor=factor)


def _title(term: Term) -> str:
    if term.key.task == TEXT:
        return "log-likelihood of the held-out text"
    return term.key.metric or _TITLES[term.key.measure]


def _constraints(study: Study) -> tuple[str, ...]:
    sentences = []
    for limit in study.objective.limits:
        unit, factor = _UNITS.get(limit.key.measure, ("", 1.0))
        allowed = f"{factor * limit.max_drop:g} {unit}".strip()
        title = limit.key.metric or _TITLES[limit.key.measure]
        sentences.append(
            f"Constraint: on {limit.key.task or 'the held-out text'}, the drop from "
            f"{limit.reference or 'the hand-written recipe'} may be at most {allowed} ({title})."
        )
    return tuple(sentences)


def _held_out(study: Study, test: Confirmation) -> tuple[HeldOut, ...]:
    """Return the held-out scores of the winner and the reference.

    They include the penalty that the search subtracted for the size of a change, so that they can be compared with the
    search scores.
    """
    scores = {trial.number: trial.scores for trial in study.trials if trial.number in (test.winner, test.reference)}
    if study.objective.multi_objective:
        winner = tuple(term.winner for term in test.terms)
        reference = tuple(term.reference for term in test.terms)
    else:
        winner = (test.held_out - (test.searched - scores[test.winner][0]),)
        reference = (test.held_out_reference - (test.searched_reference - scores[test.reference][0]),)
    return HeldOut(trial=test.reference, scores=reference), HeldOut(trial=test.winner, scores=winner)
