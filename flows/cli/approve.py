"""Approve on a terminal: ``mergegate approve`` for runs that wait on a server, and the prompt of ``mergegate run``."""

from __future__ import annotations

import getpass
import socket
import sys

from rich.console import Console
from rich.markdown import Markdown

from mergegate.flows.cli.output import print_answer
from mergegate.flows.cli.progress import TerminalProgress
from mergegate.flows.cli.server import load_optional_schedules
from mergegate.flows.prefect_api import (
    ApprovalRequest,
    Decision,
    answer_run,
    find_site,
    select_waiting_run,
    site_client,
    waiting_runs,
)
from mergegate.merge_core.errors import InvalidInput, Refused


def approve_run(named: str | None, console: Console, as_json: bool, *, reject: bool, reason: str) -> None:
    """Approve or reject a run that waits for approval, and print the decision.

    Args:
        named: ID or name of the run, or name of its profile. If it is None, exactly one run must be waiting.
        console: Console for the output.
        as_json: Whether to print the decision as JSON.
        reject: Whether to reject the run instead of approving it.
        reason: Reason for the decision. A rejection requires a reason.

    Raises:
        InvalidInput: No waiting run matches, several runs match, or a rejection has no reason.
        Refused: The run does not accept the decision.
    """
    if reject and not reason.strip():
        raise InvalidInput("--reject", found="no reason", expected="--reason TEXT: people are told", remedy="give one")
    site = find_site(load_optional_schedules())
    with site_client(site) as client:
        run = select_waiting_run(waiting_runs(client), named)
        if not as_json:
            console.print(Markdown(run.summary))
        answer_run(client, run, publish=not reject, by=who_is_here(), reason=reason)
    decision = "rejected" if reject else "approved"
    if as_json:
        facts = {"profile": run.profile, "version": run.version, "run": str(run.id), "page": site.run_page(run.id)}
        print_answer(decision, f"{decision} {run.profile} {run.version}", facts)
    else:
        console.print(f"{decision} {run.profile} {run.version}; a worker goes on with it", markup=False)
        console.print(f"  {site.run_page(run.id)}", markup=False)


def who_is_here() -> str:
    """Return ``user@machine``."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError, ImportError):
        return socket.gethostname()


class TerminalApproval:
    """Prompts the user on this terminal for approval, unless it was approved in advance."""

    def __init__(self, progress: TerminalProgress, console: Console, *, beforehand: bool) -> None:
        self._progress, self._console, self._beforehand = progress, console, beforehand

    def __call__(self, request: ApprovalRequest) -> Decision:
        """Return the decision of the user.

        Raises:
            Refused: There is no terminal, or no one answers.
        """
        version, digest = request.pending.version, request.pending.digest
        if self._beforehand:
            return Decision(True, who_is_here(), "said beforehand", version, digest)
        if not (sys.stdin.isatty() and self._console.is_terminal):
            raise Refused(
                request.name,
                found=f"{version} may be {request.verb.rstrip('e')}ed when somebody approves it, "
                "and there is no terminal to ask on",
                expected="a yes",
                remedy=f"mergegate {'run' if request.verb == 'publish' else 'shadow look'} --approve says so "
                "beforehand; mergegate trigger has a worker do it, and wait",
            )
        with self._progress.paused():
            self._console.print(Markdown(request.summary))
            try:
                answer = self._console.input(f"{request.verb} {request.name} {version}? \\[y/N] ").strip().lower()
                publish = answer in ("y", "yes")
                reason = "" if publish else self._console.input("why not? ").strip()
            except EOFError:
                raise Refused(request.name, found=f"nobody decided about {version}", expected="y or n") from None
        return Decision(publish, who_is_here(), reason, version, digest)
