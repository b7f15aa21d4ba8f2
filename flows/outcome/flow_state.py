"""Conclude a flow: run its story, archive the outcome and report it to Prefect as a state.

| state | type | meaning |
| --- | --- | --- |
| ``Released``, ``NothingNew``, ``Passed`` | Completed | the run succeeded |
| ``Promoted``, ``Waiting`` | Completed | watched release: it serves users, or the evidence is not sufficient yet |
| ``RolledBack``, ``Killed`` | Failed | watched release: its parent serves users; exit code 3 |
| ``Refused`` | Failed | a check, the gate or a full disk refused; exit code 3 |
| ``Invalid`` | Failed | the input is invalid; exit code 2 |
| ``Interrupted`` | Cancelled | the user pressed Ctrl-C; exit code 130; the next run continues from there |
| ``Failed`` | Failed | an unexpected exception; exit code 1 |
| ``Cancelled`` | Cancelled | the run was due while no worker was running, and a later run has done its work |

A refusal is not a crash. At the end of a deployed run, Prefect raises the exception in a failed state and logs its
traceback. The state therefore contains an exception that carries the outcome, and a log filter drops the one line that
would print it, because the state and its reason are already in the log.
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
    record_run,
    recorded_stages,
    store_quota,
)
from mergegate.tasks.telemetry import json_log

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

_log = logging.getLogger(__name__)


class StoppedRun(Exception):
    """Outcome of a run that did not succeed, as an exception for Prefect's state. It does not indicate a defect."""

    def __init__(self, outcome: RunOutcome) -> None:
        super().__init__(outcome.in_words)
        self.outcome = outcome

    def __reduce__(self) -> tuple[object, ...]:
        return (StoppedRun, (self.outcome,))


def conclude_flow(make: Callable[[], RunOutcome], name: str, overrides: Sequence[str] = ()) -> State[RunOutcome]:
    """Run the story of a flow and return its end as a Prefect state.

    Every run gets a page and a line in the history, except a missed scheduled run that a later run replaces.

    Args:
        make: The story of the flow. Prefect's log shows its stages, unless another watcher is active.
        name: Name of the profile.
        overrides: Profile settings that the run overrides. They are recorded with the outcome.

    Raises:
        Exception: Any unexpected error, after it was recorded. Prefect logs it with its traceback.
    """
    from prefect import get_run_logger
    from prefect.states import Cancelled, Completed, Failed

    if replacement := find_replacement_run():
        return Cancelled(message=f"made up for by {replacement}, which began after this run was due")
    clock, watcher = RunClock(), lambda: ProgressLog(get_run_logger())
    run, flow = running_flow()
    detail("Prefect's flow run %s (%s); project state in %s", run, flow, home())
    context = {"run": run, "flow": flow, "profile": name}
    with json_log(context, watcher) as say, recorded_stages(watcher) as recorder:
        try:
            with disk_errors_refused(home()):
                outcome = _run_recorded(make, name)
        except MergegateError as error:
            outcome = stopped_outcome(error)
        except KeyboardInterrupt:
            outcome = RunOutcome(status="interrupted", message=INTERRUPTED)
        except Exception as failure:
            kind, text = type(failure).__name__, " ".join(str(failure).split())
            outcome = RunOutcome(status="failed", message=f"{name} failed: {kind}: {text}".rstrip(": "))
            archived = keep_outcome(outcome, name, clock, recorder.stages)
            if archived.report is not None:
                failure.add_note(f"report: {archived.report}")
            publish_artifact(archived, name)
            say("run ended", level="error", status="failed", message=outcome.message)
            raise
        outcome = outcome.model_copy(update={"overrides": tuple(overrides)})
        outcome = keep_outcome(outcome, name, clock, recorder.stages)
        level = "warning" if outcome.exit_code else "info"
        say("run ended", level=level, status=outcome.status, message=outcome.in_words, seconds=clock.seconds())
    publish_artifact(outcome, name)
    state = state_name(outcome.status)
    if outcome.exit_code:
        _hide_refusal_tracebacks()
        if outcome.status == "interrupted":
            return Cancelled(name=state, message=outcome.message, data=StoppedRun(outcome))
        return Failed(name=state, message=outcome.in_words, data=StoppedRun(outcome))
    return Completed(name=state, message=outcome.message, data=outcome)


def within_limits(make: Callable[[Profile], RunOutcome], profile: Profile) -> RunOutcome:
    """Run ``make`` within the limits of the profile.

    Raises:
        OutOfTime: The run exceeded its time limit.
    """
    with limited(profile.limits):
        return make(profile)


def flow_outcome(state: State[Any]) -> RunOutcome | BaseException | None:
    """Return the outcome of a flow run, or the exception that ended it."""
    value = state.result(raise_on_failure=False)
    if isinstance(value, StoppedRun):
        return value.outcome
    return value if isinstance(value, RunOutcome | BaseException) else None


def _run_recorded(make: Callable[[], RunOutcome], name: str) -> RunOutcome:
    """Run ``make`` while recording its use of the store, then bring the store below its quota.

    The record protects the artifacts that the run needs from removal, now and until the next run.
    """
    store_quota()  # reports an invalid setting before any work
    with log_shared_store_savings(), record_run(name) as run:
        try:
            outcome = _retry_if_lost(make)
        except MergegateError as error:
            outcome = stopped_outcome(error)
        if run is not None:
            # A refused run without measurements does not show which artifacts the next run needs.
            judged = outcome.exit_code == 0 or outcome.content is not None or outcome.sweep is not None
            run.end(outcome.status, judged=judged)
            keep_quota()
    return outcome


def _retry_if_lost(make: Callable[[], RunOutcome]) -> RunOutcome:
    """Run ``make`` again if an artifact was removed from the store between two stages."""
    try:
        return make()
    except LostArtifact as lost:
        announce(f"{lost.where}: gone from the store; the run begins again and makes what is missing")
        return make()


def publish_artifact(outcome: RunOutcome, name: str) -> None:
    """Save the end of the run as a Markdown artifact of the Prefect run, which Prefect's UI shows.

    An error here never fails the run, because the report has all results.
    """
    from prefect.artifacts import create_markdown_artifact

    key = "".join(character if character.isalnum() else "-" for character in f"release-{name}".lower())
    try:
        create_markdown_artifact(prefect_page(outcome, name), key=key, description=outcome.message.splitlines()[0])
    except Exception as failure:
        _log.warning("Prefect's page about this run was not written: %s", failure)


class _StoppedRunFilter(logging.Filter):
    """Drop log records that would print the traceback of a ``StoppedRun``. Its message is already in the log."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], StoppedRun))


_stopped_run_filter = _StoppedRunFilter()


def _hide_refusal_tracebacks() -> None:
    for logger in ("prefect.flow_runs", "prefect.engine"):
        logging.getLogger(logger).addFilter(_stopped_run_filter)  # addFilter ignores a filter that is already attached
