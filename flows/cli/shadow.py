"""``mergegate shadow``: run the proxy of a shadow test, send it traffic, and decide which model serves users."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import uvicorn
from rich.console import Console
from rich.text import Text
from sqlalchemy.exc import SQLAlchemyError

from mergegate.flows.cli.command import ApproveOption, JsonOption, command_context
from mergegate.flows.cli.server import require_free_port
from mergegate.flows.operations.console import OUTCOME_STYLES, print_answer, print_table, short_path
from mergegate.flows.operations.run import RunView, current_user, load_for_flow, run_flow
from mergegate.flows.operations.summary import outcome_json
from mergegate.flows.outcome import RunOutcome
from mergegate.flows.profile import Profile, load_profile
from mergegate.flows.shadow_watch import open_watch, shadow_settings
from mergegate.merge_core.errors import CannotDecide, InvalidInput, Refused
from mergegate.tasks.base.stage import home
from mergegate.tasks.release.report import (
    ARM_COLUMNS,
    ShadowContent,
    arm_cells,
    shadow_outcome,
    shadow_rows,
    shadow_sentence,
)
from mergegate.tasks.shadow import FollowedRouting, Routing, read_routing, records_url, routing_file, write_routing
from mergegate.tasks.shadow.traffic import (
    Recorder,
    ReplaySettings,
    ShadowProxy,
    open_records,
    open_redaction,
    read_key,
    read_traffic,
    replay,
)

_STOP_S = 5
# Longer than clients keep a connection, because the server must not close one that a client is about to reuse.
_KEEP_ALIVE_S = 75
ShadowProfile = Annotated[Path, typer.Argument(help="Profile with a section 'shadow'.", metavar="PROFILE")]


class ProxyServer(uvicorn.Server):
    """Server that closes connections without a request in progress after a while, and the oldest if there are many.

    uvicorn waits without a limit for the rest of a request's headers, so slow clients could use up all file handles.
    """

    def __init__(self, config: uvicorn.Config, max_waiting: int) -> None:
        super().__init__(config)
        self._max_waiting, self._waiting_since = max_waiting, dict[Any, float]()

    async def on_tick(self, counter: int) -> bool:
        """Close connections. uvicorn calls this ten times per second."""

        def is_active(connection: Any) -> bool:
            cycle = getattr(connection, "cycle", None)
            return cycle is not None and not cycle.response_complete and not connection.transport.is_closing()

        now, connections = time.monotonic(), self.server_state.connections
        self._waiting_since = {each: self._waiting_since.get(each, now) for each in connections if not is_active(each)}
        oldest_first = sorted(self._waiting_since, key=self._waiting_since.__getitem__)
        for number, connection in enumerate(oldest_first, start=self._max_waiting - len(oldest_first)):
            if number < 0 or now - self._waiting_since[connection] > _KEEP_ALIVE_S:
                connection.transport.abort()
        return await super().on_tick(counter)


def shadow_serve_command(
    profile: ShadowProfile,
    candidate: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="Version to test.", show_default="the current release at the target"),
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="Start again, even if the version was promoted, rolled back or killed.")
    ] = False,
) -> None:
    """Run the proxy in front of the parent and the candidate.

    The proxy answers users and records both models. The short form is mergegate shadow PROFILE.
    """
    with command_context(with_state=True) as console:
        run_proxy(load_profile(profile), candidate, console, reset=reset)


def run_proxy(profile: Profile, candidate: str | None, console: Console, *, reset: bool = False) -> None:
    """Answer requests until the process is stopped.

    ``candidate`` is the version to test. Default: the current release at the target or, if that is unknown, the version
    of the last test. With ``reset``, the test starts again even if the version was already promoted, rolled back or
    killed.

    Raises:
        InvalidInput: The profile has no section ``shadow``, a key is not set, or the address is in use.
    """
    settings = shadow_settings(profile)
    url, file = records_url(profile.name, settings), routing_file(profile.name)
    redaction = open_redaction(settings.redact, settings.redactor)
    previous = read_routing(file)
    version = candidate
    if not version and profile.publish:
        with suppress(Refused, CannotDecide):  # an unavailable target must not stop the proxy
            current = profile.publish.current_release(profile.root)
            version = current.name if current else None
    version = version or (previous.candidate if previous else "candidate")
    if previous is not None and previous.candidate == version and not reset:
        routing = previous.model_copy(update={"mode": settings.mode, "share": settings.share})
    else:
        routing = Routing(candidate=version, since=time.time(), mode=settings.mode, share=settings.share)
    write_routing(file, routing)
    host, port = settings.address
    require_free_port(host, port, f"shadow.listen: {host}:{port}")
    recorder = Recorder(lambda: open_records(url), redaction, settings)
    proxy = ShadowProxy(settings, FollowedRouting(file, routing), recorder, file.with_suffix(".session-secret"))
    console.print(
        f"{profile.name}: testing {routing.candidate} ({routing.mode}, {routing.share:.0%})"
        if routing.watching
        else f"{profile.name}: {routing.candidate} is {routing.serving}: {routing.why}"
    )
    console.print(f"  parent     {settings.parent.url}\n  candidate  {settings.candidate.url}")
    database = short_path(Path(url.removeprefix("sqlite:///"))) if url.startswith("sqlite") else url
    problem = ""  # the proxy keeps answering without a database
    try:
        open_records(url).close()
    except (SQLAlchemyError, OSError) as error:
        problem = f"  (not available now: {type(error).__name__}; requests that are not recorded are counted)"
    console.print(f"  records    {database}{problem}")
    console.print(f"  listening  http://{settings.listen}/v1   status: http://{settings.listen}/shadow/status")
    # The recorder stores that a model's server stopped midway, so uvicorn need not print a traceback.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    config = uvicorn.Config(
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
    with suppress(KeyboardInterrupt):
        ProxyServer(config, settings.max_requests).run()


def shadow_replay_command(
    file: Annotated[Path, typer.Argument(help="Requests, conversations or prompts, one JSON object per line.")],
    to: Annotated[str, typer.Option(metavar="URL", help="URL of the proxy.")] = "http://127.0.0.1:8100",
    model: Annotated[str, typer.Option(metavar="NAME", help="Model of requests that do not name one.")] = "model",
    rate: Annotated[float, typer.Option(min=0.001, help="Number of users that start per second.")] = 10.0,
    client_keys_env: Annotated[
        str | None,
        typer.Option(
            metavar="VARIABLE", help="Environment variable with the keys of the clients. The first one is sent."
        ),
    ] = None,
    header: Annotated[
        str, typer.Option(metavar="NAME", help="Header that names a session.", rich_help_panel="Advanced")
    ] = "x-session-id",
    concurrency: Annotated[
        int, typer.Option(min=1, help="Maximum number of concurrent requests.", rich_help_panel="Advanced")
    ] = 16,
    rounds: Annotated[
        int, typer.Option(min=1, help="Number of repetitions, each with new users.", rich_help_panel="Advanced")
    ] = 1,
    stream: Annotated[
        bool, typer.Option("--stream", help="Request streamed responses.", rich_help_panel="Advanced")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Send the requests of a file to the proxy, as users would."""
    with command_context(as_json, with_state=True) as console:
        if not file.is_file():
            raise InvalidInput(str(file), found="no such file", expected="requests or prompts, as JSON lines")
        traffic = read_traffic(file, model)
        key = "".join(read_key(client_keys_env).split()[:1])
        settings = ReplaySettings(header, rate, concurrency, rounds, stream, key)
        result = asyncio.run(replay(traffic, to.rstrip("/"), settings))
        counts = ", ".join(f"{count} with {response}" for response, count in sorted(result.statuses.items()))
        message = f"{result.request_count} requests in {result.seconds:.1f} s: {counts}"
        if as_json:
            facts = {"sent": result.request_count, "statuses": dict(result.statuses), "seconds": result.seconds}
            print_answer("replayed", message, facts)
        else:
            console.print(message)


ReasonOption = Annotated[str, typer.Option(help="Reason for the decision, which is stored.")]


def shadow_evaluate_command(
    profile: ShadowProfile, approve: ApproveOption = False, as_json: JsonOption = False
) -> None:
    """Judge new pairs, then promote, roll back or wait."""
    _run_flow(profile, "look", "", as_json, approve=approve)


def shadow_promote_command(profile: ShadowProfile, reason: ReasonOption, as_json: JsonOption = False) -> None:
    """Promote the candidate, regardless of the evidence."""
    _run_flow(profile, "promote", reason, as_json)


def shadow_rollback_command(profile: ShadowProfile, reason: ReasonOption, as_json: JsonOption = False) -> None:
    """Return all users to the parent, regardless of evidence."""
    _run_flow(profile, "roll back", reason, as_json)


def _run_flow(
    profile: Path, decision: Literal["look", "promote", "roll back"], reason: str, as_json: bool, approve: bool = False
) -> None:
    with command_context(as_json, with_state=True) as console:
        from mergegate.flows.shadow import require_reason, shadow

        if by_hand := decision != "look":
            require_reason(reason)
        by = current_user() if by_hand else ""
        loaded = load_for_flow(profile)
        flow = partial(shadow, profile, say=decision, why=reason, by=by, return_state=True)
        headline = (f"{loaded.name} on users' traffic", f"profile {profile}")
        outcome = run_flow(flow, headline, RunView(approve=approve), console)
        _print_outcome(outcome, console, as_json)
        # A manual decision did its job, even if that was a rollback.
        raise typer.Exit(0 if by_hand and outcome.status in ("promoted", "rolled back") else outcome.exit_code)


def shadow_status_command(profile: ShadowProfile, as_json: JsonOption = False) -> None:
    """Show which model serves users, and the evidence so far.

    This neither judges nor changes anything.
    """
    with command_context(as_json, with_state=True) as console:
        content = open_watch(load_profile(profile)).current_content()
        page = home() / "reports" / f"{content.name}.shadow.html"
        status = "watching" if content.serving == "watch" else content.serving
        if as_json:
            report = str(page) if page.is_file() else None
            print_answer(status, shadow_sentence(content), {**_state_json(content), "report": report})
            return
        style = OUTCOME_STYLES[shadow_outcome(content)]
        console.print(Text(f"{content.name} {content.candidate}: {status}", style=style))
        console.print(Text(f"  {shadow_sentence(content)}"))
        _print_evidence(content, console)
        if page.is_file():
            console.print(Text("  report    ", style="dim"), Text(short_path(page)), sep="")


def _print_outcome(outcome: RunOutcome, console: Console, as_json: bool) -> None:
    if as_json:
        state = _state_json(outcome.shadow) if outcome.shadow else {}
        findings = [outcome.stopped_by] if outcome.stopped_by else []
        print_answer(outcome.status, outcome.text, {**outcome_json(outcome), **state}, findings)
        return
    console.print()
    if outcome.shadow is not None:
        _print_evidence(outcome.shadow, console)
        console.print()
    style = "bold red" if outcome.exit_code else "bold green"
    console.print(Text(outcome.text, style=style))
    if outcome.report is not None:
        console.print(Text("  report  ", style="dim"), Text(short_path(outcome.report)), sep="")


def _state_json(content: ShadowContent) -> dict[str, object]:
    """Return the state of the test as plain data, without the curve and without users' texts."""
    content_json = content.model_dump(mode="json", exclude={"points", "examples"})
    return {
        "shadow": {**content_json, "pairs": content.pairs, "now": content.now.model_dump() if content.now else None}
    }


def _print_evidence(content: ShadowContent, console: Console) -> None:
    for label, value in shadow_rows(content):
        console.print(Text(f"  {label:<17}", style="dim"), Text(value), sep="")
    arms = (("parent", content.parent_arm), ("candidate", content.candidate_arm))
    console.print()
    print_table(
        console, ("", *map(str.lower, ARM_COLUMNS)), [(name, *arm_cells(arm)) for name, arm in arms], numbers=True
    )
    lines = [f"waiting  {content.waiting:,} pairs for the next look"] if content.waiting else []
    for title, counts in (("not judged", content.left_out), ("not recorded", content.not_recorded)):
        if counts:
            lines.append(f"{title}: {'; '.join(f'{count:,} {reason}' for reason, count in counts)}")
    for line in lines:
        console.print(Text(f"  {line}", style="dim"))
