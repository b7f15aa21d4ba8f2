"""The numbers of a run in MLflow, whatever came of it: a run of an experiment, by MLflow's REST interface.

::

    MERGEGATE_MLFLOW=releases                       # the experiment; made where there is none
    MLFLOW_TRACKING_URI=https://mlflow.acme.example  # and MLFLOW_TRACKING_TOKEN: MLflow's own variables

No package is needed for it. A release that the target ``mlflow`` publishes has a version of a model besides.
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
_TIMEOUT_S = 20.0  # nobody waits longer at the end of a run
_API = "/api/2.0/mlflow"
_MOST_PARAM, _MOST_TAG = 6000, 5000  # characters, as MLflow takes them
_GOOD = ("released", "passed", "nothing new")
_log = logging.getLogger(__name__)


class _NotTaken(Exception):
    """The server said no; the message says what."""


def tell_mlflow(record: RunRecord, numbers: Mapping[str, float], environment: Mapping[str, str] = os.environ) -> None:
    """Say it to MLflow where somebody asked for it. Never an error of the run.

    Args:
        numbers: By name, as a tracker groups them.
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
    except (_NotTaken, Unreachable) as failure:
        _log.warning("the numbers of this run were not sent to MLflow: %s", failure)
    except Exception as failure:
        _log.warning("the numbers of this run were not sent to MLflow: %s: %s", type(failure).__name__, failure)


def _write_run(client: JsonClient, experiment: str, record: RunRecord, numbers: Mapping[str, float]) -> None:
    place = _experiment(client, experiment)
    now = round(time.time() * 1000)
    began = now - round(1000 * record.seconds)
    name = f"{record.profile} {record.version or record.status}"
    tags = [{"key": key, "value": value[:_MOST_TAG]} for key, value in _tags(record).items() if value]
    body = {"experiment_id": place, "run_name": name, "start_time": began, "tags": tags}
    made = _mapping(_asked(client, "runs/create", body).get("run"))
    run = str(_mapping(made.get("info")).get("run_id", ""))
    if not run:
        raise _NotTaken("it has made no run")
    metrics = [{"key": _metric(key), "value": value, "timestamp": now, "step": 0} for key, value in numbers.items()]
    params = [{"key": key, "value": value[:_MOST_PARAM]} for key, value in _params(record).items() if value]
    _asked(client, "runs/log-batch", {"run_id": run, "metrics": metrics, "params": params})
    status = "FINISHED" if record.status in _GOOD else "KILLED" if record.status == "interrupted" else "FAILED"
    _asked(client, "runs/update", {"run_id": run, "status": status, "end_time": now})


def _experiment(client: JsonClient, name: str) -> str:
    """Id of the experiment, which is made where there is none."""
    query = urlencode({"experiment_name": name})
    found = _mapping(_asked(client, f"experiments/get-by-name?{query}").get("experiment"))
    if not found:
        # Somebody else may have made it meanwhile: then it is there now.
        _asked(client, "experiments/create", {"name": name})
        found = _mapping(_asked(client, f"experiments/get-by-name?{query}").get("experiment"))
    if not found:
        raise _NotTaken(f"there is no experiment {name}, and none was made")
    return str(found.get("experiment_id", ""))


def _asked(client: JsonClient, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """What the server answers; nothing, of what is not there or is there already."""
    answer = client.request(f"{_API}/{path}", body)
    said = _mapping(answer.body)
    if answer.ok or said.get("error_code") in ("RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"):
        return said if answer.ok else {}
    raise _NotTaken(answer.complaint)


def _tags(record: RunRecord) -> dict[str, str]:
    told = {"status": record.status, "message": record.message, "release": record.version or "", "run": record.run}
    return {f"mergegate.{key}": value for key, value in {**told, "flow": record.flow, "at": record.location}.items()}


def _params(record: RunRecord) -> dict[str, str]:
    parents = {f"parent.{one.name}": f"{one.ref}@{one.revision or one.digest}" for one in record.parents}
    said = {f"set.{key}": value for key, _, value in (one.partition("=") for one in record.overrides)}
    return {"profile": record.profile, "method": record.method, "recipe": record.recipe} | {
        _metric(key): value for key, value in (parents | said).items()
    }


def _metric(name: str) -> str:
    """A name that MLflow takes: letters, digits, and a few signs."""
    return "".join(one if one.isalnum() or one in "_-. /" else "_" for one in name)[:250]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
