"""Sweeps of a few trials over the demo's models, in projects of the tests."""

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
# A hand-written recipe that is no good: it forgets a part of reversing.
WEIGHTS = {
    "reverser": {"low": 0.05, "high": 1.0, "start": 0.35},
    "shifter": {"low": 0.05, "high": 1.0, "start": 0.65},
}


def small_sweep() -> dict[str, Any]:
    """An average whose weights are searched for by the likelihood of answers, and are easily found."""
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
    """The same, searched for by exact match of copying, which every average of these models can."""
    profile = small_sweep()
    objective = [{"task": "demo/tasks/copy.yaml", "measure": "exact"}]
    profile["sweep"] |= {"objective": objective, "budget": {"trials": 4}}
    guard = {"task": "demo/tasks/copy.yaml", "guarded_by": "best parent"}
    place = {"to": "directory", "path": "../releases/saturated"}
    return profile | {"name": "saturated", "evaluate": {"tasks": [guard]}, "publish": place}


def make_swept(place: Path) -> None:
    """A project in which a sweep was confirmed and released, then asked for again, and another had nothing to find.

    ``printed.json``: exit code and output of each by name; and how many trials there were before it was asked again.
    """
    project = make_project(place)
    profile, saturated = write_profile(project, small_sweep()), write_profile(project, saturated_sweep(), "saturated")
    printed = {"first": project.mergegate("sweep", profile)}
    scored = len(scored_trials(project.home, "reverse"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_pool, "score_trial", None)  # whoever wants to have anything scored fails
        printed["again"] = project.mergegate("sweep", profile)
    printed["saturated"] = project.mergegate("sweep", saturated)
    said = {name: [one.exit_code, one.output] for name, one in printed.items()}
    (place / "printed.json").write_text(json.dumps([said, scored]))


def write_profile(project: Project, profile: Mapping[str, Any], file: str = NAME) -> str:
    """Its name, to be given to a command."""
    (project.root / "profiles" / f"{file}.yaml").write_text(yaml.safe_dump(dict(profile), sort_keys=False))
    return f"profiles/{file}.yaml"


def scored_trials(home: Path, task: str) -> list[dict[str, Any]]:
    """Records of trials that were asked about a task, as they were written."""
    found: list[dict[str, Any]] = []
    for journal in sorted((home / "sweeps").glob("*/trials.journal")):
        for line in journal.read_text().splitlines():
            found.append(json.loads(line.partition(" ")[2]))  # before it, what vouches for it
    return [record for record in found if "scored" in record and task in numbers_of(record)]


def numbers_of(record: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
    """What a trial got, by task: one number a document."""
    return {task: np.frombuffer(base64.b64decode(packed), "<f8") for task, *_, packed in record["sheet"]}
