"""``mergegate run`` and ``mergegate compare``: run a flow on this terminal and print its outcome.

``mergegate sweep``, ``tune`` and ``shadow`` run their flows with :func:`run_flow` too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from mergegate.flows.cli.approve import TerminalApproval
from mergegate.flows.cli.command import ApproveOption, GuardsOption, JsonOption, VerboseOption, command_context
from mergegate.flows.cli.json_events import EventLines, print_event
from mergegate.flows.cli.progress import TerminalProgress
from mergegate.flows.cli.run_summary import outcome_json, print_outcome
from mergegate.flows.outcome import RunOutcome, flow_outcome
from mergegate.flows.prefect_api import approval_function, configured_url, local_api, require_writable
from mergegate.flows.profile import Profile, RemedyChoice, load_profile
from mergegate.tasks.checkpoints import start_model_process


class RemedyOption(StrEnum):
    """Remedies to try when the gate refuses."""

    WRITTEN = "written"
    AUTO = "auto"


def run_command(
    profile: Annotated[Path, typer.Argument(help="Profile (YAML).")],
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
        arguments = ReleaseArguments(profile, settings, publish, choice)
        outcome = run_release(arguments, RunView(approve=approve, events=events, verbose=verbose), console)
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
        outcome = run_comparison(reference, candidate, profile, RunView(verbose=verbose), console)
        print_outcome(console, outcome, as_json)
        raise typer.Exit(outcome.exit_code)


@dataclass(frozen=True)
class RunView:
    """How a run shows its progress.

    With ``approve``, the user approved publication in advance. With ``events``, one line of JSON is printed for each
    event instead of the progress. ``verbose`` logs details. With ``silent``, nothing is printed.
    """

    approve: bool = False
    events: bool = False
    verbose: bool = False
    silent: bool = False


class ReleaseArguments(NamedTuple):
    """Arguments of the flow ``release``. A path is passed as it is, because Prefect stores the arguments of a flow."""

    profile: Path | Profile
    overrides: tuple[str, ...] = ()
    publish: bool = True
    remedy: RemedyChoice | None = None


def run_release(arguments: ReleaseArguments, view: RunView, console: Console) -> RunOutcome:
    """Run the flow ``release``, and return its outcome. An invalid profile raises InvalidInput."""
    from mergegate.flows.release import release, run_release_dry_pass

    loaded = load_for_flow(arguments.profile, arguments.overrides).with_remedies(arguments.remedy)
    return run_flow(
        partial(release, *arguments, return_state=True),
        headline_of(loaded, arguments.profile),
        view,
        console,
        dry_pass=partial(run_release_dry_pass, *arguments),
        prepare=partial(start_models_early, loaded),
    )


def run_comparison(
    reference: str, candidate: str, profile: Path | Profile, view: RunView, console: Console
) -> RunOutcome:
    """Run the flow ``compare``, and return its outcome."""
    from mergegate.flows.compare import compare

    load_profile(profile, needs_recipe=False)  # a usage error ends the command at once
    name = profile.name if isinstance(profile, Profile) else profile
    headline = (f"{Path(candidate).name} against {Path(reference).name}", f"profile {name}")
    return run_flow(partial(compare, reference, candidate, profile, return_state=True), headline, view, console)


def start_models_early(profile: Profile) -> None:
    """Start the model process while Prefect's API starts, if the profile lets it use this machine without limits."""
    # A cluster evaluates elsewhere, and a memory limit applies only inside the flow.
    if profile.runner.kind == "local" and profile.limits.memory is None:
        start_model_process()


def headline_of(profile: Profile, source: Path | Profile) -> tuple[str, str]:
    """Return the two parts of the line above the progress: the merge, and the profile as the user named it."""
    return profile.headline(), f"profile {source.name if isinstance(source, Profile) else source}"


def load_for_flow(profile: Path | Profile, overrides: tuple[str, ...] = ()) -> Profile:
    """Load a profile and its recipes before a flow starts, so that usage errors end the command immediately."""
    loaded = load_profile(profile, overrides)
    loaded.headline()
    return loaded


def run_flow(
    flow: Callable[[], Any],
    headline: tuple[str, str],
    view: RunView,
    console: Console,
    *,
    dry_pass: Callable[[], RunOutcome | None] = lambda: None,
    prepare: Callable[[], None] = lambda: None,
) -> RunOutcome:
    """Run a flow with progress on the console and Prefect's API available, and return its outcome.

    ``headline`` is the line above the progress, in two parts. First try ``dry_pass``. If it returns an outcome, there
    is no work and the flow does not run. ``prepare`` starts work in the background that the flow needs in any case.
    """
    progress = TerminalProgress(console, verbose=view.verbose)
    watching: Callable[[], AbstractContextManager[None]] = nullcontext if view.silent else progress.watching
    if view.events:
        watching = partial(EventLines().watching, verbose=view.verbose)
    progress.headline(*headline)
    if not configured_url():  # a server should record every run, because other users see its list
        with watching():
            if (cached_outcome := dry_pass()) is not None:
                return cached_outcome
    prepare()
    with ExitStack() as stack:
        with console.status("starting Prefect's API") if console.is_terminal else nullcontext():
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
