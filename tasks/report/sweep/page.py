"""Render the page of a sweep from ``sweep.html``, in the design of a release's report."""

from __future__ import annotations

from mergegate.merge_core.wording import format_duration
from mergegate.tasks.report import wording
from mergegate.tasks.report.page import page_style, page_template
from mergegate.tasks.report.sweep import study_facts
from mergegate.tasks.report.sweep import wording as words
from mergegate.tasks.report.sweep.content import SweepContent
from mergegate.tasks.report.sweep.parameter_plots import MAX_SLICES, parallel_plot, slices_plot
from mergegate.tasks.report.sweep.score_plots import front_plot, history_plot


def render_sweep(content: SweepContent) -> str:
    """Return the page of the sweep as HTML, without scripts or external resources. Equal content gives equal text."""
    from markupsafe import Markup

    def safe(plots: tuple[str, ...]) -> list[Markup]:
        return [Markup(plot) for plot in plots]  # matplotlib draws these plots and escapes the names in them

    objectives = range(len(content.objectives))
    ranked = sorted(
        (parameter for parameter in content.parameters if parameter.importance is not None),
        key=lambda parameter: -(parameter.importance or 0.0),
    )
    # The trials of the front, the best in the first objective first.
    front = [
        trial for trial in content.trials if trial.number in content.front and study_facts.state_of(trial) != "failed"
    ]
    front.sort(key=lambda trial: (-study_facts.score_in(trial, 0), trial.number))
    return page_template("sweep/sweep.html").render(
        content=content,
        wording=wording,
        words=words,
        duration=format_duration,
        outcome_of_sweep=words.sweep_outcome(content),
        style=page_style("reading.css", "sweep/sweep.css"),
        history=[] if content.soup else [safe(history_plot(content, index)) for index in objectives],
        soup_rows=words.soup_table(content).rows,
        slices=[safe(slices_plot(content, index)) for index in objectives],
        parallel=[safe(parallel_plot(content, index)) for index in objectives]
        if len(content.parameters) > MAX_SLICES
        else [],
        front=safe(front_plot(content)),
        rows=[study_facts.recipe_rows(content, index) for index in objectives],
        winner=study_facts.trial_numbered(content, content.winner),
        front_trials=front,
        ranked=ranked,
        budget=words.budget_rows(content.budget, len(content.trials)),
        problems=words.problem_rows(content),
    )
