"""Log runs to experiment trackers: Weights & Biases, and MLflow through its REST API. Off by default.

::

    MERGEGATE_WANDB=acme/releases        # project, or team/project; extra "wandb", which reads its own key
    WANDB_MODE=offline                   # wandb's own: files below .mergegate/wandb, for a later 'wandb sync'

    MERGEGATE_MLFLOW=releases            # an experiment, created if absent; no extra needed
    MLFLOW_TRACKING_URI=https://mlflow.acme.example  # and MLFLOW_TRACKING_TOKEN: MLflow's own variables

Every run is logged, whatever its outcome. The publish target ``mlflow`` also registers a model version for each
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

from mergegate.merge_core.errors import pip_command
from mergegate.tasks.report import RunRecord
from mergegate.tasks.telemetry.mlflow import (
    MlflowClient,
    MlflowError,
    member,
    metric_entries,
    param_entries,
    tag_entries,
)

MLFLOW, WANDB = "MERGEGATE_MLFLOW", "MERGEGATE_WANDB"
_MLFLOW_TIMEOUT_S = 20.0  # longest wait at the end of a run
_log = logging.getLogger(__name__)


def tracked_numbers(record: RunRecord) -> dict[str, float]:
    """Return the numbers of a run (points, ratios, seconds, bytes). Trackers group the names by their first part."""
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
    """Send the numbers of a run to each tracker that ``environment`` names. It never raises.

    ``home`` is the directory of the project's state. wandb stores its files below it.
    """
    if destination := environment.get(WANDB, ""):
        try:
            team, _, project = destination.rpartition("/")
            wandb: Any = importlib.import_module("wandb")
            parents = {parent.name: f"{parent.ref}@{parent.revision or parent.digest}" for parent in record.parents}
            config = {"profile": record.profile, "method": record.method, "recipe": record.recipe, "parents": parents}
            run = wandb.init(
                project=project,
                entity=team or None,
                name=f"{record.profile} {record.version or record.status}",
                job_type=record.flow,
                dir=str(home),
                config=config,
                settings=wandb.Settings(silent=True, disable_git=True, disable_code=True, init_timeout=30),
            )
            run.log(tracked_numbers(record))
            run.summary.update({"status": record.status, "message": record.message, "release": record.version or ""})
            is_good = record.status in ("released", "passed", "nothing new", "promoted", "waiting")
            run.finish(exit_code=0 if is_good else 1)
        except ImportError:
            _log.warning("%s is set, but wandb is not installed: %s", WANDB, pip_command("mergegate[wandb]"))
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
            with MlflowClient(address, _MLFLOW_TIMEOUT_S, token) as client:
                _log_to_mlflow(client, experiment, record)
        except MlflowError as failure:
            _log.warning("could not send this run to MLflow: %s", failure)
        except Exception as failure:
            _log.warning("could not send this run to MLflow: %s: %s", type(failure).__name__, failure)


def _log_to_mlflow(client: MlflowClient, experiment: str, record: RunRecord) -> None:
    experiment_id = client.experiment_id(experiment)
    if not experiment_id:
        # If another process creates the experiment first, this request changes nothing and the next one finds it.
        client.post("experiments/create", {"name": experiment})
        experiment_id = client.experiment_id(experiment)
    if not experiment_id:
        raise MlflowError(f"the experiment {experiment!r} does not exist, and the server did not create it")

    now = round(time.time() * 1000)
    tags = {"status": record.status, "message": record.message, "release": record.version or "", "run": record.run}
    tags |= {"flow": record.flow, "at": record.location}
    body = {
        "experiment_id": experiment_id,
        "run_name": f"{record.profile} {record.version or record.status}",
        "start_time": now - round(1000 * record.seconds),
        "tags": tag_entries({f"mergegate.{key}": value for key, value in tags.items()}),
    }
    run = str(member(client.post("runs/create", body), "run", "info", "run_id"))
    if not run:
        raise MlflowError("the server returned no ID for the new run")

    params = {"profile": record.profile, "method": record.method, "recipe": record.recipe}
    params |= {f"parent.{item.name}": f"{item.ref}@{item.revision or item.digest}" for item in record.parents}
    params |= {f"set.{key}": value for key, _, value in (item.partition("=") for item in record.overrides)}
    metrics = metric_entries(tracked_numbers(record), now)
    client.post("runs/log-batch", {"run_id": run, "metrics": metrics, "params": param_entries(params)})
    good = record.status in ("released", "passed", "nothing new")
    status = "FINISHED" if good else "KILLED" if record.status == "interrupted" else "FAILED"
    client.post("runs/update", {"run_id": run, "status": status, "end_time": now})
