"""Format the progress line of a running sweep."""

from __future__ import annotations

import math

from mergegate.tasks.report.wording import number
from mergegate.tasks.sweep import SearchProgress


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
