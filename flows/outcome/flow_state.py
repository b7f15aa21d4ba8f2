"""Name a flow's run, run its story, archive the outcome and report it to Prefect as a state.

| state | type | meaning |
| --- | --- | --- |
| ``Released``, ``NothingNew``, ``Passed`` | Completed | the run succeeded |
| ``Promoted``, ``Waiting`` | Completed | shadow test: the candidate serves users, or the evidence is not sufficient |
| ``RolledBack``, ``Killed`` | Failed | shadow test: the parent serves users; exit code 3 |
| ``Refused`` | Failed | a check, the gate or a full disk refused; exit code 3 |
| ``Invalid`` | Failed | the input is invalid; exit code 2 |
| ``Interrupted`` | Cancelled | the user pressed Ctrl-C; exit code 130; the next run continues from there |
| ``Failed`` | Failed | an unexpected exception; exit code 1 |
| ``Cancelled`` | Cancelled | the run was due while no worker was running, and a later run has done its work |

A refusal is not a crash. A failed state contains an exception, here one that carries the outcome. When a deployed run
ends, Prefect would log its traceback, and after a refused task, an empty one. A log filter drops these records, because
the log already has the state and its reason.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergegate.flows.outcome.run_outcome import RunOutcome, archive_outcome, prefect_page, running_flow, stopped_outcome
from mergegate.flows.prefect_api import find_replacement_run
from mergegate.flows.profile import Profile, load_profile, profile_name
from mergegate.merge_core.errors import INTERRUPTED, MergegateError, state_name, to_printable
from mergegate.merge_core.files import disk_errors_refused
from mergegate.merge_core.wording import detail
from mergegate.tasks.base.stage import (
    DeferredProgress,
    LostArtifact,
    ProgressLog,
    RecordedProgress,
    StageEnd,
    WorkRequired,
    announce,
    apply_limits,
    current_watcher,
    dry_pass,
    home,
    keep_quota,
    log_shared_store_savings,
    progress_watcher,
    record_run,
    relay_progress,
    store_quota,
)
from mergegate.tasks.release.telemetry import json_log

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

_log = logging.getLogger(__name__)
_LONGEST = 60  # characters of one part
_CHECKS = frozenset(
    {"licenses", "compat", "sources", "documents", "preview", "overlap"}
)  # stages that only check input


class StoppedRun(Exception):
    """Exception that carries the outcome of an unsuccessful run in Prefect's state. It does not indicate a defect."""

    def __init__(self, outcome: RunOutcome) -> None:
        super().__init__(outcome.text_with_proposal)
        self.outcome = outcome

    def __reduce__(self) -> tuple[object, ...]:
        return (StoppedRun, (self.outcome,))


def name_run() -> str:
    """Return the name of the current flow run, for Prefect's ``flow_run_name``. Never raises.

    Prefect needs the name before any check runs, even on a server that only lists runs. Building a name therefore reads
    little data. If a profile cannot be read, the name of its file is used.
    """
    try:
        from prefect.runtime import flow_run

        return run_name(flow_run.flow_name or "run", flow_run.parameters or {}, time.strftime("%Y-%m-%d"))
    except Exception:  # a missing name must not fail a run
        return f"run · {time.strftime('%Y-%m-%d')}"


def run_name(flow: str, parameters: Mapping[str, Any], day: str) -> str:
    """Return the name of a run on a day, by which users recognize it.

    For example: ``support-assistant · ties of 3 · 2026-11-21``.
    """
    if "candidate" in parameters:
        sides = (str(parameters[side]) for side in ("candidate", "reference"))
        return f"{' against '.join(_cut(to_printable(Path(side).name or side)) for side in sides)} · {day}"
    profile = parameters.get("profile")
    if not isinstance(profile, Profile | Path | str):
        return f"{flow} · {day}"
    method = _method(profile)
    subject = f"sweep of {method}" if flow == "sweep" and method else method or (flow if flow != "release" else "")
    subject = flow if flow == "shadow" else subject
    return " · ".join(part for part in (_cut(profile_name(profile)), _cut(subject), day) if part)


def _method(profile: Profile | Path | str) -> str:
    """Return the method of a profile, such as ``ties of 3``, or an empty string if the recipe cannot be read."""
    try:
        candidate = load_profile(profile if isinstance(profile, Profile) else Path(profile)).candidates()[0]
        return candidate.summary.partition(" over ")[0]
    except Exception:  # the flow reports the error
        return ""


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def conclude_flow(make: Callable[[], RunOutcome], name: str, overrides: Sequence[str] = ()) -> State[RunOutcome]:
    """Run ``make``, the story of a flow, and return its end as a Prefect state.

    Every run gets a page and a line in the history, with two exceptions: usage errors (see ``_is_usage_error``), and a
    missed scheduled run that a later run replaces. Prefect's log shows the stages, unless another watcher is active.
    ``name`` is the name of the profile. ``overrides`` are the profile settings that the run overrides. They are
    recorded with the outcome.

    Raises:
        Exception: Any unexpected error, after mergegate has recorded it. Prefect logs it with its traceback.
    """
    from prefect import get_run_logger
    from prefect.states import Cancelled, Completed, Failed

    if replacement := find_replacement_run():
        return Cancelled(message=f"run {replacement} replaces this run, because it started after this one was due")
    for logger in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
        logging.getLogger(logger).addFilter(_is_worth_logging)  # ignores a filter that is already attached
    began, watcher = time.monotonic(), lambda: ProgressLog(get_run_logger())
    run, flow = running_flow()
    detail("Prefect's flow run %s (%s); project state in %s", run, flow, home())
    context = {"run": run, "flow": flow, "profile": name}
    with json_log(context, watcher) as say, progress_watcher(RecordedProgress(current_watcher(watcher))) as recorder:
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
            archived = archive_outcome(outcome, name, began, recorder.stages)
            if archived.report is not None:
                failure.add_note(f"report: {archived.report}")
            publish_artifact(archived, name)
            say("run ended", level="error", status="failed", message=outcome.message)
            raise
        outcome = outcome.model_copy(update={"overrides": tuple(overrides), "stages": tuple(recorder.stages)})
        if not _is_usage_error(outcome, recorder.stages):
            outcome = archive_outcome(outcome, name, began, recorder.stages)
        level = "warning" if outcome.exit_code else "info"
        seconds = time.monotonic() - began
        say("run ended", level=level, status=outcome.status, message=outcome.text_with_proposal, seconds=seconds)
    publish_artifact(outcome, name)
    state = state_name(outcome.status)
    if outcome.exit_code:
        if outcome.status == "interrupted":
            return Cancelled(name=state, message=outcome.text, data=StoppedRun(outcome))
        return Failed(name=state, message=outcome.text_with_proposal, data=StoppedRun(outcome))
    return Completed(name=state, message=outcome.text, data=outcome)


def run_dry_pass(
    make: Callable[[], RunOutcome], flow: str, name: str, overrides: Sequence[str] = ()
) -> RunOutcome | None:
    """Run ``make``, the story of a flow, against the cache only. Return its outcome, or None if there is work to do.

    A dry pass (``stage.dry_pass``) runs the flow's own code on the same inputs, without Prefect's API. If it
    finishes, progress watchers receive its stages, and its outcome is archived like any other. If it fails, the real
    run starts and reports the reason. ``name`` is the name of the profile.
    """
    began, deferred = time.monotonic(), DeferredProgress()
    try:
        store_quota()  # the real run reports an invalid setting
        with progress_watcher(deferred), dry_pass():
            outcome = make()
    except (Exception, WorkRequired) as reason:
        detail("the dry pass found work to do: %s", " ".join(str(reason).split()))
        return None
    with json_log({"flow": flow, "profile": name}, DeferredProgress) as say:
        relay_progress(deferred.stages)
        outcome = outcome.model_copy(update={"overrides": tuple(overrides), "stages": tuple(deferred.stages)})
        outcome = archive_outcome(outcome, name, began, deferred.stages, flow)
        seconds = time.monotonic() - began
        say("run ended", status=outcome.status, message=outcome.text_with_proposal, seconds=seconds)
    return outcome


def within_limits(make: Callable[[Profile], RunOutcome], profile: Profile) -> RunOutcome:
    """Run ``make`` within the time and memory limits of the profile. Exceeding the time limit raises OutOfTime."""
    with apply_limits(profile.limits):
        return make(profile)


def flow_outcome(state: State[Any]) -> RunOutcome | BaseException | None:
    """Return the outcome in the state of a flow run, or the exception that ended the run."""
    value = state.result(raise_on_failure=False)
    if isinstance(value, StoppedRun):
        return value.outcome
    return value if isinstance(value, RunOutcome | BaseException) else None


def _run_recorded(make: Callable[[], RunOutcome], name: str) -> RunOutcome:
    """Run ``make`` and record which artifacts it uses, then shrink the store to its quota.

    The record protects these artifacts from removal, now and until the next run.
    """
    store_quota()  # reports an invalid setting before any work
    with log_shared_store_savings(), record_run(name) as run:
        try:
            try:
                outcome = make()
            except LostArtifact as lost:  # it was removed from the store between two stages
                announce(f"{lost.where}: it was removed from the store; the run starts again and rebuilds it")
                outcome = make()
        except MergegateError as error:
            outcome = stopped_outcome(error)
        if run is not None:
            # A refused run without measurements does not show which artifacts the next run needs.
            judged = outcome.exit_code == 0 or outcome.content is not None or outcome.sweep is not None
            run.end(outcome.status, judged=judged)
            keep_quota()
    return outcome


def _is_usage_error(outcome: RunOutcome, stages: Sequence[StageEnd]) -> bool:
    """Return whether the user who started a run has to correct its input, so that the run is not archived.

    The line is between attended and unattended runs. A command or a Python call shows invalid input to the user who
    started it: a misspelled override, an unknown key, a recipe instead of a profile, a missing file. Recording it would
    replace the latest report with a page about a typing error. No one watches a run that a deployment starts, by its
    schedule or by a trigger. If its profile has become invalid, the history is where the team finds out, so it is
    recorded. A run that had already merged or evaluated a model is recorded in both cases.
    """
    if outcome.status != "invalid" or any(stage.stage not in _CHECKS for stage in stages):
        return False
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    return context is None or context.flow_run is None or context.flow_run.deployment_id is None


def publish_artifact(outcome: RunOutcome, name: str) -> None:
    """Save the outcome as a Markdown artifact of the Prefect run, which Prefect's UI shows.

    An error here never fails the run, because the report has all results.
    """
    from prefect.artifacts import create_markdown_artifact

    key = "".join(character if character.isalnum() else "-" for character in f"release-{name}".lower())
    try:
        create_markdown_artifact(prefect_page(outcome, name), key=key, description=outcome.message.splitlines()[0])
    except Exception as failure:
        _log.warning("Prefect's page about this run could not be written: %s", failure)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Return false for the traceback of a ``StoppedRun``, or an empty one: the log already has the message."""
    return not (record.exc_info and isinstance(record.exc_info[1], StoppedRun | None))
