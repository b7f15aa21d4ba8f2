"""``mergegate shadow PROFILE``: the proxy before two servers; ``mergegate shadow replay FILE``: traffic for it."""

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
from mergegate.merge_core.errors import InvalidInput, Refused
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
from mergegate.tasks.shadow.traffic import Recorder, ShadowProxy, open_redaction, read_traffic, replay

_STOP_S = 5
_KEEP_ALIVE_S = 75  # longer than clients keep a connection: else one is closed as it is used again


def serve_shadow(profile: Path, candidate: str | None, console: Console, *, again: bool = False) -> None:
    """Answer requests until somebody ends it.

    Args:
        candidate: The version that is watched; None: what is released at the target. Where that cannot be told, or
            nothing is: the one that was watched last.
        again: Watch it from now on, whatever was decided of it before.

    Raises:
        InvalidInput: for a profile without ``shadow``, a key that is not set, an address that is taken.
    """
    import uvicorn

    read = load_profile(profile)
    settings = shadow_settings(read)
    url, file = records_url(read.name, settings), routing_file(read.name)
    redaction = open_redaction(settings.redact, settings.redact_with)
    routing = _routing(read, settings, candidate, file, again)
    _require_free(*settings.address)
    recorder = Recorder(
        lambda: open_records(url),
        redaction,
        most=settings.queue,
        body_limit=settings.body_limit,
        keep_days=settings.keep_days,
    )
    proxy = ShadowProxy(settings, FollowedRouting(file, routing), recorder)
    host, port = settings.address
    console.print(
        f"{read.name}: {routing.candidate} is watched ({routing.mode}, {routing.share:.0%})"
        if routing.watching
        else f"{read.name}: {routing.candidate} is {routing.serving}: {routing.why}"
    )
    console.print(f"  parent     {settings.parent.url}\n  candidate  {settings.candidate.url}")
    console.print(f"  records    {_where(url)}{_reachable(url)}")
    console.print(f"  listening  http://{settings.listen}/v1   status: http://{settings.listen}/shadow/status")
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # A server that stops midway is recorded, not traced.
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
    """Send the requests of a file to a proxy, and say what came back."""
    if not file.is_file():
        raise InvalidInput(str(file), found="no such file", expected="jsonl of requests or prompts")
    traffic = read_traffic(file, model)
    done = replay(traffic, to.rstrip("/"), header=header, rate=rate, at_once=at_once, rounds=rounds, stream=stream)
    said = ", ".join(f"{count} with {what}" for what, count in sorted(done.statuses.items()))
    message = f"{done.sent} requests in {done.seconds:.1f} s: {said}"
    if as_json:
        print_answer("replayed", message, {"sent": done.sent, "statuses": dict(done.statuses), "seconds": done.seconds})
    else:
        console.print(message)


def _routing(profile: Profile, settings: ShadowSettings, candidate: str | None, file: Path, again: bool) -> Routing:
    """What is watched from now on: as it was left, or a candidate that is new."""
    before = read_routing(file)
    version = candidate or _released(profile) or (before.candidate if before else "candidate")
    wanted = {"mode": settings.mode, "share": settings.share}
    if before is not None and before.candidate == version and not again:
        routing = before.model_copy(update=wanted)
    else:
        routing = Routing(candidate=version, since=time.time(), mode=settings.mode, share=settings.share)
    write_routing(file, routing)
    return routing


def _released(profile: Profile) -> str | None:
    """The version at the profile's target; None also where that is out of reach: users are answered all the same."""
    try:
        current = profile.publish.current(profile.root) if profile.publish else None
    except Refused:
        return None
    return current.name if current else None


def _where(url: str) -> str:
    return short_path(Path(url.removeprefix("sqlite:///"))) if url.startswith("sqlite") else url


def _reachable(url: str) -> str:
    """Nothing; or why records are lost for now. A database that is down keeps no proxy from answering."""
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
