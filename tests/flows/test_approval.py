"""Manual approval of a release without a deployment: on a terminal, or in advance with ``--approve``."""

from __future__ import annotations

import io
import json
import sys
from uuid import UUID

import pytest
from demo_project import Project, expect
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateDetails, StateType
from rich.console import Console

from mergegate.flows.operations.progress import TerminalProgress
from mergegate.flows.operations.run import TerminalApproval
from mergegate.flows.prefect_api import ApprovalRequest, Decision, WaitingRun, select_waiting_run, waiting_runs
from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.release.publish import PendingRelease


@pytest.mark.proof
def test_a_release_that_has_to_be_approved_is_published_only_then(demo: Project) -> None:
    """A run without a terminal is refused, ``--approve`` publishes, and a run with nothing new needs no approval."""
    profile, releases = demo.edit("demo.yaml", "releases/demo\n", "releases/demo\n  approval: true\n"), "edited-demo"
    expect(demo.mergegate("run", profile), 3, "--approve")
    assert not list(demo.root.glob(f"releases/{releases}/*"))

    done = demo.mergegate("run", profile, "--approve", "--json")
    outcome = json.loads(done.stdout)
    assert (done.exit_code, outcome["status"]) == (0, "released")
    assert "approved in advance" in outcome["message"]
    published = {one.name for one in demo.root.glob(f"releases/{releases}/*")}
    assert published == {"latest", outcome["version"]}

    expect(demo.mergegate("run", profile), 0, "nothing new")


REQUEST = ApprovalRequest("demo", PendingRelease("abc123", "d" * 64, is_current=False), "# All of it", 60.0)


def asked(monkeypatch: pytest.MonkeyPatch, typed: str) -> Decision:
    """Type an answer to the approval prompt and return the decision."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    keyboard = io.StringIO(typed)
    monkeypatch.setattr(keyboard, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", keyboard)
    progress = TerminalProgress(console)
    with progress.watching():
        return TerminalApproval(progress, console, in_advance=False)(REQUEST)


@pytest.mark.parametrize(
    ("typed", "publish"), [("y\n", True), ("yes\n", True), ("n\nno better\n", False), ("\n\n", False)]
)
def test_the_terminal_prompt_returns_the_decision(monkeypatch: pytest.MonkeyPatch, typed: str, publish: bool) -> None:
    decision = asked(monkeypatch, typed)
    assert (decision.publish, decision.digest) == (publish, "d" * 64)
    assert decision.by
    assert decision.text().endswith(": no better") == ("no better" in typed)


def test_a_closed_terminal_makes_no_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="no decision about"):
        asked(monkeypatch, "")


WAITING = tuple(
    WaitingRun(UUID(int=number), f"run-{number}", profile, f"version-{number}", "")
    for number, profile in enumerate(("one", "two"), start=1)
)


def test_the_run_that_is_meant_is_found_by_whatever_a_person_calls_it() -> None:
    for named in ("two", "run-2", str(UUID(int=2))):
        assert select_waiting_run(WAITING, named) == WAITING[1]
    assert select_waiting_run(WAITING[:1], None) == WAITING[0]


@pytest.mark.parametrize(
    ("runs", "named", "message"),
    [
        (WAITING, None, "one version-1: run run-1"),
        (WAITING, "three", "one version-1: run run-1"),
        ((), None, "waits for approval"),
    ],
)
def test_a_run_that_is_not_clearly_named_is_not_approved(
    runs: tuple[WaitingRun, ...], named: str | None, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        select_waiting_run(runs, named)


@pytest.mark.story
def test_a_run_whose_deployment_was_deleted_still_waits(prefect_api: None) -> None:
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow_from_name("release"), "removed-profile")
        run = client.create_flow_run_from_deployment(deployment)
        keys = {"schema": "run-publish-1-schema", "description": "run-publish-1-description"}
        client.create_flow_run_input(run.id, keys["schema"], '{"properties": {"version": {"default": "version-1"}}}')
        client.create_flow_run_input(run.id, keys["description"], '"# Evidence"')
        details = StateDetails(run_input_keyset=keys)
        suspended: State[object] = State(type=StateType.PAUSED, name="Suspended", state_details=details)
        client.set_flow_run_state(run.id, suspended, force=True)
        client.delete_deployment(deployment)
        try:
            found = [waiting for waiting in waiting_runs(client) if waiting.id == run.id]
        finally:
            client.delete_flow_run(run.id)
    assert found == [WaitingRun(run.id, run.name, "", "version-1", "# Evidence")]
