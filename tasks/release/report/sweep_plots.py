"""Plot the search of a sweep: the best score over trials, the Pareto front, and the values of the parameters.

The shape and color of a mark show the origin of a trial. Its fill shows the state of the trial: filled if it was scored
on all documents, hollow if it was dropped, a cross if it violates a constraint. No information depends on color alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mergegate.tasks.release.report.plots import (
    DASHED,
    Ink,
    Key,
    Layout,
    TextStyle,
    blank,
    chart,
    draw_twice,
    legend,
    panel,
    shorten,
    ticks,
    write,
)
from mergegate.tasks.release.report.sweep import (
    BASELINE,
    HAND_WRITTEN,
    SAMPLER,
    SweepContent,
    best_so_far,
    by_origin,
    score_in,
    score_text,
    scored_trials,
    state_of,
    value_text,
)
from mergegate.tasks.sweep import Coordinate, Trial

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_SLICES = 9
# Shape, color and size of the marks, by the origin of the trial.
_MARK = {HAND_WRITTEN: ("s", Ink.INCONCLUSIVE, 6.5), SAMPLER: ("o", Ink.TEXT, 6.0), BASELINE: ("D", Ink.ACCENT, 5.2)}
_FAINT = 0.55  # opacity of all trials except the best
_STAIRS: dict[str, dict[str, Any]] = {
    SAMPLER: {"linewidth": 2.4},
    BASELINE: {"linewidth": 2.0, "linestyle": (0, (5, 2))},
}
_NAME_DISTANCE = 15  # smallest distance between the names of recipes, in pixels
_CHARACTER = 7.0  # width of a character in a choice's name, in pixels
_BEST_SHARE = 0.25  # share of the trials that are drawn as lines in the parallel plot
_TICK: Key = {"linestyle": "none", "marker": "|", "markersize": 7, "markeredgewidth": 1.2}
_OTHERS: Key = {"color": Ink.MUTED.value, "alpha": 0.35, "zorder": 2, **_TICK}
_BETTER: Key = {"color": Ink.ACCENT.value, "linewidth": 1.1, "alpha": 0.5, "zorder": 3}
_START: Key = {"color": Ink.INCONCLUSIVE.value}


class Axis(NamedTuple):
    """Scores from ``low`` to ``high``, in the displayed unit. Lower scores are drawn on the lower edge."""

    low: float
    high: float


class _Mark(NamedTuple):
    """A trial at its position. ``beyond`` is 'v' if the score is below the plot and '<' if it is to the left of it."""

    x: float
    y: float
    trial: Trial
    beyond: str = ""
    strong: bool = False


def score_axis(content: SweepContent, objective: int) -> Axis:
    """Return an axis that covers the better half of the scores and a little more. Outliers would compress the rest."""
    factor, trials = content.objectives[objective].factor, scored_trials(content)
    scores = sorted(factor * score_in(trial, objective) for trial in trials)
    if not scores:
        return Axis(0.0, 1.0)
    levels = [factor * score_in(trial, objective) for trial in trials if trial.origin == HAND_WRITTEN]
    top, median = scores[-1], scores[len(scores) // 2]
    bottom = max(scores[0], top - 2.2 * (top - median)) if top > median else scores[0]
    # The front and the best hand-written recipe are always visible. Hopeless hand-written recipes may be cut off.
    shown = [factor * score_in(trial, objective) for trial in content.trials if trial.number in content.front]
    bottom = min([bottom, *shown, *([max(levels)] if levels else [])])
    span = top - bottom or abs(top) or 1.0
    return Axis(bottom - 0.06 * span, top + 0.08 * span)


def _mark_trials(axes: Axes, marks: Iterable[_Mark]) -> None:
    """Draw the marks, with one call for all marks of the same style so that a thousand trials are as fast as ten."""
    groups: dict[tuple[str, str, str, bool], list[_Mark]] = {}
    for mark in marks:
        groups.setdefault((mark.trial.origin, state_of(mark.trial), mark.beyond, mark.strong), []).append(mark)
    for (origin, state, beyond, strong), group in groups.items():
        shape, color, size = _MARK[origin]
        style: Key = {"markersize": size, "alpha": 1.0 if strong else _FAINT, "zorder": 4}
        style |= {"linestyle": "none", "marker": shape}
        if beyond:
            style |= {"marker": beyond, "markerfacecolor": "none", "markeredgecolor": color.value, "clip_on": False}
        elif state == "infeasible":
            style |= {"marker": "+", "color": color.value, "markeredgewidth": 1.4, "markersize": 8}
        elif state == "dropped":
            style |= {"markerfacecolor": "none", "markeredgecolor": color.value}
        else:
            style |= {"markerfacecolor": color.value, "markeredgewidth": 0}
        axes.plot([mark.x for mark in group], [mark.y for mark in group], **style)


def _mark_winner(axes: Axes, x: float, y: float) -> None:
    edge: Key = {"markeredgecolor": Ink.PAPER.value, "markeredgewidth": 1.4}
    axes.plot([x], [y], "o", markersize=12, color=Ink.PASS.value, zorder=7, clip_on=False, **edge)


def _keys(content: SweepContent, trials: Sequence[Trial], objective: int, axis: Axis) -> list[Key]:
    """Return legend entries for the kinds of marks that occur in a plot."""
    keys: list[Key] = []
    origins, states = {trial.origin for trial in trials}, {state_of(trial) for trial in trials}
    names = {SAMPLER: content.sampler_name, BASELINE: "random baseline", HAND_WRITTEN: "hand-written"}
    for origin, label in names.items():
        if origin in origins:
            shape, color, size = _MARK[origin]
            face: Key = {"markerfacecolor": color.value, "markeredgewidth": 0, "linestyle": "none"}
            keys.append({"label": label, "marker": shape, "markersize": size, **face})
    hollow: Key = {"markerfacecolor": "none", "markeredgecolor": Ink.MUTED.value, "linestyle": "none"}
    if "dropped" in states:
        keys.append({"label": "dropped early", "marker": "o", "markersize": 6, **hollow})
    if "infeasible" in states:
        keys.append(
            {"label": "violates a constraint", "marker": "+", "markersize": 8, **hollow, "markeredgewidth": 1.4}
        )
    factor = content.objectives[objective].factor
    if any(factor * score_in(trial, objective) < axis.low for trial in trials if state_of(trial) != "failed"):
        keys.append({"label": "below the chart", "marker": "v", "markersize": 6, **hollow})
    return keys


def _winner_key(content: SweepContent) -> Key:
    style: Key = {"marker": "o", "markersize": 9, "color": Ink.PASS.value, "linestyle": "none"}
    return {"label": content.winner_word, **style}


def history_plot(content: SweepContent, objective: int) -> tuple[Markup, ...]:
    """Return plots of the best score so far over candidates, wide and narrow. Empty with fewer than two candidates.

    The sampler is compared with random search after the same number of candidates, so each search counts its own. The
    distance between the two curves is the benefit of the sampler. Each hand-written recipe is a horizontal line.
    """
    runs = {origin: by_origin(content.trials, origin) for origin in (SAMPLER, BASELINE)}
    candidates = [trial for run in runs.values() for trial in run]
    if len(candidates) < 2:
        return ()
    factor, axis = content.objectives[objective].factor, score_axis(content, objective)
    winner = next((trial for trial in candidates if trial.number == content.winner), None)
    reference = content.trial(content.reference)
    all_keys = _keys(content, candidates, objective, axis)
    if winner is not None:
        all_keys.append(_winner_key(content))
    if any(state_of(trial) == "failed" for trial in candidates):
        cross: Key = {"marker": "x", "color": Ink.FAIL.value, "linestyle": "none", "markersize": 6}
        all_keys.append({"label": "no score", **cross})

    def draw(layout: Layout) -> Figure:
        keys = list(all_keys)
        if layout.narrow and reference is not None:
            name = _level_name(content, objective, reference)
            keys.append({"label": name, "color": _MARK[HAND_WRITTEN][1].value, **DASHED})
        height = 230 if layout.narrow else 320
        figure, axes = chart(layout, keys, (58, 4, height, 20) if layout.narrow else (66, 190, height, 20))
        axes.set_xlim(0.3, max(map(len, runs.values())) + 0.7)
        axes.set_ylim(axis.low, axis.high)
        ticks(axes, "x", 5 if layout.narrow else 8, integer=True)
        ticks(axes, "y", 5 if layout.narrow else 6)
        _draw_levels(axes, content, objective, axis, 0 if layout.narrow else height)
        for origin, run in runs.items():
            _draw_run(axes, run, factor, objective, axis)
            # The best score so far, from the first trial with a score to the last candidate.
            scores = enumerate(best_so_far(run, objective), start=1)
            best = [(number, factor * score) for number, score in scores if math.isfinite(score)]
            if best:
                xs, ys = zip(*best, strict=True)
                stairs = ([*xs, len(run) + 0.4], [*ys, ys[-1]])
                color = _MARK[origin][1].value
                axes.plot(*stairs, color=color, drawstyle="steps-post", zorder=3, **_STAIRS[origin])
            if winner is not None and winner in run:
                _mark_winner(axes, run.index(winner) + 1, max(factor * score_in(winner, objective), axis.low))
        write(axes, (1, 0), "candidates tried", TextStyle(align="right", ink=Ink.MUTED), shift=(0, 34))
        return figure

    sentences = [f"Best {content.objectives[objective].title} so far over candidates."]
    for name, run in ((content.sampler_name, runs[SAMPLER]), ("Random baseline", runs[BASELINE])):
        bests = [best for best in best_so_far(run, objective) if math.isfinite(best)]
        if bests:
            first, last = (score_text(content, objective, best) for best in (bests[0], bests[-1]))
            sentences.append(f"{name}: from {first} to {last} in {len(run)} candidates.")
    for trial in by_origin(content.trials, HAND_WRITTEN):
        score = score_text(content, objective, score_in(trial, objective))
        sentences.append(f"{trial.label or 'Hand-written'}: {score}.")
    return draw_twice(f"history-{objective}", " ".join(sentences), draw)


def _draw_run(axes: Axes, run: Sequence[Trial], factor: float, objective: int, axis: Axis) -> None:
    step = 0.02 * (axis.high - axis.low)
    failed, marks = [], []
    for position, trial in enumerate(run, start=1):
        score = factor * score_in(trial, objective)
        if state_of(trial) == "failed":
            failed.append(position)
        else:
            marks.append(_Mark(position, max(score, axis.low + step), trial, "v" if score < axis.low else ""))
    _mark_trials(axes, marks)
    style: Key = {"markersize": 6, "markeredgewidth": 1.5, "clip_on": False, "zorder": 5}
    axes.plot(failed, [0.05] * len(failed), "x", color=Ink.FAIL.value, transform=axes.get_xaxis_transform(), **style)


def _draw_levels(axes: Axes, content: SweepContent, objective: int, axis: Axis, name_height: float) -> None:
    """Draw a line for each hand-written recipe, with its name on the right.

    ``name_height`` is the height of the panel in pixels. It is 0 on a narrow page, where the legend names the
    reference.
    """
    factor, ink = content.objectives[objective].factor, _MARK[HAND_WRITTEN][1]
    recipes = by_origin(scored_trials(content), HAND_WRITTEN)
    previous = math.inf  # distance of the previous name from the top, in pixels
    for trial in sorted(recipes, key=lambda recipe: score_in(recipe, objective)):
        score, is_reference = factor * score_in(trial, objective), trial.number == content.reference
        if score >= axis.low:
            axes.axhline(score, color=ink.value, zorder=2, alpha=1 if is_reference else 0.6, **DASHED)
        if name_height:
            distance = name_height * (axis.high - max(score, axis.low)) / (axis.high - axis.low)
            previous = min(distance, previous - _NAME_DISTANCE)
            text = _level_name(content, objective, trial) + (" ↓" if score < axis.low else "")
            write(axes, (1, 1), text, TextStyle(bold=is_reference, ink=ink), shift=(8, previous))


def _level_name(content: SweepContent, objective: int, trial: Trial) -> str:
    return f"{shorten(trial.label or 'hand-written', 24)} {score_text(content, objective, score_in(trial, objective))}"


def front_plot(content: SweepContent) -> tuple[Markup, ...]:
    """Plot the first two objectives against each other, wide and narrow, and mark the Pareto front.

    The front consists of the candidates that no other candidate beats in all objectives. The result is empty with a
    single objective or without a front.
    """
    if len(content.objectives) < 2 or not content.front:
        return ()
    across, up = score_axis(content, 0), score_axis(content, 1)
    scored, objectives = scored_trials(content), content.objectives[:2]
    keys = [*_keys(content, scored, 1, up), {"label": "front", "color": Ink.PASS.value, "linewidth": 1.8}]
    keys += [_winner_key(content)] if content.winner is not None else []
    names = [f"{item.title}{f', {item.unit}' if item.unit else ''}" for item in objectives]

    def draw(layout: Layout) -> Figure:
        figure, axes = chart(layout, keys, (58, 8, 270, 36) if layout.narrow else (66, 60, 380, 36))
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
                _mark_winner(axes, max(x, across.low), max(y, up.low))
            else:
                beyond = "<" if x < across.low else "v" if y < up.low else ""
                marks.append(
                    _Mark(max(x, across.low), max(y, up.low), trial, beyond, strong=trial.number in content.front)
                )
        _mark_trials(axes, marks)
        if len(content.objectives) == 2:
            xs, ys = zip(*sorted(front), strict=True)
            axes.plot(xs, ys, color=Ink.PASS.value, linewidth=1.8, drawstyle="steps-pre", zorder=3)
        write(axes, (1, 0), shorten(names[0], 60), TextStyle(align="right", ink=Ink.MUTED), shift=(0, 34))
        left = 58 if layout.narrow else 66
        write(axes, (0, 1), shorten(names[1], 60), TextStyle(ink=Ink.MUTED), shift=(-left + 2, -14))
        return figure

    numbers = " ".join(f"Trial {number}." for number in content.front)
    return draw_twice("front", f"{names[0]} against {names[1]}. On the front: {numbers}", draw)


def share_of(parameter: Coordinate, value: bool | float | str | None) -> float:
    """Return the position of a value in its range, from 0 to 1, or NaN if it is missing or not a choice."""
    if parameter.free.type == "category":
        # Compare types too, because True equals 1 in Python.
        choices = parameter.free.choices
        same = (at for at, each in enumerate(choices) if type(each) is type(value) and each == value)
        return (next(same, math.nan) + 0.5) / len(choices)
    if value is None or isinstance(value, str):
        return math.nan
    low, high, position = parameter.low, parameter.high, float(value)
    if parameter.free.type == "log" and low > 0:
        low, high, position = math.log(low), math.log(high), math.log(max(position, low))
    return (position - low) / (high - low) if high > low else 0.5


def slices_plot(content: SweepContent, objective: int) -> tuple[Markup, ...]:
    """Return plots with one panel per parameter, wide and narrow.

    A slice shows one parameter while all others vary. A ridge means that the parameter matters, but a cloud does not
    mean that it is irrelevant. The result is empty if fewer than two trials have a score, or with more than
    ``MAX_SLICES`` parameters.
    """
    scored, count = scored_trials(content), len(content.parameters)
    if len(scored) < 2 or not 0 < count <= MAX_SLICES:
        return ()
    axis = score_axis(content, objective)
    keys = _keys(content, [trial for trial in scored if trial.point], objective, axis)
    keys += [_winner_key(content)] if content.winner is not None else []
    keys.append({"label": "start", **_START, **DASHED})

    def draw(layout: Layout) -> Figure:
        columns = min(count, 2 if layout.narrow else 3)
        legend_columns = 2 if layout.narrow else len(keys)
        head = 14 + 19 * math.ceil(len(keys) / legend_columns)
        left, gap, height, title, foot = (44, 16, 120, 28, 26) if layout.narrow else (66, 34, 170, 32, 30)
        width = (layout.width - left - gap * (columns - 1) - 4) / columns
        if count < columns + 1 and not layout.narrow:
            width = min(width, 400)
        figure = blank(layout, head + math.ceil(count / columns) * (title + height + foot))
        for index, parameter in enumerate(content.parameters):
            row, column = divmod(index, columns)
            top = head + row * (title + height + foot) + title
            axes = panel(figure, (left + column * (width + gap), top, width, height))
            axes.set_ylim(axis.low, axis.high)
            ticks(axes, "y", 4)
            if column:
                axes.set_yticklabels([])
            name = shorten(parameter.name, 17 if layout.narrow else 34)
            write(axes, (0, 1), name, TextStyle(size=12 if layout.narrow else 13, bold=True), shift=(0, -13))
            _draw_slice(axes, content, parameter, objective, axis, width)
        legend(figure, keys, 0 if layout.narrow else left - 6, legend_columns)
        return figure

    return draw_twice(f"slices-{objective}", _spoken_values(content), draw)


def _draw_slice(
    axes: Axes, content: SweepContent, parameter: Coordinate, objective: int, axis: Axis, width: float
) -> None:
    # Label the ends and the middle of a range, or the choices of a category.
    free, low, high = parameter.free, parameter.low, parameter.high
    if free.type == "category":
        room = max(3, int(width / len(free.choices) / _CHARACTER))
        labels = {share_of(parameter, choice): shorten(value_text(choice), room) for choice in free.choices}
    else:
        middle = (low + high) / 2
        if free.type == "log" and low > 0:
            middle = float(f"{math.sqrt(low * high):.1g}")
        if free.type == "integer":
            middle = round(middle)
        labels = {0.0: value_text(low), share_of(parameter, middle): value_text(middle), 1.0: value_text(high)}
        if len(set(labels.values())) < 3:
            labels = {0.0: value_text(low), 1.0: value_text(high)}
    axes.set_xticks(list(labels), list(labels.values()))
    axes.set_xlim(-0.03, 1.03)
    start = share_of(parameter, free.start)
    if math.isfinite(start):
        axes.axvline(start, zorder=2, **_START, **DASHED)
    factor = content.objectives[objective].factor
    step, marks = 0.03 * (axis.high - axis.low), []
    for trial in scored_trials(content):
        x, y = share_of(parameter, trial.point.get(parameter.name)), factor * score_in(trial, objective)
        if not math.isfinite(x):
            continue
        if free.type == "category" and trial.origin != HAND_WRITTEN:
            # Spread the trials of one choice. The golden ratio fills a line evenly, the same way every time.
            x += ((trial.number * 0.6180339887) % 1 - 0.5) * 0.5 / len(free.choices)
        if trial.number == content.winner:
            _mark_winner(axes, x, max(y, axis.low))
        else:
            marks.append(_Mark(x, max(y, axis.low + step), trial, "v" if y < axis.low else ""))
    _mark_trials(axes, marks)


def _spoken_values(content: SweepContent) -> str:
    """Return a text alternative to the plots for screen readers: start and winner of each parameter."""
    winner, sentences = content.trial(content.winner), ["Scores against the values of the parameters."]
    if winner is not None:
        values = [(each.name, value_text(each.free.start), winner.point.get(each.name)) for each in content.parameters]
        sentences += [f"{name}: start {start}, winner {value_text(value)}." for name, start, value in values]
    return " ".join(sentences)


def parallel_plot(content: SweepContent, objective: int) -> tuple[Markup, ...]:
    """Return plots with one line per candidate, wide and narrow. Empty if fewer than two trials have a score.

    Each parameter is a row from its low to its high end, and a candidate is a line through all rows. Rows keep the
    names readable and suit tall phones. On a narrow page, names are above their rows, where lines would cross them, so
    all trials are marks there.
    """
    ranked = sorted(scored_trials(content), key=lambda trial: -score_in(trial, objective))
    if len(ranked) < 2:
        return ()
    better = {trial.number for trial in ranked[: max(1, round(_BEST_SHARE * len(ranked)))]}
    start = {parameter.name: parameter.free.start for parameter in content.parameters}
    winner, count = content.trial(content.winner), len(content.parameters)

    def draw(layout: Layout) -> Figure:
        best, first, won = _BETTER, {**_START, **DASHED}, {"color": Ink.PASS.value, "linewidth": 2.6}
        below = 0.0  # distance of the marks from the middle of a row
        if layout.narrow:
            best = {**_BETTER, **_TICK, "alpha": 0.9, "markersize": 10, "markeredgewidth": 1.6}
            first = {**_START, **_TICK, "markersize": 15, "markeredgewidth": 1.8}
            won = {"color": Ink.PASS.value, "linestyle": "none", "marker": "o", "markersize": 9}
            below = 0.22
        keys = [{"label": "the best quarter", **best}, {"label": "all others", **_OTHERS}, {"label": "start", **first}]
        keys += [{"label": content.winner_word, **won}] if content.winner is not None else []
        left, right = (2, 2) if layout.narrow else (236, 132)
        figure, axes = chart(layout, keys, (left, right, count * (38 if layout.narrow else 30), 16), foot=8)
        axes.spines["bottom"].set_visible(False)
        axes.grid(visible=False)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlim(-0.01, 1.01)
        axes.set_ylim(count - 0.5, -0.5)

        def path(point: Mapping[str, bool | float | str], **style: Any) -> None:
            # A category that is not among the choices leaves a gap.
            positions = [share_of(parameter, point.get(parameter.name)) for parameter in content.parameters]
            axes.plot(positions, [index + below for index in range(count)], clip_on=False, **style)

        for trial in ranked:
            path(trial.point, **(best if trial.number in better else _OTHERS))
        path(start, zorder=4, **first)
        if winner is not None:
            path(winner.point, zorder=5, **won)
        for index, parameter in enumerate(content.parameters):
            axes.plot([0, 1], [index + below] * 2, color=Ink.RULE.value, linewidth=1.2, zorder=1)
            _write_names(axes, parameter, index, winner, (left, right) if not layout.narrow else None)
        return figure

    return draw_twice(f"parallel-{objective}", _spoken_values(content), draw)


def _write_names(
    axes: Axes, parameter: Coordinate, row: int, winner: Trial | None, margins: tuple[float, float] | None
) -> None:
    """Write the name of a parameter, the ends of its range and the winner's value next to its row.

    ``margins`` are the margins of a wide page. On a narrow page, the text is above the row.
    """
    value = value_text(winner.point.get(parameter.name)) if winner is not None else ""
    low, high = value_text(parameter.low), value_text(parameter.high)
    if parameter.free.type == "category":
        low, high = f"{len(parameter.free.choices)} choices", ""
    size = 12 if margins else 11.5
    bold = TextStyle(size=size, bold=True, ink=Ink.PASS, align="right")
    small = TextStyle(size=11 if margins else 10.5, ink=Ink.MUTED, align="right")
    texts: list[tuple[int, float, str, TextStyle]] = [
        (0, 2, shorten(parameter.name, 24), TextStyle(size=size)),
        (1, -62, f"{low} to {high}" if high else low, small),
        (1, -2, value, bold),
    ]
    if margins:
        texts = [
            (0, -margins[0], shorten(parameter.name, 26), TextStyle(size=size)),
            (0, -10, low, small),
            (1, 10, high, TextStyle(size=11, ink=Ink.MUTED)),
            (1, margins[1], shorten(value, 11), bold),
        ]
    for end, shift, text, style in texts:
        offset = (shift, 0 if margins else -7)
        write(axes, (end, row), text, style, shift=offset, coordinates=axes.get_yaxis_transform())
