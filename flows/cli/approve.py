"""Approve releases on a terminal: runs that wait on a server, and the run of this process."""

from __future__ import annotations

import getpass
import socket
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown

from mergegate.flows.cli.command import JsonOption, command_context
from mergegate.flows.cli.output import print_answer
from mergegate.flows.cli.progress import TerminalProgress
from mergegate.flows.cli.server import load_optional_schedules
from mergegate.flows.prefect_api import (
    ApprovalRequest,
    Decision,
    find_site,
    page_of_run,
    select_waiting_run,
    site_client,
    waiting_runs,
)
from mergegate.merge_core.errors import InvalidInput, Refused


def approve_command(
    run: Annotated[
        str | None,
        typer.Argument(help="ID or name of a waiting run, or name of its profile.", show_default="the only one"),
    ] = None,
    reject: Annotated[bool, typer.Option("--reject", help="Reject the release.")] = False,
    reason: Annotated[
        str, typer.Option(help="Reason for the decision. Required with --reject; users are notified of it.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Approve or reject a release that waits on the server.

    mergegate shows the evidence first.
    """
    with command_context(as_json, with_state=True) as console:
        if reject and not reason.strip():
            raise InvalidInput(
                "--reject", found="no reason", expected="--reason TEXT, which is part of the notification"
            )
        site = find_site(load_optional_schedules())
        with site_client(site) as client:
            waiting_run = select_waiting_run(waiting_runs(client), run)
            if not as_json:
                console.print(Markdown(waiting_run.summary))
            answer = client.resume_flow_run(
                waiting_run.id,
                run_input={
                    "publish": not reject,
                    "by": current_user(),
                    "reason": reason,
                    "version": waiting_run.version,
                },
            )
            if answer.status.value != "ACCEPT":
                raise Refused(
                    f"run {waiting_run.name}",
                    found=str(getattr(answer.details, "reason", "") or "it did not accept the answer"),
                    expected="a run that waits for approval",
                    remedy="mergegate approve lists all waiting runs",
                )
        name, page = f"{waiting_run.profile} {waiting_run.version}", page_of_run(waiting_run.id, site.address)
        decision = "rejected" if reject else "approved"
        if as_json:
            facts = {"profile": waiting_run.profile, "version": waiting_run.version, "run": str(waiting_run.id)}
            print_answer(decision, f"{decision} {name}", {**facts, "page": page})
        else:
            console.print(f"{decision} {name}; a worker continues the run")
            console.print(f"  {page}")


def current_user() -> str:
    """Return ``user@machine``, or only the machine if the user is unknown."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError, ImportError):
        return socket.gethostname()


class TerminalApproval:
    """Prompts the user on this terminal to approve a release, or approves without a prompt if ``in_advance`` is set."""

    def __init__(self, progress: TerminalProgress, console: Console, *, in_advance: bool) -> None:
        self._progress, self._console, self._in_advance = progress, console, in_advance

    def __call__(self, request: ApprovalRequest) -> Decision:
        """Return the decision of the user.

        Raises:
            Refused: There is no terminal, or the input ends before the user answers.
        """
        version, digest = request.pending.version, request.pending.digest
        if self._in_advance:
            return Decision(True, current_user(), "approved in advance", version, digest)
        if not (sys.stdin.isatty() and self._console.is_terminal):
            raise Refused(
                request.name,
                found=f"{version} needs approval before mergegate may {request.verb} it, and there is no terminal",
                expected="an approval",
                remedy=f"approve it in advance: mergegate {'run' if request.verb == 'publish' else 'shadow evaluate'} "
                "--approve; or use mergegate trigger, whose run waits for approval",
            )
        with self._progress.pause():
            self._console.print(Markdown(request.summary))
            try:
                answer = self._console.input(f"{request.verb} {request.name} {version}? \\[y/N] ").strip().lower()
                publish = answer in ("y", "yes")
                reason = "" if publish else self._console.input("reason: ").strip()
            except EOFError:
                raise Refused(request.name, found=f"no decision about {version}", expected="y or n") from None
        return Decision(publish, current_user(), reason, version, digest)
