"""Define and run sweeps of a few trials over the demo models."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from demo_project import Project, make_project
from numpy.typing import NDArray

from mergegate.tasks.sweep import trial_pool

NAME = "small-sweep"
TASKS = ("reverse", "shift")
SEARCH, CONFIRMATION = 40, 100
LINEAR = "demo/recipes/linear-searched.yaml"
# The start point is a poor hand-written recipe: the merge loses part of the reversing skill.
WEIGHTS = {"reverser": {"low": 0.05, "high": 1.0, "start": 0.35}, "shifter": {"low": 0.05, "high": 1.0, "start": 0.65}}


def small_sweep() -> dict[str, Any]:
    """Return a sweep profile for averaging weights, scored by answer likelihood. Good weights are easy to find."""
    return {
        "name": NAME,
        "recipe": LINEAR,
        "sweep": {
            "parameters": WEIGHTS,
            "objective": [{"task": f"demo/tasks/{task}.yaml", "clip": 0.5} for task in TASKS],
            "documents": {"search": SEARCH, "confirmation": CONFIRMATION},
            "budget": {"trials": 10},
            "population": 4,
        },
        "checks": {"license": {"purpose": "commercial", "visibility": "public"}},
        "evaluate": {
            "dtype": "float32",
            "tasks": [
                {"task": "demo/tasks/reverse.yaml", "guarded_by": "reverser", "max_drop": 20},
                {"task": "demo/tasks/shift.yaml", "guarded_by": "shifter", "max_drop": 20},
            ],
        },
        "publish": {"to": "directory", "path": f"../releases/{NAME}"},
    }


def saturated_sweep() -> dict[str, Any]:
    """Return the same sweep, scored by exact match on copying, which every average of these models solves."""
    profile = small_sweep()
    objective = [{"task": "demo/tasks/copy.yaml", "measure": "exact"}]
    profile["sweep"] |= {"objective": objective, "budget": {"trials": 4}}
    guard = {"task": "demo/tasks/copy.yaml", "guarded_by": "best parent"}
    place = {"to": "directory", "path": "../releases/saturated"}
    return profile | {"name": "saturated", "evaluate": {"tasks": [guard]}, "publish": place}


def make_swept(place: Path) -> None:
    """Create a project with a sweep that was confirmed, released and repeated, and a sweep that had nothing to improve.

    ``printed.json`` contains the exit code and output of each command by name, and the number of scored trials before
    the repetition.
    """
    project = make_project(place)
    profile, saturated = write_profile(project, small_sweep()), write_profile(project, saturated_sweep(), "saturated")
    printed = {"first": project.mergegate("sweep", profile)}
    scored = len(scored_trials(project.home, "reverse"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_pool, "score_trial", None)  # scoring another trial would fail
        printed["again"] = project.mergegate("sweep", profile)
    printed["saturated"] = project.mergegate("sweep", saturated)
    said = {name: [one.exit_code, one.output] for name, one in printed.items()}
    (place / "printed.json").write_text(json.dumps([said, scored]))


def write_profile(project: Project, profile: Mapping[str, Any], file: str = NAME) -> str:
    """Write a profile into the project and return its relative path."""
    (project.root / "profiles" / f"{file}.yaml").write_text(yaml.safe_dump(dict(profile), sort_keys=False))
    return f"profiles/{file}.yaml"


def scored_trials(home: Path, task: str) -> list[dict[str, Any]]:
    """Return the journal records of trials that were scored on a task, in the order in which they were written."""
    found: list[dict[str, Any]] = []
    for journal in sorted((home / "sweeps").glob("*/trials.journal")):
        for line in journal.read_text().splitlines():
            found.append(json.loads(line.partition(" ")[2]))  # the part before the space is a digest
    return [record for record in found if "scored" in record and task in numbers_of(record)]


def numbers_of(record: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
    """Return a trial's scores by task, one per document."""
    return {task: np.frombuffer(base64.b64decode(packed), "<f8") for task, *_, packed in record["sheet"]}
