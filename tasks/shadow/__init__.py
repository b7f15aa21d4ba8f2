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
from tasks.shadow.judged import JudgedPair, JudgedPairs, open_judged, read_judged
from tasks.shadow.losses import LostPair, keep_lost, lost_pair, read_lost
from tasks.shadow.pairs import Sample, SampledPair, sample_pairs
from tasks.shadow.records import RecordedAnswer, RecordedPair, Records, open_records
from tasks.shadow.routing import Routing, read_routing, write_routing
from tasks.shadow.settings import ShadowJudge, ShadowServer, ShadowSettings
from tasks.shadow.split import ArmComparison, ArmSummary, ErrorRate, LatencyQuantiles, compare_arms
from tasks.shadow.switch import SwitchRule, kill_reason
from tasks.shadow.verdict import ShadowOutcome, ShadowVerdict, shadow_verdict

__all__ = [
    "ArmComparison",
    "ArmRow",
    "ArmSummary",
    "ErrorRate",
    "JudgedPair",
    "JudgedPairs",
    "LatencyQuantiles",
    "LostPair",
    "RecordedAnswer",
    "RecordedPair",
    "Records",
    "Routing",
    "Sample",
    "SampledPair",
    "ShadowDecision",
    "ShadowEvidence",
    "ShadowJudge",
    "ShadowOutcome",
    "ShadowRule",
    "ShadowServer",
    "ShadowSettings",
    "ShadowVerdict",
    "SwitchRule",
    "compare_arms",
    "decide_shadow",
    "evidence_of",
    "keep_lost",
    "kill_reason",
    "lost_pair",
    "open_judged",
    "open_records",
    "path",
    "read_judged",
    "read_lost",
    "read_routing",
    "sample_pairs",
    "shadow_verdict",
    "write_routing",
]
