"""Say in one or two sentences what decided about a drop. Pure functions.

How verdict sentences are built: subject, change, reference, then the bound that decides and the limit that it is
compared with. Only that limit is named::

    pass          gsm8k lost 0.4 points against math and at most 1.1; the margin is 3
    fail          gsm8k lost 4.1 points against math, at least 2.3; max_drop is 2
    inconclusive  Not shown to be safe: gsm8k lost 1.4 points against math and may have lost up to 3.1; the margin is 3.
                  All 1,319 documents of this run are used. About 3,570, or margin: 3.5, would decide

A pass depends on the upper bound, so it names the margin, or with ``rule: suite`` the limit of the task. A failure
depends on ``max_drop``. An inconclusive sentence starts with ``UNSAFE`` and ends with the remedy. No
sentence ends with a period, because callers join sentences.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from mergegate.tasks.stage import Outcome

UNSAFE = "Not shown to be safe"  # First words of an inconclusive verdict.


class JudgedDrop(NamedTuple):
    """Drop with its bounds in points, the limits that it is compared with, and the outcome."""

    subject: str  # For example 'gsm8k' or 'the mean of 6 tasks'.
    reference: str
    drop: float
    low: float
    high: float
    outcome: Outcome
    max_drop: float
    bound: float  # Largest upper bound that passes.
    setting: Literal["margin", "per-task limit", "mean margin"]  # Setting that defines ``bound``.
    documents: int  # Number of documents used.
    planned: int  # Number of documents that this run may use.
    needed: int | None = None  # Number of documents that would decide, if known.
    comparisons: int = 1  # Number of comparisons among which this one deviates; 1 if it does not.

    @property
    def digits(self) -> int:
        """Fewest decimals (1 to 3) that show each value on the correct side of its limits."""

        def shows_order(digits: int) -> bool:
            pairs = [(value, limit) for value in (self.drop, self.high) for limit in (self.max_drop, self.bound)]
            pairs += [(self.low, self.max_drop), (self.low, 0.0)]
            return all((round(value, digits) > limit) == (value > limit) for value, limit in pairs)

        return next((digits for digits in (1, 2) if shows_order(digits)), 3)

    def sentence(self) -> str:
        """Return the verdict as text in the form that the module docstring describes."""
        drop, low, high = (
            f"{round(value, self.digits) + 0.0:.{self.digits}f}" for value in (self.drop, self.low, self.high)
        )  # + 0.0 turns -0.0 into 0.0
        gained = drop.startswith("-")
        change = f"gained {drop[1:]} points over" if gained else f"lost {drop} points against"
        change = f"{self.subject} {change} {self.reference}"
        max_drop = f"max_drop is {self.max_drop:.4g}"
        bound = f"the {self.setting} is {self.bound:.4g}"
        early = f", after {self.documents:,} of {self.planned:,} documents" if self.documents < self.planned else ""
        if self.outcome == "fail":
            # A drop may exceed max_drop although its lower bound, which excludes chance, does not.
            least = f", at least {low}" if self.low > self.max_drop else f", and not by chance (at least {low})"
            return f"{change}{least}; {max_drop}{early}"
        if self.outcome == "pass":
            most = f", at least {high.removeprefix('-')}" if high.startswith("-") else f" and at most {high}"
            most = f" and lost at most {high}" if gained and not high.startswith("-") else most
            return f"{change}{most}; {bound}{early}"
        if self.high > self.bound:
            reason = f"{change} {'but' if gained else 'and'} may have lost up to {high}; {bound}"
        else:
            reason = f"{change}, which may be chance; {max_drop}"
        if self.comparisons > 1:
            reason += f". One of {self.comparisons} comparisons may deviate by chance"
        return f"{UNSAFE}: {reason}. {self._remedy()}"

    def _remedy(self) -> str:
        """Return the number of documents used, and the remedy: more documents, or a wider margin."""
        within = self.needed is not None and self.needed <= self.planned
        documents = f"{self.documents:,} of {self.planned:,} documents" if self.documents < self.planned else ""
        used = f"{documents or f'All {self.documents:,} documents'} of this run are used"
        ways = [f"about {self.needed:,} documents"] if self.needed else []
        if self.high > self.bound and self.drop <= self.max_drop and not within:
            wider = math.ceil(2 * self.high) / 2  # Settings are usually multiples of half a point.
            ways += [f"a {self.setting} of {wider:g}"] if wider <= 100 else []
        if not ways:
            return used
        text = f"{ways[0]}, or {ways[1]}, would decide" if len(ways) == 2 else f"{ways[0]} would decide"
        return f"{used}. {text[0].upper()}{text[1:]}"
