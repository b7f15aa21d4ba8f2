"""Describe a sweep in words: the verdict, numbers with the relevant digits, the savings and the cost.

All functions are pure.
"""

from __future__ import annotations

import math

from mergegate.merge_core.wording import format_duration
from mergegate.tasks.report.sweep.content import (
    ParameterValue,
    ReportedBudget,
    ReportedConfirmation,
    ReportedParameter,
    SweepContent,
)
from mergegate.tasks.report.sweep.study_facts import (
    BASELINE,
    HAND_WRITTEN,
    SAMPLER,
    by_origin,
    decimals_for,
    documents_used,
    recipe_rows,
    state_of,
    trial_numbered,
)
from mergegate.tasks.report.table import Row, ScoreTable
from mergegate.tasks.report.wording import MINUS, NONE, interval, number, plain
from mergegate.tasks.stage import Outcome
from mergegate.tasks.sweep import INGREDIENT, SOUP

SAMPLERS = {
    "cma": "CMA-ES",
    "random": "random search",
    "tpe": "TPE",
    "gp": "a Gaussian process",
    "nsga2": "NSGA-II",
}
_TITLES: dict[Outcome, str] = {
    "pass": "Confirmed",
    "fail": "No candidate confirmed",
    "inconclusive": "Not finished",
}


def sweep_outcome(content: SweepContent) -> Outcome:
    if not content.finished:
        return "inconclusive"
    return "pass" if content.confirmation is not None and content.confirmation.confirmed else "fail"


def sweep_title(content: SweepContent) -> str:
    return _TITLES[sweep_outcome(content)]


def sweep_sentence(content: SweepContent) -> str:
    """Return the reason for the outcome, with the lead and its interval: '0.0021 nats per token [0.0016, 0.0026]'."""
    test = content.confirmation
    # Hand-written recipes are not candidates.
    candidates = sum(trial.origin != HAND_WRITTEN for trial in content.trials)
    count = f"{candidates} candidate{'' if candidates == 1 else 's'}" if candidates else ""
    if test is None:
        prefix = f"{count} {'was' if count == '1 candidate' else 'were'} tried. " if count else ""
        return f"{prefix}{content.ending or 'No candidate could be confirmed.'}"
    rival = trial_numbered(content, content.reference)
    reference = f"the hand-written recipe {rival.label if rival else ''}".rstrip()
    if rival is not None and rival.origin == INGREDIENT:
        reference = f"the best ingredient {rival.label}"
    if len(content.objectives) > 1:
        reference += " in the weighted sum of the objectives"
    shown, decimals = content.objectives[test.objective], decimals_for(content, test.objective)
    bounds = interval(shown.factor * test.low, shown.factor * test.high, decimals)
    parts = (number(shown.factor * test.gain, decimals), shown.unit, bounds)
    lead = (
        f"On {test.documents:,} documents that no trial has seen, its lead over {reference} is "
        f"{' '.join(part for part in parts if part)}, {p_text(test.p)}."
    )
    note = test.note or "This lead is not shown to be more than chance."
    if content.soup:
        members = sum(result.outcome in ("first", "kept") for result in content.soup.ingredients)
        start = f"The soup has {members} of {len(content.soup.ingredients)} models."
        return f"{start} {lead}" if test.confirmed else f"{start} {lead} {note}"
    if test.confirmed:
        winner, value = trial_numbered(content, content.winner), ""
        if winner is not None and len(winner.point) == 1:  # A search with only one parameter says which value won.
            ((name, number_or_choice),) = winner.point.items()
            is_float = isinstance(number_or_choice, float)
            value = f" ({name} {number_or_choice:.4g})" if is_float else f" ({name} {number_or_choice})"
        return f"Trial {content.winner}{value} won among {count}. {lead}"
    return f"Trial {content.winner} had the best score on the search documents. {lead} {note}"


def sweep_consequence(content: SweepContent) -> str:
    """Return a sentence that tells the reader what follows from the outcome."""
    if not content.finished:
        return "Next: start the sweep again to continue. No trial is scored twice."
    if sweep_outcome(content) == "pass":
        return "Next: release the recipe of the winner. The gate of the release tests it on other documents."
    changed, best = ("models", "reference") if content.soup else ("parameters", "best hand-written recipe")
    return (
        f"The sweep released no recipe. Next: keep the {best}, or search again with more documents or with other "
        f"{changed}."
    )


def winner_word(content: SweepContent) -> str:
    """Return ``winner``, or ``best so far`` if the search has not finished."""
    return "winner" if content.finished else "best so far"


def level_text(test: ReportedConfirmation) -> str:
    """Return the confidence level: '95 %'."""
    return f"{plain(round(100 * test.confidence, 3))} %"


def p_text(p: float) -> str:
    """Return the p-value as text: 'p = 0.42', 'p = 0.003', or with an exponent if it is smaller than 0.001."""
    if p <= 1e-6:  # no test is exact for such small values
        return f"p < 1e{MINUS}6"
    if p < 0.001:
        mantissa, exponent = f"{p:.0e}".split("e")
        return f"p = {mantissa}e{number(int(exponent), 0)}"
    return f"p = {p:.2f}" if p >= 0.095 else f"p = {p:.2g}"


def score_text(content: SweepContent, objective: int, score: float) -> str:
    """Return a score as text, in the unit in which the report shows its objective, without the name of the unit.

    The text has enough decimals to distinguish the recipes of this sweep. A score that is NaN or infinite becomes a
    placeholder. ``objective`` is an index, and ``score`` is in the unit of the search.
    """
    if not math.isfinite(score):
        return NONE
    return number(content.objectives[objective].factor * score, decimals_for(content, objective))


def difference_text(content: SweepContent, objective: int, difference: float) -> str:
    """Return a difference between two scores as text, with a plus sign if it is positive."""
    text = score_text(content, objective, difference)
    return f"+{text}" if math.isfinite(difference) and difference > 0 and text.strip("0.") else text


def value_text(value: ParameterValue | None) -> str:
    """Return a parameter's value with three digits, or a category as written."""
    if value is None:
        return NONE
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()  # as written in YAML
    if isinstance(value, int):
        return str(value).replace("-", MINUS)
    return plain(float(f"{value:.3g}"))


def range_text(parameter: ReportedParameter) -> str:
    """Return the range of a parameter as text: '0.05 to 1', 'ties, dare_ties'."""
    if parameter.type == "category":
        return ", ".join(value_text(choice) for choice in parameter.among)
    kind = {"log": ", log scale", "integer": ", whole numbers"}.get(parameter.type, "")
    return f"{value_text(parameter.low)} to {value_text(parameter.high)}{kind}"


def objective_text(content: SweepContent, objective: int) -> str:
    """Return the objective with its terms: 'log-likelihood of the answers (copy, reverse), in nats per token'."""
    shown = content.objectives[objective]
    terms = f" ({', '.join(shown.terms)})" if shown.terms else ""
    return f"{shown.title}{terms}{f', in {shown.unit}' if shown.unit else ''}"


def sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]


def search_text(content: SweepContent) -> str:
    """Return a sentence about the sampler, its seed and the runner."""
    if content.soup:
        return f"Search: {content.soup.rule} soup. Runner: {content.runner}."
    size = f" with {content.population} candidates per generation" if content.population else ""
    sampler = SAMPLERS.get(content.sampler, content.sampler)
    return f"Sampler: {sampler}{size}, seed {content.seed}. Runner: {content.runner}."


def optimism_sentence(content: SweepContent, objective: int) -> str:
    """Return a sentence about the share of the winner's lead on the search documents that is optimism.

    The result is empty if the winner or the reference lacks a score on either set, or if they are the same trial.
    """
    rows = {row.role: row for row in recipe_rows(content, objective)}
    if not {"winner", "reference"} <= rows.keys():
        return ""
    winner, reference = rows["winner"], rows["reference"]
    search, held_out = winner.search - reference.search, winner.held_out - reference.held_out
    if not (math.isfinite(search) and math.isfinite(held_out)):
        return ""
    unit = content.objectives[objective].unit
    seen, unseen = (f"{difference_text(content, objective, lead)} {unit}".strip() for lead in (search, held_out))
    start = f"The lead of the winner is {seen} on the search documents and {unseen} on the held-out documents."
    if search <= 0:
        return start
    optimism = 1 - held_out / search
    share = "None" if optimism <= 0.005 else "All" if optimism >= 1 else f"{100 * optimism:.0f} %"
    return f"{start} {share} of the lead on the search documents is optimism."


def counts_sentence(content: SweepContent) -> str:
    """Return a sentence with the number of trials by origin, and how many were dropped, infeasible or failed."""
    parts = []
    for origin, words in (
        (HAND_WRITTEN, "hand-written"),
        (SAMPLER, f"by {SAMPLERS.get(content.sampler, content.sampler)}"),
        (BASELINE, "by the random baseline"),
        (INGREDIENT, "of one model"),
        (SOUP, "of several models"),
    ):
        count = len(by_origin(content.trials, origin))
        if count:
            parts.append(f"{count} {words}")
    state_texts = {
        "dropped": ("was dropped early", "were dropped early"),
        "infeasible": ("violates a constraint", "violate a constraint"),
        "failed": ("has no score", "have no score"),
    }
    state_counts = [
        f"{count} {singular if count == 1 else plural}"
        for state, (singular, plural) in state_texts.items()
        if (count := sum(state_of(trial) == state for trial in content.trials))
    ]
    total = _trial_count(content)
    return (
        f"{total}: {', '.join(parts)}.{' Of these, ' + ', '.join(state_counts) + '.' if state_counts else ''}"
        if parts
        else f"{total}."
    )


def racing_sentence(content: SweepContent) -> str:
    """Return a sentence about how many documents racing saved by dropping hopeless candidates, and at what risk."""
    racing, used = content.racing, documents_used(content.trials)
    if racing.rule == "none":
        return "Every candidate was scored on all search documents."
    looks = ""
    if racing.looks:
        looks = f" after {', '.join(f'{100 * look:g}' for look in racing.looks[:-1])} % of the documents"
    rule = {
        "paired": f"Racing drops a candidate{looks} if a paired test shows that it is worse than the best so far.",
        "halving": f"Racing drops the worse two thirds of each generation{looks}.",
    }[racing.rule]
    risk = "The chance that this drops a good candidate is unknown."
    if racing.error is not None:
        risk = f"The chance that this drops a candidate that is not worse is at most {100 * racing.error:g} %."
    share = (
        f" On average, a candidate was scored on {100 * used:.0f} % of the documents." if math.isfinite(used) else ""
    )
    return f"{rule} {risk}{share}"


def search_effort(content: SweepContent) -> str:
    """Return the trials, time, cost and failures: '62 trials in 10.1 s · cost 0.0034 · 4 trials without a score'."""
    spent, used = content.budget, documents_used(content.trials)
    failed = sum(state_of(trial) == "failed" for trial in content.trials)
    parts = [f"{_trial_count(content)} in {format_duration(3600 * spent.spent_hours)}"]
    if spent.spent_cost is not None:
        parts.append(f"cost {money(spent.spent_cost)}")
    if math.isfinite(used) and used < 1:
        parts.append(f"{100 * used:.0f} % of the documents scored")
    if failed:
        parts.append(f"{failed} trial{'' if failed == 1 else 's'} without a score")
    return " · ".join(parts)


def problem_rows(content: SweepContent) -> tuple[tuple[str, str], ...]:
    """Return each reason why trials have no score, as a pair of the affected trials and the reason.

    The trials are 'trial 3', 'trials 3, 7 and 12', or 'trials 3, 7, 12 and 9 more'.
    """
    trials_by_problem: dict[str, list[int]] = {}
    for trial in content.trials:
        if state_of(trial) == "failed":
            trials_by_problem.setdefault(trial.problem or "its score is not a number", []).append(trial.number)
    rows = []
    for problem, numbers in trials_by_problem.items():
        *first, last = map(str, numbers)
        listed = f"s {', '.join(first)} and {last}" if first else f" {last}"
        if len(numbers) > 4:
            listed = f"s {', '.join(first[:3])} and {len(numbers) - 3} more"
        rows.append((f"trial{listed}", problem))
    return tuple(rows)


def budget_rows(budget: ReportedBudget, trial_count: int) -> tuple[tuple[str, str, str, float | None], ...]:
    """Return the budget as rows: name, spent amount, budget, and spent share in [0, 1] or None without a limit."""
    first_row = [("Trials", f"{trial_count:,}", f"{budget.trials:,}", min(1.0, trial_count / budget.trials))]
    hours = None if budget.hours is None else format_duration(3600 * budget.hours)
    share = None if budget.hours is None else min(1.0, budget.spent_hours / budget.hours)
    rows: list[tuple[str, str, str, float | None]] = [
        *first_row,
        ("Time", format_duration(3600 * budget.spent_hours), hours or "no limit", share),
    ]
    if budget.spent_cost is not None or budget.cost is not None:
        spent = budget.spent_cost or 0.0
        bound = None if budget.cost is None else min(1.0, spent / budget.cost)
        rows.append(("Cost", money(spent), "no limit" if budget.cost is None else money(budget.cost), bound))
    return tuple(rows)


def money(amount: float) -> str:
    """Format an amount in the profile's currency, with two decimals, or more if it is less than 0.01."""
    return f"{amount:,.2f}" if amount >= 0.01 or amount == 0 else f"{amount:.2g}"


def _trial_count(content: SweepContent) -> str:
    count = len(content.trials)
    return f"{count} trial{'' if count == 1 else 's'}"


def sweep_table(content: SweepContent, objective: int = 0) -> ScoreTable:
    """Return one row per recipe: search score, held-out score and difference. The winner's row has the outcome."""
    unit = content.objectives[objective].unit
    title = content.objectives[objective].title
    rows = []
    for row in recipe_rows(content, objective):
        numbers = (
            score_text(content, objective, row.search),
            score_text(content, objective, row.held_out),
            difference_text(content, objective, row.optimism),
        )
        name, note = row.label, {"reference": "reference" if content.soup else "best hand-written"}.get(row.role, "")
        if row.role == "winner":
            name = f"{'soup' if content.soup else winner_word(content)}, trial {row.trial}"
            note = {"pass": "confirmed", "fail": "not confirmed", "inconclusive": ""}[sweep_outcome(content)]
        rows.append(Row((name, *numbers, note), sweep_outcome(content) if row.role == "winner" else None))
    return ScoreTable(
        title=f"{title}, {unit}" if unit else title,
        columns=("recipe", "search", "held-out", "optimism", "result"),
        rows=tuple(rows),
    )


def soup_table(content: SweepContent) -> ScoreTable:
    """Return one row per ingredient of a soup: its score alone, its contributions with a bound, and its outcome.

    The table has no rows if free parameters were searched.
    """
    results = content.soup.ingredients if content.soup else ()
    unit = content.objectives[0].unit

    def text(value: float | None) -> str:
        return NONE if value is None else difference_text(content, 0, value)

    return ScoreTable(
        title=f"contributions of the models, {unit}" if unit else "contributions of the models",
        columns=("model", "alone", "search", "held-out", "at least", "result"),
        rows=tuple(
            Row(
                (
                    result.ingredient,
                    NONE if result.alone is None else score_text(content, 0, result.alone),
                    text(result.searched),
                    text(result.contribution),
                    text(result.low),
                    result.outcome,
                ),
                "pass" if result.outcome in ("first", "kept") else None,
            )
            for result in results
        ),
    )


def soup_sentence(content: SweepContent) -> str:
    """Return a sentence about the rule that chose the ingredients of a soup, and its error."""
    assert content.soup is not None
    soup, shown = content.soup, content.objectives[0]
    if soup.rule == "uniform":
        return "A uniform soup averages all models. Only its lead is tested."
    margin = f"{MINUS}{plain(round(shown.factor * soup.margin, 6))}" if soup.margin else "zero"
    error = plain(round(100 * (1 - soup.confidence), 3))
    return (
        "The search adds a model if the score on the search documents does not fall. A test on the held-out documents "
        f"then keeps it if its contribution is shown to be above {margin}. The tests have a fixed order and end with "
        f"the first model that fails, so at most {error} % of soups contain a model whose true contribution is lower."
    )
