"""Plot the scores of a search: the best score so far over trials, and the Pareto front of several objectives.

The sampler is compared with random search after the same number of candidates, so each search counts its own. The
distance between the two curves is the benefit of the sampler. Each hand-written recipe is a horizontal line. The front
consists of the candidates that no other candidate beats in all objectives.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mergegate.tasks.report.rows import shorten
from mergegate.tasks.report.svg import Ink, TextStyle, drawing, inline, write
from mergegate.tasks.report.sweep.canvas import (
    DASHED,
    INK,
    NARROW,
    WIDE,
    Axis,
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
from mergegate.tasks.report.sweep.study_facts import (
    BASELINE,
    HAND_WRITTEN,
    SAMPLER,
    SearchHistory,
    by_origin,
    score_in,
    search_history,
    state_of,
    trial_numbered,
)
from mergegate.tasks.report.sweep.wording import SAMPLERS, score_text
from mergegate.tasks.sweep import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CHARACTERS = 24  # longest recipe name next to its level, in characters
_NAME_DISTANCE = 15  # smallest distance between names, in pixels
_STAIRS: dict[str, dict[str, Any]] = {
    SAMPLER: {"linewidth": 2.4},
    BASELINE: {"linewidth": 2.0, "linestyle": (0, (5, 2))},
}


def history_plot(content: SweepContent, objective: int) -> tuple[str, ...]:
    """Return plots of the best score so far over candidates, wide and narrow. Empty with fewer than two candidates."""
    runs = {origin: search_history(by_origin(content.trials, origin), objective) for origin in (SAMPLER, BASELINE)}
    if sum(len(run.trials) for run in runs.values()) < 2:
        return ()
    factor, axis = content.objectives[objective].factor, score_axis(content, objective)
    candidates = [trial for run in runs.values() for trial in run.trials]
    plots = []
    for layout in (WIDE, NARROW):
        plot = f"history-{objective}-{layout.name}"
        keys = trial_keys(content, candidates, objective, axis)
        winner = next((trial for trial in candidates if trial.number == content.winner), None)
        if winner is not None:
            keys.append(winner_key(content))
        failed = [trial for trial in candidates if state_of(trial) == "failed"]
        if failed:
            keys.append(Key.style_key("no score", marker="x", color=Ink.FAIL.value, linestyle="none", markersize=6))
        reference = trial_numbered(content, content.reference)
        if layout.narrow and reference is not None:
            keys.append(
                Key.style_key(_level_name(content, objective, reference), color=INK[HAND_WRITTEN].value, **DASHED)
            )
        left, right = (58, 4) if layout.narrow else (66, 190)
        columns = 2 if layout.narrow else max(1, len(keys))
        head = 20 + 19 * math.ceil(len(keys) / columns)
        panel_height, foot = (230, 46) if layout.narrow else (320, 46)
        height = head + panel_height + foot
        longest = max(len(run.trials) for run in runs.values())
        with drawing(plot):
            figure = blank(layout, height)
            axes = panel(figure, layout, height, (left, head, layout.width - left - right, panel_height))
            axes.set_xlim(0.3, longest + 0.7)
            axes.set_ylim(axis.low, axis.high)
            ticks(axes, "x", 5 if layout.narrow else 8, integer=True)
            ticks(axes, "y", 5 if layout.narrow else 6)
            _draw_levels(axes, content, objective, axis, 0 if layout.narrow else panel_height)
            for origin, run in runs.items():
                _draw_run(axes, run, factor, objective, axis)
                # The best score so far, from the first trial with a score to the last candidate.
                best = [
                    (number, factor * score) for number, score in enumerate(run.best, start=1) if math.isfinite(score)
                ]
                if best:
                    xs, ys = zip(*best, strict=True)
                    stairs = ([*xs, len(run.best) + 0.4], [*ys, ys[-1]])
                    axes.plot(*stairs, color=INK[origin].value, drawstyle="steps-post", zorder=3, **_STAIRS[origin])
                if winner is not None and winner in run.trials:
                    position = run.trials.index(winner) + 1
                    mark_winner(axes, position, axis.clip(factor * score_in(winner, objective)))
            write(axes, (1, 0), "candidates tried", TextStyle(align="right", ink=Ink.MUTED), shift=(0, 34))
            legend(figure, layout, keys, 0 if layout.narrow else left - 6, columns)
            plots.append(inline(figure, plot, _alt_text(content, objective, runs)))
    return tuple(plots)


def _draw_run(axes: Axes, run: SearchHistory, factor: float, objective: int, axis: Axis) -> None:
    step = 0.02 * (axis.high - axis.low)
    failed, marks = [], []
    for position, trial in enumerate(run.trials, start=1):
        score = factor * score_in(trial, objective)
        if state_of(trial) == "failed":
            failed.append(position)
        else:
            marks.append(Mark(position, max(score, axis.low + step), trial, "v" if axis.is_below(score) else ""))
    mark_trials(axes, marks)
    style: dict[str, Any] = {"markersize": 6, "markeredgewidth": 1.5, "clip_on": False, "zorder": 5}
    axes.plot(failed, [0.05] * len(failed), "x", color=Ink.FAIL.value, transform=axes.get_xaxis_transform(), **style)


def _draw_levels(axes: Axes, content: SweepContent, objective: int, axis: Axis, name_height: float) -> None:
    """Draw a line for each hand-written recipe, with its name on the right.

    ``name_height`` is the height of the panel in pixels. It is 0 on a narrow page, where the legend names the
    reference.
    """
    factor = content.objectives[objective].factor
    recipes = [recipe for recipe in by_origin(content.trials, HAND_WRITTEN) if state_of(recipe) != "failed"]
    ink = INK[HAND_WRITTEN]
    previous = math.inf  # distance of the previous name from the top, in pixels
    for trial in sorted(recipes, key=lambda recipe: score_in(recipe, objective)):
        score, is_reference = factor * score_in(trial, objective), trial.number == content.reference
        is_below = axis.is_below(score)
        if not is_below:
            axes.axhline(score, color=ink.value, zorder=2, alpha=1 if is_reference else 0.6, **DASHED)
        if name_height:
            distance = name_height if is_below else name_height * (axis.high - score) / (axis.high - axis.low)
            previous = min(distance, previous - _NAME_DISTANCE)
            text = _level_name(content, objective, trial) + (" ↓" if is_below else "")
            write(axes, (1, 1), text, TextStyle(bold=is_reference, ink=ink), shift=(8, previous))


def _level_name(content: SweepContent, objective: int, trial: Trial) -> str:
    name = shorten(trial.label or "hand-written", _CHARACTERS)
    return f"{name} {score_text(content, objective, score_in(trial, objective))}"


def _alt_text(content: SweepContent, objective: int, runs: dict[str, SearchHistory]) -> str:
    sentences = [f"Best {content.objectives[objective].title} so far over candidates."]
    names = {SAMPLER: SAMPLERS.get(content.sampler, content.sampler), BASELINE: "Random baseline"}
    for origin, run in runs.items():
        bests = [best for best in run.best if math.isfinite(best)]
        if bests:
            first, last = (score_text(content, objective, best) for best in (bests[0], bests[-1]))
            sentences.append(f"{names[origin]}: from {first} to {last} in {len(run.trials)} candidates.")
    for trial in by_origin(content.trials, HAND_WRITTEN):
        sentences.append(
            f"{trial.label or 'Hand-written'}: {score_text(content, objective, score_in(trial, objective))}."
        )
    return " ".join(sentences)


def front_plot(content: SweepContent) -> tuple[str, ...]:
    """Plot the first two objectives against each other, wide and narrow, and mark the Pareto front.

    The result is empty with a single objective or without a front.
    """
    if len(content.objectives) < 2 or not content.front:
        return ()
    across, up = score_axis(content, 0), score_axis(content, 1)
    scored = [trial for trial in content.trials if state_of(trial) != "failed"]
    objectives = content.objectives[:2]
    plots = []
    for layout in (WIDE, NARROW):
        plot = f"front-{layout.name}"
        keys = trial_keys(content, scored, 1, up)
        keys.append(Key.style_key("front", color=Ink.PASS.value, linewidth=1.8))
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
            write(axes, (1, 0), shorten(names[0], 60), TextStyle(align="right", ink=Ink.MUTED), shift=(0, 34))
            write(axes, (0, 1), shorten(names[1], 60), muted, shift=(-left + 2, -14))
            legend(figure, layout, keys, 0 if layout.narrow else left - 6, columns)
            numbers = " ".join(f"Trial {number}." for number in content.front)
            plots.append(inline(figure, plot, f"{names[0]} against {names[1]}. On the front: {numbers}"))
    return tuple(plots)
