"""Conclude a run that has nothing to do, without Prefect's API and its records.

A dry pass runs the flow's own code on the same inputs, but against the cache only (``tasks.stage.dry_run_pass``). If it
finishes, the run is over: its page, its history line and its machine-readable log are stored like those of any other
run. If it does not finish, the real run starts and reports the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mergegate.flows.outcome.archive import RunClock, keep_outcome
from mergegate.flows.outcome.ending import RunOutcome
from mergegate.merge_core.wording import detail
from mergegate.tasks.stage import (
    DeferredProgress,
    WorkRequired,
    dry_pass,
    progress_watcher,
    relay_progress,
    store_quota,
)
from mergegate.tasks.telemetry import json_log


def run_dry_pass(
    make: Callable[[], RunOutcome], flow: str, name: str, overrides: Sequence[str] = ()
) -> RunOutcome | None:
    """Return the outcome of ``make`` if everything is cached, or None if work remains or the dry pass cannot finish.

    Args:
        make: The story of the flow. Progress watchers receive its stages after it has finished.
        flow: Name of the flow.
        name: Name of the profile.
        overrides: Profile settings that the run overrides. They are recorded with the outcome.
    """
    clock, held = RunClock(), DeferredProgress()
    try:
        store_quota()  # the real run reports an invalid setting
        with progress_watcher(held), dry_pass():
            outcome = make()
    except (Exception, WorkRequired) as reason:
        detail("a look does not suffice: %s", " ".join(str(reason).split()))
        return None
    with json_log({"flow": flow, "profile": name}, DeferredProgress) as say:
        relay_progress(held.stages)
        outcome = outcome.model_copy(update={"overrides": tuple(overrides)})
        outcome = keep_outcome(outcome, name, clock, held.stages, flow)
        say("run ended", status=outcome.status, message=outcome.in_words, seconds=clock.seconds())
    return outcome
