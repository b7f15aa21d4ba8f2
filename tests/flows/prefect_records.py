"""Task runs of stages as Prefect records them. ``test_stage.py`` runs these tests in a process of their own."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from test_stage import count, double, run, two_stages

from mergegate.tasks.checkpoints.model import Model
from mergegate.tasks.store.store import Artifact

pytestmark = pytest.mark.usefixtures("prefect_api", "home")


def task_runs(flow_run: UUID, count: int = 2) -> dict[str, Any]:
    """Return the task runs of a flow run by name, once Prefect shows, with some delay, that all have ended."""
    chosen = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run]))
    deadline = time.monotonic() + 120
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline:
            found = client.read_task_runs(flow_run_filter=chosen)
            if len(found) == count and all(run.state and run.state.is_final() for run in found):
                return {run.name: run for run in found}
            threading.Event().wait(0.05)
    raise AssertionError(f"{len(found)} task runs: {found}")


def test_prefect_distinguishes_a_miss_a_hit_and_a_rebuild() -> None:
    def seen() -> tuple[str, str]:
        runs = task_runs(two_stages(21))
        return runs["count"].state_name, runs["double"].state_name

    assert seen() == ("Made", "Made")
    assert seen() == ("Cached", "Cached")
    artifact, _, _ = run(21)
    assert isinstance(artifact, Artifact)
    (artifact.directory / "number.txt").write_text("x")
    assert seen() == ("Rebuilt", "Cached")  # The rebuilt bytes are identical, so dependents stay valid.


def test_prefect_shows_a_refusal_as_a_failure_with_its_reason() -> None:
    runs = task_runs(two_stages(22, allowed=False), count=1)
    assert set(runs) == {"count"}
    assert (runs["count"].state_name, runs["count"].state.message) == ("Refused", "here: no")


def test_prefects_graph_shows_dependencies_between_stages() -> None:
    for _ in range(2):  # The second time, both come from the store.
        runs = task_runs(two_stages(23))
        assert [str(one.id) for one in runs["double"].task_inputs["wait_for"]] == [str(runs["count"].id)]
        assert not runs["count"].task_inputs.get("wait_for")


def test_the_graph_has_stages_passed_to_after() -> None:
    @flow
    def allowed() -> dict[str, Any]:
        from prefect.context import FlowRunContext

        count.after(double(count(24)))(25, Model(name="second", digest="d", directory=Path("/")))
        context = FlowRunContext.get()
        assert context is not None
        assert context.flow_run is not None
        return task_runs(context.flow_run.id, count=3)

    runs = allowed()
    assert [one.id for one in runs["count second"].task_inputs["wait_for"]] == [runs["double"].id]


def test_a_value_stage_has_no_directory_but_is_verified(home: Path) -> None:
    two_stages(26)
    (file,) = (home / "store" / "double").iterdir()
    assert file.suffix == ".json"
    file.write_text(file.read_text().replace("52", "53"))
    assert task_runs(two_stages(26))["double"].state_name == "Rebuilt"
    assert "52" in file.read_text()
