"""Explaining a merge: how its parents' weights interfere, which documents were lost, which remedy to try."""

from tasks.explain.remedies import CHANCE, movement, untried
from tasks.explain.stage import Explanation, explain_merge

__all__ = [
    "CHANCE",
    "Explanation",
    "explain_merge",
    "movement",
    "untried",
]
