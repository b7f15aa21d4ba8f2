"""``mergegate fetch-data``: fetch the datasets of a profile's tasks into the directory that the profile names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mergegate.flows.cli.command import JsonOption, command_context
from mergegate.flows.cli.output import print_answer
from mergegate.flows.profile import load_profile
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.evaluation import (
    FetchedDataset,
    TaskDataset,
    fetch_datasets,
    is_file_name,
    named_data,
    require_supported,
)


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
        require_supported(task, profile.root, code_allowed=task in profile.evaluate.allow_code)
        datasets += named_data(task, (profile.root / task).absolute() if is_file_name(task) else None)
    fetched: list[FetchedDataset] = []

    def note(dataset: FetchedDataset) -> None:
        fetched.append(dataset)
        status = f"fetched at {dataset.revision[:12]}" if dataset.revision else "already there"
        console.print(f"{dataset.name}: {status}")

    fetch_datasets(datasets, root, note)
    return root, fetched
