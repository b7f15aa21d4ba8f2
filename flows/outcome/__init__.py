"""How a run ends: one frozen value for the command line, for ``--json`` and for Prefect's pages; what is kept of it.

::

    return concluded(lambda: in_time(make_release, load_profile(profile)), profile_name(profile))  # a flow's last line
    outcome_of(state)                                                                              # what came of it
"""

from mergegate.flows.outcome.content import public_names, report_content, sweep_report
from mergegate.flows.outcome.ending import (
    RunOutcome,
    already_released,
    keep_shadow,
    keep_sweep,
    reported_outcome,
    stopped_outcome,
)
from mergegate.flows.outcome.flow_state import StoppedRun, concluded, in_time, outcome_of, show_in_prefect
from mergegate.flows.outcome.keeping import keep_refusal
from mergegate.flows.outcome.naming import name_run, profile_name, run_name
from mergegate.flows.outcome.watched import shadow_report
from mergegate.flows.outcome.without_work import found_by_looking

__all__ = [
    "RunOutcome",
    "StoppedRun",
    "already_released",
    "concluded",
    "found_by_looking",
    "in_time",
    "keep_refusal",
    "keep_shadow",
    "keep_sweep",
    "name_run",
    "outcome_of",
    "profile_name",
    "public_names",
    "report_content",
    "reported_outcome",
    "run_name",
    "shadow_report",
    "show_in_prefect",
    "stopped_outcome",
    "sweep_report",
]
