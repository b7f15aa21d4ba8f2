"""All that speaks to Prefect's API: the one in a run's own process, and a project's server with its deployments.

``embedded`` serves a run that has no server. ``site`` is where a project's server is and what everybody is told of it;
``nights`` reads ``nights.yaml``; ``deployments`` and ``automations`` keep the server in step with it; ``runs`` starts
and follows what is deployed, ``approval`` has a run wait for a person, and ``waiting`` answers it. Nothing here imports
Prefect before it is used.
"""

from mergegate.flows.prefect_api.approval import ApprovalRequest, Decision, asked_by, asked_decision, required_decision
from mergegate.flows.prefect_api.automations import SILENCE_S, keep_rules, wanted_rules
from mergegate.flows.prefect_api.deployments import (
    POOL,
    DeployedChange,
    deployment_names,
    find_deployment,
    keep_deployments,
    make_pool,
    wanted_deployments,
)
from mergegate.flows.prefect_api.embedded import configure, has_server, local_api, require_writable
from mergegate.flows.prefect_api.missed import made_up_for_by
from mergegate.flows.prefect_api.nights import NIGHTS, Nights, load_nights
from mergegate.flows.prefect_api.rearming import rearm_when_served
from mergegate.flows.prefect_api.runs import FinishedRun, StartedRun, follow_run, site_client, start_run
from mergegate.flows.prefect_api.serving import serve_prefect
from mergegate.flows.prefect_api.site import (
    PORT,
    Site,
    database_url,
    find_site,
    make_secret,
    page_of_run,
    require_database,
    require_site,
    write_settings,
)
from mergegate.flows.prefect_api.waiting import WaitingRun, answer_run, choose_waiting, waiting_runs

__all__ = [
    "NIGHTS",
    "POOL",
    "PORT",
    "SILENCE_S",
    "ApprovalRequest",
    "Decision",
    "DeployedChange",
    "FinishedRun",
    "Nights",
    "Site",
    "StartedRun",
    "WaitingRun",
    "answer_run",
    "asked_by",
    "asked_decision",
    "choose_waiting",
    "configure",
    "database_url",
    "deployment_names",
    "find_deployment",
    "find_site",
    "follow_run",
    "has_server",
    "keep_deployments",
    "keep_rules",
    "load_nights",
    "local_api",
    "made_up_for_by",
    "make_pool",
    "make_secret",
    "page_of_run",
    "rearm_when_served",
    "require_database",
    "require_site",
    "require_writable",
    "required_decision",
    "serve_prefect",
    "site_client",
    "start_run",
    "waiting_runs",
    "wanted_deployments",
    "wanted_rules",
    "write_settings",
]
