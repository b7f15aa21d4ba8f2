"""Run a proxy in front of two stub servers, with records in a directory of the test."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from stub_openai import Stub, serving, stub

from mergegate.tasks.shadow import FollowedRouting, Routing, ShadowSettings
from mergegate.tasks.shadow.records import Records, open_records
from mergegate.tasks.shadow.traffic import Recorder, ShadowProxy, open_redaction

NOBODY = "http://127.0.0.1:9"  # The "discard" port, on which no server listens.
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class RunningProxy:
    """A running proxy with its servers and a client."""

    url: str
    parent: Stub
    candidate: Stub
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
    judge = {"model": "judge", "url": f"{NOBODY}/v1"}
    servers = {"parent": {"url": f"{parent}/v1"}, "candidate": {"url": f"{candidate}/v1", **(own or {})}}
    return ShadowSettings.model_validate({**servers, "judge": judge, "share": 1.0, **more})


@contextmanager
def running_proxy(
    directory: Path, *, parent: str = "", candidate: str = "", connect: Any = None, **more: Any
) -> Iterator[RunningProxy]:
    """Run servers with these faults (``dead``: no server listens) behind a proxy with these settings."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    with stub("parent", parent) as ours, stub("candidate", candidate) as theirs:
        settings = shadow_settings(
            NOBODY if parent == "dead" else ours.url, NOBODY if candidate == "dead" else theirs.url, **more
        )
        recorder = Recorder(
            connect or (lambda: open_records(database_url(directory))),
            open_redaction(settings.redact, settings.redactor),
            queue_size=settings.record_queue,
            max_body_bytes=settings.max_body_bytes,
            retention_days=settings.retention_days,
        )
        routing = Routing(candidate="v1", mode=settings.mode, share=settings.share, since=0.0)
        proxy = ShadowProxy(settings, FollowedRouting(directory / "routing.json", routing), recorder)
        with serving(proxy.application()) as url, httpx.Client(timeout=60, trust_env=False) as client:
            yield RunningProxy(url, ours, theirs, client, directory, proxy)
            ours.release()


def question(text: str = "hello", path: str = CHAT, **more: Any) -> dict[str, Any]:
    """Return the body of a request."""
    said: dict[str, Any] = (
        {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    )
    return {"model": "m", **said, **more}
