"""``mergegate fetch-data``: the datasets that a profile's tasks are loaded from, into the directory that it names."""

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
    """Fetch what is not there yet, and say what came.

    Raises:
        InvalidInput: for a profile without ``evaluate.data``, or a dataset that cannot be had.
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
    asked: list[TaskDataset] = []
    for task in profile.asked_tasks():
        require_supported(task, profile.root, code_allowed=task in profile.evaluate.allow_code)
        asked += named_data(task, (profile.root / task).absolute() if is_file_name(task) else None)
    found: list[FetchedDataset] = []

    def note(one: FetchedDataset) -> None:
        found.append(one)
        what = f"fetched at {one.revision[:12]}" if one.revision else "is there"
        console.print(f"{one.name}: {what}", markup=False)

    fetch_datasets(asked, root, note)
    if as_json:
        told = [{"dataset": one.name, "revision": one.revision, "directory": str(one.directory)} for one in found]
        print_answer("fetched", f"{len(found)} datasets in {root}", {"directory": str(root), "datasets": told})
    elif not found:
        console.print("nothing to fetch: the data of all tasks lie beside them")
    return found
