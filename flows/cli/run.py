"""``mergegate run``, ``compare``, ``sweep``, ``tune`` and ``demo``: run a flow, and print its outcome."""

from __future__ import annotations

import os
import shutil
import threading
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from mergegate.flows.candidates import TuningSize
from mergegate.flows.cli.command import (
    ApproveOption,
    GuardsOption,
    JsonOption,
    SetOption,
    VerboseOption,
    command_context,
)
from mergegate.flows.operations.progress import print_event
from mergegate.flows.operations.run import (
    ReleaseArguments,
    RunView,
    convert_evolve,
    load_for_flow,
    run_comparison,
    run_release,
    run_sweep,
)
from mergegate.flows.operations.summary import outcome_json, print_outcome
from mergegate.flows.profile import RemedyChoice, load_profile, override_profile
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.base.stage import home
from mergegate.tasks.sweep import serve_dashboard


def run_command(
    profile: Annotated[Path, typer.Argument(help="Profile (YAML).")],
    approve: ApproveOption = False,
    overrides: SetOption = None,
    publish: Annotated[
        bool, typer.Option("--publish/--no-publish", help="Publish a merge that passes, or stop before publication.")
    ] = True,
    remedy: Annotated[
        RemedyChoice | None,
        typer.Option(
            help="Remedies to try when the gate refuses: only the list in the profile, or also proposed ones.",
            show_default="the setting in the profile",
        ),
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Only run the checks, and show which stages are cached.")
    ] = False,
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=USD",
            help="With --dry-run: hourly price of an instance. Repeatable.",
            rich_help_panel="Advanced",
        ),
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
        if dry:
            from mergegate.flows.cli.check import dry_run

            planned = load_profile(profile, settings).with_remedies(remedy)
            planned = planned if publish else planned.model_copy(update={"publish": None})
            raise typer.Exit(dry_run(planned, console, as_json, price or ()))
        arguments = ReleaseArguments(profile, settings, publish, remedy)
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
    overrides: SetOption = None,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Judge one checkpoint against another by a profile's guards.

    mergegate evaluates A and B, and neither merges nor publishes anything.
    """
    with command_context(as_json, with_state=True) as console:
        guards = override_profile(profile, overrides, needs_recipe=False)
        outcome = run_comparison(reference, candidate, guards, RunView(verbose=verbose), console)
        print_outcome(console, outcome, as_json)
        raise typer.Exit(outcome.exit_code)


_DASHBOARD_PORT = 8080


def sweep_command(
    profile: Annotated[Path, typer.Argument(help="Profile with a section 'sweep', or mergekit-evolve's YAML.")],
    overrides: SetOption = None,
    release: Annotated[
        bool, typer.Option("--release/--no-release", help="Release a confirmed winner, or only save its recipe.")
    ] = True,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Serve Optuna's dashboard of the search on this machine.")
    ] = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Search a recipe or a soup, and release the winner.

    The winner is confirmed on documents that no trial saw.
    """
    with command_context(as_json, with_state=True) as console:
        study_view, server = None, None
        profile_to_sweep = override_profile(convert_evolve(profile, console), overrides)
        if dashboard:
            loaded = load_for_flow(profile_to_sweep)
            if loaded.sweep and loaded.sweep.soup:
                raise InvalidInput(
                    "--dashboard",
                    found="a soup, which has no free parameters",
                    expected="a search over free parameters",
                    remedy="remove --dashboard; the report shows each model of the soup",
                )
            # Without a location in the profile, the study is next to the scored trials.
            study_view = loaded.sweep_storage() or str(home() / "sweeps" / f"{loaded.name}.optuna")
            console.print(Text(f"dashboard: http://127.0.0.1:{_DASHBOARD_PORT}"))
            server = threading.Thread(target=serve_dashboard, args=(study_view, _DASHBOARD_PORT), daemon=True)
            server.start()
        outcome = run_sweep(profile_to_sweep, RunView(verbose=verbose), console, release=release, study_view=study_view)
        print_outcome(console, outcome, as_json)
        if server is not None:
            console.print(Text("the dashboard is still running; press Ctrl-C to stop it", style="dim"))
            server.join()
        raise typer.Exit(outcome.exit_code)


def tune_command(
    profile: Annotated[Path, typer.Argument(help="Profile with tasks, and a recipe with a 'lambda'.")],
    overrides: SetOption = None,
    trials: Annotated[int, typer.Option(min=2, help="Number of scales to try.")] = 16,
    search: Annotated[int, typer.Option(min=10, help="Documents of each task for the search.")] = 50,
    confirmation: Annotated[int, typer.Option(min=20, help="Documents of each task to confirm the best scale.")] = 100,
    release: Annotated[
        bool, typer.Option("--release/--no-release", help="Release the merge with a confirmed scale.")
    ] = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the best scale of a merge, without labels.

    The scale is the recipe's 'lambda'. The best one is where the merge is most certain of its answers.
    """
    with command_context(as_json, with_state=True) as console:
        loaded = load_for_flow(profile, tuple(overrides or ())).with_scale_search(
            TuningSize(trials, search, confirmation)
        )
        outcome = run_sweep(loaded, RunView(verbose=verbose), console, release=release)
        print_outcome(console, outcome, as_json)
        raise typer.Exit(outcome.exit_code)


PROFILE = Path("profiles", "demo.yaml")


def demo_command(
    directory: Annotated[Path, typer.Argument(help="Directory for the demo, its state and its release.")] = Path(
        "mergegate-demo"
    ),
    as_json: JsonOption = False,
) -> None:
    """Release a merge of the demo models in a new directory.

    mergegate first copies the models there. The demo takes about a minute, and needs neither a network nor an account.
    """
    with command_context(as_json) as console:
        is_new = copy_demo(directory)
        where = "copied the demo into" if is_new else "the demo is in"
        console.print(f"{where} {directory}; run other commands about it there (cd {directory})")
        # The state is in the demo, but the working directory stays, so that printed paths are relative to it.
        os.environ.setdefault("MERGEGATE_HOME", str((directory / ".mergegate").absolute()))
    run_command(directory / PROFILE, as_json=as_json)


def copy_demo(directory: Path) -> bool:
    """Copy the demo with its models, data and scripts into ``directory``. Return whether anything had to be copied.

    Raises:
        InvalidInput: The directory has other content, or this installation does not include the demo.
    """
    if (directory / PROFILE).is_file():
        return False
    if directory.exists() and any(directory.iterdir()):
        raise InvalidInput(
            str(directory),
            found="a directory with other content",
            expected="the demo, or an empty or new directory",
            remedy="choose another one: mergegate demo DIRECTORY",
        )
    source = Path(__file__).resolve().parents[2] / PROFILE
    if not source.is_file():
        try:
            installed = [file for file in files("mergegate") or () if file.parts[-2:] == PROFILE.parts]
        except PackageNotFoundError:
            installed = []
        paths = (Path(str(file.locate())).resolve() for file in installed)
        source = next((path for path in paths if path.is_file()), Path())
    if not source.is_file():
        raise InvalidInput(
            "the demo",
            found="this installation does not include it",
            expected="share/mergegate/profiles, which is part of the wheel",
            remedy="install mergegate with pip or pipx, or run profiles/demo.yaml in a clone",
        )
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copytree(
        source.parent, directory / PROFILE.parent, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
    )
    return True
