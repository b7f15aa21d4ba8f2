"""Define the values that the parts of a sweep exchange: metric keys, trial requests, scores and trials.

A *sheet* holds the scores of a model on the documents of one set. For each (task, measure) it has one number per
document, in the fixed order of the set. Sheets of two models on one set are therefore paired, number by number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergegate.tasks.sweep.settings import Measure, Value

if TYPE_CHECKING:
    from mergegate.tasks.sweep.race import Race

TEXT = ""  # task name that stands for the held-out text of ``perplexity``


class MetricKey(NamedTuple):
    """Identifies one number per document: the ``measure`` of an answer. More is better."""

    task: str  # lm-eval's name, or TEXT for the held-out text
    measure: Measure
    metric: str = ""  # lm-eval's label, for measure 'metric'


Sheet = Mapping[MetricKey, NDArray[np.float64]]  # [evaluated documents of the task], in the order of the set
Point = Mapping[str, Value]  # value by name of coordinate


AskedSet = Literal["search", "confirmation"]


@dataclass(frozen=True)
class TrialRequest:
    """A candidate to score. Picklable.

    Args:
        recipe: Recipe as parsed YAML, without placeholders.
        set: Set of documents to score it on.
        race: Rule that may drop it early. None: it is scored on all documents.
        directory: Directory that its relative paths are relative to. None: it has no relative paths.
    """

    recipe: Mapping[str, Any]
    set: AskedSet = "search"
    race: Race | None = None
    directory: Path | None = None


@dataclass(frozen=True)
class TrialScores:
    """Scores of one candidate.

    Args:
        sheet: One number per document, by (task, measure). For a dropped candidate, only the first documents.
        dropped: Whether the race dropped it before all documents were evaluated.
        change: Relative size of the change from the base, ``|merge - base| / |base|`` over all tensors. NaN if it was
            not measured.
        seconds: Wall time by activity: ``merge``, ``load``, ``score``.
        problem: Why there is no score (the merge was refused or computed NaN). Empty if there is one.
    """

    sheet: Sheet
    dropped: bool = False
    change: float = float("nan")
    seconds: Mapping[str, float] | None = None
    problem: str = ""


@dataclass(frozen=True)
class Trial:
    """One candidate of a sweep, with its parameters and scores.

    Args:
        number: Index from 0, in the order in which candidates were proposed.
        generation: Generation of the sampler that proposed it. -1: hand-written.
        origin: ``hand-written``, ``sampler`` or ``baseline``.
        label: Name of a hand-written recipe. Empty for other trials.
        point: Values by name of coordinate.
        scores: One number per objective (a single one unless ``multi_objective`` is set). More is better. A dropped
            trial has the value that ranks it: the incumbent's score plus the observed mean paired difference. NaN: see
            ``problem``.
        violation: Sum of all constraint violations, in the unit of the scores. 0: feasible.
        documents: Share of the search documents that it was evaluated on, in (0, 1].
        dropped: See ``TrialScores``.
        change: See ``TrialScores``.
        seconds: Total wall time.
        problem: See ``TrialScores``.
    """

    number: int
    generation: int
    origin: str
    label: str
    point: Point
    scores: tuple[float, ...]
    violation: float = 0.0
    documents: float = 1.0
    dropped: bool = False
    change: float = float("nan")
    seconds: float = 0.0
    problem: str = ""
