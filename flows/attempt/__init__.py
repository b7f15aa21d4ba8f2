"""One attempt at a release: a recipe whose parents are found and allowed, merged, measured and decided on
(``assessment``), asked for what else a profile wants (``judgements``), and kept as a frozen value (``attempt``)."""

from flows.attempt.assessment import Assessment, assess_merge, ensemble_of
from flows.attempt.attempt import (
    AlreadyReleased,
    Attempt,
    FailedMerge,
    FurtherJudgement,
    JudgedMerge,
    open_remedies,
    proposed_remedy,
)
from flows.attempt.judgements import judge_answers, serve_merge

__all__ = [
    "AlreadyReleased",
    "Assessment",
    "Attempt",
    "FailedMerge",
    "FurtherJudgement",
    "JudgedMerge",
    "assess_merge",
    "ensemble_of",
    "judge_answers",
    "open_remedies",
    "proposed_remedy",
    "serve_merge",
]
