"""Write projects that release a merge with quantized variants, with the test double or with the real formats."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

sys.path.append(str(Path(__file__).resolve().parents[1] / "flows"))

from demo_project import PROFILES, SOURCES, Project, make_project  # shared with the tests of the flows
from patience import HANG_S
from test_killed_run import DIES, environment, files_of

__all__ = ["DIES", "PROFILES", "SOURCES", "Project", "files_of"]

ROOT = PROFILES.parent
PROFILE = "profiles/variants.yaml"

ROUNDED: Sequence[Mapping[str, Any]] = (
    {"format": "rounded", "bits": [8, 5]},
    {"format": "rounded", "bits": 7, "suffix": "Bad", "fault": "scales"},
)
REAL: Sequence[Mapping[str, Any]] = (
    {"format": "gguf", "types": ["Q8_0"]},
    {"format": "compressed-tensors", "scheme": "FP8_DYNAMIC"},
)


def write_profile(project: Project, variants: Sequence[Mapping[str, Any]], **more: Any) -> str:
    """Write a profile with one task of the demo, which is enough to notice a bad variant, and return its path."""
    profile = yaml.safe_load((PROFILES / "demo-variants.yaml").read_text())
    profile["evaluate"]["tasks"] = [{"task": "demo/tasks/reverse.yaml", "guarded_by": "bpe-reverser", "max_drop": 3}]
    profile |= {"name": "tiny", "publish": {"to": "directory", "path": "../releases/tiny"}}
    (project.root / PROFILE).write_text(yaml.safe_dump({**profile, "variants": list(variants), **more}))
    return PROFILE


def variant_project(root: Path, variants: Sequence[Mapping[str, Any]], **more: Any) -> Project:
    """Create a project with a profile that has ``variants``, and the environments of the quantizers."""
    project = make_project(root)
    for tools in (".venv-gguf", ".venv-quantize"):
        (root / tools).symlink_to(ROOT / tools)
    write_profile(project, variants, **more)
    return project


def published_places(project: Project) -> set[str]:
    """Return the names of all places in which something complete was published."""
    releases = project.root / "releases"
    return {path.parent.name for path in releases.glob("*/latest")} if releases.exists() else set()


def run_process(project: Project, *command: str) -> subprocess.CompletedProcess[str]:
    """Run mergegate (or ``-c PROGRAM``) in a process of its own, which a test may kill."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    start = command if command[0] == "-c" else ("-m", "mergegate", *command)
    return subprocess.run(
        [sys.executable, *start],
        cwd=project.root,
        env=environment(project) | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
