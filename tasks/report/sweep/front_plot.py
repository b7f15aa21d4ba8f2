"""Plot the front of several objectives: the candidates that no other candidate beats in all of them."""

from __future__ import annotations

import math

from mergegate.tasks.report.rows import shortened
from mergegate.tasks.report.svg import Ink, TextStyle, drawing, inline, write
from mergegate.tasks.report.sweep.canvas import (
    NARROW,
    WIDE,
    Drawing,
    Key,
    Mark,
    blank,
    legend,
    mark_trials,
    mark_winner,
    panel,
    score_axis,
    ticks,
    trial_keys,
    winner_key,
)
from mergegate.tasks.report.sweep.content import SweepContent
from mergegate.tasks.report.sweep.study_facts import score_in, state_of


def front_plot(content: SweepContent) -> tuple[str, ...]:
    """Plot the first two objectives against each other, and mark the Pareto front.

    Returns:
        Two versions of the plot, one for wide and one for narrow screens. The result is empty if there is only one
        objective or no front.
    """
    if len(content.objectives) < 2 or not content.front:
        return ()
    return tuple(_draw(content, layout, f"front-{layout.name}") for layout in (WIDE, NARROW))


def _draw(content: SweepContent, layout: Drawing, plot: str) -> str:
    across, up = score_axis(content, 0), score_axis(content, 1)
    scored = [trial for trial in content.trials if state_of(trial) != "failed"]
    objectives = content.objectives[:2]
    keys = trial_keys(content, scored, 1, up)
    keys.append(Key.styled("front", color=Ink.PASS.value, linewidth=1.8))
    keys += [winner_key(content)] if content.winner is not None else []
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
        marks, front = [], []
        for trial in scored:
            x, y = (objective.factor * score_in(trial, index) for index, objective in enumerate(objectives))
            if trial.number in content.front:
                front.append((x, y))
            if trial.number == content.winner:
                mark_winner(axes, across.clip(x), up.clip(y))
            else:
                beyond = "<" if across.is_below(x) else "v" if up.is_below(y) else ""
                marks.append(Mark(across.clip(x), up.clip(y), trial, beyond, strong=trial.number in content.front))
        mark_trials(axes, marks)
        if len(content.objectives) == 2:
            xs, ys = zip(*sorted(front), strict=True)
            axes.plot(xs, ys, color=Ink.PASS.value, linewidth=1.8, drawstyle="steps-pre", zorder=3)
        names = [f"{item.title}{f', {item.unit}' if item.unit else ''}" for item in objectives]
        muted = TextStyle(ink=Ink.MUTED)
        write(axes, (1, 0), shortened(names[0], 60), TextStyle(align="right", ink=Ink.MUTED), shift=(0, 34))
        write(axes, (0, 1), shortened(names[1], 60), muted, shift=(-left + 2, -14))
        legend(figure, layout, keys, 0 if layout.narrow else left - 6, columns)
        numbers = " ".join(f"Trial {number}." for number in content.front)
        return inline(figure, plot, f"{names[0]} against {names[1]}. On the front: {numbers}")
