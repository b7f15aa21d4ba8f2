"""The proxy against real servers: clients' view, copied requests, records and faults."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from asgi_server import serving_asgi
from openai_server import EchoServer, serving
from samples import sampled_rows
from sqlalchemy.exc import OperationalError
from typer.testing import CliRunner

from mergegate.flows.cli.app import app
from mergegate.flows.cli.shadow import ProxyServer
from mergegate.tasks.shadow import FollowedRouting, Routing, ShadowSettings, read_routing
from mergegate.tasks.shadow.routing import goes_to_candidate
from mergegate.tasks.shadow.traffic import Recorder, Records, ShadowProxy, open_records, open_redaction

NOBODY = "http://127.0.0.1:9/v1"  # The "discard" port, on which no server listens.
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FAULTS = ["", "dead", "error", "garbage", "hang", "cut", "stall"]
SECRET = "sk-verysecret0123456789"


@dataclass(frozen=True)
class RunningProxy:
    """A running proxy with its servers and a client."""

    url: str
    parent: EchoServer
    candidate: EchoServer
    client: httpx.Client
    directory: Path
    proxy: ShadowProxy

    def records(self) -> Records:
        """Open the records; call it after the proxy has stopped and written everything."""
        return open_records(database_url(self.directory))

    def status(self) -> dict[str, Any]:
        """Return the proxy's own status."""
        return dict(self.client.get(f"{self.url}/shadow/status").json())


def database_url(directory: Path) -> str:
    return f"sqlite:///{directory / 'records.sqlite'}"


def shadow_settings(parent: str, candidate: str, own: Any = None, **more: Any) -> ShadowSettings:
    """Return a profile's ``shadow`` section that copies every request by default.

    ``own`` holds additional settings of the candidate's server.
    """
    judge = {"model": "judge", "url": NOBODY}
    servers = {"parent": {"url": parent}, "candidate": {"url": candidate, **(own or {})}}
    return ShadowSettings.model_validate({**servers, "judge": judge, "share": 1.0, **more})


@contextmanager
def running_proxy(
    directory: Path, *, parent: str = "", candidate: str = "", connect: Any = None, **more: Any
) -> Iterator[RunningProxy]:
    """Run servers with these faults (``dead``: no server listens) behind a proxy with these settings."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    echo = EchoServer("parent", parent), EchoServer("candidate", candidate)
    with serving(echo[0]) as ours, serving(echo[1]) as theirs:
        urls = NOBODY if parent == "dead" else ours.url, NOBODY if candidate == "dead" else theirs.url
        settings = shadow_settings(*urls, **more)
        recorder = Recorder(
            connect or (lambda: open_records(database_url(directory))),
            open_redaction(settings.redact, settings.redactor),
            settings,
        )
        routing = Routing(candidate="v1", mode=settings.mode, share=settings.share, since=0.0)
        proxy = ShadowProxy(settings, FollowedRouting(directory / "routing.json", routing), recorder)
        with serving_asgi(proxy.application()) as url, httpx.Client(timeout=60, trust_env=False) as client:
            try:
                yield RunningProxy(url, ours, theirs, client, directory, proxy)
            finally:
                ours.released.set()
                theirs.released.set()


def question(text: str = "hello", path: str = CHAT, **more: Any) -> dict[str, Any]:
    """Return the body of a request."""
    key, value = ("prompt", text) if path == COMPLETIONS else ("messages", [{"role": "user", "content": text}])
    return {"model": "m", key: value, **more}


def seen(client: httpx.Client, url: str, path: str, content: bytes, **headers: str) -> tuple[Any, ...]:
    """Return everything that a client can see of an answer, except headers that belong to one connection."""
    given = {"content-type": "application/json", "x-request-id": "r1", **headers}
    try:
        with client.stream("POST", url + path, content=content, headers=given) as answer:
            body = bytearray()
            try:
                for piece in answer.iter_raw():
                    body += piece
                end = "whole"
            except httpx.HTTPError as error:
                end = type(error).__name__
            own = (b"transfer-encoding", b"connection", b"x-request-id")
            named = sorted((name.lower(), value) for name, value in answer.headers.raw if name.lower() not in own)
            return answer.status_code, named, bytes(body), end
    except httpx.HTTPError as error:
        return (type(error).__name__,)


CONTENTS = [
    json.dumps(question()).encode(),
    json.dumps(question(stream=True)).encode(),
    json.dumps(question('ü → \u2028 "quoted"', stream=True), ensure_ascii=False).encode(),
    b'{"model":"m",  "messages":[{"role":"user","content":"twice"}], "n":1, "n":1}',
    b"no JSON at all \xff\x00",
    b"[1, 2]" * 1000,
]


def ask(one: RunningProxy) -> httpx.Response:
    return one.client.post(one.url + CHAT, json=question())


@pytest.mark.story
@pytest.mark.parametrize("fault", FAULTS)
def test_the_candidate_never_affects_the_client_in_mirror_mode(tmp_path: Path, fault: str) -> None:
    with running_proxy(tmp_path, candidate=fault) as one:
        for content in CONTENTS:
            direct = seen(one.client, one.parent.root, CHAT, content)
            assert seen(one.client, one.url, CHAT, content) == direct
        one.candidate.released.set()


@pytest.mark.parametrize(
    ("fault", "stream"),
    sampled_rows(product(("error", "garbage", "cut"), (False, True)), [("error", False), ("cut", True)]),
)
def test_faults_of_the_parent_reach_the_client(tmp_path: Path, fault: str, stream: bool) -> None:
    content = json.dumps(question(stream=stream)).encode()
    with running_proxy(tmp_path, parent=fault) as one:
        assert seen(one.client, one.url, CHAT, content) == seen(one.client, one.parent.root, CHAT, content)


def test_an_unavailable_parent_gives_an_openai_error(tmp_path: Path) -> None:
    with running_proxy(tmp_path, parent="dead") as one:
        answer = ask(one)
    assert answer.status_code == 502
    assert "did not answer" in answer.json()["error"]["message"]
    with one.records() as records:
        assert [(row.arm, row.role, row.error) for row in records.arms("v1")] == [("parent", "answer", "ConnectError")]


@pytest.mark.parametrize(("path", "stream"), [(CHAT, True), (COMPLETIONS, False)])
def test_a_pair_is_recorded_with_request_and_both_answers(tmp_path: Path, path: str, stream: bool) -> None:
    with running_proxy(tmp_path) as one:
        body = question("how?", path, stream=stream)
        answer = one.client.post(one.url + path, json=body, headers={"x-session-id": "s", "x-request-id": "r7"})
        direct = one.client.post(one.candidate.root + path, json=body)
    with one.records() as records:
        (pair,) = records.pairs("v1")
        rows = records.arms("v1")
    assert json.loads(pair.parent.request) == body
    assert (pair.parent.response, pair.parent.status) == (answer.content, 200)
    assert (pair.candidate.response, pair.candidate.status) == (direct.content, 200)
    assert [(row.arm, row.role) for row in rows] == [("parent", "answer"), ("candidate", "copy")]
    assert answer.headers["x-request-id"] == "r7"
    assert "r7" in {request.headers["x-request-id"] for request in one.candidate.log}


def test_other_endpoints_are_forwarded_once(tmp_path: Path) -> None:
    with running_proxy(tmp_path) as one:
        for method in ("GET", "PUT", "HEAD"):
            for path in ("/v1/models/a%2Fb?x=%20y", "/health", "/v1/files"):
                sent = b"content" if method == "PUT" else None
                direct = one.client.request(method, one.parent.root + path, content=sent)
                passed = one.client.request(method, one.url + path, content=sent)
                assert (passed.status_code, passed.content) == (direct.status_code, direct.content)
                twice = [(request.method, request.path, request.body) for request in one.parent.log[-2:]]
                assert twice == [(method, path, sent or b"")] * 2
        assert one.candidate.log == []


def test_a_hanging_candidate_delays_no_client_and_copies_are_bounded(tmp_path: Path) -> None:
    with running_proxy(tmp_path, candidate="hang", max_copies=2) as one:
        for _ in range(5):
            assert ask(one).status_code == 200
        while one.status()["counts"].get("not copied: too many copies", 0) < 3:
            pass
        status = one.status()
    assert status["copies_in_flight"] == 2
    assert status["counts"]["not copied: too many copies"] == 3


def test_too_many_concurrent_requests_get_a_retry_after(tmp_path: Path) -> None:
    with running_proxy(tmp_path, parent="hang", max_requests=1) as one, httpx.Client(timeout=60) as other:
        with one.client.stream("GET", f"{one.url}/v1/models") as _:
            pass  # This request is answered, because only chat requests hang.
        while one.status()["in_flight"]:
            pass  # The client receives the whole answer a moment before the proxy has finished with it.
        waiting = threading.Thread(target=lambda: other.post(one.url + CHAT, json=question()))
        waiting.start()
        while one.status()["in_flight"] == 0:
            pass
        refused = ask(one)
        one.parent.released.set()
        waiting.join()
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "too many" in refused.json()["error"]["message"]


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
LONG_BODY = json.dumps(question("x" * (12 << 20))).encode()
SLOW = {  # What a client sends first, what it repeats, and whether it gets an answer.
    "body": (HEAD + b"Content-Length: 100\r\n\r\n{", b"", True),
    "no body": (HEAD + b"Content-Length: 100\r\n\r\n", b"", True),
    "chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", b"1\r\n \r\n", True),
    "drops": (HEAD + b"Content-Length: 100000\r\n\r\n{", b" ", True),
    "upload": (b"PUT /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{", b" ", True),
    "reader": (HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(LONG_BODY), LONG_BODY), b"", False),
}


@pytest.mark.parametrize(("kind", "limit"), list(product(SLOW, ({"max_requests": 2}, {"client_timeout": 1.0}))))
def test_slow_clients_make_room_for_others_and_are_dropped_in_time(tmp_path: Path, kind: str, limit: Any) -> None:
    first, repeated, is_answered = SLOW[kind]
    with running_proxy(tmp_path, **limit) as one, ExitStack() as stack:
        slow = [stack.enter_context(socket.socket()) for _ in range(2)]
        for connection in slow:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", int(one.url.rpartition(":")[2])))
            with suppress(OSError):  # On a busy machine, even a long body may arrive too slowly.
                connection.sendall(first)
        while (status := one.status())["in_flight"] < 2 and not status["counts"].get("answered 408: slow client"):
            pass
        ended = time.monotonic() + 20
        while one.status()["in_flight"] if "client_timeout" in limit else ask(one).status_code == 503:
            assert time.monotonic() < ended
            with suppress(OSError):
                slow[0].sendall(repeated)
                slow[1].sendall(repeated)
            time.sleep(0.05)
        if is_answered and "client_timeout" in limit:
            assert all(connection.recv(12) == b"HTTP/1.1 408" for connection in slow)


def test_half_sent_headers_cannot_use_up_all_connections(tmp_path: Path) -> None:
    with (
        running_proxy(tmp_path) as one,
        serving_asgi(one.proxy, partial(ProxyServer, max_waiting=2)) as url,
        ExitStack() as stack,
    ):
        slow = []
        for _ in range(4):
            slow.append(stack.enter_context(socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))))
            slow[-1].sendall(HEAD)
            time.sleep(0.25)  # The server orders connections ten times per second.
        assert [connection.recv(1) for connection in slow[:2]] == [b"", b""]
        slow[3].sendall(b"Content-Length: 2\r\n\r\n{}")
        assert slow[3].recv(12).startswith(b"HTTP/1.1 ")


@pytest.mark.parametrize(
    ("key", "path", "status", "sent"),
    [
        ("Bearer ours", CHAT, 200, "operator"),
        ("bearer theirs", COMPLETIONS, 200, "operator"),
        ("Bearer ours", "/v1/models", 200, "operator"),
        *(("Bearer ours", path, 200, "") for path in ("/v1/files", "/v1/%63hat/completions", "/v1/models/", "/")),
        *((key, path, 401, None) for key in ("", "Bearer", "Bearer operator", "Bearer ourss") for path in (CHAT, "/")),
    ],
)
def test_the_operators_key_is_sent_only_for_its_paths_and_for_clients_with_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, path: str, status: int, sent: str | None
) -> None:
    for name, value in {"OPERATOR_KEY": "operator", "CLIENT_KEYS": "ours theirs"}.items():
        monkeypatch.setenv(name, value)
    with running_proxy(tmp_path, own={"api_key_env": "OPERATOR_KEY"}, client_keys_env="CLIENT_KEYS") as one:
        one.proxy._routing.decide("promoted", "good")
        headers = {"api-key": "ours"} if key == "bearer theirs" else {}
        body = question("hello", path if path == COMPLETIONS else CHAT)
        answer = one.client.post(one.url + path, json=body, headers={"authorization": key, **headers})
        assert answer.status_code == status
        assert [request.token for request in one.candidate.log] == ([] if sent is None else [sent])
        assert not {"api-key", "x-api-key"} & {name for each in one.candidate.log for name in each.headers}


@pytest.mark.parametrize(("keys", "status"), [("ours theirs", 200), ("theirs\nours", 200), ("no", 401), ("", 401)])
def test_a_replay_sends_the_first_key_of_a_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: str, status: int
) -> None:
    monkeypatch.setenv("CLIENT_KEYS", "ours theirs")
    (file := tmp_path / "traffic.jsonl").write_text('{"prompt": "hello"}')
    with running_proxy(tmp_path, client_keys_env="CLIENT_KEYS") as one:
        monkeypatch.setenv("CLIENT_KEYS", keys)
        sent = ["--client-keys-env", "CLIENT_KEYS"] if keys else []
        result = CliRunner().invoke(app, ["shadow", "replay", str(file), "--to", one.url, "--json", *sent])
    assert json.loads(result.stdout)["statuses"] == {str(status): 1}
    assert [request.token for request in one.parent.log] == ([keys.split()[0]] if status == 200 else [])


@pytest.mark.story
@pytest.mark.parametrize("fault", ["dead", "error"])
def test_the_parent_replaces_a_failing_candidate_and_both_are_recorded(tmp_path: Path, fault: str) -> None:
    with running_proxy(tmp_path, candidate=fault, mode="split") as one:
        answer = one.client.post(one.url + CHAT, json=question("who?"))
    assert "parent echo who?" in answer.text
    with one.records() as records:
        rows = [(row.arm, row.role, row.fallback) for row in records.arms("v1")]
        assert rows == [("candidate", "answer", True), ("parent", "answer", True)]
        assert records.counts("v1")["fallbacks"] == 1
        assert list(records.pairs("v1")) == []


@pytest.mark.story
def test_a_candidate_that_fails_too_often_is_killed_immediately(tmp_path: Path) -> None:
    with running_proxy(tmp_path, candidate="error", kill_switch={"window": 20, "max_error_percent": 10}) as one:
        for _ in range(30):
            ask(one)
        routing = read_routing(tmp_path / "routing.json")
        asked = len(one.candidate.log)
        ask(one)
    assert routing is not None
    assert routing.serving == "killed"
    assert "failed" in routing.why
    assert len(one.candidate.log) == asked < 30


@pytest.mark.parametrize(("serving", "answers", "copied"), [("promoted", "candidate", 0), ("watch", "parent", 1)])
def test_the_proxy_follows_the_routing_file(tmp_path: Path, serving: Any, answers: str, copied: int) -> None:
    with running_proxy(tmp_path) as one:
        one.proxy._routing.decide(serving, "somebody said so")
        said = ask(one)
    assert f"{answers} echo" in said.text
    with one.records() as records:
        assert len(list(records.pairs("v1"))) == copied


def test_each_server_may_use_its_own_model_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_CANDIDATE", "own-key")
    monkeypatch.setenv("KEY_OF_CLIENTS", "client")
    own = {"model": "merge-7", "api_key_env": "KEY_OF_CANDIDATE"}
    with running_proxy(tmp_path, own=own, client_keys_env="KEY_OF_CLIENTS") as one:
        one.client.post(one.url + CHAT, json=question(), headers={"authorization": "Bearer client"})
    assert (one.candidate.bodies[0]["model"], one.candidate.log[0].token) == ("merge-7", "own-key")
    assert one.parent.log[0].token == "client"


def test_a_secret_is_in_no_record_log_or_status(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    patterns = [r"sk-[A-Za-z0-9]+"]
    with running_proxy(tmp_path, redact=patterns) as one:
        for stream in (False, True):
            body = question(f"my key is {SECRET}", stream=stream, user=SECRET)
            headers = {"authorization": f"Bearer {SECRET}"}
            headers |= dict.fromkeys(("cookie", "x-request-id", "x-session-id"), SECRET)
            answer = one.client.post(f"{one.url}{CHAT}?key={SECRET}", json=body, headers=headers)
            assert answer.status_code == 200
        status = json.dumps(one.status())
    kept = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert SECRET[3:].encode() not in kept
    assert SECRET not in status + caplog.text
    with one.records() as records:
        assert len(list(records.pairs("v1"))) == 2


@pytest.mark.story
def test_clients_are_answered_without_a_database_and_lost_records_are_counted(tmp_path: Path) -> None:
    is_broken = True

    def connect() -> Any:
        if is_broken:
            raise OperationalError("insert", {}, Exception("disk is full"))
        return open_records(database_url(tmp_path))

    with running_proxy(tmp_path, connect=connect) as one:
        for _ in range(3):
            assert ask(one).status_code == 200
        while one.status()["counts"].get("not recorded: database", 0) < 6:
            pass
        is_broken = False
        ask(one)
    with one.records() as records:
        assert records.counts("v1")["not recorded: database"] == 6
        assert len(list(records.pairs("v1"))) == 1


@pytest.mark.story
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_each_user_stays_on_the_arm_of_the_session(tmp_path: Path, share: float) -> None:
    with running_proxy(tmp_path, mode="split", share=share) as one:
        for user in [f"user-{number}" for number in range(40)] * 2:
            said = one.client.post(one.url + CHAT, json=question(), headers={"x-session-id": user})
            is_candidate = goes_to_candidate(f"session {user}", "v1", share)
            assert said.headers["x-served-by"] == ("candidate" if is_candidate else "parent")
