"""Record the numbers of a run in MLflow as a run of an experiment, through MLflow's REST API.

Every run is recorded, independent of its outcome.

::

    MERGEGATE_MLFLOW=releases                       # the experiment; created if absent
    MLFLOW_TRACKING_URI=https://mlflow.acme.example  # and MLFLOW_TRACKING_TOKEN: MLflow's own variables

This needs no additional package. A release that the target ``mlflow`` publishes also gets a model version.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from mergegate.tasks.http import JsonClient, Unreachable
from mergegate.tasks.report.history.record import RunRecord

MLFLOW = "MERGEGATE_MLFLOW"
_TIMEOUT_S = 20.0  # longest wait at the end of a run
_API = "/api/2.0/mlflow"
_MOST_PARAM, _MOST_TAG = 6000, 5000  # MLflow's limits, in characters
_GOOD_STATUSES = ("released", "passed", "nothing new")
_log = logging.getLogger(__name__)


class _MLflowRefusal(Exception):
    """The server rejected a request. The message gives the reason."""


def tell_mlflow(record: RunRecord, numbers: Mapping[str, float], environment: Mapping[str, str] = os.environ) -> None:
    """Send the numbers of a run to MLflow, if an experiment is configured.

    This never raises an error, so it cannot fail the run.

    Args:
        record: Record of the run.
        numbers: Numbers by name, in the groups of a tracker.
        environment: Environment variables that name the server and the experiment.
    """
    if not (experiment := environment.get(MLFLOW, "").strip()):
        return
    address = environment.get("MLFLOW_TRACKING_URI", "").strip()
    if not address.startswith(("http://", "https://")):
        _log.warning("%s is set, but MLFLOW_TRACKING_URI is no address of MLflow's server: nothing was sent", MLFLOW)
        return
    try:
        with JsonClient(address, _TIMEOUT_S, environment.get("MLFLOW_TRACKING_TOKEN", ""), connections=1) as client:
            _write_run(client, experiment, record, numbers)
    except (_MLflowRefusal, Unreachable) as failure:
        _log.warning("the numbers of this run were not sent to MLflow: %s", failure)
    except Exception as failure:
        _log.warning("the numbers of this run were not sent to MLflow: %s: %s", type(failure).__name__, failure)


def _write_run(client: JsonClient, experiment: str, record: RunRecord, numbers: Mapping[str, float]) -> None:
    experiment_id = _experiment(client, experiment)
    now = round(time.time() * 1000)
    start = now - round(1000 * record.seconds)
    name = f"{record.profile} {record.version or record.status}"
    tags = [{"key": key, "value": value[:_MOST_TAG]} for key, value in _tags(record).items() if value]
    body = {"experiment_id": experiment_id, "run_name": name, "start_time": start, "tags": tags}
    created = _mapping(_request(client, "runs/create", body).get("run"))
    run = str(_mapping(created.get("info")).get("run_id", ""))
    if not run:
        raise _MLflowRefusal("it has made no run")
    metrics = [{"key": _metric(key), "value": value, "timestamp": now, "step": 0} for key, value in numbers.items()]
    params = [{"key": key, "value": value[:_MOST_PARAM]} for key, value in _params(record).items() if value]
    _request(client, "runs/log-batch", {"run_id": run, "metrics": metrics, "params": params})
    status = "FINISHED" if record.status in _GOOD_STATUSES else "KILLED" if record.status == "interrupted" else "FAILED"
    _request(client, "runs/update", {"run_id": run, "status": status, "end_time": now})


def _experiment(client: JsonClient, name: str) -> str:
    """Return the id of the experiment, which is created if absent."""
    query = urlencode({"experiment_name": name})
    result = _mapping(_request(client, f"experiments/get-by-name?{query}").get("experiment"))
    if not result:
        # If another process creates it first, this request fails and the next one finds it.
        _request(client, "experiments/create", {"name": name})
        result = _mapping(_request(client, f"experiments/get-by-name?{query}").get("experiment"))
    if not result:
        raise _MLflowRefusal(f"there is no experiment {name}, and none was made")
    return str(result.get("experiment_id", ""))


def _request(client: JsonClient, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Return the server's response. It is empty if the object does not exist, or if it already exists."""
    answer = client.request(f"{_API}/{path}", body)
    response = _mapping(answer.body)
    if answer.ok or response.get("error_code") in ("RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"):
        return response if answer.ok else {}
    raise _MLflowRefusal(answer.complaint)


def _tags(record: RunRecord) -> dict[str, str]:
    tags = {"status": record.status, "message": record.message, "release": record.version or "", "run": record.run}
    return {f"mergegate.{key}": value for key, value in {**tags, "flow": record.flow, "at": record.location}.items()}


def _params(record: RunRecord) -> dict[str, str]:
    parents = {f"parent.{item.name}": f"{item.ref}@{item.revision or item.digest}" for item in record.parents}
    settings = {f"set.{key}": value for key, _, value in (item.partition("=") for item in record.overrides)}
    return {"profile": record.profile, "method": record.method, "recipe": record.recipe} | {
        _metric(key): value for key, value in (parents | settings).items()
    }


def _metric(name: str) -> str:
    """Return ``name`` with only the characters that MLflow accepts: letters, digits and a few signs."""
    return "".join(character if character.isalnum() or character in "_-. /" else "_" for character in name)[:250]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
