"""How a sweep is told: the verdict in a sentence, numbers with the digits that matter, what was saved and what it cost.

Pure functions of values.
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
    optimism_of,
    state_of,
    trial_numbered,
)
from mergegate.tasks.report.wording import MINUS, NONE, interval, number, plain
from mergegate.tasks.stage import Outcome

SAMPLERS = {
    "cma": "CMA-ES",
    "random": "random search",
    "tpe": "TPE",
    "gp": "a Gaussian process",
    "nsga2": "NSGA-II",
}


def sweep_outcome(content: SweepContent) -> Outcome:
    if not content.finished:
        return "inconclusive"
    return "pass" if content.confirmation is not None and content.confirmation.confirmed else "fail"


def sweep_title(content: SweepContent) -> str:
    return {"pass": "Confirmed", "fail": "No candidate confirmed", "inconclusive": "Not finished"}[
        sweep_outcome(content)
    ]


def sweep_sentence(content: SweepContent) -> str:
    """Why, with the numbers of the one test."""
    test = content.confirmation
    candidates = _candidates(content)
    if test is None:
        tried = f"{candidates} {'was' if candidates == '1 candidate' else 'were'} tried. " if candidates else ""
        return f"{tried}{content.ending or 'No candidate is there to be confirmed.'}"
    hand_written = trial_numbered(content, content.reference)
    against = _named(hand_written.label if hand_written else "")
    if len(content.objectives) > 1:
        against += ", in the weighted sum of the objectives"
    documents = f"{test.documents:,} documents that no trial has seen"
    gain = gain_text(content)
    if test.confirmed:
        return (
            f"Of {candidates}, trial {content.winner}{_with(content)} won, and on {documents} it is {gain} better "
            f"than {against}, {p_text(test.p)}."
        )
    if test.note:
        return f"On {documents}, trial {content.winner} against {against}: {gain}, {p_text(test.p)}. {test.note}"
    worse = "worse" if test.gain < 0 else "better"
    return (
        f"Trial {content.winner} was the best where it was searched; on {documents} it is {gain} {worse} than "
        f"{against}, {p_text(test.p)}: that may be chance."
    )


def _with(content: SweepContent) -> str:
    """Of a search for one number: which it was."""
    winner = trial_numbered(content, content.winner)
    if winner is None or len(winner.point) != 1:
        return ""
    ((name, value),) = winner.point.items()
    return f" ({name} {value:.4g})" if isinstance(value, float) else f" ({name} {value})"


def sweep_consequence(content: SweepContent) -> str:
    """What follows."""
    if not content.finished:
        return "It goes on where it was when it is started again: nothing is scored twice."
    if sweep_outcome(content) == "pass":
        return "The winner is an ordinary recipe; whether it is released is for the release's own gate."
    return "Nothing is released. The best hand-written recipe remains what is known to be best."


def winner_word(content: SweepContent) -> str:
    """What the best trial is called: only of a search that is over it has won."""
    return "winner" if content.finished else "best so far"


def gain_text(content: SweepContent) -> str:
    """'0.0021 nats a token [0.0016, 0.0026]': the size of the difference, and its interval with its signs."""
    test = content.confirmation
    if test is None:
        return NONE
    shown = content.objectives[test.objective]
    decimals = decimals_for(content, test.objective)
    flip = -1 if test.gain < 0 and not test.note else 1
    low, high = sorted((flip * shown.factor * test.low, flip * shown.factor * test.high))
    size = number(flip * shown.factor * test.gain, decimals)
    return " ".join(part for part in (size, shown.unit, interval(low, high, decimals)) if part)


def level_text(test: ReportedConfirmation) -> str:
    """'95 %'."""
    return f"{plain(round(100 * test.confidence, 3))} %"


def p_text(p: float) -> str:
    """'p = 0.42', 'p = 0.003', or with an exponent."""
    if p <= 1e-6:  # so far out no test is exact
        return f"p < 1e{MINUS}6"
    if p < 0.001:
        mantissa, exponent = f"{p:.0e}".split("e")
        return f"p = {mantissa}e{number(int(exponent), 0)}"
    return f"p = {p:.2f}" if p >= 0.095 else f"p = {p:.2g}"


def score_text(content: SweepContent, objective: int, score: float) -> str:
    """A score in its unit, with the digits that tell this sweep's recipes apart."""
    if not math.isfinite(score):
        return NONE
    return number(content.objectives[objective].factor * score, decimals_for(content, objective))


def difference_text(content: SweepContent, objective: int, difference: float) -> str:
    """With its sign, also where it is positive."""
    text = score_text(content, objective, difference)
    return f"+{text}" if math.isfinite(difference) and difference > 0 and text.strip("0.") else text


def value_text(value: ParameterValue | None) -> str:
    """A parameter's value with three digits; a category as it is written."""
    if value is None:
        return NONE
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()  # as YAML says it
    if isinstance(value, int):
        return str(value).replace("-", MINUS)
    return plain(float(f"{value:.3g}"))


def range_text(parameter: ReportedParameter) -> str:
    """What a parameter may be: 'from 0.05 to 1', 'ties, dare_ties'."""
    if parameter.type == "category":
        return ", ".join(value_text(choice) for choice in parameter.among)
    kind = {"log": ", by its logarithm", "integer": ", whole numbers"}.get(parameter.type, "")
    return f"from {value_text(parameter.low)} to {value_text(parameter.high)}{kind}"


def objective_text(content: SweepContent, objective: int) -> str:
    """'log-likelihood of the answers of copy and reverse, nats a token'."""
    shown = content.objectives[objective]
    of = f" of {', '.join(shown.terms)}" if shown.terms else ""
    return f"{shown.title}{of}{f', in {shown.unit}' if shown.unit else ''}"


def sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]


def search_text(content: SweepContent) -> str:
    """How the candidates were proposed, and where they were scored."""
    each = f", {content.population} candidates a generation" if content.population else ""
    return (
        f"{sentence_case(SAMPLERS.get(content.sampler, content.sampler))}{each}, seed {content.seed}; {content.runner}."
    )


def optimism_sentence(content: SweepContent, objective: int) -> str:
    """How much of the lead was luck with the search documents; empty where that is not known."""
    found = optimism_of(content, objective)
    if found is None:
        return ""
    unit = content.objectives[objective].unit
    ahead, remains = (
        f"{difference_text(content, objective, lead)} {unit}".strip() for lead in (found.search, found.held_out)
    )
    said = f"On the search documents the winner leads the best hand-written recipe by {ahead}, elsewhere by {remains}"
    if found.search <= 0:
        return f"{said}."
    lost = 1 - found.held_out / found.search
    if lost <= 0.005:
        return f"{said}: none of the lead was luck with the documents."
    if lost >= 1:
        return f"{said}: the whole lead was luck with the documents."
    return f"{said}: {100 * lost:.0f} % of the lead was luck with the documents."


def counts_sentence(content: SweepContent) -> str:
    """What was tried, and what became of it: candidates by origin, dropped, failed, infeasible."""
    parts = []
    for origin, words in (
        (HAND_WRITTEN, "hand-written"),
        (SAMPLER, _sampler(content)),
        (BASELINE, "by the random baseline"),
    ):
        count = len(by_origin(content.trials, origin))
        if count:
            parts.append(f"{count} {words}")
    fates = {
        "dropped": "dropped before all documents were asked",
        "infeasible": "outside a constraint",
        "failed": "without a score",
    }
    found = [
        f"{count} {words}"
        for state, words in fates.items()
        if (count := sum(state_of(trial) == state for trial in content.trials))
    ]
    said = _trials(content)
    return (
        f"{said}: {', '.join(parts)}.{' Of them ' + ', '.join(found) + '.' if found else ''}" if parts else f"{said}."
    )


def racing_sentence(content: SweepContent) -> str:
    """What dropping hopeless candidates saved, and at which risk."""
    racing, used = content.racing, documents_used(content.trials)
    if racing.rule == "none":
        return "Every candidate was asked all search documents."
    how = {
        "paired": "A candidate is dropped when it is shown, document by document, to be worse than the best so far",
        "halving": "The worse two thirds of each generation go on no further",
    }[racing.rule]
    if racing.looks:
        how += f", after {', '.join(f'{100 * look:g}' for look in racing.looks[:-1])} % of the documents"
    risk = (
        f"; at most {100 * racing.error:g} % of those that are not worse are lost so"
        if racing.error is not None
        else "; no chance of error is stated for that"
    )
    saved = f" It asked {100 * used:.0f} % of the documents." if math.isfinite(used) else ""
    return f"{how}{risk}.{saved}"


def search_effort(content: SweepContent) -> str:
    """'62 trials in 10.1 s for 0.0034 · 73 % of the documents asked · 4 without a score'."""
    spent, used = content.budget, documents_used(content.trials)
    cost = "" if spent.spent_cost is None else f" for {money(spent.spent_cost)}"
    failed = sum(state_of(trial) == "failed" for trial in content.trials)
    parts = [f"{_trials(content)} in {format_duration(3600 * spent.spent_hours)}{cost}"]
    if math.isfinite(used) and used < 1:
        parts.append(f"{100 * used:.0f} % of the documents asked")
    if failed:
        parts.append(f"{failed} without a score")
    return " · ".join(parts)


def problems_of(content: SweepContent) -> tuple[tuple[str, str], ...]:
    """Why trials have no score: each reason once, with the trials it befell."""
    befell: dict[str, list[int]] = {}
    for trial in content.trials:
        if state_of(trial) == "failed":
            befell.setdefault(trial.problem or "its score is not a number", []).append(trial.number)
    return tuple((_listed(numbers), problem) for problem, numbers in befell.items())


def budget_rows(budget: ReportedBudget, tried: int) -> tuple[tuple[str, str, str, float | None], ...]:
    """What was spent of what was given: name, spent, given, and the share in [0, 1]; None where it has no bound."""
    rows = [("Trials", f"{tried:,}", f"{budget.trials:,}", min(1.0, tried / budget.trials))]
    given = None if budget.hours is None else format_duration(3600 * budget.hours)
    share = None if budget.hours is None else min(1.0, budget.spent_hours / budget.hours)
    found: list[tuple[str, str, str, float | None]] = [
        *rows,
        ("Time", format_duration(3600 * budget.spent_hours), given or "not bounded", share),
    ]
    if budget.spent_cost is not None or budget.cost is not None:
        spent = budget.spent_cost or 0.0
        bound = None if budget.cost is None else min(1.0, spent / budget.cost)
        found.append(("Cost", money(spent), "not bounded" if budget.cost is None else money(budget.cost), bound))
    return tuple(found)


def money(amount: float) -> str:
    """In whatever currency the profile thinks: two decimals, more where it is less than that."""
    return f"{amount:,.2f}" if amount >= 0.01 or amount == 0 else f"{amount:.2g}"


def _candidates(content: SweepContent) -> str:
    """'60 candidates'; empty without one. Hand-written recipes are none."""
    count = sum(trial.origin != HAND_WRITTEN for trial in content.trials)
    return f"{count} candidate{'' if count == 1 else 's'}" if count else ""


def _trials(content: SweepContent) -> str:
    count = len(content.trials)
    return f"{count} trial{'' if count == 1 else 's'}"


def _named(label: str) -> str:
    return f"the hand-written recipe {label}" if label else "the hand-written recipe"


def _sampler(content: SweepContent) -> str:
    return f"by {SAMPLERS.get(content.sampler, content.sampler)}"


def _listed(numbers: list[int]) -> str:
    """'trial 3', 'trials 3, 7 and 12', 'trials 3, 7, 12 and 9 more'."""
    if len(numbers) == 1:
        return f"trial {numbers[0]}"
    if len(numbers) > 4:
        return f"trials {', '.join(map(str, numbers[:3]))} and {len(numbers) - 3} more"
    return f"trials {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
