"""A person's yes before a release is published or promoted: asked on Prefect's pages, on a terminal, or beforehand.

A deployed run suspends: its process ends, its slot is free, its page shows the evidence and a form. Whoever resumes it
(the page, ``mergegate approve``) starts it again from the top; everything comes from the store, and it arrives here
once more. The suspension is keyed by the digest of what would be published, so an answer is found only by a run that
has made the very same again; one that has made anything else finds no answer, and suspends anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mergegate.flows.prefect_api.waiting_runs import QUESTION, question_keys, suspended_runs
from mergegate.merge_core.errors import Refused
from mergegate.tasks.publish import ApprovalSettings, PendingRelease
from mergegate.tasks.report import ReportContent, as_markdown

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

# After silence of the time that the profile gives, a rule on the server refuses the run (``automations``). Where there
# is none, the server itself fails it, this much later.
_GRACE_S = 600
_DIGITS = 40  # of the digest in a key


@dataclass(frozen=True)
class ApprovalRequest:
    """What a person is asked.

    Attributes:
        name: Of the release.
        summary: Markdown: scores, drops, licence, where the report is.
        timeout_s: For how long.
        verb: What is done after a yes.
    """

    name: str
    pending: PendingRelease
    summary: str
    timeout_s: float
    verb: Literal["publish", "promote"] = "publish"


@dataclass(frozen=True)
class Decision:
    """What a person said of one release.

    Attributes:
        publish: Yes or no.
        by: Who said so, as they call themselves: nobody checks that.
        reason: Why, where they said so.
        version, digest: Of what.
        waits: No answer yet: another run waits for it, and this one need not.
    """

    publish: bool
    by: str
    reason: str
    version: str
    digest: str
    waits: str = ""

    @property
    def status(self) -> Literal["refused", "passed"]:
        """Of the run, where nothing is published."""
        return "passed" if self.waits else "refused"

    def sentence(self) -> str:
        if self.waits:
            return f"{self.version} waits for approval already, in run {self.waits}"
        who = f" by {self.by}" if self.by else ""
        if self.publish:
            return f"approved{who}" + (f": {self.reason}" if self.reason else "")
        return f"{self.version} is not released\nrejected{who}: {self.reason or 'no reason was given'}"


AskPerson = Callable[[ApprovalRequest], Decision]
"""Asks somebody who is there. Raises ``Refused`` where nobody answers."""

_asker: ContextVar[AskPerson | None] = ContextVar("asker", default=None)


@contextmanager
def approval_function(ask: AskPerson) -> Iterator[None]:
    """Runs inside that are not deployed ask by ``ask``."""
    token = _asker.set(ask)
    try:
        yield
    finally:
        _asker.reset(token)


def require_decision(
    settings: ApprovalSettings,
    content: ReportContent,
    report: Path | None,
    find_pending: Callable[[], PendingRelease],
) -> Decision | None:
    """What a person says of a release; None where it stands already.

    A deployed run is suspended here, and does not come back in this process.

    Args:
        report: The page about it.
        find_pending: What would be published.

    Raises:
        Refused: when there is nobody to be asked, or who was asked did not answer.
    """
    pending = find_pending()
    if pending.is_current:
        return None
    return request_decision(
        ApprovalRequest(content.name, pending, _summary(content, pending, report), settings.timeout_s)
    )


def request_decision(request: ApprovalRequest) -> Decision:
    """What a person says to ``request``.

    A deployed run is suspended here, and does not come back in this process.

    Raises:
        Refused: when there is nobody to be asked, or who was asked did not answer.
    """
    pending = request.pending
    if (run := _deployed_run()) is not None:
        return _by_suspending(request, run)
    if (ask := _asker.get()) is not None:
        return ask(request)
    command = "run" if request.verb == "publish" else "shadow look"
    raise Refused(
        request.name,
        found=f"{pending.version} may be {request.verb.rstrip('e')}ed when somebody approves it, "
        "and nobody can be asked here",
        expected="a terminal, or a deployed run, which waits",
        remedy=f"mergegate {command} --approve says yes beforehand; mergegate trigger has a worker do it, and wait",
    )


def _by_suspending(request: ApprovalRequest, run: FlowRun) -> Decision:
    from prefect.client.orchestration import get_client
    from prefect.flow_runs import suspend_flow_run
    from prefect.input import RunInput
    from pydantic import Field, ValidationError, create_model

    pending = request.pending
    key = QUESTION + pending.digest[:_DIGITS]
    with get_client(sync_client=True) as client:
        if (other := _same_elsewhere(client, run, key)) is not None:
            return Decision(False, "", "", pending.version, pending.digest, waits=other)
    # What stands in ``version`` is the only thing that can: an answer to another question is not taken.
    only: Any = Literal.__getitem__(pending.version)
    form = create_model(
        "Approval",
        __base__=RunInput,
        publish=(bool, Field(description=f"{request.verb.capitalize()} it, or not.")),
        by=(str, Field(default="", description="Who decides.")),
        reason=(str, Field(default="", description="Why; for a no, what people are told.")),
        version=(only, Field(default=pending.version, description="What is decided about.")),
    )
    form._description = request.summary
    try:
        said: Any = suspend_flow_run(wait_for_input=form, timeout=round(request.timeout_s) + _GRACE_S, key=key)
    except ValidationError:  # it was started again without an answer
        raise Refused(
            request.name,
            found=f"nobody decided about {pending.version}",
            remedy="run it again: somebody is asked again",
        ) from None
    return Decision(said.publish, said.by.strip(), said.reason.strip(), pending.version, pending.digest)


def _same_elsewhere(client: SyncPrefectClient, run: FlowRun, key: str) -> str | None:
    """Name of another run of this deployment that waits with the same question. Those that wait with an older one are
    cancelled: what they ask about has been overtaken."""
    from prefect.states import Cancelled

    found = None
    for other in suspended_runs(client):
        if other.id == run.id or other.deployment_id != run.deployment_id or not question_keys(other):
            continue
        if question_keys(other)["response"].endswith(f"{key}-response"):
            found = found or other.name
        else:
            overtaken: State[Any] = Cancelled(message=f"overtaken by run {run.name}, which made something else")
            client.set_flow_run_state(other.id, overtaken, force=True)
    return found


def _summary(content: ReportContent, pending: PendingRelease, report: Path | None) -> str:
    lines = [
        f"**{content.name} {pending.version}** is ready to be published. Licence: {content.licence}.",
        *(f"* {one}" for one in content.obligations),
        "",
        as_markdown(content),
        f"Digest `{pending.digest}`" + (f", report `{report}`" if report else "") + ".",
    ]
    return "\n".join(lines)


def _deployed_run() -> FlowRun | None:
    """The flow run that this is, where it belongs to a deployment and so can be started again."""
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    run = context.flow_run if context else None
    return run if run is not None and run.deployment_id is not None else None
