"""Explaining a merge: how its parents' weights interfere, which documents were lost, which remedy to try."""

from mergegate.tasks.explain.remedies import CHANCE, Remedy, by_content, movement, untried
from mergegate.tasks.explain.stage import Explanation, explain_merge

__all__ = [
    "CHANCE",
    "Explanation",
    "Remedy",
    "by_content",
    "explain_merge",
    "movement",
    "untried",
]
