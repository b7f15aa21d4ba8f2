"""Plot the front of several objectives: the candidates that no other candidate beats in all of them."""

from __future__ import annotations

import math

from mergegate.tasks.report.rows import shortened
from mergegate.tasks.report.svg import Ink, drawing, inline
from mergegate.tasks.report.sweep.canvas import (
    NARROW,
    WIDE,
    Drawing,
    Key,
    Mark,
    blank,
    key_of_winner,
    keys_of_trials,
    legend,
    mark_trials,
    mark_winner,
    panel,
    score_axis,
    ticks,
    write,
)
from mergegate.tasks.report.sweep.content import SweepContent
from mergegate.tasks.report.sweep.study_facts import score_in, state_of
from mergegate.tasks.report.sweep.wording import SAMPLERS


def front_plot(content: SweepContent) -> tuple[str, ...]:
    """Plot the first two objectives against each other, and mark the Pareto front.

    Returns:
        Two versions of the plot, one for wide and one for narrow screens. The result is empty if there is only one
        objective or no front.
    """
    if len(content.objectives) < 2 or not content.front:
        return ()
    return tuple(_front(content, layout, f"front-{layout.name}") for layout in (WIDE, NARROW))


def _front(content: SweepContent, layout: Drawing, plot: str) -> str:
    across, up = score_axis(content, 0), score_axis(content, 1)
    scored = [trial for trial in content.trials if state_of(trial) != "failed"]
    factors = [objective.factor for objective in content.objectives[:2]]
    keys = keys_of_trials(
        scored, sampler=SAMPLERS.get(content.sampler, content.sampler), objective=1, axis=up, factor=factors[1]
    )
    keys += [
        Key.of("front", color=Ink.PASS.value, linewidth=1.8),
        *([key_of_winner(content)] if content.winner is not None else []),
    ]
    columns = 2 if layout.narrow else len(keys)
    head = 36 + 19 * math.ceil(len(keys) / columns)
    left, right, panel_height, foot = (58, 8, 270, 46) if layout.narrow else (66, 60, 380, 46)
    height = head + panel_height + foot
    with drawing(plot):
        figure = blank(layout, height)
        axes = panel(figure, layout, height, (left, head, layout.width - left - right, panel_height))
        axes.grid(axis="x", color=Ink.RULE.value, linewidth=0.7)
        axes.set_xlim(across.low, across.high)
        axes.set_ylim(up.low, up.high)
        ticks(axes, "x", 4 if layout.narrow else 8)
        ticks(axes, "y", 5 if layout.narrow else 7)
        marks = []
        for trial in scored:
            x, y = (factor * score_in(trial, index) for index, factor in enumerate(factors))
            strong = trial.number in content.front
            if trial.number == content.winner:
                mark_winner(axes, across.held(x), up.held(y))
            else:
                beyond = "<" if across.is_below(x) else "v" if up.is_below(y) else ""
                marks.append(Mark(across.held(x), up.held(y), trial, beyond, strong))
        mark_trials(axes, marks)
        best = sorted(
            (factors[0] * score_in(trial, 0), factors[1] * score_in(trial, 1))
            for trial in scored
            if trial.number in content.front
        )
        if len(content.objectives) == 2:
            xs, ys = zip(*best, strict=True)
            axes.plot(xs, ys, color=Ink.PASS.value, linewidth=1.8, drawstyle="steps-pre", zorder=3)
        names = [
            f"{objective.title}{f', {objective.unit}' if objective.unit else ''}"
            for objective in content.objectives[:2]
        ]
        write(
            axes,
            (1, 0),
            shortened(names[0], 60),
            shift=(0, 34),
            coordinates="axes fraction",
            align="right",
            ink=Ink.MUTED,
        )
        write(axes, (0, 1), shortened(names[1], 60), shift=(-left + 2, -14), coordinates="axes fraction", ink=Ink.MUTED)
        legend(figure, layout, keys, 0 if layout.narrow else left - 6, columns)
        numbers = " ".join(f"Trial {number}." for number in content.front)
        return inline(figure, plot, f"{names[0]} against {names[1]}. On the front: {numbers}")
