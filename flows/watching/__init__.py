"""Follow a release on users' traffic, for ``flows/shadow.py``: watch its state, judge new pairs, and decide."""

from mergegate.flows.watching.pair_judging import judge_new_pairs, plan_judging
from mergegate.flows.watching.promotion import Followed, apply_decision, conclude_shadow, promote_candidate, report_once
from mergegate.flows.watching.watch import Watch, open_watch, shadow_settings

__all__ = [
    "Followed",
    "Watch",
    "apply_decision",
    "conclude_shadow",
    "judge_new_pairs",
    "open_watch",
    "plan_judging",
    "promote_candidate",
    "report_once",
    "shadow_settings",
]
