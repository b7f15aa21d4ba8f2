"""Compare a released candidate with its parent on live user traffic before the candidate is promoted.

``traffic`` is a proxy in front of both servers. It stores their answers through ``records`` and follows ``routing``,
which tells it where to send requests. Pure functions evaluate the result: ``evidence`` tests the judged pairs,
``split`` compares errors and latency, and ``switch`` takes a failing candidate off the traffic immediately.

This package does not import ``traffic`` and ``records``, because they need a web server and a database. Import them
directly.
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
