"""The one line that a person watches while a sweep searches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mergegate.tasks.report.wording import number


@dataclass(frozen=True)
class SearchStatus:
    """Where a search is.

    Args:
        done: Trials that are scored, of ``total``.
        best: Best score so far, and ``hand_written`` that of the best hand-written recipe; NaN: none yet.
        factor: From a score to what is shown.
        generation: That is being asked for, from 1, of ``generations``; 0: the sampler knows none.
        dropped, failed: How many so far.
        seconds_left: A guess; None before there is one.
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
    """``trial 37 of 60 · best 98.1 (hand-written 92.5) · 4 of 5 generations · about 40 s left``.

    Args:
        width: Characters it may take; then what matters least is left out first.
    """
    best, hand_written = _told_apart(status)
    parts = [(f"trial {status.done} of {status.total}", 0)]
    if math.isfinite(status.best):
        beside = f" (hand-written {hand_written})" if math.isfinite(status.hand_written) else ""
        parts.append((f"best {best}{beside}", 1))
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


def _told_apart(status: SearchStatus) -> tuple[str, str]:
    """Two scores with two digits of their difference."""
    best, other = status.factor * status.best, status.factor * status.hand_written
    apart = abs(best - other)
    size = apart if math.isfinite(apart) and apart > 0 else abs(best) or 1.0
    decimals = max(1, min(6, 1 - math.floor(math.log10(size)))) if math.isfinite(size) else 1
    return number(best, decimals), number(other, decimals)


def _rough(seconds: float) -> str:
    """A guess says no seconds of an hour."""
    if seconds < 90:
        return f"{max(5, 5 * round(seconds / 5))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
