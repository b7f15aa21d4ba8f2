"""Conclude a run: build its outcome, write its report page and record it.

A flow returns a Prefect state, from which the command line and ``--json`` read the same frozen outcome::

    return conclude_flow(lambda: within_limits(make_release, load_profile(profile)), profile_name(profile))
    outcome = flow_outcome(state)
"""

from mergegate.flows.outcome.flow_state import (
    StoppedRun,
    conclude_flow,
    flow_outcome,
    name_run,
    run_dry_pass,
    run_name,
    within_limits,
)
from mergegate.flows.outcome.publication import publish_attempt, variant_heads
from mergegate.flows.outcome.report_content import LIBRARIES, public_names, report_content
from mergegate.flows.outcome.run_outcome import RunOutcome, reported_outcome, store_page
