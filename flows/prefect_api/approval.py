"""Require manual approval before a release is published or promoted: on Prefect's pages, on a terminal, or in advance.

A deployed run suspends itself: its process ends, its slot is free, and its page shows the evidence and a form. When a
user answers there or with ``mergegate approve``, the run starts again from the top, reads all stages from the store,
and asks for the same approval. The key of the suspension is the digest of the release, so the run finds the answer
only if it built exactly the same release. If it built another one, it suspends again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.release.publish import ApprovalSettings, PendingRelease
from mergegate.tasks.release.report import ReportContent, as_markdown

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

# After the time-out of the profile, a rule on the server refuses the run (``automations``). Without such a rule, the
# server itself fails the run this much later.
_GRACE_S = 600
# Prefix of the key of an approval request. The first digits of the release's digest follow it.
_QUESTION = "publish-"
_DIGITS = 40  # digits of the release's digest in the key of a suspension


@dataclass(frozen=True)
class ApprovalRequest:
    """A request for approval of a release.

    ``summary`` is Markdown with the scores, the license and the location of the report. ``verb`` is the action that
    follows an approval.
    """

    name: str
    pending: PendingRelease
    summary: str
    timeout_s: float
    verb: Literal["publish", "promote"] = "publish"


@dataclass(frozen=True)
class Decision:
    """The answer to an approval request, about one ``version`` and ``digest``.

    ``by`` is the name that the user entered. It is not verified. If another run already waits for the same answer, this
    is not a decision, and ``waits`` is the name of that run.
    """

    publish: bool
    by: str
    reason: str
    version: str
    digest: str
    waits: str = ""

    def text(self) -> str:
        """Describe the decision, for example ``approved by alice: checked by hand``."""
        if self.waits:
            return f"run {self.waits} already waits for approval of {self.version}"
        verb, by = "approved" if self.publish else "rejected", f" by {self.by}" if self.by else ""
        reason = self.reason or ("" if self.publish else "no reason given")
        return f"{verb}{by}{f': {reason}' if reason else ''}"


RequestDecision = Callable[[ApprovalRequest], Decision]
"""Function that prompts a user for a decision. It raises ``Refused`` if no one answers."""

_decision_source: ContextVar[RequestDecision | None] = ContextVar("decision_source", default=None)


@contextmanager
def approval_function(ask: RequestDecision) -> Iterator[None]:
    """Use ``ask`` for all approvals in the block, except in deployed runs."""
    token = _decision_source.set(ask)
    try:
        yield
    finally:
        _decision_source.reset(token)


def require_decision(
    settings: ApprovalSettings,
    content: ReportContent,
    report: Path | None,
    find_pending: Callable[[], PendingRelease],
) -> Decision | None:
    """Ask a user to approve a release, and return the decision. Return None if the release is already published.

    A deployed run is suspended, so that this call does not return. ``find_pending`` returns the release to publish, and
    ``report`` is the path of its page.

    Raises:
        Refused: There is no way to ask, or no one answered.
    """
    pending = find_pending()
    if pending.is_current:
        return None
    lines = [
        f"**{content.name} {pending.version}** is ready to be published. License: {content.licence}.",
        *(f"* {obligation}" for obligation in content.obligations),
        "",
        as_markdown(content),
        f"Digest `{pending.digest}`" + (f", report `{report}`" if report else "") + ".",
    ]
    return request_decision(ApprovalRequest(content.name, pending, "\n".join(lines), settings.timeout_s))


def request_decision(request: ApprovalRequest) -> Decision:
    """Ask a user to approve a release, and return the decision.

    A deployed run is suspended, so that this call does not return.

    Raises:
        Refused: There is no way to ask, or no one answered.
    """
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    run = context.flow_run if context else None
    if run is not None and run.deployment_id is not None:  # only a deployed run can be started again
        return _suspend_for_decision(request, run)
    if (ask := _decision_source.get()) is not None:
        return ask(request)
    command = "run" if request.verb == "publish" else "shadow evaluate"
    raise Refused(
        request.name,
        found=f"{request.pending.version} needs approval before mergegate may {request.verb} it, and no one can answer",
        expected="a terminal, or a deployed run, which waits",
        remedy=f"approve it in advance: mergegate {command} --approve; or use mergegate trigger, whose run waits",
    )


def _suspend_for_decision(request: ApprovalRequest, run: FlowRun) -> Decision:
    from prefect.client.orchestration import get_client
    from prefect.flow_runs import suspend_flow_run
    from prefect.input import RunInput
    from prefect.states import Cancelled
    from pydantic import Field, ValidationError, create_model

    pending = request.pending
    key = _QUESTION + pending.digest[:_DIGITS]
    # Another run of this deployment may already wait for the same approval. Runs that wait for an older one are
    # cancelled, because their release is outdated.
    waits = ""
    with get_client(sync_client=True) as client:
        for waiting_run in suspended_runs(client):
            keys = question_keys(waiting_run)
            if waiting_run.id == run.id or waiting_run.deployment_id != run.deployment_id or not keys:
                continue
            if keys["response"].endswith(f"{key}-response"):
                waits = waits or waiting_run.name
            else:
                replaced: State[Any] = Cancelled(
                    message=f"run {run.name} replaces this run, because it built another release"
                )
                client.set_flow_run_state(waiting_run.id, replaced, force=True)
    if waits:
        return Decision(False, "", "", pending.version, pending.digest, waits=waits)
    # The form accepts only this ``version``, so an answer to another request is rejected.
    fixed_version: Any = Literal.__getitem__(pending.version)
    form = create_model(
        "Approval",
        __base__=RunInput,
        publish=(bool, Field(description=f"Whether to {request.verb} it.")),
        by=(str, Field(default="", description="Your name.")),
        reason=(str, Field(default="", description="Reason for the decision. A rejection is reported with it.")),
        version=(fixed_version, Field(default=pending.version, description="Version that the decision is about.")),
    )
    form._description = request.summary
    try:
        answer: Any = suspend_flow_run(wait_for_input=form, timeout=round(request.timeout_s) + _GRACE_S, key=key)
    except ValidationError:  # the run was started again without an answer
        raise Refused(
            request.name,
            found=f"there is no decision about {pending.version}",
            remedy="start the run again; it asks again",
        ) from None
    return Decision(answer.publish, answer.by.strip(), answer.reason.strip(), pending.version, pending.digest)


@dataclass(frozen=True)
class WaitingRun:
    """A run that waits for approval of ``version``.

    ``profile`` comes from the name of the deployment. It is empty if the deployment no longer exists. ``summary`` is
    the evidence on the run's page, as Markdown.
    """

    id: UUID
    name: str
    profile: str
    version: str
    summary: str


def waiting_runs(client: SyncPrefectClient) -> tuple[WaitingRun, ...]:
    """Return all runs that wait for approval, the oldest first."""
    from prefect.exceptions import ObjectNotFound

    waiting = []
    for run in suspended_runs(client):
        if keys := question_keys(run):
            summary = json.loads(client.read_flow_run_input(run.id, keys["description"]))
            form = json.loads(client.read_flow_run_input(run.id, keys["schema"]))
            version = form["properties"]["version"]["default"]
            profile = ""
            if run.deployment_id:
                with suppress(ObjectNotFound):  # the run outlives its deployment
                    profile = client.read_deployment(run.deployment_id).name
            waiting.append(WaitingRun(run.id, run.name, profile, str(version), str(summary)))
    return tuple(waiting)


def suspended_runs(client: SyncPrefectClient) -> list[FlowRun]:
    """Return all suspended or paused runs, the oldest first."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
    from prefect.client.schemas.objects import StateType

    paused = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PAUSED]))
    runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(state=paused))
    return sorted(runs, key=lambda run: run.state.timestamp.timestamp() if run.state else 0.0)


def question_keys(run: FlowRun) -> dict[str, str]:
    """Return the server's keys for the form and the answer of an approval request. Empty for any other run."""
    keys = run.state.state_details.run_input_keyset if run.state else None
    return dict(keys) if keys and f"-{_QUESTION}" in keys.get("schema", "") else {}


def select_waiting_run(waiting: tuple[WaitingRun, ...], name: str | None) -> WaitingRun:
    """Return the waiting run whose ID, name or profile is ``name``. Without a name, return the only waiting run.

    Raises:
        InvalidInput: No run matches, or several do.
    """
    matches = [run for run in waiting if name is None or name in (str(run.id), run.name, run.profile)]
    if len(matches) == 1:
        return matches[0]
    listed = "".join(f"\n  {run.profile} {run.version}: run {run.name}, {run.id}" for run in matches or waiting)
    count = f"{len(matches)} runs wait" if matches else "no such run waits"
    raise InvalidInput(
        name or "mergegate approve",
        found=f"{count} for approval{listed}",
        expected="one waiting run",
        remedy="name one of these runs" if matches or waiting else "",
    )
