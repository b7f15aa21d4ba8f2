"""Two workers, local or on a cluster, produce the same release as one: the same artifacts, verdict and page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from demo_project import Project, make_project

pytestmark = [pytest.mark.story, pytest.mark.proof]

MEASURED = ("merge", "perplexity", "evaluate", "gate")  # Stages whose artifacts must be identical.


def measured(home: Path) -> dict[str, str]:
    """Return the content digest of each measurement and decision, by stage and key."""
    found = {}
    for stage in MEASURED:
        for place in (home / "store" / stage).iterdir():
            record = place / "manifest.json" if place.is_dir() else place
            if not place.name.endswith((".partial", ".lock")):
                found[f"{stage}/{place.stem}"] = json.loads(record.read_text())["digest"]
    return found


@pytest.mark.parametrize("runner", ["{workers: 2}", "{kind: dask, workers: 2}"])
def test_two_workers_make_what_one_makes(
    runner: str, demo_release: Path, tmp_path: Path, prefect_api: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "dask" in runner:
        pytest.importorskip("prefect_dask")
    project = make_project(tmp_path / "project")
    profile = project.edit("demo.yaml", "perplexity:", f"runner: {runner}\nperplexity:")
    result = project.mergegate("run", profile, "--json")
    assert result.exit_code == 0, result.output
    alone = measured(Project(demo_release).home)
    assert len([name for name in alone if name.startswith("evaluate/")]) >= 12  # Four models, three tasks.
    assert measured(project.home) == alone
    assert not list(project.home.glob("runner-*"))
    # A run without a runner has no work left.
    again = project.mergegate("run", project.edit("demo.yaml", "perplexity:", "perplexity:"), "--json")
    assert json.loads(again.stdout)["status"] == "nothing new"
