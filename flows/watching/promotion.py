"""Carry out a decision about a watched release: approval, the alias, the routing and notifications."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from mergegate.flows.outcome import RunOutcome, store_shadow_page
from mergegate.flows.prefect_api import ApprovalRequest, Decision, request_decision
from mergegate.flows.profile import Profile
from mergegate.flows.watching.watch import Watch
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.publish import PendingRelease
from mergegate.tasks.report import ShadowContent, shadow_rows, shadow_sentence
from mergegate.tasks.shadow import Routing, read_routing, write_routing
from mergegate.tasks.stage import announce
from mergegate.tasks.store import digest

Followed = Literal["promoted", "rolled back", "killed"]
"""Possible final states of a watched release."""


def promote_candidate(watch: Watch, content: ShadowContent, why: str, now: Callable[[], float]) -> RunOutcome:
    """Promote the candidate, after manual approval if the profile requires it. A rejection rolls it back."""
    approval = watch.profile.asks("shadow")
    if approval is None:
        return apply_decision(watch, content, "promoted", why, now)
    page = store_shadow_page(content)
    decision = request_decision(
        ApprovalRequest(content.name, _pending(content), _summary(content, page), approval.timeout_s, "promote")
    )
    if decision.waits:
        return conclude_shadow(content, "waiting", decision.sentence())
    if decision.publish:
        return apply_decision(watch, content, "promoted", f"{why}; {decision.sentence()}", now)
    return apply_decision(watch, content, "rolled back", _rejection(decision), now)


def apply_decision(
    watch: Watch,
    content: ShadowContent,
    serving: Followed,
    why: str,
    now: Callable[[], float],
    *,
    by_hand: bool = False,
) -> RunOutcome:
    """Apply a decision: set the alias at the target, then the routing, then notify listeners.

    Every step may run twice. If an interim look is killed between steps, the next look completes the rest.
    """
    before = watch.told().alias_before
    if serving == "promoted":
        before = name_release(watch.profile, watch.routing.candidate) or before
    elif before and watch.routing.serving == "promoted":
        name_release(watch.profile, before)
    current = read_routing(watch.routing_file) or watch.routing
    if not by_hand and current != watch.routing:
        # The proxy's kill switch or a manual decision came first.
        announce(f"{watch.profile.name}: {current.serving} meanwhile, which stays")
    else:
        current = Routing(
            candidate=current.candidate,
            mode=current.mode,
            share=current.share,
            serving=serving,
            since=now(),
            why=why,
        )
        write_routing(watch.routing_file, current)
    now_served = content.model_copy(
        update={"serving": current.serving, "reason": current.why if current.serving != "watch" else content.reason}
    )
    return report_once(watch, now_served, before)


def name_release(profile: Profile, version: str) -> str:
    """Point the profile's alias at ``version`` on its target.

    Returns:
        Version that the alias pointed at before, or an empty string.

    Raises:
        InvalidInput: The target does not support aliases or does not have this version.
        Refused: The target refused the change.
    """
    target, name = profile.publish, profile.shadow.alias if profile.shadow else None
    if target is None or name is None:
        return ""
    if not isinstance(target, AliasTarget):
        raise InvalidInput(
            "shadow.alias",
            found=f"{name!r}, and a target ({target.target_name}) that keeps no aliases",
            remedy="say 'alias: null'",
        )
    before = target.resolve_alias(profile.root, name) or ""
    if before != version:
        target.set_alias(profile.root, version, name)
    return before if before != version else ""


@runtime_checkable
class AliasTarget(Protocol):
    """A target on which a name can refer to a version."""

    def set_alias(self, root: Path, version: str, name: str) -> None: ...
    def resolve_alias(self, root: Path, name: str) -> str | None: ...


def conclude_shadow(
    content: ShadowContent,
    status: Literal["promoted", "waiting", "rolled back", "killed", "nothing new"],
    message: str = "",
) -> RunOutcome:
    """Return the outcome of an interim look, with its page."""
    text = message or f"{status}: {content.name} {content.candidate}: {content.reason}"
    return RunOutcome(
        status=status, message=text, version=content.candidate, report=store_shadow_page(content), shadow=content
    )


def report_once(watch: Watch, content: ShadowContent, alias_before: str = "") -> RunOutcome:
    assert content.serving != "watch"
    emit_shadow_event(content)
    watch.tell(content.serving, alias_before or watch.told().alias_before)
    return conclude_shadow(content, content.serving)


def emit_shadow_event(content: ShadowContent) -> None:
    """Emit a Prefect event for automations: ``mergegate.shadow.promoted``, ``.rolled-back`` or ``.killed``."""
    from prefect.events import emit_event

    emit_event(
        event=f"mergegate.shadow.{content.serving.replace(' ', '-')}",
        resource={
            "prefect.resource.id": f"mergegate.shadow.{content.name}",
            "prefect.resource.name": content.name,
            "mergegate.candidate": content.candidate,
        },
        payload={
            "why": content.reason,
            "pairs": content.pairs,
            **dict(shadow_rows(content)),
        },
    )


def _pending(content: ShadowContent) -> PendingRelease:
    """Return the subject of the approval. An answer is valid for this candidate only."""
    subject = digest({"promote": content.candidate, "of": content.name})
    return PendingRelease(content.candidate, subject, is_current=False)


def _summary(content: ShadowContent, page: Path) -> str:
    rows = "\n".join(f"* {label}: {value}" for label, value in shadow_rows(content))
    about = f"**{content.name} {content.candidate}** may be promoted.\n\n{shadow_sentence(content)}."
    return f"{about}\n\n{rows}\n\nPage `{page}`."


def _rejection(decision: Decision) -> str:
    return f"rejected{f' by {decision.by}' if decision.by else ''}: {decision.reason or 'no reason was given'}"
