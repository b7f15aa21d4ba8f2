"""What was decided about a watched release, carried out: a person's yes, the alias, the routing, who is told."""

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
"""What can become of a release that is watched."""


def promote_candidate(watch: Watch, content: ShadowContent, why: str, now: Callable[[], float]) -> RunOutcome:
    """Promote it; with a person's yes, where the profile asks for one. Who says no rolls it back."""
    asks = watch.profile.asks("shadow")
    if asks is None:
        return apply_decision(watch, content, "promoted", why, now)
    page = store_shadow_page(content)
    decision = request_decision(
        ApprovalRequest(content.name, _pending(content), _summary(content, page), asks.timeout_s, "promote")
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
    """What was decided, carried out: the alias at the target, then where requests go, then who listens is told.

    Of all of it any part may be done twice: a look that is killed in between is followed by one that does the rest.
    """
    before = watch.told().alias_before
    if serving == "promoted":
        before = name_release(watch.profile, watch.routing.candidate) or before
    elif before and watch.routing.serving == "promoted":
        name_release(watch.profile, before)
    current = read_routing(watch.routing_file) or watch.routing
    if not by_hand and current != watch.routing:
        # Somebody was faster: the proxy's kill switch, or a person.
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
    """Have the profile's alias mean ``version`` at its target; which one it meant before, empty where none.

    Raises:
        InvalidInput: when the target keeps no aliases, or has no such version.
        Refused: when it says no.
    """
    target, name = profile.publish, profile.shadow.alias if profile.shadow else None
    if target is None or name is None:
        return ""
    if not isinstance(target, AliasTarget):
        raise InvalidInput(
            "shadow.alias",
            found=f"{name!r}, and a target ({target.to_name}) that keeps no aliases",
            remedy="say 'alias: null'",
        )
    before = target.aliased(profile.root, name) or ""
    if before != version:
        target.set_alias(profile.root, version, name)
    return before if before != version else ""


@runtime_checkable
class AliasTarget(Protocol):
    """A target where a name can mean a version."""

    def set_alias(self, root: Path, version: str, name: str) -> None: ...
    def aliased(self, root: Path, name: str) -> str | None: ...


def conclude_shadow(
    content: ShadowContent,
    status: Literal["promoted", "waiting", "rolled back", "killed", "nothing new"],
    message: str = "",
) -> RunOutcome:
    """The end of a look, with its page."""
    said = message or f"{status}: {content.name} {content.candidate}: {content.reason}"
    return RunOutcome(
        status=status, message=said, version=content.candidate, report=store_shadow_page(content), shadow=content
    )


def report_once(watch: Watch, content: ShadowContent, alias_before: str = "") -> RunOutcome:
    assert content.serving != "watch"
    tell_prefect(content)
    watch.tell(content.serving, alias_before or watch.told().alias_before)
    return conclude_shadow(content, content.serving)


def tell_prefect(content: ShadowContent) -> None:
    """An event for automations: ``mergegate.shadow.promoted``, ``.rolled-back`` or ``.killed``."""
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
    """What is asked about: an answer counts for this candidate alone."""
    asked = digest({"promote": content.candidate, "of": content.name})
    return PendingRelease(content.candidate, asked, is_current=False)


def _summary(content: ShadowContent, page: Path) -> str:
    rows = "\n".join(f"* {what}: {value}" for what, value in shadow_rows(content))
    about = f"**{content.name} {content.candidate}** may be promoted.\n\n{shadow_sentence(content)}."
    return f"{about}\n\n{rows}\n\nPage `{page}`."


def _rejection(decision: Decision) -> str:
    return f"rejected{f' by {decision.by}' if decision.by else ''}: {decision.reason or 'no reason was given'}"
