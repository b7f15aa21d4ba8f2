"""Only a run itself can use its embedded API, and its database is a copy of the user's empty one."""

from __future__ import annotations

import shutil
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from socketserver import BaseRequestHandler, TCPServer

import prefect
import pytest
from api_start import start_api
from loopback import answering
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_HOME, get_current_settings, temporary_settings

from mergegate.flows.prefect_api import embedded_api, local_api
from mergegate.merge_core.errors import InvalidInput

FOREIGN = "http://somebody.example"


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


@pytest.mark.story  # a new database needs about a hundred migrations
@pytest.mark.parametrize("kept", ["intact", "no database", "a table is gone"])
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


@contextmanager
def server_of_another_protocol() -> Iterator[str]:
    """Yield the URL of a server that greets its clients like a mail server."""

    class Greeting(BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1024)
            self.request.sendall(b"220 mail.example ESMTP\r\n")

    with answering(TCPServer(("127.0.0.1", 0), Greeting)) as server:
        yield f"http://127.0.0.1:{server.server_address[1]}/api"


def require_refusal(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_api, "configured_url", lambda: url)
    with pytest.raises(InvalidInput, match="no server answers"), local_api():
        pass


def test_a_configured_address_with_an_invalid_port_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_refusal("http://127.0.0.1:abc/api", monkeypatch)


def test_a_configured_server_of_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with server_of_another_protocol() as url:
        require_refusal(url, monkeypatch)


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
    with (
        temporary_settings({PREFECT_HOME: tmp_path}),
        pytest.raises(RuntimeError, match="did not start"),
        local_api(),
    ):
        pass
    assert len(starts) == (2 if exists else 1)
