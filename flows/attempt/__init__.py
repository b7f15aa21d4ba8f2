"""Run one attempt at a release, and search for recipes to attempt.

* ``assessment`` measures a merge and passes the results to the gate.
* ``variants`` builds and judges quantized variants of a merge that passed.
* ``attempt`` holds the result as a frozen value, with the verdicts of a judge and of a server if the profile has them.
* ``search`` looks for the recipe to merge.
"""

from mergegate.flows.attempt.assessment import Assessment, assess_merge
from mergegate.flows.attempt.attempt import (
    AlreadyReleased,
    Attempt,
    FailedMerge,
    FurtherJudgment,
    JudgedMerge,
    distance_from_passing,
    judge_answers,
    open_remedies,
    proposed_remedy,
    serve_merge,
)
from mergegate.flows.attempt.search import (
    open_trial_pool,
    prepare_search,
    run_confirmation,
    run_search,
    sweep_candidates,
    with_tuned_candidate,
)
from mergegate.flows.attempt.variants import conversion_texts, judge_variants
