"""The shadow: after a release, the candidate answers what users ask, beside its parent, before it is promoted.

``traffic`` stands before both servers and keeps what they answered in ``records``; ``routing`` says where requests go.
What is shown so far, and what follows from it, are pure functions: ``evidence`` of judged pairs, ``split`` of errors
and latency, ``switch`` of what cannot wait for either. The two packages bring web servers and databases with them: who
needs them imports them himself.
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
from tasks.shadow.places import records_url, routing_file
from tasks.shadow.routing import FollowedRouting, Routing, read_routing, write_routing
from tasks.shadow.settings import ShadowJudge, ShadowServer, ShadowSettings
from tasks.shadow.split import ArmComparison, ArmSummary, ErrorRate, LatencyQuantiles, compare_arms
from tasks.shadow.switch import SwitchRule, kill_reason

__all__ = [
    "ArmComparison",
    "ArmRow",
    "ArmSummary",
    "ErrorRate",
    "FollowedRouting",
    "LatencyQuantiles",
    "Routing",
    "ShadowDecision",
    "ShadowEvidence",
    "ShadowJudge",
    "ShadowRule",
    "ShadowServer",
    "ShadowSettings",
    "SwitchRule",
    "compare_arms",
    "decide_shadow",
    "evidence_of",
    "kill_reason",
    "path",
    "read_routing",
    "records_url",
    "routing_file",
    "write_routing",
]
