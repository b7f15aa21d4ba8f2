"""Sweeps of a few trials over the demo's models, in projects of the tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from demo_project import Project

NAME = "small-sweep"
WEIGHT = {"low": 0.05, "high": 1.0, "start": 0.5}
TASKS = ("reverse", "shift")
SIZES = {"search": 40, "confirmation": 160}


def small_sweep(**changes: Any) -> dict[str, Any]:
    """An average whose weights are searched for: half and half, as ``linear.yaml`` has it, reverses badly.

    Args:
        changes: Of what stands under ``sweep``; of the profile itself, those that stand there.
    """
    profile: dict[str, Any] = {
        "name": NAME,
        "recipe": "demo/recipes/linear-searched.yaml",
        "sweep": {
            "parameters": {"reverser": WEIGHT, "shifter": WEIGHT},
            "objective": [{"task": f"demo/tasks/{task}.yaml", "clip": 0.5} for task in TASKS],
            "documents": dict(SIZES),
            "budget": {"trials": 10},
            "population": 4,
        },
        "checks": {"license": {"purpose": "commercial", "visibility": "public"}},
        "evaluate": {
            "on_inconclusive": "warn",
            "tasks": [
                {"task": "demo/tasks/reverse.yaml", "guarded_by": "reverser", "max_drop": 15},
                {"task": "demo/tasks/shift.yaml", "guarded_by": "shifter", "max_drop": 15},
            ],
        },
        "publish": {"to": "directory", "path": f"../releases/{NAME}"},
    }
    for name, value in changes.items():
        (profile if name in profile and name != "sweep" else profile["sweep"])[name] = value
    return profile


def write_profile(project: Project, profile: Mapping[str, Any], file: str = NAME) -> str:
    """Its name, to be given to a command."""
    (project.root / "profiles" / f"{file}.yaml").write_text(yaml.safe_dump(dict(profile), sort_keys=False))
    return f"profiles/{file}.yaml"


def scored_trials(home: Path) -> list[dict[str, Any]]:
    """Records of all ledgers below a state, as they were written; those that only note the time are left out."""
    found: list[dict[str, Any]] = []
    for journal in sorted((home / "sweeps").glob("*/trials.journal")):
        for line in journal.read_text().splitlines():
            found.append(json.loads(line.partition(" ")[2]))  # before it, what vouches for it
    return [record for record in found if "scored" in record]
