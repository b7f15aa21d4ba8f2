"""``mergegate shadow PROFILE`` runs the proxy before two servers, ``mergegate shadow replay FILE`` sends it traffic."""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path

from rich.console import Console
from sqlalchemy.exc import SQLAlchemyError

from mergegate.flows.cli.output import print_answer
from mergegate.flows.cli.styles import short_path
from mergegate.flows.profile import Profile, load_profile
from mergegate.flows.watching import shadow_settings
from mergegate.merge_core.errors import CannotDecide, InvalidInput, Refused
from mergegate.tasks.shadow import (
    FollowedRouting,
    Routing,
    ShadowSettings,
    read_routing,
    records_url,
    routing_file,
    write_routing,
)
from mergegate.tasks.shadow.records import open_records
from mergegate.tasks.shadow.traffic import Recorder, ReplaySettings, ShadowProxy, open_redaction, read_traffic, replay

_STOP_S = 5
# longer than clients keep a connection: the server must not close one before its reuse
_KEEP_ALIVE_S = 75


def serve_shadow(profile: Path, candidate: str | None, console: Console, *, again: bool = False) -> None:
    """Answer requests until the process is stopped.

    Args:
        candidate: Version to watch. Default: the current release at the target, or if that is unknown, the version
            watched last.
        again: Whether to watch it from now on, even if there was a decision before.

    Raises:
        InvalidInput: The profile has no section ``shadow``, a key is not set, or the address is in use.
    """
    import uvicorn

    loaded = load_profile(profile)
    settings = shadow_settings(loaded)
    url, file = records_url(loaded.name, settings), routing_file(loaded.name)
    redaction = open_redaction(settings.redact, settings.redactor)
    routing = _routing(loaded, settings, candidate, file, again)
    _require_free(*settings.address)
    recorder = Recorder(
        lambda: open_records(url),
        redaction,
        queue_size=settings.record_queue,
        max_body_bytes=settings.max_body_bytes,
        retention_days=settings.retention_days,
    )
    proxy = ShadowProxy(settings, FollowedRouting(file, routing), recorder)
    host, port = settings.address
    console.print(
        f"{loaded.name}: {routing.candidate} is watched ({routing.mode}, {routing.share:.0%})"
        if routing.watching
        else f"{loaded.name}: {routing.candidate} is {routing.serving}: {routing.why}"
    )
    console.print(f"  parent     {settings.parent.url}\n  candidate  {settings.candidate.url}")
    console.print(f"  records    {_where(url)}{_reachable(url)}")
    console.print(f"  listening  http://{settings.listen}/v1   status: http://{settings.listen}/shadow/status")
    # a server that stops midway is recorded, so it needs no traceback
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    uvicorn.run(
        proxy.application(),
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_STOP_S,
    )


def replay_file(
    file: Path,
    to: str,
    console: Console,
    as_json: bool,
    *,
    model: str,
    header: str,
    rate: float,
    at_once: int,
    rounds: int,
    stream: bool,
) -> None:
    """Send the requests of a file to a proxy, and print the responses."""
    if not file.is_file():
        raise InvalidInput(str(file), found="no such file", expected="jsonl of requests or prompts")
    traffic = read_traffic(file, model)
    done = replay(traffic, to.rstrip("/"), ReplaySettings(header, rate, at_once, rounds, stream))
    counts = ", ".join(f"{count} with {response}" for response, count in sorted(done.statuses.items()))
    message = f"{done.request_count} requests in {done.seconds:.1f} s: {counts}"
    if as_json:
        print_answer(
            "replayed", message, {"sent": done.request_count, "statuses": dict(done.statuses), "seconds": done.seconds}
        )
    else:
        console.print(message)


def _routing(profile: Profile, settings: ShadowSettings, candidate: str | None, file: Path, again: bool) -> Routing:
    """Return the routing from now on: unchanged, or that of a new candidate."""
    previous = read_routing(file)
    version = candidate or _released(profile) or (previous.candidate if previous else "candidate")
    settings_now = {"mode": settings.mode, "share": settings.share}
    if previous is not None and previous.candidate == version and not again:
        routing = previous.model_copy(update=settings_now)
    else:
        routing = Routing(candidate=version, since=time.time(), mode=settings.mode, share=settings.share)
    write_routing(file, routing)
    return routing


def _released(profile: Profile) -> str | None:
    """Return the version at the profile's target, or None. An unavailable target must not stop the proxy."""
    try:
        current = profile.publish.current_release(profile.root) if profile.publish else None
    except (Refused, CannotDecide):
        return None
    return current.name if current else None


def _where(url: str) -> str:
    return short_path(Path(url.removeprefix("sqlite:///"))) if url.startswith("sqlite") else url


def _reachable(url: str) -> str:
    """Return why records are lost for now, or an empty string. The proxy keeps answering without a database."""
    try:
        open_records(url).close()
    except (SQLAlchemyError, OSError) as error:
        return f"  (not reachable now: {type(error).__name__}; what is not recorded is counted)"
    return ""


def _require_free(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InvalidInput(
                f"shadow.listen: {host}:{port}",
                found=(error.strerror or "cannot be had").lower(),
                expected="an address of this machine that nobody listens on",
            ) from None
