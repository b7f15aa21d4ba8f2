"""One attempt at a release: a recipe whose parents are found and allowed, merged, measured and decided on
(``assessment``), asked for what else a profile wants (``judgements``), and kept as a frozen value (``attempt``); and
what to merge, searched for (``search``)."""

from mergegate.flows.attempt.assessment import Assessment, assess_merge, ensemble_of
from mergegate.flows.attempt.attempt import (
    AlreadyReleased,
    Attempt,
    FailedMerge,
    FurtherJudgement,
    JudgedMerge,
    open_remedies,
    proposed_remedy,
)
from mergegate.flows.attempt.judgements import judge_answers, serve_merge
from mergegate.flows.attempt.search import (
    all_candidates,
    labels_of,
    open_workshop,
    prepare_search,
    tuned_remedy,
    watched_confirmation,
    watched_search,
)

__all__ = [
    "AlreadyReleased",
    "Assessment",
    "Attempt",
    "FailedMerge",
    "FurtherJudgement",
    "JudgedMerge",
    "all_candidates",
    "assess_merge",
    "ensemble_of",
    "judge_answers",
    "labels_of",
    "open_remedies",
    "open_workshop",
    "prepare_search",
    "proposed_remedy",
    "serve_merge",
    "tuned_remedy",
    "watched_confirmation",
    "watched_search",
]
