"""``mergegate deploy`` synchronizes a real Prefect server on loopback with ``schedules.yaml``."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest
import served_site
from demo_project import make_project
from patience import HANG_S
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import BlockDocumentCreate
from prefect.client.schemas.objects import State, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Scheduled

from mergegate.flows import prefect_api
from mergegate.flows.prefect_api.schedules import parse_schedules
from mergegate.merge_core.errors import InvalidInput

pytestmark = pytest.mark.story

Begin = Callable[[Path], None]
DEMO = {"profile": "profiles/demo.yaml", "schedule": "0 3 * * *", "timezone": "Europe/Berlin"}
REFUSAL, QUOTES = "demo is not released\nreverse lost 22.2 points\nand more", "something 'broke' \"loudly\""
REFUSED = {"profile": "profiles/demo-refused.yaml"}
FORBIDDEN = {"profile": "profiles/demo-forbidden.yaml"}


@dataclass(frozen=True)
class Served:
    """A project with its Prefect server and a client."""

    root: Path
    site: prefect_api.Site
    client: SyncPrefectClient
    environment: dict[str, str]

    def deploy(self, nights: prefect_api.Schedules, site: prefect_api.Site | None = None) -> dict[str, str]:
        """Deploy like ``mergegate deploy`` and return the change of each deployment and rule by name."""
        here = site or self.site
        wanted = prefect_api.desired_deployments(nights, self.root)
        done = prefect_api.sync_deployments(self.client, wanted, here)
        rules = prefect_api.sync_rules(
            self.client,
            prefect_api.desired_rules(nights, wanted),
            nights.notify,
            {one.name: one.id for one in done},
            here,
        )
        return {one.name: one.change for one in done} | dict(rules)

    def deployment(self, name: str = "release/demo") -> DeploymentResponse:
        there = prefect_api.deployments_on_server(self.client).get(name)
        assert there is not None
        return there

    def scheduled_run(self, deployment: DeploymentResponse, days: int, *tags: str) -> UUID:
        """Create a run that is due in so many days, and return its id."""
        state: State[object] = Scheduled(scheduled_time=datetime.now(UTC) + timedelta(days=days))
        return self.client.create_flow_run_from_deployment(deployment.id, state=state, tags=tags).id

    def manual_runs(self) -> set[UUID]:
        """Return the ids of all runs, except those that the server's scheduler has planned.

        The server returns at most 200 runs. Planned runs start later than all others, so they come last.
        """
        runs = self.client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_ASC)
        return {run.id for run in runs if not run.auto_scheduled}

    def run(self, *command: str, code: int = 0) -> str:
        done = subprocess.run(
            command, cwd=self.root, env=self.environment, capture_output=True, text=True, timeout=HANG_S, check=False
        )
        assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, begin_records: Begin) -> Iterator[Served]:
    yield from start_server(tmp_path_factory.mktemp("served"), begin_records)


@pytest.fixture(scope="module")
def served_alone(tmp_path_factory: pytest.TempPathFactory, begin_records: Begin) -> Iterator[Served]:
    """Yield a server on which no other test has left runs that occupy its only slot."""
    yield from start_server(tmp_path_factory.mktemp("alone"), begin_records)


def start_server(root: Path, begin_records: Begin) -> Iterator[Served]:
    begin_records(make_project(root).home)
    (root / "prefect.yaml").write_text((served_site.PROJECT / "prefect.yaml").read_text())
    port, environment = served_site.free_port(), served_site.bare_environment(root)
    with served_site.in_a_terminal_of_its_own(
        [*served_site.MERGEGATE, "server", "--port", str(port)], root, environment
    ) as log:
        served_site.until(lambda: served_site.answers(port), "the server", log)
        with served_site.asked(root, port) as client:
            yield Served(root, served_site.site_of(root, port), client, environment)


def nights(*profiles: dict[str, str], **more: object) -> prefect_api.Schedules:
    return parse_schedules({"profiles": list(profiles), **more}, "schedules.yaml")


def test_twice_does_nothing_and_what_is_listed_no_more_goes(served: Served) -> None:
    served.deploy(nights(FORBIDDEN))  # Removes deployments that other tests have left.
    first = served.deploy(nights(DEMO, REFUSED))
    assert (first["release/demo"], first["release/demo-refused"]) == ("made", "made")
    assert set(served.deploy(nights(DEMO, REFUSED)).values()) == {"unchanged"}

    foreign = served.client.create_deployment(served.client.create_flow_from_name("release"), "of-somebody-else")
    later = served.deploy(nights({**DEMO, "schedule": "30 4 * * *"}))
    assert (later["release/demo"], later["release/demo-refused"]) == ("changed", "removed")
    assert served.client.read_deployment(foreign).name == "of-somebody-else"

    without = served.deploy(nights({"profile": DEMO["profile"]}))
    assert without["release/demo"] == "changed"
    assert served.deployment().schedules == []


def test_removing_a_schedule_removes_its_planned_runs(served: Served) -> None:
    """The server's scheduler may add runs during a deployment. The next deployment removes them."""
    served.deploy(nights({**DEMO, "schedule": "30 4 * * *"}))
    there = served.deployment()
    mine = served.scheduled_run(there, 1)

    def only_mine() -> bool:
        served.deploy(nights({"profile": DEMO["profile"]}))
        planned = served.client.get_scheduled_flow_runs_for_deployments([there.id])
        return [run.id for run in planned if run.auto_scheduled or run.id == mine] == [mine]

    served_site.until(only_mine, "only the run of the user")
    served.client.delete_flow_run(mine)


def test_a_deployment_has_a_readable_name_and_description(served: Served) -> None:
    served.deploy(nights(DEMO))
    there = served.deployment()
    assert there.description == "demo · ties of 2 over base"
    assert set(there.tags) == {"mergegate", "release", "demo", "nightly"}
    (schedule,) = [one.schedule.model_dump() for one in there.schedules]
    assert (schedule["cron"], schedule["timezone"]) == ("0 3 * * *", "Europe/Berlin")
    assert there.global_concurrency_limit is not None
    assert there.global_concurrency_limit.limit == 1
    assert there.concurrency_options is not None
    assert there.concurrency_options.collision_strategy.value == "CANCEL_NEW"
    form = there.parameter_openapi_schema or {}
    assert "Profile file" in form["properties"]["profile"]["description"]
    assert {"type": "string", "format": "path"} in form["properties"]["profile"]["anyOf"]
    assert served.client.read_work_pool("mergegate").concurrency_limit == 1


def test_what_the_form_cannot_mean_is_refused_before_a_run_exists(served: Served) -> None:
    served.deploy(nights(DEMO))
    wrong = 'profile={"name": "x", "recepe": "y"}'
    before = served.manual_runs()
    # A plain shell in the project directory needs only the settings that ``mergegate server`` wrote.
    assert "recepe" in served.run("prefect", "deployment", "run", "release/release", "-p", wrong, code=1)
    assert served.manual_runs() == before


@pytest.mark.proof
def test_prefects_own_deploy_works_as_well(served: Served) -> None:
    served.deploy(nights(DEMO))
    served.run("prefect", "--no-prompt", "deploy", "--all")
    there = served.deployment("release/release")
    assert there.pull_steps == [{"prefect.deployments.steps.set_working_directory": {"directory": str(served.root)}}]
    assert there.work_pool_name == "mergegate"


@pytest.mark.proof
def test_another_project_keeps_its_deployments_even_on_a_server_with_many_flows(served: Served, tmp_path: Path) -> None:
    """Prefect returns at most 200 flows at once, in the order of their names."""
    served.deploy(nights(DEMO))
    with pytest.raises(InvalidInput, match="it belongs to another project"):
        served.deploy(nights(DEMO), replace(served.site, root=tmp_path))
    for number in range(200):
        served.client.create_flow_from_name(f"another-team-{number}")
    assert len(served.client.read_flows()) == 200
    assert "release/demo" in prefect_api.deployments_on_server(served.client)
    with pytest.raises(InvalidInput, match="it belongs to another project"):
        served.deploy(nights(DEMO), replace(served.site, root=tmp_path))


def test_an_invalid_cron_is_refused_with_the_name_of_its_profile(served: Served) -> None:
    with pytest.raises(InvalidInput, match="schedule of demo"):
        served.deploy(nights({**DEMO, "schedule": "99 3 * * *"}))


def test_without_the_secret_nobody_is_let_in(served: Served) -> None:
    for wrong in ("", "mergegate:guessed"):
        with pytest.raises(InvalidInput, match="secret"):
            prefect_api.require_site(replace(served.site, secret=wrong))


@pytest.fixture
def told(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[served_site.Received]:
    with served_site.webhook() as received:
        monkeypatch.setenv("HOOK", received.url)
        yield received


@pytest.mark.proof
def test_the_block_of_a_recipient_is_found_among_many(
    served: Served, told: served_site.Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect returns at most 200 blocks at once. Names of mergegate's blocks come after those of another team."""
    served.deploy(nights(DEMO, notify=[{"to": "webhook", "address": "$HOOK"}]))
    kind = served.client.read_block_type_by_slug("secret")
    schema = served.client.get_most_recent_block_schema_for_block_type(kind.id)
    assert schema is not None
    for number in range(200):
        document = BlockDocumentCreate(
            name=f"another-team-{number}", data={"value": "x"}, block_type_id=kind.id, block_schema_id=schema.id
        )
        served.client.create_block_document(document)

    def of_mergegate() -> list[str]:
        names = [block.name or "" for block in served.client.read_block_documents(limit=200, offset=200)]
        return [name for name in names if name.startswith("mergegate-")]

    assert len(of_mergegate()) == 1
    monkeypatch.delenv("HOOK")  # the address is only in the block
    assert "made" not in served.deploy(nights(DEMO, notify=[{"to": "webhook", "address": "$HOOK"}])).values()
    served.deploy(nights(DEMO))
    assert of_mergegate() == []


@pytest.mark.proof
def test_each_recipient_is_notified_once_per_occasion(served: Served, told: served_site.Received) -> None:
    """Eight runs change state at the same time, and each message arrives exactly once as plain text."""
    file = nights(DEMO, notify=[{"to": "webhook", "address": "$HOOK"}])
    assert "made" in served.deploy(file).values()
    deployment = served.deployment()
    runs = [served.client.create_flow_run_from_deployment(deployment.id) for _ in range(8)]
    endings = (
        ("Released", StateType.COMPLETED, "released demo 123\napproved by somebody", "✓ demo: released demo 123"),
        ("Refused", StateType.FAILED, REFUSAL, "✗ demo refused: reverse lost 22.2 points"),
        ("Invalid", StateType.FAILED, "profile.yaml: unknown key", "✗ demo invalid: profile.yaml: unknown key"),
        ("Failed", StateType.FAILED, QUOTES, f"✗ demo failed: {QUOTES}"),
        ("Crashed", StateType.CRASHED, "the run has been silent", "✗ demo crashed: the run has been silent"),
        ("Late", StateType.SCHEDULED, None, "! demo is late: no worker has started it"),
        ("Suspended", StateType.PAUSED, None, "? demo waits for approval: mergegate approve demo"),
        ("Cancelled", StateType.CANCELLED, None, ""),
    )
    for run, (name, kind, message, _) in zip(runs, endings, strict=True):
        state: State[object] = State(type=kind, name=name, message=message)
        served.client.set_flow_run_state(run.id, state, force=True)
    wanted = {
        f"{text} · {prefect_api.page_of_run(run.id, served.site.address)}"
        for run, (*_, text) in zip(runs, endings, strict=True)
        if text
    }
    served_site.until(lambda: wanted <= set(told.texts()), f"{wanted} in\n{told.texts()}")
    assert sorted(text for text in told.texts() if text in wanted) == sorted(wanted)

    assert set(served.deploy(file).values()) == {"unchanged"}
    gone = served.deploy(nights(DEMO))
    assert [name for name, change in gone.items() if change == "removed"] == sorted(
        f"mergegate: notify webhook of {occasion}" for occasion in ("released", "refused", "failed", "late", "approval")
    )
    assert not [one for one in served.client.read_block_documents(limit=200) if "webhook-hook" in (one.name or "")]


UNKNOWN_KEY = ("profiles/bad.yaml", "name: support\nrecepe: x\n", "Invalid", "unknown key 'recepe'", "support · ")


@pytest.mark.proof
@pytest.mark.parametrize(
    ("profile", "content", "state", "reason", "name"),
    [
        (FORBIDDEN["profile"], None, "Refused", "does not permit sharing modified", "demo-forbidden · ties of 2"),
        pytest.param(*UNKNOWN_KEY, marks=pytest.mark.proof),
    ],
)
def test_a_refused_run_does_not_look_like_a_crash_in_logs(
    served_alone: Served, profile: str, content: str | None, state: str, reason: str, name: str
) -> None:
    served = served_alone
    served.deploy(nights({"profile": DEMO["profile"]}))
    if content is not None:
        (served.root / profile).write_text(content)
    served.run("prefect", "deployment", "run", "release/release", "-p", f'profile="{profile}"')
    log = served.run(*served_site.MERGEGATE, "worker", "--once")
    (run,) = [one for one in served.client.read_flow_runs() if one.parameters == {"profile": profile}]
    assert run.state is not None
    assert (run.state.type, run.state.name) == (StateType.FAILED, state)
    assert reason in str(run.state.message)
    said = "\n".join([log, *(line.message for line in served.client.read_logs())])
    assert f"Finished in state {state}" in said
    assert reason in said
    for word in ("Traceback", "NoneType", "exception", "Unexpected", "exited with status code"):
        assert word not in said, said
    assert run.name.startswith(name)
    page = served.root / ".mergegate" / "reports" / f"{name.split()[0]}.html"
    assert state in page.read_text(encoding="utf-8")


@pytest.mark.proof
def test_one_of_several_missed_scheduled_runs_is_made_up_for(served_alone: Served) -> None:
    """After two scheduled runs without a worker, one is executed and the other is cancelled."""
    served = served_alone
    served.deploy(nights({"profile": "profiles/demo-forbidden.yaml", "schedule": "0 3 * * *", "timezone": "UTC"}))
    deployment = served.deployment("release/demo-forbidden")
    missed = {served.scheduled_run(deployment, -days, "auto-scheduled") for days in (1, 2)}
    for _ in missed:  # each worker takes one run because there is one slot
        served.run(*served_site.MERGEGATE, "worker", "--once")
    assert Counter(served.client.read_flow_run(one).state_name for one in missed) == {"Refused": 1, "Cancelled": 1}
    # A run that a user starts is always executed.
    asked_for = served.scheduled_run(deployment, -1)
    served.run(*served_site.MERGEGATE, "worker", "--once")
    assert served.client.read_flow_run(asked_for).state_name == "Refused"
