"""The shadow: after a release, the candidate answers what users ask, beside its parent, before it is promoted.

What is shown so far, and what follows from it, are pure functions: ``evidence`` of judged pairs, ``split`` of errors
and latency, ``switch`` of what cannot wait for either.
"""

from tasks.shadow.arms import ArmRow
from tasks.shadow.evidence import (
    ShadowDecision,
    ShadowEvidence,
    ShadowRule,
    decide_shadow,
    evidence_of,
    path,
)
from tasks.shadow.split import ArmComparison, ArmSummary, ErrorRate, LatencyQuantiles, compare_arms
from tasks.shadow.switch import SwitchRule, kill_reason

__all__ = [
    "ArmComparison",
    "ArmRow",
    "ArmSummary",
    "ErrorRate",
    "LatencyQuantiles",
    "ShadowDecision",
    "ShadowEvidence",
    "ShadowRule",
    "SwitchRule",
    "compare_arms",
    "decide_shadow",
    "evidence_of",
    "kill_reason",
    "path",
]
