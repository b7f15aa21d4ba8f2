"""The last step of every flow: run the story, keep what came of it, and say it to Prefect in one state.

| state | type | means |
| --- | --- | --- |
| ``Released``, ``NothingNew``, ``Passed`` | Completed | the run did what it was asked |
| ``Promoted``, ``Waiting`` | Completed | of a watched release: it serves users, or the evidence does not suffice yet |
| ``RolledBack``, ``Killed`` | Failed | of a watched release: its parent serves users: exit code 3 |
| ``Refused`` | Failed | a check, the gate, the disk said no: exit code 3 |
| ``Invalid`` | Failed | the input cannot mean anything: exit code 2 |
| ``Interrupted`` | Cancelled | somebody pressed Ctrl-C: exit code 130; the next run goes on from there |
| ``Failed`` | Failed | an exception that nobody foresaw: exit code 1 |
| ``Cancelled`` | Cancelled | it was due while nobody was there to run it, and a later run has done its work |

A no is no crash. Prefect raises whatever a failed state holds at the end of a deployed run, and logs that with its
traceback. So it holds an exception that carries the outcome, and the one line that would print it is left out: the
state and its reason have been logged by then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mergegate.flows.outcome.archive import RunClock, keep_outcome, running_flow
from mergegate.flows.outcome.ending import RunOutcome, stopped_outcome
from mergegate.flows.outcome.markdown import prefect_page
from mergegate.flows.prefect_api import find_replacement_run
from mergegate.flows.profile import Profile
from mergegate.merge_core.errors import INTERRUPTED, MergegateError, state_name
from mergegate.merge_core.files import disk_errors_refused
from mergegate.merge_core.wording import detail
from mergegate.tasks.stage import (
    LostArtifact,
    ProgressLog,
    announce,
    home,
    keep_quota,
    limited,
    log_shared_store_savings,
    logged_for_machines,
    record_run,
    recorded_stages,
    store_quota,
)

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

_log = logging.getLogger(__name__)


class StoppedRun(Exception):
    """A run that ended with a no, as its state holds it: an answer, not a fault of anything."""

    def __init__(self, outcome: RunOutcome) -> None:
        super().__init__(outcome.in_words)
        self.outcome = outcome

    def __reduce__(self) -> tuple[object, ...]:
        return (StoppedRun, (self.outcome,))


def conclude_flow(make: Callable[[], RunOutcome], name: str, overrides: Sequence[str] = ()) -> State[RunOutcome]:
    """The end of a flow: what ``make`` returns, or what it refuses, as Prefect's state and on its pages.

    Whatever the end, there is a page about it and a line in the history; but not of a night that was made up for.

    Args:
        make: The story of the flow. Stages that it runs are watched by Prefect's log, unless somebody watches already.
        name: Of the profile.
        overrides: What the run was told otherwise, to be kept with what came of it.

    Raises:
        Exception: that nobody foresaw, after it was noted; Prefect logs it with its traceback.
    """
    from prefect import get_run_logger
    from prefect.states import Cancelled, Completed, Failed

    if later := find_replacement_run():
        return Cancelled(message=f"made up for by {later}, which began after this run was due")
    clock, watcher = RunClock(), lambda: ProgressLog(get_run_logger())
    run, flow = running_flow()
    detail("Prefect's flow run %s (%s); project state in %s", run, flow, home())
    about = {"run": run, "flow": flow, "profile": name}
    with logged_for_machines(about, watcher) as say, recorded_stages(watcher) as noted:
        try:
            with disk_errors_refused(home()):
                outcome = _noted(make, name)
        except MergegateError as error:
            outcome = stopped_outcome(error)
        except KeyboardInterrupt:
            outcome = RunOutcome(status="interrupted", message=INTERRUPTED)
        except Exception as failure:
            kind, said = type(failure).__name__, " ".join(str(failure).split())
            outcome = RunOutcome(status="failed", message=f"{name} failed: {kind}: {said}".rstrip(": "))
            kept = keep_outcome(outcome, name, clock, noted.stages)
            if kept.report is not None:
                failure.add_note(f"report: {kept.report}")
            publish_artifact(kept, name)
            say("run ended", level="error", status="failed", message=outcome.message)
            raise
        outcome = outcome.model_copy(update={"overrides": tuple(overrides)})
        outcome = keep_outcome(outcome, name, clock, noted.stages)
        level = "warning" if outcome.exit_code else "info"
        say("run ended", level=level, status=outcome.status, message=outcome.in_words, seconds=clock.seconds())
    publish_artifact(outcome, name)
    state = state_name(outcome.status)
    if outcome.exit_code:
        _leave_out_tracebacks_of_refusals()
        if outcome.status == "interrupted":
            return Cancelled(name=state, message=outcome.message, data=StoppedRun(outcome))
        return Failed(name=state, message=outcome.in_words, data=StoppedRun(outcome))
    return Completed(name=state, message=outcome.message, data=outcome)


def within_limits(make: Callable[[Profile], RunOutcome], profile: Profile) -> RunOutcome:
    """What ``make`` comes to within the limits of ``profile``.

    Raises:
        OutOfTime: when it does not.
    """
    with limited(profile.limits):
        return make(profile)


def flow_outcome(state: State[Any]) -> RunOutcome | BaseException | None:
    """What a flow run came to; where that was no outcome, the exception that ended it."""
    found = state.result(raise_on_failure=False)
    if isinstance(found, StoppedRun):
        return found.outcome
    return found if isinstance(found, RunOutcome | BaseException) else None


def _noted(make: Callable[[], RunOutcome], name: str) -> RunOutcome:
    """The outcome of a run whose use of the store is noted: nobody removes what it needs, now or until the next one.
    At its end the store is brought below its quota."""
    store_quota()  # a setting that means nothing is said before anything is done
    with log_shared_store_savings(), record_run(name) as run:
        try:
            outcome = _once_more_if_lost(make)
        except MergegateError as error:
            outcome = stopped_outcome(error)
        if run is not None:
            # A page about a refusal is no evidence: only what was measured tells what the next run will need.
            judged = outcome.exit_code == 0 or outcome.content is not None or outcome.sweep is not None
            run.end(outcome.status, judged=judged)
            keep_quota()
    return outcome


def _once_more_if_lost(make: Callable[[], RunOutcome]) -> RunOutcome:
    """What was removed from the store between two stages is made again, as it would be by the next run."""
    try:
        return make()
    except LostArtifact as lost:
        announce(f"{lost.where}: gone from the store; the run begins again and makes what is missing")
        return make()


def publish_artifact(outcome: RunOutcome, name: str) -> None:
    """Keep the end of the run as a Markdown artifact of the Prefect run, where its UI shows it.

    Nothing that goes wrong with it is an error of the run: what was found stands in the report.
    """
    from prefect.artifacts import create_markdown_artifact

    key = "".join(character if character.isalnum() else "-" for character in f"release-{name}".lower())
    try:
        create_markdown_artifact(prefect_page(outcome, name), key=key, description=outcome.message.splitlines()[0])
    except Exception as failure:
        _log.warning("Prefect's page about this run was not written: %s", failure)


class _RefusalsAreSaid(logging.Filter):
    """Leaves out what would print the traceback of a ``StoppedRun``, a second time said and no error."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], StoppedRun))


_refusals_are_said = _RefusalsAreSaid()


def _leave_out_tracebacks_of_refusals() -> None:
    for logger in ("prefect.flow_runs", "prefect.engine"):
        logging.getLogger(logger).addFilter(_refusals_are_said)  # once: a filter is added only if it is not there
