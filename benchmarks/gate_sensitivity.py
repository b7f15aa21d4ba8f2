"""Simulate merges that know nothing, and equal merges, for references of different skill.

The tables are in ``dev/measurements/references-at-chance.md``. Run it with
``benchmarks/operating_characteristics.py sensitivity``. The rule is that of ``gate.sensitivity``, on counts of
many samples with the gate's own bounds. ``tests/gate/test_gate_sensitivity.py`` verifies that the gate decides the same
way.

The reference knows the answer to some documents and guesses on the others. Guesses are the answers of a merge that
knows nothing, so the two differ only where the reference knows more. In this case, a loss is hardest to see.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergegate.tasks.quality.gate.regression import is_within
from mergegate.tasks.quality.gate.settings import GateRule, Guard
from mergegate.tasks.quality.gate.statistics import binary_bounds

RULE, GUARD = GateRule(), Guard(task="quiz", guarded_by="base")  # the defaults: max_drop 2, margin 3
Counts = NDArray[np.float64]


class Quiz(NamedTuple):
    """Kind of task, with a model that knows nothing about it."""

    name: str
    targets: tuple[float, ...]  # share of documents for which each choice is right; empty for free answers
    guess: int | None  # choice that the model always gives; None: a random one

    @property
    def chance(self) -> float:
        """Score of a random choice."""
        return 1 / len(self.targets) if self.targets else 0.0


QUIZZES = (
    Quiz("4 choices, random answers", (0.25,) * 4, None),
    Quiz("4 choices, always A", (0.25,) * 4, 0),
    Quiz("2 choices, 62 % yes, always yes", (0.62, 0.38), 0),
    Quiz("free answers, nothing", (), None),
)
SKILLS = (0, 1, 2, 3, 4, 6, 10)  # points by which the reference beats the guesses
LARGE_SKILLS = (6, 10, 20, 40)


class Samples(NamedTuple):
    """Counts of many simulated merges on ``n`` documents each."""

    n: int
    chance: float  # score of a random choice
    right: Counts  # documents that the reference gets right
    lost: Counts  # of these, documents that the merge gets wrong
    won: Counts  # documents that only the merge gets right
    frequent: Counts  # documents for which the most frequent answer is right

    def published(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which merges pass, by the interval of the drop alone and with the check of the reference."""
        _, high = binary_bounds(self.lost, self.won, self.n, RULE.confidence)
        drop = 100 * (self.lost - self.won) / self.n
        before = is_within(drop, 100 * high, GUARD.max_drop, GUARD.upper_limit)
        low, _ = binary_bounds(self.right, np.zeros_like(self.right), self.n, RULE.confidence)
        above = np.minimum(low - self.chance, (self.right - self.frequent) / self.n)
        return before, before & (100 * above >= GUARD.upper_limit)


def ignorant(quiz: Quiz, skill: float, n: int, runs: int, rng: np.random.Generator) -> Samples:
    """Simulate merges that know nothing. Their reference knows enough to score ``skill`` points more."""
    shares = quiz.targets or (0.0, 1.0)  # the right answer is never the empty one
    targets = rng.multinomial(n, shares, size=runs).astype(np.float64)
    guesses = rng.binomial(n, quiz.chance, size=runs) if quiz.guess is None else targets[:, quiz.guess]
    known = skill / 100 / (1 - (quiz.chance if quiz.guess is None else shares[quiz.guess]))
    lost = rng.binomial((n - guesses).astype(np.int64), known).astype(np.float64)
    frequent = targets.max(1) if quiz.targets else np.zeros(runs)
    return Samples(n, quiz.chance, guesses + lost, lost, np.zeros(runs), frequent)


def equal(skill: float, discordance: float, n: int, runs: int, rng: np.random.Generator) -> Samples:
    """Simulate merges that are as good as their reference, which scores ``skill`` points above chance (4 choices)."""
    score, half = 0.25 + skill / 100, discordance / 2
    counts = rng.multinomial(n, [half, half, score - half, 1 - score - half], size=runs).astype(np.float64)
    lost, won, both, _ = counts.T
    frequent = rng.multinomial(n, (0.25,) * 4, size=runs).max(1).astype(np.float64)
    return Samples(n, 0.25, lost + both, lost, won, frequent)


def sensitivity_table(runs: int, rng: np.random.Generator) -> list[str]:
    """Return both tables: percentage published, by the interval alone / with all checks."""
    lines = [_line("merge", "documents", *(f"+{skill}" for skill in SKILLS)), "| :-- |" + " --: |" * (len(SKILLS) + 1)]
    for quiz in QUIZZES:
        for n in (500, 1319):
            cells = [_both(ignorant(quiz, skill, n, runs, rng)) for skill in SKILLS]
            lines.append(_line(quiz.name, f"{n:,}", *cells))
    lines += ["", _line("documents", "discordance", *(f"+{skill}" for skill in LARGE_SKILLS))]
    lines.append("|" + " --: |" * (len(LARGE_SKILLS) + 2))
    for n in (500, 1319):
        for discordance in (0.05, 0.10, 0.20):
            cells = [_both(equal(skill, discordance, n, runs, rng)) for skill in LARGE_SKILLS]
            lines.append(_line(f"{n:,}", f"{discordance:.2f}", *cells))
    return lines


def _both(samples: Samples) -> str:
    return " / ".join(f"{100 * passed.mean():.1f}" for passed in samples.published())


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
