"""Compare a released candidate with its parent on live user traffic before the candidate is promoted.

``traffic`` is a proxy in front of both servers. It stores their answers through ``records``, and ``routing`` tells it
where to send requests. Pure functions evaluate the result: ``evidence`` tests the judged pairs, ``arm_comparison``
compares errors and latency, and ``kill_switch`` takes a failing candidate off the traffic immediately.

Import ``traffic`` and ``records`` directly. They need a web server and a database, so this package does not import
them.
"""

from mergegate.tasks.shadow.arm_comparison import ArmSummary
from mergegate.tasks.shadow.evidence import evidence_of, evidence_path
from mergegate.tasks.shadow.judgments import (
    JudgedPair,
    JudgedPairs,
    LostPair,
    open_judged,
    read_judged,
    read_lost_pairs,
    store_lost_pairs,
)
from mergegate.tasks.shadow.kill_switch import kill_reason
from mergegate.tasks.shadow.pairs import Sample, SampledPair, sample_pairs
from mergegate.tasks.shadow.recorded_traffic import ArmRow
from mergegate.tasks.shadow.routing import (
    FollowedRouting,
    Routing,
    read_routing,
    records_url,
    routing_file,
    write_routing,
)
from mergegate.tasks.shadow.settings import ShadowJudge, ShadowRule, ShadowServer, ShadowSettings, SwitchRule
from mergegate.tasks.shadow.verdict import JudgedTotals, ShadowVerdict, shadow_verdict
