"""What passes between the parts of a sweep: what is asked about a document, what came back, and a trial.

A *sheet* holds what a model got on the documents of one set: for each asked (task, measure) one number a document, in
the fixed order of the set. Sheets of two models on one set are paired, number by number.
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

TEXT = ""  # in place of a task: the held-out text of ``perplexity``


class MetricKey(NamedTuple):
    """One number of a document: ``measure`` of its answer. More is better."""

    task: str  # as lm-eval calls it; TEXT: the held-out text
    measure: Measure
    metric: str = ""  # of measure 'metric': lm-eval's label


Sheet = Mapping[MetricKey, NDArray[np.float64]]  # [documents of that task that were asked], in the order of the set
Point = Mapping[str, Value]  # value by name of parameter


AskedSet = Literal["search", "confirmation"]


@dataclass(frozen=True)
class TrialRequest:
    """A candidate that is to be scored. Picklable.

    Args:
        recipe: One document, as YAML says it, without holes.
        set: Which documents it is asked.
        race: What it is held against on the way; None: it is asked everything.
        directory: What its relative paths are relative to; None: it has none.
    """

    recipe: Mapping[str, Any]
    set: AskedSet = "search"
    race: Race | None = None
    directory: Path | None = None


@dataclass(frozen=True)
class TrialScores:
    """What came back of one candidate.

    Args:
        sheet: By (task, measure) one number a document; of a dropped candidate the first documents only.
        dropped: Whether it was shown to be worse than the incumbent before all documents were asked.
        change: Relative size of what the merge changed in its base, ``|merge - base| / |base|`` over all tensors; NaN
            where it was not asked for.
        seconds: Of its parts: ``merge``, ``load``, ``score``, in wall time.
        problem: Why there is no score (the merge was refused, or computed NaN); empty where there is.
    """

    sheet: Sheet
    dropped: bool = False
    change: float = float("nan")
    seconds: Mapping[str, float] | None = None
    problem: str = ""


@dataclass(frozen=True)
class Trial:
    """One candidate of a sweep: its parameters and what it scored.

    Args:
        number: From 0, in the order in which candidates were proposed.
        generation: Of the sampler that proposed it; -1: hand-written.
        origin: ``hand-written``, ``sampler`` or ``baseline``.
        label: Name of a hand-written recipe; else empty.
        point: Values by name.
        scores: One number an objective (one altogether, unless there are several); more is better. Of a dropped one
            what it is ranked by: the incumbent's score and the mean paired difference seen. NaN: a problem.
        violation: By how much constraints are missed together, in their unit; 0: feasible.
        documents: Share of the search documents that were asked, in (0, 1].
        dropped, change, seconds, problem: As in ``TrialScores``.
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
