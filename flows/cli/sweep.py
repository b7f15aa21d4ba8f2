"""``mergegate sweep`` and ``mergegate tune``: search the free values of a recipe, also from mergekit-evolve's YAML."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from mergegate.flows.candidates import TuningSize
from mergegate.flows.cli.command import JsonOption, VerboseOption, command_context
from mergegate.flows.cli.run import RunView, headline_of, load_for_flow, run_flow
from mergegate.flows.cli.run_summary import print_outcome
from mergegate.flows.outcome import RunOutcome
from mergegate.flows.profile import Profile, parse_profile
from mergegate.merge_core import open_checkpoint
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import read_yaml
from mergegate.tasks.stage import home
from mergegate.tasks.sweep import convert_evolve_file, count_layers, serve_dashboard

_DASHBOARD_PORT = 8080


def sweep_command(
    profile: Annotated[Path, typer.Argument(help="Profile with a section 'sweep', or mergekit-evolve's YAML.")],
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
        profile_to_sweep = convert_evolve(profile, console)
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
        loaded = load_for_flow(profile).with_scale_search(TuningSize(trials, search, confirmation))
        outcome = run_sweep(loaded, RunView(verbose=verbose), console, release=release)
        print_outcome(console, outcome, as_json)
        raise typer.Exit(outcome.exit_code)


def run_sweep(
    profile: Path | Profile, view: RunView, console: Console, *, release: bool, study_view: str | None = None
) -> RunOutcome:
    """Run the flow ``sweep``, and return its outcome. ``study_view`` is the study for Optuna's dashboard."""
    from mergegate.flows.sweep import sweep

    loaded = load_for_flow(profile)
    flow = partial(sweep, profile, release=release, view=study_view, return_state=True)
    return run_flow(flow, headline_of(loaded, profile), view, console)


def convert_evolve(file: Path, console: Console) -> Path | Profile:
    """Convert mergekit-evolve's YAML to an equivalent profile, and print the settings without an equivalent.

    A profile file is returned as its path, because Prefect stores the arguments of a flow.

    Raises:
        InvalidInput: The file is neither.
    """
    documents = read_yaml(file, "a profile (YAML)")
    if len(documents) != 1 or not isinstance(documents[0], Mapping) or "genome" not in documents[0]:
        return file
    content = documents[0]
    genome = content["genome"]
    models = genome.get("models") if isinstance(genome, Mapping) else None
    first = models[0] if isinstance(models, list) and models else None
    name = first.get("model") if isinstance(first, Mapping) else first
    layers = None  # all layers of a model that is not local share one value
    if isinstance(name, str) and (file.parent / name).is_dir():
        layers = count_layers(open_checkpoint(file.parent / name).tensors)
    converted = convert_evolve_file(content, file.stem, str(file), layers)
    console.print(Text(f"{file}: converted from mergekit-evolve, without these settings"), style="bold")
    for dropped in converted.unsupported:
        console.print(Text(f"  {dropped.setting}: {dropped.reason}", style="dim"))
    return parse_profile({"root": file.absolute().parent, **converted.profile}, str(file))
