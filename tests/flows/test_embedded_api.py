"""Only a run itself can use its embedded API, and its database is a copy of the user's empty one."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from socketserver import BaseRequestHandler, TCPServer

import prefect
import pytest
from loopback import answering
from patience import HANG_S
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_HOME, get_current_settings, temporary_settings
from samples import sampled

from mergegate.flows.prefect_api import embedded_api, local_api
from mergegate.merge_core.errors import InvalidInput

FOREIGN = "http://somebody.example"
_START = """
import asyncio, sys
from pathlib import Path
from mergegate.flows.prefect_api import configure, local_api
own_loop = asyncio.new_event_loop()
asyncio.set_event_loop(own_loop)
configure(Path(sys.argv[1]))
with local_api():
    from prefect.client.orchestration import get_client
    with get_client(sync_client=True) as client:
        print("runs:", len(client.read_flow_runs()))
assert asyncio.get_event_loop_policy().get_event_loop() is own_loop
"""


def start_api(home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Start the API on a home, and print how many runs it has recorded. It must leave the event loop of its caller."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MERGEGATE_"))}
    return subprocess.run(
        [sys.executable, "-c", _START, str(home)],
        env={**inherited, "PYTHONPATH": str(Path(__file__).parents[2]), **variables},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def asked(path: str, method: str, headers: dict[str, str]) -> tuple[int, str | None]:
    """Send a request and return its status and the origin that may read the response."""
    url = f"{get_current_settings().api.url}/{path}"
    request = urllib.request.Request(url, data=b"{}", method=method, headers={**headers, "Origin": FOREIGN})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.headers.get("Access-Control-Allow-Origin")
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get("Access-Control-Allow-Origin")


@pytest.mark.parametrize("path", ["flow_runs/filter", "block_documents/filter", "deployments/filter", "flows/"])
@pytest.mark.parametrize("secret", [{}, {"Authorization": "Basic bWVyZ2VnYXRlOmd1ZXNzZWQ="}], ids=["none", "guessed"])
def test_without_the_secret_nothing_is_read_or_made(prefect_api: None, path: str, secret: dict[str, str]) -> None:
    assert asked(path, "POST", {"Content-Type": "application/json", **secret}) == (401, None)


def test_no_page_of_another_origin_is_let_in(prefect_api: None) -> None:
    status, allowed = asked("flow_runs/filter", "OPTIONS", {"Access-Control-Request-Method": "POST"})
    assert status >= 400
    assert allowed is None


def test_the_run_itself_knows_the_secret(prefect_api: None) -> None:
    with get_client(sync_client=True) as client:
        assert isinstance(client.read_flow_runs(), list)


def tables(database: Path) -> set[str]:
    with closing(sqlite3.connect(database)) as connection:
        return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


@pytest.mark.proof  # a new database needs about a hundred migrations
@pytest.mark.parametrize("kept", sampled(["intact", "no database", "a table is gone"], ["intact"], pytest.mark.proof))
def test_a_new_project_copies_the_empty_database_of_the_user(prefect_database: Path, tmp_path: Path, kept: str) -> None:
    empty = tmp_path / "cache" / "mergegate" / f"prefect-{prefect.__version__}.db"
    empty.parent.mkdir(parents=True)
    shutil.copy(prefect_database, empty)
    if kept == "no database":
        empty.write_bytes(b"no database" * 1000)
    else:
        with closing(sqlite3.connect(empty)) as connection:
            connection.execute("CREATE TABLE mark (id)" if kept == "intact" else "DROP TABLE log")
    done = start_api(tmp_path / "home", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (0, "runs: 0\n"), done.stderr
    created = tables(tmp_path / "home" / "prefect" / "prefect.db")
    assert "log" in created
    assert ("mark" in created) == (kept == "intact")
    if kept == "no database":
        assert tables(empty) == tables(prefect_database)
    else:
        assert empty.exists() == (kept == "intact")


class MailGreeting(BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(1024)
        self.request.sendall(b"220 mail.example ESMTP\r\n")


@pytest.mark.parametrize("port", ["of a mail server", "abc"])
def test_a_configured_address_without_a_prefect_server_is_refused(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    with answering(TCPServer(("127.0.0.1", 0), MailGreeting)) as server:
        url = f"http://127.0.0.1:{port if port == 'abc' else server.server_address[1]}/api"
        monkeypatch.setattr(embedded_api, "configured_url", lambda: url)
        with pytest.raises(InvalidInput, match="no server answers"), local_api():
            pass


@pytest.mark.parametrize("exists", [True, False], ids=["damaged database", "no database"])
def test_an_api_that_never_starts_raises_a_public_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    """The API starts at most twice: on the existing database, and on a new one."""
    database = tmp_path / "prefect.db"
    if exists:
        database.touch()
    starts = []

    def fail(database: Path | None) -> None:
        starts.append(database)
        raise embedded_api.ApiNotStarted("Prefect's API did not start")

    monkeypatch.setattr(embedded_api, "configured_url", lambda: None)
    monkeypatch.setattr(embedded_api, "_database", lambda: database)
    monkeypatch.setattr(embedded_api, "_create_database", lambda database: None)
    monkeypatch.setattr(embedded_api, "_start_server", fail)
    with temporary_settings({PREFECT_HOME: tmp_path}), pytest.raises(RuntimeError, match="did not start"), local_api():
        pass
    assert len(starts) == (2 if exists else 1)
