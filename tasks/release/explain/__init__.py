"""Explain a merge: how the weights of its parents interfere, which documents it lost, and which remedies to try."""

from mergegate.tasks.release.explain.remedies import (
    CHANCE,
    Remedy,
    drop_tried_remedies,
    normalize_recipe,
    relative_movement,
)
from mergegate.tasks.release.explain.stage import Explanation, explain_merge
