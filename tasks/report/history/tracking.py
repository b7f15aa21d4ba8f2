"""Record the numbers of a run in a team's experiment tracker: Weights & Biases or MLflow. Off by default.

::

    MERGEGATE_WANDB=acme/releases        # project, or team/project; extra "wandb", which reads its own key
    WANDB_MODE=offline                   # wandb's own: written below .mergegate/wandb, sent later by 'wandb sync'
    MERGEGATE_MLFLOW=releases            # an experiment; see ``tasks.report.history.mlflow``
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergegate.tasks.report.history.mlflow import tell_mlflow
from mergegate.tasks.report.history.record import RunRecord

WANDB = "MERGEGATE_WANDB"
_log = logging.getLogger(__name__)


def tracked_numbers(record: RunRecord) -> dict[str, float]:
    """Return points, ratios, seconds and bytes by name, in the groups of a tracker."""
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
    _log_to_wandb(record, home, environment)
    tell_mlflow(record, tracked_numbers(record), environment)


def _log_to_wandb(record: RunRecord, home: Path, environment: Mapping[str, str]) -> None:
    if not (destination := environment.get(WANDB, "")):
        return
    try:
        team, _, project = destination.rpartition("/")
        wandb: Any = importlib.import_module("wandb")
        run = wandb.init(
            project=project,
            entity=team or None,
            name=f"{record.profile} {record.version or record.status}",
            job_type=record.flow,
            dir=str(home),
            config={
                "profile": record.profile,
                "method": record.method,
                "recipe": record.recipe,
                "parents": {
                    parent.name: f"{parent.ref}@{parent.revision or parent.digest}" for parent in record.parents
                },
            },
            settings=wandb.Settings(silent=True, disable_git=True, disable_code=True, init_timeout=30),
        )
        run.log(tracked_numbers(record))
        run.summary.update({"status": record.status, "message": record.message, "release": record.version or ""})
        run.finish(exit_code=0 if record.status in ("released", "passed", "nothing new", "promoted", "waiting") else 1)
    except ImportError:
        _log.warning("%s is set, but wandb is not installed: pip install 'mergegate[wandb]'", WANDB)
    except Exception as failure:
        _log.warning("the numbers of this run were not sent to Weights & Biases: %s", failure)
