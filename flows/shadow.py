"""A look at a release that is watched on users' traffic: judge what is new, and promote it, roll it back or wait.

::

    mergegate shadow look profiles/support.yaml                            # one look, here
    - {profile: profiles/support.yaml, flow: shadow, schedule: every 1 h}   # in nights.yaml: a worker looks

The proxy records and routes; this decides. Whoever looks again finds what was judged in the ledger, and where nothing
has come since nothing is done. How often is looked changes no error rate (``tasks.shadow.evidence``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from prefect import flow
from prefect.client.schemas.objects import State

from mergegate.flows.outcome import RunOutcome, conclude_flow, name_run, profile_name, within_limits
from mergegate.flows.profile import Profile, load_profile
from mergegate.flows.watching import (
    Followed,
    apply_decision,
    conclude_shadow,
    judge_new_pairs,
    open_watch,
    plan_judging,
    promote_candidate,
    report_once,
)
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.report import ShadowContent


@flow(name="shadow", flow_run_name=name_run)
def shadow(
    profile: Path | Profile, say: Literal["look", "promote", "roll back"] = "look", why: str = "", by: str = ""
) -> State[RunOutcome]:
    """Look at a release that is watched, or say by hand what becomes of it.

    Args:
        profile: A profile file with a section ``shadow``, relative to the project, or a whole profile.
        say: By hand: what becomes of it, whatever the evidence says.
        why: By hand: the reason, which is kept.
        by: Who says so.
    """
    by_hand: Followed = "promoted" if say == "promote" else "rolled back"
    make = make_look if say == "look" else partial(decide_by_hand, serving=by_hand, why=why, by=by)
    return conclude_flow(lambda: within_limits(make, load_profile(profile)), profile_name(profile))


def make_look(profile: Profile, *, now: Callable[[], float] = time.time) -> RunOutcome:
    """The story. Raises what a check refuses; a candidate that is rolled back comes back with its page."""
    watch = open_watch(profile)
    with watch.ledger() as ledger:
        known = len(ledger.pairs)
        sample, lost = judge_new_pairs(watch, ledger, now) if watch.is_open else plan_judging(watch, ledger, now)
        verdict = watch.verdict(ledger)
    told = watch.told()
    content = watch.content(watch.routing, verdict, ledger, sample, lost, now())
    if watch.is_open:
        if verdict.outcome == "promote":
            return promote_candidate(watch, content, verdict.reason, now)
        if verdict.outcome in ("roll back", "kill"):
            serving: Followed = "killed" if verdict.outcome == "kill" else "rolled back"
            return apply_decision(watch, content, serving, verdict.reason, now)
        nothing_new = told.says(watch.routing) and len(ledger.pairs) == known
        watch.tell("watch", told.alias_before)
        return conclude_shadow(content, "nothing new" if nothing_new else "waiting")
    # The proxy has killed it, or somebody has decided by hand.
    return conclude_shadow(content, "nothing new") if told.says(watch.routing) else report_once(watch, content)


def decide_by_hand(
    profile: Profile, *, serving: Followed, why: str, by: str, now: Callable[[], float] = time.time
) -> RunOutcome:
    """What somebody says becomes of it, whatever the evidence says; and why, for those who come after.

    Raises:
        InvalidInput: without a reason.
    """
    if not why.strip():
        raise InvalidInput("--why", found="no reason", expected="--why TEXT: it is kept beside what was decided")
    watch = open_watch(profile)
    ledger = watch.read_ledger()
    sample, lost = plan_judging(watch, ledger, now)
    content = watch.content(watch.routing, watch.verdict(ledger), ledger, sample, lost, now())
    return apply_decision(
        watch, content, serving, f"{why.strip()} (by hand{f', {by}' if by else ''})", now, by_hand=True
    )


def shadow_state(profile: Profile, *, now: Callable[[], float] = time.time) -> ShadowContent:
    """What is known now. Asks nobody and changes nothing.

    Raises:
        InvalidInput: when nothing is watched.
    """
    watch = open_watch(profile)
    ledger = watch.read_ledger()
    sample, lost = plan_judging(watch, ledger, now)
    return watch.content(watch.routing, watch.verdict(ledger), ledger, sample, lost, now())
