"""``mergegate gate``, ``smoke`` and ``fetch-data``: judge results, test a server, or fetch datasets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mergegate.flows.cli.command import GuardsOption, JsonOption, SetOption, command_context
from mergegate.flows.operations.console import print_answer
from mergegate.flows.operations.gate import judge_results, load_guards
from mergegate.flows.operations.summary import print_outcome
from mergegate.flows.profile import load_profile, override_profile
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.base.stage import device_kind, home, store
from mergegate.tasks.base.store import digest
from mergegate.tasks.models.checkpoints import (
    Model,
    PinnedCheckpoint,
    apply_adapters_outside_flow,
    download_snapshots,
    find_checkpoint,
    pin_checkpoints,
)
from mergegate.tasks.quality.evaluation import FetchedDataset, TaskDataset, fetch_datasets, require_supported
from mergegate.tasks.quality.serve import (
    STEPS,
    RunningServer,
    ServeSettings,
    ServeVerdict,
    SmokeSetup,
    find_server,
    smoke_checkpoint,
    smoke_url,
)


def gate_command(
    results: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=DIR", help="Results by model: merge=DIR reference=DIR. A log or results file also works."
        ),
    ],
    profile: GuardsOption,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Judge results of lm-eval or inspect_ai by guards.

    The guards are those of a profile. A directory contains the output of lm-eval 0.4 or 0.5 with --log_samples, or
    .eval or .json logs of inspect_ai. mergegate does not run any model.
    """
    with command_context(as_json, with_state=True) as console:
        loaded, location = load_guards(override_profile(profile, overrides, needs_recipe=False))
        outcome = judge_results(_directories_by_model(results), loaded, location, console)
        print_outcome(console, outcome, as_json)
        raise typer.Exit(outcome.exit_code)


def _directories_by_model(entries: Sequence[str]) -> dict[str, Path]:
    """Parse entries of the form ``NAME=DIRECTORY``. Raise InvalidInput if a model is named twice."""
    directories: dict[str, Path] = {}
    for entry in entries:
        name, equals, directory = entry.partition("=")
        if not (name and equals and directory):
            raise InvalidInput(
                entry, found="not a model with a directory", expected="NAME=DIRECTORY, for example merge=out/merge"
            )
        if name in directories:
            raise InvalidInput(entry, found=f"a second directory for {name}", expected="one directory for each model")
        directories[name] = Path(directory)
    return directories


_MARKS = {"pass": ("✓", "green"), "fail": ("✗", "bold red"), "not offered": ("·", "dim")}


def smoke_command(
    target: Annotated[str, typer.Argument(help="Checkpoint, or URL of a running server.")],
    profile: Annotated[
        Path | None,
        typer.Option("--profile", "-p", help="Profile whose section 'serve' applies.", show_default="no settings"),
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="For a URL: checkpoint that the server should serve.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="For a URL: the model on the server.")] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="VARIABLE",
            help="For a URL: environment variable with the server's API key.",
            rich_help_panel="Advanced",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a checkpoint, and test its answers.

    For a URL, mergegate tests the server there. The exit code is 3 if a check fails.
    """
    with command_context(as_json, with_state=True) as console:
        loaded = load_profile(profile, needs_recipe=False) if profile else None
        settings = (loaded.serve if loaded else None) or ServeSettings()
        is_url = target.startswith(("http://", "https://"))
        if not is_url and (checkpoint or model):
            option = "--checkpoint" if checkpoint else "--model"
            raise InvalidInput(
                option, found="this option needs the URL of a server", expected="a URL", remedy=f"omit {option}"
            )
        log: Path | None = None
        with console.status("reading headers") as status:

            def show(number: int, step: str) -> None:
                status.update(f"{number} of {STEPS}: {step}")

            if is_url:
                key = os.environ.get(api_key_env, "") if api_key_env else ""
                verdict = smoke_url(
                    RunningServer(target, model, key),
                    settings,
                    checkpoint=_pinned(str(checkpoint))[0] if checkpoint else None,
                    device=device_kind(),
                    on_progress=show,
                )
            else:
                # A missing server is reported before a checkpoint is downloaded.
                server = find_server(settings, loaded.root if loaded else Path())
                served, adapted = _pinned(target)
                log = home() / "logs" / f"smoke-{served.directory.name}.log"
                log.parent.mkdir(parents=True, exist_ok=True)
                log.unlink(missing_ok=True)  # log of an earlier run
                setup = SmokeSetup(server, device_kind(), log)
                verdict = smoke_checkpoint(served, settings, setup, adapted_model=adapted, on_progress=show)
        if as_json:
            print_answer(
                str(verdict.outcome) if hasattr(verdict, "outcome") else "asked",
                verdict.summary(),
                verdict.model_dump(mode="json"),
            )
        else:
            _print_verdict(verdict, console)
            if verdict.refuses() and log and log.exists():
                console.print(Text("  log      ", "dim"), Text(os.path.relpath(log)), sep="")
        raise typer.Exit(3 if verdict.refuses() else 0)


def _pinned(reference: str) -> tuple[Model, PinnedCheckpoint | None]:
    """Download a checkpoint if necessary, and return it as a model. For ``model+adapter``, also return both parts."""
    checkpoint = find_checkpoint(reference)
    if checkpoint.snapshots:
        download_snapshots(checkpoint.snapshots, store().hashes)
    if checkpoint.adapter:
        (adapted,) = pin_checkpoints([checkpoint], store().hashes)
        return apply_adapters_outside_flow([adapted])[0], adapted
    # This command has no cache, so the path identifies the model.
    return Model(name=checkpoint.name, digest=digest(str(checkpoint.directory)), directory=checkpoint.directory), None


def _print_verdict(verdict: ServeVerdict, console: Console) -> None:
    """Print the checks, the costs of serving, and the verdict with remedies."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("", "check", "result", "expected"):
        table.add_column(column, overflow="fold")
    for check in verdict.checks:
        mark, style = _MARKS[check.outcome]
        result = f"{check.where}: {check.seen}" if check.where else check.seen
        if check.outcome == "not offered":
            result = f"not offered: {result}"
        table.add_row(
            Text(mark, style), Text(check.name, style, no_wrap=True), Text(result), Text(check.expected, "dim")
        )
    console.print(table)
    console.print()
    if quantities := verdict.measured.quantities():
        numbers = Table.grid(padding=(0, 2, 0, 0))
        for name, value in quantities:
            numbers.add_row(Text(f"   {name}", "dim"), Text(value))
        console.print(numbers)
        how = "; one request at a time, the fastest of three" if verdict.measured.throughput else ""
        console.print(Text(f"   {verdict.measured.occasion}{how}", "dim"))
        console.print()
    line = f"{verdict.model} on {verdict.server}: {'refused, ' if verdict.refuses() else ''}{verdict.count()}"
    console.print(Text(line, "bold red" if verdict.refuses() else "bold green"))
    for check in verdict.failures:
        if check.remedy:
            console.print(Text(f"  {check.name}: {check.remedy}"))


def fetch_data_command(
    profile: Annotated[Path, typer.Argument(help="Profile with 'evaluate.data'.")], as_json: JsonOption = False
) -> None:
    """Fetch the datasets of a profile's tasks for offline runs.

    They are stored in the directory 'evaluate.data' of the profile.
    """
    with command_context(as_json, with_state=True) as console:
        root, fetched = fetch_profile_data(profile, console)
        if as_json:
            rows = [
                {"dataset": dataset.name, "revision": dataset.revision, "directory": str(dataset.directory)}
                for dataset in fetched
            ]
            print_answer("fetched", f"{len(fetched)} datasets in {root}", {"directory": str(root), "datasets": rows})
        elif not fetched:
            console.print("nothing to fetch: the tasks' own files include all data")


def fetch_profile_data(file: Path, console: Console) -> tuple[Path, list[FetchedDataset]]:
    """Fetch a profile's missing datasets, print the status of each, and return their directory and all datasets.

    Raises:
        InvalidInput: The profile has no ``evaluate.data``, or a dataset is not available.
    """
    profile = load_profile(file, needs_recipe=False)
    if profile.evaluate is None or profile.evaluate.data is None:
        raise InvalidInput(
            f"{file}: evaluate.data",
            found="it is missing",
            expected="a directory for the datasets",
            remedy="add 'data: eval-data' under 'evaluate'",
        )
    root = (profile.root / profile.evaluate.data).absolute()
    datasets: list[TaskDataset] = []
    for task in profile.task_names():
        allowed = task in profile.evaluate.allow_code
        datasets += require_supported(task, profile.root, code_allowed=allowed).datasets
    fetched: list[FetchedDataset] = []

    def note(dataset: FetchedDataset) -> None:
        fetched.append(dataset)
        status = f"fetched at {dataset.revision[:12]}" if dataset.revision else "already there"
        console.print(f"{dataset.name}: {status}")

    fetch_datasets(datasets, root, note)
    return root, fetched
