"""Build control pairs, which show whether the judge can tell a good answer from a bad one. All functions are pure.

A judge that calls every pair a tie approves any merge. Known-bad pairs are therefore mixed with the others: a real
answer against a damaged copy of it, with its words in random order or its end missing. The judge finds a control if it
prefers the intact answer in both orders. It decides only if the share of controls that it finds is shown to be above a
limit (assay sensitivity; ICH E10, 2000, section 1.5). The default limit is one quarter, which coin tosses would find.
No judge finds all controls, because damage hardly matters in a bad answer. Controls do not count in the win rate.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from mergegate.tasks.gate import share_bounds

MIN_CONTROLS = 24  # a judge that finds three of four passes in 99.9 % of runs
Damage = Literal["shuffled", "truncated"]
DAMAGES: tuple[Damage, ...] = ("shuffled", "truncated")
_FEW_WORDS = 8  # below this, letters are damaged instead of words
_FEW_LETTERS = 4  # shorter answers are not damaged: a part of them may be as good


class ControlResult(BaseModel):
    """Share of the control pairs that the judge found."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pairs: int
    found: int  # Pairs in which it preferred the intact answer in both orders.
    low: float  # One-sided lower bound of the share.
    min_share: float  # The judge decides only if ``low`` is above this.

    @property
    def passed(self) -> bool:
        """Whether the judge is shown to tell good answers from bad ones."""
        return self.low > self.min_share

    def describe(self) -> str:
        """Return ``the judge found 12 of 40 control pairs (at least 18 %, more than 25 % is required)``."""
        if not self.pairs:
            return "no control pair shows that the judge can tell a good answer from a damaged copy of it"
        return (
            f"the judge found {self.found:,} of {self.pairs:,} control pairs (at least {100 * self.low:.0f} %, more "
            f"than {100 * self.min_share:g} % is required)"
        )


def control_count(pairs: int, share: float) -> int:
    """Return the number of control pairs among ``pairs`` judged pairs: the ``share`` of them, but at least 24."""
    return max(MIN_CONTROLS, math.ceil(share * pairs))


def damaged_copy(answer: str, damage: Damage) -> str | None:
    """Return a copy of an answer that any judge should find worse, or None if the answer is too short or uniform.

    A long answer has its words shuffled, or ends after a third of them. A short one has its letters shuffled, or ends
    after half of them. The same answer always has the same copy.
    """
    units: Sequence[str] = answer.split()
    joint, kept = " ", 3
    if len(units) < _FEW_WORDS:
        units, joint, kept = "".join(answer.split()), "", 2
        if len(units) < _FEW_LETTERS:
            return None
    if damage == "truncated":
        return joint.join(units[: len(units) // kept])
    shuffled = list(units)
    random.Random(hashlib.sha256(answer.encode()).digest()).shuffle(shuffled)
    return joint.join(shuffled) if shuffled != list(units) else None


def control_result(hits: Sequence[bool], confidence: float, min_share: float) -> ControlResult:
    """Return the share of controls that were found, with its exact bound.

    ``hits`` says for each control whether the judge preferred the intact answer in both orders. ``confidence`` is that
    of the lower bound, in (0, 1).
    """
    low, _ = share_bounds(sum(hits), len(hits), confidence)
    return ControlResult(pairs=len(hits), found=sum(hits), low=low, min_share=min_share)
