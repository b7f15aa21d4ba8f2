"""Compare a released candidate with its parent on live user traffic before the candidate is promoted.

``traffic`` is a proxy in front of both servers. It stores their answers, and ``routing`` tells it where to send
requests. Pure functions evaluate the result: ``verdict`` tests the judged pairs, and ``arms`` compares errors and
latency, and takes a failing candidate off the traffic immediately.

Import ``traffic`` directly. It needs a web server and a database, so this package does not import it.
"""

from mergegate.tasks.shadow.arms import ArmRow, ArmSummary, kill_reason
from mergegate.tasks.shadow.judgments import (
    JudgedPair,
    JudgedPairs,
    LostPair,
    open_judged,
    read_judged,
    read_lost_pairs,
    store_lost_pairs,
)
from mergegate.tasks.shadow.pairs import Sample, SampledPair, sample_pairs
from mergegate.tasks.shadow.routing import (
    FollowedRouting,
    Routing,
    read_routing,
    records_url,
    routing_file,
    write_routing,
)
from mergegate.tasks.shadow.settings import ShadowJudge, ShadowRule, ShadowServer, ShadowSettings, SwitchRule
from mergegate.tasks.shadow.verdict import JudgedTotals, ShadowVerdict, evidence_of, evidence_path, shadow_verdict
