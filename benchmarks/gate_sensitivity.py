"""Simulate merges that know nothing, and equal merges, for references of different skill.

The tables are in ``docs/benchmarks/gate-error-rates.md``. Run it with
``benchmarks/operating_characteristics.py sensitivity --runs 2000``. The gate's own functions decide about each merge,
from scores of single documents: ``measure_guard``, ``judge_guards`` and ``gate_verdict``.

The reference knows the answer to some documents and guesses on the others. Guesses are the answers of a merge that
knows nothing, so the two differ only where the reference knows more. In this case, a loss is hardest to see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergegate.tasks.evaluation import DocumentScore, PairedScores
from mergegate.tasks.gate.evidence import measure_guard
from mergegate.tasks.gate.regression import judge_guards
from mergegate.tasks.gate.settings import GateRule, Guard
from mergegate.tasks.gate.stage import gate_verdict

RULE, GUARD = GateRule(), Guard(task="quiz", guarded_by="base")  # the defaults: max_drop 2, margin 3


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


@cache
def row(document: int, target: int, right: bool, chance: float) -> DocumentScore:
    """Return the score of one document; only scores with equal arguments are equal."""
    hashes = (f"d{document}", f"p{document}", f"t{target}")
    return DocumentScore("quiz", "acc,none", document, *hashes, float(right), chance=chance)


def publishes(
    reference: NDArray[np.bool_], merge: NDArray[np.bool_], targets: Sequence[int], chance: float
) -> tuple[bool, bool]:
    """Return whether the gate publishes a merge, by the interval alone and with all checks."""
    rows = tuple(
        (row(document, target, bool(left), chance), row(document, target, bool(right), chance))
        for document, (left, right, target) in enumerate(zip(reference, merge, targets, strict=True))
    )
    left, right = tuple(map(float, reference)), tuple(map(float, merge))
    keys = tuple(("quiz", document) for document in range(len(rows)))
    evidence = measure_guard(GUARD, "acc,none", PairedScores(keys, left, right, (), rows), True)
    verdicts = (judge_guards([each], RULE.confidence) for each in (replace(evidence, rows=()), evidence))
    before, after = (gate_verdict(each, None, RULE.on_inconclusive).publishable for each in verdicts)
    return before, after


def ignorant(quiz: Quiz, skill: float, n: int, runs: int, rng: np.random.Generator) -> tuple[float, float]:
    """Return the share of merges without any knowledge that are published, by the interval and with all checks."""
    published = np.zeros((runs, 2))
    base = max(quiz.targets, default=0.0) if quiz.guess is not None else quiz.chance
    known = skill / 100 / (1 - base)
    for run in range(runs):
        targets = rng.choice(len(quiz.targets), n, p=quiz.targets) if quiz.targets else np.arange(n)
        guesses = rng.integers(len(quiz.targets), size=n) if quiz.targets and quiz.guess is None else quiz.guess
        merge = targets == guesses if quiz.targets else np.zeros(n, dtype=np.bool_)
        reference = merge | (rng.random(n) < known)
        published[run] = publishes(reference, merge, targets.tolist(), quiz.chance)
    before, after = published.mean(0)
    return float(before), float(after)


def equal(skill: float, discordance: float, n: int, runs: int, rng: np.random.Generator) -> tuple[float, float]:
    """Return the share of equally good merges that are published, on a task with 4 choices."""
    published = np.zeros((runs, 2))
    score = 0.25 + skill / 100
    for run in range(runs):
        reference = rng.random(n) < score
        change = rng.random(n)
        loses, wins = discordance / 2 / score, discordance / 2 / (1 - score)
        merge = np.where(reference, change >= loses, change < wins)
        published[run] = publishes(reference, merge, rng.integers(4, size=n).tolist(), 0.25)
    before, after = published.mean(0)
    return float(before), float(after)


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


def _both(shares: tuple[float, float]) -> str:
    return " / ".join(f"{100 * share:.1f}" for share in shares)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
