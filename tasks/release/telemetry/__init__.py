"""Send the numbers and the log of a run to other systems: Prometheus, OpenTelemetry, Weights & Biases, MLflow, JSON.

Every export is off unless an environment variable enables it. An export that fails logs a warning and never fails the
run. The client of MLflow's REST API serves its model registry, too.
"""

from mergegate.tasks.release.telemetry.exports import (
    MlflowClient,
    MlflowError,
    export_metrics,
    export_to_trackers,
    member,
    metric_entries,
    mlflow_key,
    param_entries,
    tag_entries,
)
from mergegate.tasks.release.telemetry.json_log import json_log
