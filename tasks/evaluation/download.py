"""Download the datasets of tasks into a local directory (``evaluate.data``) on a machine with a network.

Each dataset is downloaded whole, with the layout of the Hub, at the commit in ``datasets.json`` in the directory. With
a copy of this file, every machine downloads the same data. A dataset without an entry is downloaded at its current
commit, or at the revision that its task names, and gets an entry. It is moved to its final directory only when it is
complete, because an incomplete dataset would be a different benchmark.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import write_state
from mergegate.merge_core.parsing import parse_json, read_plain
from mergegate.tasks.checkpoints.hub import HubAccess, describe_hub_error, hub_access
from mergegate.tasks.evaluation.mirror import find_dataset, find_datasets
from mergegate.tasks.evaluation.task_datasets import TaskDataset

REVISIONS = "datasets.json"  # file in the directory with the commit of each dataset, by name
_ARRIVING = ".arriving"  # subdirectory for incomplete datasets
_COMMIT = 40  # number of characters in a commit
_WANTED = ["*.parquet", "*.jsonl", "*.json", "*.csv", "*.tsv", "*.txt", "*.gz", "*.zst", "*.arrow", "README.md"]


@dataclass(frozen=True)
class FetchedDataset:
    """Result for one dataset."""

    name: str
    revision: str  # commit; empty if the dataset was put there by other means
    directory: Path


def fetch_datasets(datasets: Sequence[TaskDataset], root: Path, on_dataset: Callable[[FetchedDataset], None]) -> None:
    """Download every dataset that is missing or incomplete in ``root``.

    Args:
        datasets: Datasets of the tasks (``named_data``).
        root: Directory to fill.
        on_dataset: Called with each dataset when it is complete.

    Raises:
        InvalidInput: If the network is forbidden, a dataset is not on the Hub or not accessible, two tasks need
            different revisions of a dataset, or data at a web address is missing from ``root``.
    """
    pinned = _revisions(root)
    by_name: dict[str, list[TaskDataset]] = {}
    for dataset in datasets:
        by_name.setdefault(dataset.path, []).append(dataset)
    at_addresses = by_name.pop("", [])
    for name, requests in by_name.items():
        revision = _one_revision(name, requests)
        if name in pinned or not all(_is_there(root, dataset) for dataset in requests):
            on_dataset(_fetch(name, revision, root, pinned))
        else:
            on_dataset(FetchedDataset(name, "", root / name))
    find_datasets(root, [*(dataset for requests in by_name.values() for dataset in requests), *at_addresses])


def _fetch(name: str, requested: str, root: Path, pinned: dict[str, str]) -> FetchedDataset:
    """Download one dataset. A pinned dataset that is present is checked again, which is cheap if it is complete."""
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]  # httpx's or httpx2's

    directory, access = root / name, hub_access(writing=False)
    api: Any = access.api()
    try:
        revision = pinned.get(name) or str(api.dataset_info(name, revision=requested or None, timeout=20).sha)
        if len(requested) == _COMMIT and requested != revision:
            raise InvalidInput(
                f"{root / REVISIONS}: {name}",
                found=revision,
                expected=f"{requested}, which a task names",
                remedy="remove that line and its directory; then it is fetched anew",
            )
        is_new = not directory.is_dir() or not any(directory.iterdir())
        if not is_new and name not in pinned:
            raise InvalidInput(
                str(directory),
                found="a directory without the data that its tasks want",
                expected="all of it, or no such directory",
                remedy="move it away; then it is fetched",
            )
        download_path = _arriving(root, name, revision) if is_new else directory
        api.snapshot_download(
            name, repo_type="dataset", revision=revision, local_dir=download_path, allow_patterns=_WANTED
        )
    except (HTTPError, HFValidationError, ConnectionError, FileNotFoundError) as error:
        raise _unavailable(name, error, access) from error
    pinned[name] = revision
    write_state(root / REVISIONS, (json.dumps(pinned, indent=1, sort_keys=True) + "\n").encode())
    if is_new:
        directory.parent.mkdir(parents=True, exist_ok=True)
        download_path.rename(directory)
    return FetchedDataset(name, revision, directory)


def _arriving(root: Path, name: str, revision: str) -> Path:
    """Create the directory for an incomplete dataset; an earlier download of this revision continues in it."""
    path = root / _ARRIVING / f"{name.replace('/', '--')}@{revision[:40].replace('/', '-')}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def _unavailable(name: str, error: Exception, access: HubAccess) -> InvalidInput:
    return InvalidInput(
        f"dataset {name}",
        found=describe_hub_error(error, access),
        expected="a dataset of the Hub that may be read from here",
        remedy="HF_TOKEN of an account that may read it; or leave its task out",
    )


def _one_revision(name: str, datasets: Iterable[TaskDataset]) -> str:
    tasks_by_revision = {dataset.revision: dataset.task for dataset in datasets if dataset.revision}
    if len(tasks_by_revision) > 1:
        raise InvalidInput(
            f"dataset {name}",
            found=" and ".join(f"{revision} for task {task}" for revision, task in tasks_by_revision.items()),
            expected="one revision of a dataset in a directory",
            remedy="name one in both tasks, or give one of them a file of its own in the directory",
        )
    return next(iter(tasks_by_revision), "")


def _is_there(root: Path, dataset: TaskDataset) -> bool:
    try:
        return root.is_dir() and bool(find_dataset(root, dataset).files)
    except InvalidInput:
        return False


def _revisions(root: Path) -> dict[str, str]:
    if not (root / REVISIONS).exists():
        return {}
    content = parse_json(read_plain(root / REVISIONS, 1 << 20), str(root / REVISIONS))
    return {str(name): str(revision) for name, revision in content.items()} if isinstance(content, dict) else {}
