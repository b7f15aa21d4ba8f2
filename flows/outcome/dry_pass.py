"""The end of a run that has nothing to do: found by a look, without Prefect's API and its records.

The story is told as a run tells it, over the same inputs and by the same code, but for looking only
(``tasks.stage.looking``). If it comes to its end, that is the end of the run, and its page, its line in the history and
in the log for machines are kept like any other's; if not, whatever the reason, the run itself begins and says it.
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
    logged_for_machines,
    progress_watcher,
    relay_progress,
    store_quota,
)


def run_dry_pass(
    make: Callable[[], RunOutcome], flow: str, name: str, overrides: Sequence[str] = ()
) -> RunOutcome | None:
    """What ``make`` comes to where everything is done already; None where something is to be done, or in the way.

    Args:
        make: The story of the flow. Whoever watches is told of its stages when it has come to its end.
        flow: Its name.
        name: Of the profile.
        overrides: What the run is told otherwise, to be kept with what came of it.
    """
    clock, held = RunClock(), DeferredProgress()
    try:
        store_quota()  # a setting that means nothing is for the run to refuse
        with progress_watcher(held), dry_pass():
            outcome = make()
    except (Exception, WorkRequired) as reason:
        detail("a look does not suffice: %s", " ".join(str(reason).split()))
        return None
    with logged_for_machines({"flow": flow, "profile": name}, DeferredProgress) as say:
        relay_progress(held.stages)
        outcome = outcome.model_copy(update={"overrides": tuple(overrides)})
        outcome = keep_outcome(outcome, name, clock, held.stages, flow)
        say("run ended", status=outcome.status, message=outcome.in_words, seconds=clock.seconds())
    return outcome
