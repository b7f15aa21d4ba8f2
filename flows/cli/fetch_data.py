"""``mergegate fetch-data``: the datasets of a profile's tasks by name, into the directory that it names."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from flows.profile import load_profile
from merge_core.errors import InvalidInput
from tasks.evaluation import FetchedDataset, fetch_datasets, require_supported


def fetch_data(file: Path, console: Console) -> list[FetchedDataset]:
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
    names = profile.evaluate.tasks_by_name
    found: list[FetchedDataset] = []

    def note(one: FetchedDataset) -> None:
        found.append(one)
        what = f"fetched at {one.revision[:12]}" if one.revision else "is there"
        console.print(f"{one.name}: {what}", markup=False)

    for name in names:
        require_supported(name, code_allowed=name in profile.evaluate.allow_code)
    fetch_datasets(names, root, note)
    if not found:
        console.print("no task by name: data of a YAML file are its own")
    return found
