"""One attempt at a release: a recipe whose parents are found and allowed, merged, measured and decided on
(``assessment``), asked for what else a profile wants (``judgements``), and kept as a frozen value (``attempt``); and
what to merge, searched for (``search``)."""

from mergegate.flows.attempt.assessment import Assessment, assess_merge, measure_ensemble
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
    open_trial_pool,
    prepare_search,
    recipe_labels,
    run_confirmation,
    run_search,
    sweep_candidates,
    tuned_remedy,
)

__all__ = [
    "AlreadyReleased",
    "Assessment",
    "Attempt",
    "FailedMerge",
    "FurtherJudgement",
    "JudgedMerge",
    "assess_merge",
    "judge_answers",
    "measure_ensemble",
    "open_remedies",
    "open_trial_pool",
    "prepare_search",
    "proposed_remedy",
    "recipe_labels",
    "run_confirmation",
    "run_search",
    "serve_merge",
    "sweep_candidates",
    "tuned_remedy",
]
