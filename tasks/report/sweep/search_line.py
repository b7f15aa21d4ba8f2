"""Format the progress line of a running sweep."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mergegate.tasks.report.wording import number


@dataclass(frozen=True)
class SearchStatus:
    """Progress of a search.

    Args:
        done: Number of scored trials.
        total: Number of trials in the budget.
        best: Best score so far; NaN before the first score.
        hand_written: Best score of the hand-written recipes; NaN before the first score.
        factor: Factor from a score to the displayed number.
        generation: Current generation, from 1; 0 if the sampler has no generations.
        generations: Number of generations.
        dropped: Number of dropped trials so far.
        failed: Number of failed trials so far.
        seconds_left: Estimated remaining seconds; None before there is an estimate.
    """

    done: int
    total: int
    best: float = math.nan
    hand_written: float = math.nan
    factor: float = 1.0
    generation: int = 0
    generations: int = 0
    dropped: int = 0
    failed: int = 0
    seconds_left: float | None = None


def search_line(status: SearchStatus, width: int | None = None) -> str:
    """Return the line: ``trial 37 of 60 · best 98.1 (hand-written 92.5) · 4 of 5 generations · about 40 s left``.

    Args:
        status: Progress of the search.
        width: Largest number of characters. The least important parts are left out first. Default: no limit.
    """
    # Show both scores with two digits of their difference.
    scores = [status.factor * status.best, status.factor * status.hand_written]
    difference = abs(scores[0] - scores[1])
    size = difference if math.isfinite(difference) and difference > 0 else abs(scores[0]) or 1.0
    decimals = max(1, min(6, 1 - math.floor(math.log10(size)))) if math.isfinite(size) else 1
    best, hand_written = (number(score, decimals) for score in scores)
    parts = [(f"trial {status.done} of {status.total}", 0)]
    if math.isfinite(status.best):
        comparison = f" (hand-written {hand_written})" if math.isfinite(status.hand_written) else ""
        parts.append((f"best {best}{comparison}", 1))
    if status.generations:
        parts.append((f"{status.generation} of {status.generations} generations", 3))
    if status.failed:
        parts.append((f"{status.failed} failed", 4))
    if status.dropped:
        parts.append((f"{status.dropped} dropped", 5))
    if status.seconds_left is not None and status.done < status.total:
        parts.append((f"about {_rough(status.seconds_left)} left", 2))
    for least in (5, 4, 3, 2):
        if width is None or len(" · ".join(text for text, _ in parts)) <= width:
            break
        parts = [part for part in parts if part[1] < least]
    line = " · ".join(text for text, _ in parts)
    if width is not None and len(line) > width and math.isfinite(status.best):
        line = f"{status.done}/{status.total} · best {best}"
    return line if width is None else line[:width]


def _rough(seconds: float) -> str:
    """Return an estimate without false precision. An estimate in hours has no seconds."""
    if seconds < 90:
        return f"{max(5, 5 * round(seconds / 5))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
