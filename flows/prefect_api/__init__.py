"""Use Prefect's API, either inside a run's own process or on a project's server with deployments.

* ``embedded_api`` serves the API for a run without a server, and ``server`` runs a project's server.
* ``site`` locates a project's server and provides the environment of server, workers and clients.
* ``schedules`` reads ``schedules.yaml``. ``notifications`` defines which events operators are notified of.
  ``deployments`` and ``automations`` update the server to match.
* ``runs`` starts and follows deployed runs. ``approval`` suspends a run until it is approved, and lists such runs.

No module here imports Prefect before it is needed.
"""

from mergegate.flows.prefect_api.approval import (
    ApprovalRequest,
    Decision,
    WaitingRun,
    approval_function,
    request_decision,
    require_decision,
    select_waiting_run,
    waiting_runs,
)
from mergegate.flows.prefect_api.automations import desired_rules, sync_rules
from mergegate.flows.prefect_api.deployments import (
    POOL,
    TAG,
    deployments_on_server,
    desired_deployments,
    make_pool,
    sync_deployments,
)
from mergegate.flows.prefect_api.embedded_api import configure, configured_url, local_api, require_writable
from mergegate.flows.prefect_api.runs import find_replacement_run, follow_run, site_client
from mergegate.flows.prefect_api.schedules import SCHEDULES_FILE, Schedules, load_schedules
from mergegate.flows.prefect_api.server import rearm_rules, serve_prefect
from mergegate.flows.prefect_api.site import (
    PORT,
    Site,
    database_url,
    find_site,
    load_or_create_secret,
    page_of_run,
    require_database,
    require_site,
    write_settings,
)
