"""Explaining a merge: how its parents' weights interfere, which documents were lost, which remedy to try."""

from tasks.explain.remedies import CHANCE, by_digest, instead_of_tried, movement
from tasks.explain.stage import Explanation, explain_merge

__all__ = [
    "CHANCE",
    "Explanation",
    "by_digest",
    "explain_merge",
    "instead_of_tried",
    "movement",
]
