"""``mergegate fetch-data``: fetch the datasets of a profile's tasks into the directory that the profile names."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

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


def fetch_data(file: Path, console: Console, as_json: bool = False) -> list[FetchedDataset]:
    """Fetch missing datasets, and print and return them.

    Raises:
        InvalidInput: The profile has no ``evaluate.data``, or a dataset is not available.
    """
    profile = load_profile(file)
    if profile.evaluate is None or profile.evaluate.data is None:
        raise InvalidInput(
            f"{file}: evaluate.data",
            found="no directory",
            expected="where to put the datasets",
            remedy="add 'data: eval-data' under 'evaluate'",
        )
    root = (profile.root / profile.evaluate.data).absolute()
    datasets: list[TaskDataset] = []
    for task in profile.asked_tasks():
        require_supported(task, profile.root, code_allowed=task in profile.evaluate.allow_code)
        datasets += named_data(task, (profile.root / task).absolute() if is_file_name(task) else None)
    fetched: list[FetchedDataset] = []

    def note(dataset: FetchedDataset) -> None:
        fetched.append(dataset)
        status = f"fetched at {dataset.revision[:12]}" if dataset.revision else "is there"
        console.print(f"{dataset.name}: {status}", markup=False)

    fetch_datasets(datasets, root, note)
    if as_json:
        rows = [
            {"dataset": dataset.name, "revision": dataset.revision, "directory": str(dataset.directory)}
            for dataset in fetched
        ]
        print_answer("fetched", f"{len(fetched)} datasets in {root}", {"directory": str(root), "datasets": rows})
    elif not fetched:
        console.print("nothing to fetch: the data of all tasks lie beside them")
    return fetched
