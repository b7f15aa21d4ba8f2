"""Judge a release on users' traffic, then promote it, roll it back or wait.

::

    mergegate shadow evaluate profiles/support.yaml                            # one look on this machine
    - {profile: profiles/support.yaml, flow: shadow, schedule: every 1 h}   # in schedules.yaml: a worker runs the looks

The proxy routes and records requests, and this flow decides. The ledger keeps all judged pairs, so an interim look
without new traffic does nothing. The number of looks does not affect the error rates (``tasks.shadow.verdict``).

To carry out a decision, the flow first sets the alias at the target, then changes the routing, then emits an event. The
alias moves only in the place of the merge: users compared the merge, and not its quantized variants.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.events import emit_event

from mergegate.flows.outcome import RunOutcome, conclude_flow, name_run, store_page, within_limits
from mergegate.flows.prefect_api import ApprovalRequest, request_decision
from mergegate.flows.profile import Profile, load_profile, profile_name
from mergegate.flows.shadow_watch import Watch, open_watch
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.base.stage import announce
from mergegate.tasks.base.store import digest
from mergegate.tasks.release.publish import PendingRelease
from mergegate.tasks.release.report import ShadowContent, shadow_rows, shadow_sentence
from mergegate.tasks.shadow import read_routing, routing_file, write_routing

FinalState = Literal["promoted", "rolled back", "killed"]
"""How a shadow test can end."""


@flow(name="shadow", flow_run_name=name_run)
def shadow(
    profile: Path | Profile, say: Literal["look", "promote", "roll back"] = "look", why: str = "", by: str = ""
) -> State[RunOutcome]:
    """Evaluate a release in shadow testing, or record a manual decision about it.

    Args:
        profile: Profile file with a section ``shadow``, relative to the project directory, or a parsed profile.
        say: Manual decision, independent of the evidence. 'look' lets the evidence decide.
        why: Reason for the manual decision. It is stored.
        by: Name of the user who decides.
    """
    by_hand: FinalState = "promoted" if say == "promote" else "rolled back"
    story = make_look if say == "look" else partial(decide_by_hand, serving=by_hand, why=why, by=by)
    return conclude_flow(lambda: within_limits(story, load_profile(profile)), profile_name(profile))


def make_look(profile: Profile, *, now: Callable[[], float] = time.time) -> RunOutcome:
    """Run one interim look and return its outcome. If the profile requires approval, ask before a promotion.

    A check that refuses raises its error. If the candidate is rolled back, the outcome contains the page.
    """
    watch = open_watch(profile)
    with watch.ledger() as ledger:
        judged_before = len(ledger.pairs)
        evidence = watch.judge_new_pairs(ledger, now) if watch.routing.watching else watch.read_evidence(ledger, now)
    reported = watch.reported_state()
    content, verdict = watch.content(evidence, now()), evidence.verdict
    if not watch.routing.watching:  # the proxy's kill switch or a manual decision came first
        if reported.is_current(watch.routing):
            return _conclude(content, "nothing new")
        return _report_once(watch, content)
    if verdict.outcome in ("roll back", "kill"):
        serving: FinalState = "killed" if verdict.outcome == "kill" else "rolled back"
        return _apply_decision(watch, content, serving, verdict.reason, now)
    if verdict.outcome != "promote":
        is_unchanged = reported.is_current(watch.routing) and len(evidence.judged) == judged_before
        watch.store_reported_state("watch", reported.alias_before)
        return _conclude(content, "nothing new" if is_unchanged else "waiting")

    approval = profile.approval_for("shadow")
    if approval is None:
        return _apply_decision(watch, content, "promoted", verdict.reason, now)
    page = store_page(content)
    # An answer is valid for this candidate only.
    subject = digest({"promote": content.candidate, "of": content.name})
    pending = PendingRelease(content.candidate, subject, is_current=False)
    rows = "\n".join(f"* {label}: {value}" for label, value in shadow_rows(content))
    summary = (
        f"**{content.name} {content.candidate}** is ready to be promoted.\n\n{shadow_sentence(content)}.\n\n{rows}\n\n"
        f"Page `{page}`."
    )
    decision = request_decision(ApprovalRequest(content.name, pending, summary, approval.timeout_s, "promote"))
    if decision.waits:
        return _conclude(content, "waiting", decision.text())
    if decision.publish:
        return _apply_decision(watch, content, "promoted", f"{verdict.reason}; {decision.text()}", now)
    return _apply_decision(watch, content, "rolled back", decision.text(), now)


def decide_by_hand(
    profile: Profile, *, serving: FinalState, why: str, by: str, now: Callable[[], float] = time.time
) -> RunOutcome:
    """Apply a manual decision, independent of the evidence, and store its reason.

    Raises:
        InvalidInput: The reason is empty.
    """
    require_reason(why)
    watch = open_watch(profile)
    content = watch.current_content(now)
    reason = f"{why.strip()} (by hand{f', {by}' if by else ''})"
    return _apply_decision(watch, content, serving, reason, now, by_hand=True)


def require_reason(why: str) -> None:
    """Raise InvalidInput if the reason for a manual decision is empty."""
    if not why.strip():
        raise InvalidInput("--reason", found="no reason", expected="--reason TEXT, which is stored with the decision")


def _apply_decision(
    watch: Watch,
    content: ShadowContent,
    serving: FinalState,
    why: str,
    now: Callable[[], float],
    *,
    by_hand: bool = False,
) -> RunOutcome:
    """Set the alias at the target, then the routing, then emit an event.

    All steps are idempotent. If an interim look is killed between them, the next look completes the rest.
    """
    alias_before = watch.reported_state().alias_before
    if serving == "promoted":
        alias_before = _set_alias(watch.profile, watch.routing.candidate) or alias_before
    elif alias_before and watch.routing.serving == "promoted":
        _set_alias(watch.profile, alias_before)
    file = routing_file(watch.profile.name)
    current = read_routing(file) or watch.routing
    if not by_hand and current != watch.routing:
        # The proxy's kill switch or a manual decision came first.
        announce(f"{watch.profile.name}: {current.serving} during this look, which takes precedence")
    else:
        current = current.model_copy(update={"serving": serving, "since": now(), "why": why})
        write_routing(file, current)
    reason = current.why if current.serving != "watch" else content.reason
    return _report_once(watch, content.model_copy(update={"serving": current.serving, "reason": reason}), alias_before)


def _set_alias(profile: Profile, version: str) -> str:
    """Point the profile's alias at ``version``, and return the version that it pointed at before.

    Return an empty string if nothing changes. The target raises an error if it refuses or does not have this version.
    """
    target, name = profile.publish, profile.shadow.alias if profile.shadow else None
    if target is None or name is None:
        return ""
    previous = target.resolve_alias(profile.root, name) or ""
    if previous == version:
        return ""
    target.set_alias(profile.root, version, name)
    return previous


def _report_once(watch: Watch, content: ShadowContent, alias_before: str = "") -> RunOutcome:
    """Emit the event ``mergegate.shadow.promoted``, ``.rolled-back`` or ``.killed`` for automations, and conclude."""
    assert content.serving != "watch"
    emit_event(
        event=f"mergegate.shadow.{content.serving.replace(' ', '-')}",
        resource={
            "prefect.resource.id": f"mergegate.shadow.{content.name}",
            "prefect.resource.name": content.name,
            "mergegate.candidate": content.candidate,
        },
        payload={"why": content.reason, "pairs": content.pairs, **dict(shadow_rows(content))},
    )
    watch.store_reported_state(content.serving, alias_before or watch.reported_state().alias_before)
    return _conclude(content, content.serving)


def _conclude(
    content: ShadowContent,
    status: Literal["promoted", "waiting", "rolled back", "killed", "nothing new"],
    message: str = "",
) -> RunOutcome:
    """Write the page of an interim look, and return its outcome."""
    return RunOutcome(
        status=status,
        message=message or f"{status}: {content.name} {content.candidate}: {content.reason}",
        version=content.candidate,
        report=store_page(content),
        shadow=content,
    )
