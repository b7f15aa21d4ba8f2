"""Log runs to experiment trackers: Weights & Biases, and MLflow through its REST API. Off by default.

::

    MERGEGATE_WANDB=acme/releases        # project, or team/project; extra "wandb", which reads its own key
    WANDB_MODE=offline                   # wandb's own: files below .mergegate/wandb, for a later 'wandb sync'
    MERGEGATE_MLFLOW=releases            # an experiment, created if absent; no extra needed
    MLFLOW_TRACKING_URI=https://mlflow.acme.example  # and MLFLOW_TRACKING_TOKEN: MLflow's own variables

Every run is logged, independent of its outcome. The target ``mlflow`` additionally registers a model version for each
release.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from mergegate.tasks.http import JsonClient, Unreachable
from mergegate.tasks.report import RunRecord

MLFLOW, WANDB = "MERGEGATE_MLFLOW", "MERGEGATE_WANDB"
_MLFLOW_TIMEOUT_S = 20.0  # longest wait at the end of a run
_MAX_PARAM, _MAX_TAG, _MAX_KEY = 6000, 5000, 250  # MLflow's limits, in characters
_log = logging.getLogger(__name__)


class _MLflowRefusal(Exception):
    """The server rejected a request. The message gives the reason."""


def tracked_numbers(record: RunRecord) -> dict[str, float]:
    """Return points, ratios, seconds and bytes by name. A tracker groups them by the part before the slash."""
    numbers = {"seconds": record.seconds, "bytes_merged": float(record.bytes_merged)}
    if record.perplexity is not None:
        numbers["perplexity_ratio"] = record.perplexity
    for score in record.scores:
        if score.merge is not None:
            numbers[f"score/{score.task}"] = score.merge
        numbers |= {f"drop/{score.task}": score.drop, f"drop_low/{score.task}": score.low}
        numbers |= {f"drop_high/{score.task}": score.high}
    return numbers


def export_to_trackers(record: RunRecord, home: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Send the numbers of a run to each configured tracker.

    This never raises an error, so it cannot fail the run.

    Args:
        record: Record of the run.
        home: Directory of the project's state. wandb stores its files below it.
        environment: Environment variables that name the trackers.
    """
    if destination := environment.get(WANDB, ""):
        try:
            _log_to_wandb(record, home, destination)
        except ImportError:
            _log.warning("%s is set, but wandb is not installed: pip install 'mergegate[wandb]'", WANDB)
        except Exception as failure:
            _log.warning("could not send this run to Weights & Biases: %s", failure)
    if experiment := environment.get(MLFLOW, "").strip():
        address = environment.get("MLFLOW_TRACKING_URI", "").strip()
        if not address.startswith(("http://", "https://")):
            problem = "MLFLOW_TRACKING_URI is not an http(s) address. This run is not sent to MLflow."
            _log.warning("%s is set, but %s", MLFLOW, problem)
            return
        try:
            token = environment.get("MLFLOW_TRACKING_TOKEN", "")
            with JsonClient(address, _MLFLOW_TIMEOUT_S, token, connections=1) as client:
                _log_to_mlflow(client, experiment, record)
        except (_MLflowRefusal, Unreachable) as failure:
            _log.warning("could not send this run to MLflow: %s", failure)
        except Exception as failure:
            _log.warning("could not send this run to MLflow: %s: %s", type(failure).__name__, failure)


def _log_to_wandb(record: RunRecord, home: Path, destination: str) -> None:
    team, _, project = destination.rpartition("/")
    wandb: Any = importlib.import_module("wandb")
    parents = {parent.name: f"{parent.ref}@{parent.revision or parent.digest}" for parent in record.parents}
    run = wandb.init(
        project=project,
        entity=team or None,
        name=f"{record.profile} {record.version or record.status}",
        job_type=record.flow,
        dir=str(home),
        config={"profile": record.profile, "method": record.method, "recipe": record.recipe, "parents": parents},
        settings=wandb.Settings(silent=True, disable_git=True, disable_code=True, init_timeout=30),
    )
    run.log(tracked_numbers(record))
    run.summary.update({"status": record.status, "message": record.message, "release": record.version or ""})
    run.finish(exit_code=0 if record.status in ("released", "passed", "nothing new", "promoted", "waiting") else 1)


def _log_to_mlflow(client: JsonClient, experiment: str, record: RunRecord) -> None:
    find_experiment = f"experiments/get-by-name?{urlencode({'experiment_name': experiment})}"
    experiment_facts = _object(_request(client, find_experiment).get("experiment"))
    if not experiment_facts:
        # If another process creates it first, this request fails and the next one finds it.
        _request(client, "experiments/create", {"name": experiment})
        experiment_facts = _object(_request(client, find_experiment).get("experiment"))
    if not experiment_facts:
        raise _MLflowRefusal(f"the experiment {experiment!r} does not exist, and the server did not create it")

    now = round(time.time() * 1000)
    tags = {"status": record.status, "message": record.message, "release": record.version or "", "run": record.run}
    tags |= {"flow": record.flow, "at": record.location}
    body = {
        "experiment_id": str(experiment_facts.get("experiment_id", "")),
        "run_name": f"{record.profile} {record.version or record.status}",
        "start_time": now - round(1000 * record.seconds),
        "tags": [{"key": f"mergegate.{key}", "value": value[:_MAX_TAG]} for key, value in tags.items() if value],
    }
    run = str(_object(_object(_request(client, "runs/create", body).get("run")).get("info")).get("run_id", ""))
    if not run:
        raise _MLflowRefusal("the server returned no ID for the new run")

    params = {"profile": record.profile, "method": record.method, "recipe": record.recipe}
    params |= {f"parent.{item.name}": f"{item.ref}@{item.revision or item.digest}" for item in record.parents}
    params |= {f"set.{key}": value for key, _, value in (item.partition("=") for item in record.overrides)}
    batch = {
        "run_id": run,
        "metrics": [
            {"key": _mlflow_key(key), "value": value, "timestamp": now, "step": 0}
            for key, value in tracked_numbers(record).items()
        ],
        "params": [{"key": _mlflow_key(key), "value": value[:_MAX_PARAM]} for key, value in params.items() if value],
    }
    _request(client, "runs/log-batch", batch)
    good = record.status in ("released", "passed", "nothing new")
    status = "FINISHED" if good else "KILLED" if record.status == "interrupted" else "FAILED"
    _request(client, "runs/update", {"run_id": run, "status": status, "end_time": now})


def _request(client: JsonClient, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Return the server's response. It is empty if the object does not exist, or if it already exists."""
    answer = client.request(f"/api/2.0/mlflow/{path}", body)
    if answer.ok:
        return _object(answer.body)
    if _object(answer.body).get("error_code") in ("RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"):
        return {}
    raise _MLflowRefusal(answer.complaint)


def _mlflow_key(name: str) -> str:
    """Return ``name`` with only the characters that MLflow accepts: letters, digits and a few signs."""
    accepted = (character if character.isalnum() or character in "_-. /" else "_" for character in name)
    return "".join(accepted)[:_MAX_KEY]


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
