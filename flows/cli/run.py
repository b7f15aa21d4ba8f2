"""``mergegate run`` and ``mergegate compare``: run a flow on this terminal and print its outcome.

``mergegate sweep``, ``tune`` and ``shadow`` run their flows with :func:`run_flow` too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from mergegate.flows.cli.approve import TerminalApproval
from mergegate.flows.cli.command import (
    ApproveOption,
    GuardsOption,
    JsonOption,
    VerboseOption,
    command_context,
    local_path,
)
from mergegate.flows.cli.json_events import EventLines, print_event
from mergegate.flows.cli.progress import TerminalProgress
from mergegate.flows.cli.run_summary import outcome_json, print_outcome
from mergegate.flows.outcome import RunOutcome, flow_outcome
from mergegate.flows.prefect_api import approval_function, configured_url, local_api, require_writable
from mergegate.flows.profile import Profile, RemedyChoice, load_profile


class RemedyOption(StrEnum):
    """Remedies to try when the gate refuses."""

    WRITTEN = "written"
    AUTO = "auto"


def run_command(
    profile: Annotated[Path, typer.Argument(parser=local_path, help="Profile (YAML).")],
    approve: ApproveOption = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a profile setting for this run, for example evaluate.documents=200. Repeatable.",
        ),
    ] = None,
    publish: Annotated[
        bool, typer.Option("--publish/--no-publish", help="Publish a merge that passes, or stop before publication.")
    ] = True,
    remedy: Annotated[
        RemedyOption | None,
        typer.Option(
            help="Remedies to try when the gate refuses: only the list in the profile, or also proposed ones.",
            show_default="the setting of the profile",
        ),
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Only run the checks, and show which stages are cached.")
    ] = False,
    price: Annotated[
        list[str] | None,
        typer.Option(help="With --dry-run: hourly price of an instance, as NAME=DOLLARS_PER_HOUR. Repeatable."),
    ] = None,
    events: Annotated[bool, typer.Option("--events", help="Print one line of JSON for each event.")] = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check, merge, evaluate, gate and publish a release.

    Stages that are already cached are reused, so an interrupted run resumes.
    """
    with command_context(as_json or (events and not dry), with_state=True) as console:
        settings = tuple(overrides or ())
        choice: RemedyChoice | None = remedy.value if remedy else None
        if dry:
            from mergegate.flows.cli.dry_run import dry_run

            planned = load_profile(profile, settings).with_remedies(choice)
            planned = planned if publish else planned.model_copy(update={"publish": None})
            raise typer.Exit(dry_run(planned, console, as_json, price or ()))
        from mergegate.flows.release import release, run_release_dry_pass

        loaded = load_for_flow(profile, settings).with_remedies(choice)
        # Pass the file name, because Prefect stores the parameters of a flow.
        arguments = (profile, settings, publish, choice)
        outcome = run_flow(
            partial(release, *arguments, return_state=True),
            RunView(loaded.headline(), profile, approve=approve, events=events, verbose=verbose),
            console,
            dry_pass=partial(run_release_dry_pass, *arguments),
        )
        if events:
            print_event("finished", **outcome_json(outcome))
        else:
            print_outcome(console, outcome, as_json, profile)
        raise typer.Exit(outcome.exit_code)


def compare_command(
    reference: Annotated[
        str, typer.Argument(metavar="A", help="Checkpoint to compare with: a directory, or org/name@revision.")
    ],
    candidate: Annotated[str, typer.Argument(metavar="B", help="Checkpoint to judge.")],
    profile: GuardsOption,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Judge one checkpoint against another by a profile's guards.

    mergegate evaluates A and B, and neither merges nor publishes anything.
    """
    with command_context(as_json, with_state=True) as console:
        from mergegate.flows.compare import compare as compare_checkpoints

        load_for_flow(profile)
        view = RunView(f"{Path(candidate).name} against {Path(reference).name}", profile, verbose=verbose)
        flow = partial(compare_checkpoints, reference, candidate, profile, return_state=True)
        outcome = run_flow(flow, view, console)
        print_outcome(console, outcome, as_json)
        raise typer.Exit(outcome.exit_code)


@dataclass(frozen=True)
class RunView:
    """Options of a run on the terminal.

    ``profile`` is the path as the user wrote it. With ``approve``, the user approved publication in advance. With
    ``events``, one line of JSON is printed for each event instead of the progress. ``verbose`` logs details.
    """

    headline: str
    profile: Path
    approve: bool = False
    events: bool = False
    verbose: bool = False


def load_for_flow(profile: Path | Profile, overrides: tuple[str, ...] = ()) -> Profile:
    """Load a profile and its recipes before a flow starts, so that usage errors end the command at once."""
    loaded = load_profile(profile, overrides)
    loaded.headline()
    return loaded


def run_flow(
    flow: Callable[[], Any],
    view: RunView,
    console: Console,
    *,
    dry_pass: Callable[[], RunOutcome | None] = lambda: None,
) -> RunOutcome:
    """Run a flow with progress on the terminal and Prefect's API available, and return its outcome.

    First try ``dry_pass``. If it returns an outcome, there is no work and the flow does not run.
    """
    progress = TerminalProgress(console, verbose=view.verbose)
    watching = partial(EventLines().watching, verbose=view.verbose) if view.events else progress.watching
    progress.headline(view.headline, f"profile {view.profile}")
    if not configured_url():  # a server should record every run, because other users see its list
        with watching():
            if (cached_outcome := dry_pass()) is not None:
                return cached_outcome
    with ExitStack() as stack:
        with console.status("starting Prefect's API"):
            stack.enter_context(local_api())
        with watching(), approval_function(TerminalApproval(progress, console, in_advance=view.approve)):
            try:
                state = flow()
            except Exception as failure:
                require_writable(Path(os.environ["MERGEGATE_HOME"]))
                raise failure from None
    outcome = flow_outcome(state)
    if isinstance(outcome, RunOutcome):
        return outcome
    # Prefect's API reports a full disk only as a failure.
    require_writable(Path(os.environ["MERGEGATE_HOME"]))
    if isinstance(outcome, Exception):
        raise outcome
    raise RuntimeError(f"the run ended without an outcome: {outcome!r}")
