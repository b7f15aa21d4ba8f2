"""Render the page of a sweep, and describe a sweep in words: the verdict, numbers with the relevant digits, the cost.

The page has the design of a release's report. All other functions are pure.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable

from mergegate.merge_core.wording import format_count, format_duration
from mergegate.tasks.base.stage import Outcome
from mergegate.tasks.release.report.page import render_page
from mergegate.tasks.release.report.sweep import (
    BASELINE,
    HAND_WRITTEN,
    SAMPLER,
    SweepContent,
    TrialState,
    decimals_for,
    documents_used,
    recipe_rows,
    score_in,
    score_text,
    scored_trials,
    state_of,
    value_text,
)
from mergegate.tasks.release.report.sweep_plots import MAX_SLICES, front_plot, history_plot, parallel_plot, slices_plot
from mergegate.tasks.release.report.table_rows import Row, ScoreTable
from mergegate.tasks.release.report.wording import MINUS, NONE, interval, number, plain
from mergegate.tasks.sweep import INGREDIENT, SOUP, Coordinate, SearchProgress, cumulative_shares

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
    count = format_count(candidates, "candidate") if candidates else ""
    if test is None:
        prefix = f"{count} {'was' if count == '1 candidate' else 'were'} tried. " if count else ""
        return f"{prefix}{content.ending or 'No candidate could be confirmed.'}"
    rival = content.trial(content.reference)
    reference = f"the hand-written recipe {rival.label if rival else ''}".rstrip()
    if rival is not None and rival.origin == INGREDIENT:
        reference = f"the best ingredient {rival.label}"
    if len(content.objectives) > 1:
        reference += " in the weighted sum of the objectives"
    shown, decimals = content.objectives[0], decimals_for(content, 0)
    bounds = interval(shown.factor * test.low, shown.factor * test.high, decimals)
    parts = (number(shown.factor * test.gain, decimals), shown.unit, bounds)
    lead = (
        f"On {test.documents:,} documents that no trial has seen, its lead over {reference} is "
        f"{' '.join(part for part in parts if part)}, {p_text(test.p_value)}."
    )
    if not test.confirmed:
        lead += " This lead is not shown to be more than chance."
    if content.soup:
        members = sum(result.outcome in ("first", "kept") for result in content.soup.ingredients)
        return f"The soup has {members} of {len(content.soup.ingredients)} models. {lead}"
    if test.confirmed:
        winner, value = content.trial(content.winner), ""
        if winner is not None and len(winner.point) == 1:  # A search with only one parameter says which value won.
            ((name, number_or_choice),) = winner.point.items()
            is_float = isinstance(number_or_choice, float)
            value = f" ({name} {number_or_choice:.4g})" if is_float else f" ({name} {number_or_choice})"
        return f"Trial {content.winner}{value} won among {count}. {lead}"
    return f"Trial {content.winner} had the best score on the search documents. {lead}"


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


def p_text(p: float) -> str:
    """Return the p-value as text: 'p = 0.42', 'p = 0.003', or with an exponent if it is smaller than 0.001."""
    if p <= 1e-6:  # no test is exact for such small values
        return f"p < 1e{MINUS}6"
    if p < 0.001:
        mantissa, exponent = f"{p:.0e}".split("e")
        return f"p = {mantissa}e{number(int(exponent), 0)}"
    return f"p = {p:.2f}" if p >= 0.095 else f"p = {p:.2g}"


def difference_text(content: SweepContent, objective: int, difference: float) -> str:
    """Return a difference between two scores as text, with a plus sign if it is positive."""
    text = score_text(content, objective, difference)
    return f"+{text}" if math.isfinite(difference) and difference > 0 and text.strip("0.") else text


def range_text(parameter: Coordinate) -> str:
    """Return the range of a parameter as text: '0.05 to 1', 'ties, dare_ties'."""
    if parameter.free.type == "category":
        return ", ".join(value_text(choice) for choice in parameter.free.choices)
    kind = {"log": ", log scale", "integer": ", whole numbers"}.get(parameter.free.type, "")
    return f"{value_text(parameter.low)} to {value_text(parameter.high)}{kind}"


def objective_text(content: SweepContent, objective: int) -> str:
    """Return the objective with its terms: 'log-likelihood of the answers (copy, reverse), in nats per token'."""
    shown = content.objectives[objective]
    terms = f" ({', '.join(shown.terms)})" if shown.terms else ""
    return f"{shown.title}{terms}{f', in {shown.unit}' if shown.unit else ''}"


def search_text(content: SweepContent) -> str:
    """Return a sentence about the sampler, its seed and the runner."""
    if content.soup:
        return f"Search: {content.soup.rule} soup. Runner: {content.runner}."
    size = f" with {content.population} candidates per generation" if content.population else ""
    return f"Sampler: {content.sampler_name}{size}, seed {content.seed}. Runner: {content.runner}."


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
    origins = {
        HAND_WRITTEN: "hand-written",
        SAMPLER: f"by {content.sampler_name}",
        BASELINE: "by the random baseline",
        INGREDIENT: "of one model",
        SOUP: "of several models",
    }
    states: dict[TrialState, tuple[str, str]] = {
        "dropped": ("was dropped early", "were dropped early"),
        "infeasible": ("violates a constraint", "violate a constraint"),
        "failed": ("has no score", "have no score"),
    }
    by_origin = Counter(trial.origin for trial in content.trials)
    by_state = Counter(state_of(trial) for trial in content.trials)
    parts = [f"{by_origin[origin]} {words}" for origin, words in origins.items() if by_origin[origin]]
    kinds = [f"{by_state[state]} {words[by_state[state] > 1]}" for state, words in states.items() if by_state[state]]
    total = f"{format_count(len(content.trials), 'trial')}{': ' if parts else ''}{', '.join(parts)}."
    return f"{total} Of these, {', '.join(kinds)}." if parts and kinds else total


def racing_sentence(content: SweepContent) -> str:
    """Return a sentence about how many documents racing saved by dropping hopeless candidates, and at what risk."""
    racing, used = content.racing, documents_used(content.trials)
    if racing is None:
        return "Every candidate was scored on all search documents."
    rule = "Racing drops the worse two thirds of each generation."
    risk = "The chance that this drops a good candidate is unknown."
    if racing.rule == "paired":
        looks = ", ".join(f"{100 * look:g}" for look in cumulative_shares(racing)[:-1])
        rule = (
            f"Racing drops a candidate after {looks} % of the documents if a paired test shows that it is worse than "
        )
        rule += "the best so far."
        risk = f"The chance that this drops a candidate that is not worse is at most {100 * racing.error:g} %."
    share = f" On average, a candidate was scored on {100 * used:.0f} % of the documents."
    return f"{rule} {risk}{share if math.isfinite(used) else ''}"


def search_effort(content: SweepContent) -> str:
    """Return the trials, time, cost and failures: '62 trials in 10.1 s · cost 0.0034 · 4 trials without a score'."""
    used, failed = documents_used(content.trials), len(content.trials) - len(scored_trials(content))
    parts = [f"{format_count(len(content.trials), 'trial')} in {format_duration(3600 * content.spent_hours)}"]
    if content.spent_cost is not None:
        parts.append(f"cost {_money(content.spent_cost)}")
    if math.isfinite(used) and used < 1:
        parts.append(f"{100 * used:.0f} % of the documents scored")
    if failed:
        parts.append(f"{format_count(failed, 'trial')} without a score")
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


def budget_rows(content: SweepContent) -> tuple[tuple[str, str, str, float | None], ...]:
    """Return the budget as rows: name, spent amount, budget, and spent share in [0, 1] or None without a limit."""

    def row(
        name: str, amount: float, limit: float | None, text: Callable[[float], str]
    ) -> tuple[str, str, str, float | None]:
        return name, text(amount), text(limit) if limit else "no limit", min(1.0, amount / limit) if limit else None

    budget = content.budget
    rows = [
        row("Trials", len(content.trials), budget.trials, "{:,}".format),
        row("Time", content.spent_hours, budget.hours, lambda hours: format_duration(3600 * hours)),
    ]
    if content.spent_cost is not None or budget.cost is not None:
        rows.append(row("Cost", content.spent_cost or 0.0, budget.cost, _money))
    return tuple(rows)


def _money(amount: float) -> str:
    """Format an amount in the profile's currency, with two decimals, or more if it is less than 0.01."""
    return f"{amount:,.2f}" if amount >= 0.01 or amount == 0 else f"{amount:.2g}"


def set_rows(content: SweepContent) -> tuple[tuple[str, str, str, str], ...]:
    """Return the numbers of documents as rows: task, search, confirmation and gate."""
    tasks = dict.fromkeys(task for counts in content.sizes.values() for task in counts)
    search, confirmed, gate = (content.sizes.get(name, {}) for name in ("search", "confirmation", "gate"))
    return tuple(
        (
            task or "held-out text",
            f"{search.get(task, 0):,}",
            f"{confirmed.get(task, 0):,}",
            f"{gate[task]:,}" if task in gate else "all others",
        )
        for task in tasks
    )


def sweep_table(content: SweepContent, objective: int = 0) -> ScoreTable:
    """Return one row per recipe: search score, held-out score and difference. The winner's row has the outcome."""
    shown = content.objectives[objective]
    rows = []
    for row in recipe_rows(content, objective):
        numbers = (
            score_text(content, objective, row.search),
            score_text(content, objective, row.held_out),
            difference_text(content, objective, row.optimism),
        )
        name, note = row.label, {"reference": "reference" if content.soup else "best hand-written"}.get(row.role, "")
        if row.role == "winner":
            name = f"{'soup' if content.soup else content.winner_word}, trial {row.trial}"
            note = {"pass": "confirmed", "fail": "not confirmed", "inconclusive": ""}[sweep_outcome(content)]
        rows.append(Row((name, *numbers, note), sweep_outcome(content) if row.role == "winner" else None))
    return ScoreTable(
        title=f"{shown.title}, {shown.unit}" if shown.unit else shown.title,
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


def search_line(progress: SearchProgress, width: int | None = None) -> str:
    """Return the line: ``trial 37 of 60 · best 98.1 (hand-written 92.5) · about 40 s left``.

    ``width`` is the largest number of characters. The least important parts are left out first. Default: no limit.
    """
    # Show both scores with two digits of their difference.
    scores = [math.nan if score is None else score for score in (progress.best, progress.hand_written)]
    difference = abs(scores[0] - scores[1])
    size = difference if math.isfinite(difference) and difference > 0 else abs(scores[0]) or 1.0
    decimals = max(1, min(6, 1 - math.floor(math.log10(size)))) if math.isfinite(size) else 1
    best, hand_written = (number(score, decimals) for score in scores)

    parts = [f"trial {progress.trials} of {progress.budget}"]  # the most important first
    if math.isfinite(scores[0]):
        parts.append(f"best {best}" + (f" (hand-written {hand_written})" if math.isfinite(scores[1]) else ""))
    seconds = progress.seconds_left
    if seconds is not None and progress.trials < progress.budget:
        # Round the estimate, so that it shows no false precision.
        rough = f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
        left = f"{max(5, 5 * round(seconds / 5))} s" if seconds < 90 else rough
        if width is None or len(" · ".join([*parts, f"about {left} left"])) <= width:
            parts.append(f"about {left} left")
    line = " · ".join(parts)
    if width is not None and len(line) > width and math.isfinite(scores[0]):
        line = f"{progress.trials}/{progress.budget} · best {best}"
    return line if width is None else line[:width]


def render_sweep(content: SweepContent) -> str:
    """Return the page of the sweep as HTML, without scripts or external resources. Equal content gives equal text."""
    objectives = range(len(content.objectives))
    # The trials of the front, the best in the first objective first.
    front = [trial for trial in scored_trials(content) if trial.number in content.front]
    front.sort(key=lambda trial: (-score_in(trial, 0), trial.number))
    is_large = len(content.parameters) > MAX_SLICES
    return render_page(
        "sweep.html",
        "reading.css",
        "sweep.css",
        content=content,
        words=sys.modules[__name__],
        page_outcome=sweep_outcome(content),
        history=[] if content.soup else [history_plot(content, index) for index in objectives],
        slices=[slices_plot(content, index) for index in objectives],
        parallel=[parallel_plot(content, index) for index in objectives] if is_large else [],
        front=front_plot(content),
        rows=[recipe_rows(content, index) for index in objectives],
        winner=content.trial(content.winner),
        front_trials=front,
    )
