"""The shadow: after a release, the candidate answers what users ask, beside its parent, before it is promoted.

``traffic`` stands before both servers and keeps what they answered in ``records``; ``routing`` says where requests go.
What is shown so far, and what follows from it, are pure functions: ``evidence`` of judged pairs, ``split`` of errors
and latency, ``switch`` of what cannot wait for either. The two packages bring web servers and databases with them: who
needs them imports them himself.
"""

from mergegate.tasks.shadow.arms import ArmRow
from mergegate.tasks.shadow.evidence import (
    ShadowDecision,
    ShadowEvidence,
    ShadowRule,
    decide_shadow,
    evidence_of,
    evidence_path,
)
from mergegate.tasks.shadow.judgments import JudgedPair, JudgedPairs, open_judged, read_judged
from mergegate.tasks.shadow.locations import records_url, routing_file
from mergegate.tasks.shadow.losses import LostPair, keep_lost, lost_pair, read_lost
from mergegate.tasks.shadow.pairs import Sample, SampledPair, sample_pairs
from mergegate.tasks.shadow.recorded_traffic import RecordedAnswer, RecordedPair, ShadowRecord
from mergegate.tasks.shadow.routing import FollowedRouting, Routing, Serving, read_routing, write_routing
from mergegate.tasks.shadow.settings import ShadowJudge, ShadowServer, ShadowSettings
from mergegate.tasks.shadow.split import ArmComparison, ArmSummary, ErrorRate, LatencyQuantiles, compare_arms
from mergegate.tasks.shadow.switch import SwitchRule, kill_reason
from mergegate.tasks.shadow.verdict import ShadowOutcome, ShadowVerdict, shadow_verdict

__all__ = [
    "ArmComparison",
    "ArmRow",
    "ArmSummary",
    "ErrorRate",
    "FollowedRouting",
    "JudgedPair",
    "JudgedPairs",
    "LatencyQuantiles",
    "LostPair",
    "RecordedAnswer",
    "RecordedPair",
    "Routing",
    "Sample",
    "SampledPair",
    "Serving",
    "ShadowDecision",
    "ShadowEvidence",
    "ShadowJudge",
    "ShadowOutcome",
    "ShadowRecord",
    "ShadowRule",
    "ShadowServer",
    "ShadowSettings",
    "ShadowVerdict",
    "SwitchRule",
    "compare_arms",
    "decide_shadow",
    "evidence_of",
    "evidence_path",
    "keep_lost",
    "kill_reason",
    "lost_pair",
    "open_judged",
    "read_judged",
    "read_lost",
    "read_routing",
    "records_url",
    "routing_file",
    "sample_pairs",
    "shadow_verdict",
    "write_routing",
]
