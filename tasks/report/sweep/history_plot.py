"""Best so far over trials: the sampler's search beside random search and the levels of the hand-written recipes.

Each search is counted by its own candidates: after as many as the other one. What a sampler is worth is the distance of
the two stairs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mergegate.tasks.report.rows import shortened
from mergegate.tasks.report.svg import Ink, drawing, inline
from mergegate.tasks.report.sweep.canvas import (
    DASHED,
    INK,
    NARROW,
    WIDE,
    Axis,
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
from mergegate.tasks.report.sweep.study_facts import (
    BASELINE,
    HAND_WRITTEN,
    SAMPLER,
    SearchHistory,
    by_origin,
    course_of,
    score_in,
    state_of,
    trial_numbered,
)
from mergegate.tasks.report.sweep.wording import SAMPLERS, score_text
from mergegate.tasks.sweep import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CHARACTERS = 24  # of a recipe's name beside its level
_APART = 15  # pixels between names


def history_plot(content: SweepContent, objective: int) -> tuple[str, ...]:
    """Wide and narrow; empty with less than two candidates: a stair has steps."""
    factor = content.objectives[objective].factor
    runs = {origin: course_of(by_origin(content.trials, origin), objective) for origin in (SAMPLER, BASELINE)}
    if sum(len(run.trials) for run in runs.values()) < 2:
        return ()
    return tuple(
        _draw(content, objective, runs, factor, drawn, f"history-{objective}-{drawn.name}") for drawn in (WIDE, NARROW)
    )


def _draw(
    content: SweepContent, objective: int, runs: dict[str, SearchHistory], factor: float, drawn: Drawing, plot: str
) -> str:
    axis = score_axis(content, objective)
    candidates = [trial for run in runs.values() for trial in run.trials]
    keys = keys_of_trials(
        candidates,
        sampler=SAMPLERS.get(content.sampler, content.sampler),
        objective=objective,
        axis=axis,
        factor=factor,
    )
    winner = next((trial for trial in candidates if trial.number == content.winner), None)
    if winner is not None:
        keys.append(key_of_winner(content))
    failed = [trial for trial in candidates if state_of(trial) == "failed"]
    if failed:
        keys.append(Key.of("without a score", marker="x", color=Ink.FAIL.value, linestyle="none", markersize=6))
    reference = trial_numbered(content, content.reference)
    if drawn.narrow and reference is not None:
        keys.append(Key.of(_level_name(content, objective, reference), color=INK[HAND_WRITTEN].value, **DASHED))
    left, right = (58, 4) if drawn.narrow else (66, 190)
    columns = 2 if drawn.narrow else max(1, len(keys))
    head = 20 + 19 * math.ceil(len(keys) / columns)
    tall, foot = (230, 46) if drawn.narrow else (320, 46)
    height = head + tall + foot
    longest = max(len(run.trials) for run in runs.values())
    with drawing(plot):
        figure = blank(drawn, height)
        axes = panel(figure, drawn, height, (left, head, drawn.width - left - right, tall))
        axes.set_xlim(0.3, longest + 0.7)
        axes.set_ylim(axis.low, axis.high)
        ticks(axes, "x", 5 if drawn.narrow else 8, integer=True)
        ticks(axes, "y", 5 if drawn.narrow else 6)
        _levels(axes, content, objective, axis, drawn, tall)
        for origin, run in runs.items():
            _trials(axes, run, factor, objective, axis)
            _stair(axes, origin, run, factor)
            if winner is not None and winner in run.trials:
                at = run.trials.index(winner) + 1
                mark_winner(axes, at, axis.held(factor * score_in(winner, objective)))
        write(
            axes,
            (1, 0),
            "candidates tried",
            shift=(0, 34),
            coordinates="axes fraction",
            align="right",
            ink=Ink.MUTED,
        )
        legend(figure, drawn, keys, 0 if drawn.narrow else left - 6, columns)
        return inline(figure, plot, _spoken(content, objective, runs))


def _trials(axes: Axes, run: SearchHistory, factor: float, objective: int, axis: Axis) -> None:
    step = 0.02 * (axis.high - axis.low)
    failed, marks = [], []
    for at, trial in enumerate(run.trials, start=1):
        score = factor * score_in(trial, objective)
        if state_of(trial) == "failed":
            failed.append(at)
        else:
            marks.append(Mark(at, max(score, axis.low + step), trial, "v" if axis.is_below(score) else ""))
    mark_trials(axes, marks)
    style: dict[str, Any] = {"markersize": 6, "markeredgewidth": 1.5, "clip_on": False, "zorder": 5}
    axes.plot(failed, [0.05] * len(failed), "x", color=Ink.FAIL.value, transform=axes.get_xaxis_transform(), **style)


def _stair(axes: Axes, origin: str, run: SearchHistory, factor: float) -> None:
    """The best so far, from the first that has a score to the last candidate."""
    points = [(at, factor * best) for at, best in enumerate(run.best, start=1) if math.isfinite(best)]
    if not points:
        return
    style: dict[str, Any] = {"linewidth": 2.4} if origin == SAMPLER else {"linewidth": 2.0, "linestyle": (0, (5, 2))}
    xs, ys = zip(*points, strict=True)
    ink = INK[origin].value
    axes.plot([*xs, len(run.best) + 0.4], [*ys, ys[-1]], color=ink, drawstyle="steps-post", zorder=3, **style)


def _levels(axes: Axes, content: SweepContent, objective: int, axis: Axis, drawn: Drawing, tall: float) -> None:
    """A line for each hand-written recipe, with its name on the right; on a narrow page the legend has it."""
    factor = content.objectives[objective].factor
    known = [one for one in by_origin(content.trials, HAND_WRITTEN) if state_of(one) != "failed"]
    ink = INK[HAND_WRITTEN]
    last = math.inf  # pixels from above, of the name written last
    for trial in sorted(known, key=lambda one: score_in(one, objective)):
        score = factor * score_in(trial, objective)
        is_below = axis.is_below(score)
        if not is_below:
            axes.axhline(score, color=ink.value, zorder=2, alpha=1 if _is_reference(content, trial) else 0.6, **DASHED)
        if drawn.narrow:
            continue
        down = tall if is_below else tall * (axis.high - score) / (axis.high - axis.low)
        place = min(down, last - _APART)
        text = _level_name(content, objective, trial) + (" ↓" if is_below else "")
        write(
            axes,
            (1, 1),
            text,
            shift=(8, place),
            coordinates="axes fraction",
            bold=_is_reference(content, trial),
            ink=ink,
        )
        last = place


def _level_name(content: SweepContent, objective: int, trial: Trial) -> str:
    name = shortened(trial.label or "hand-written", _CHARACTERS)
    return f"{name} {score_text(content, objective, score_in(trial, objective))}"


def _is_reference(content: SweepContent, trial: Trial) -> bool:
    return trial.number == content.reference


def _spoken(content: SweepContent, objective: int, runs: dict[str, SearchHistory]) -> str:
    """What the picture shows, for who cannot see it."""
    said = [f"Best {content.objectives[objective].title} so far over candidates."]
    names = {SAMPLER: SAMPLERS.get(content.sampler, content.sampler), BASELINE: "Random baseline"}
    for origin, run in runs.items():
        found = [best for best in run.best if math.isfinite(best)]
        if found:
            first, last = (score_text(content, objective, best) for best in (found[0], found[-1]))
            said.append(f"{names[origin]}: from {first} to {last} in {len(run.trials)} candidates.")
    for trial in by_origin(content.trials, HAND_WRITTEN):
        said.append(f"{trial.label or 'Hand-written'}: {score_text(content, objective, score_in(trial, objective))}.")
    return " ".join(said)
