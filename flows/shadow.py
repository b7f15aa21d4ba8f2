"""Check a release that is watched on users' traffic: judge new pairs, then promote it, roll it back or wait.

::

    mergegate shadow look profiles/support.yaml                            # one look on this machine
    - {profile: profiles/support.yaml, flow: shadow, schedule: every 1 h}   # in schedules.yaml: a worker runs the looks

The proxy records and routes, and this flow decides. The ledger keeps all judged pairs, so an interim look without new
traffic does nothing. The number of looks does not change any error rate (``tasks.shadow.evidence``).
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
    """Evaluate a watched release, or decide about it manually.

    Args:
        profile: Profile file with a section ``shadow``, relative to the project directory, or a parsed profile.
        say: Manual decision, independent of the evidence. 'look' lets the evidence decide.
        why: Reason of a manual decision. It is stored.
        by: Name of the person who decides.
    """
    by_hand: Followed = "promoted" if say == "promote" else "rolled back"
    story = make_look if say == "look" else partial(decide_by_hand, serving=by_hand, why=why, by=by)
    return conclude_flow(lambda: within_limits(story, load_profile(profile)), profile_name(profile))


def make_look(profile: Profile, *, now: Callable[[], float] = time.time) -> RunOutcome:
    """Run one interim look and return its outcome.

    A check that refuses raises its error. If the candidate is rolled back, the outcome carries the page.
    """
    watch = open_watch(profile)
    with watch.ledger() as ledger:
        judged_before = len(ledger.pairs)
        sample, lost = judge_new_pairs(watch, ledger, now) if watch.is_open else plan_judging(watch, ledger, now)
        verdict = watch.verdict(ledger)
    reported = watch.told()
    content = watch.content(watch.routing, verdict, ledger, sample, lost, now())
    if watch.is_open:
        if verdict.outcome == "promote":
            return promote_candidate(watch, content, verdict.reason, now)
        if verdict.outcome in ("roll back", "kill"):
            serving: Followed = "killed" if verdict.outcome == "kill" else "rolled back"
            return apply_decision(watch, content, serving, verdict.reason, now)
        nothing_new = reported.says(watch.routing) and len(ledger.pairs) == judged_before
        watch.tell("watch", reported.alias_before)
        return conclude_shadow(content, "nothing new" if nothing_new else "waiting")
    # The proxy's kill switch or a manual decision came first.
    return conclude_shadow(content, "nothing new") if reported.says(watch.routing) else report_once(watch, content)


def decide_by_hand(
    profile: Profile, *, serving: Followed, why: str, by: str, now: Callable[[], float] = time.time
) -> RunOutcome:
    """Apply a manual decision, independent of the evidence, and store its reason for later readers.

    Raises:
        InvalidInput: The reason is empty.
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
    """Return the current state of a watched release without judging or changing anything.

    Raises:
        InvalidInput: No release is watched.
    """
    watch = open_watch(profile)
    ledger = watch.read_ledger()
    sample, lost = plan_judging(watch, ledger, now)
    return watch.content(watch.routing, watch.verdict(ledger), ledger, sample, lost, now())
