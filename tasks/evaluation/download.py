"""Download the datasets of tasks into a local directory (``evaluate.data``), on a machine with network access.

Each dataset is downloaded whole, with the layout of the Hub. ``datasets.json`` in the directory pins its commit, so a
copy of this file makes every machine download the same data. A dataset without an entry is downloaded at its current
commit, or at the revision that its task requires, and gets an entry. A dataset is moved to its final directory only
when it is complete, because an incomplete dataset would be a different benchmark.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import write_state
from mergegate.merge_core.parsing import parse_json, read_plain
from mergegate.tasks.checkpoints.hub import describe_hub_error, hub_access
from mergegate.tasks.evaluation.mirror import find_dataset, find_datasets
from mergegate.tasks.evaluation.task_datasets import TaskDataset

REVISIONS = "datasets.json"  # file in the directory with the commit of each dataset, by name
_INCOMPLETE = ".arriving"  # subdirectory for incomplete datasets
_COMMIT_LENGTH = 40
_DATA_FILES = ["*.parquet", "*.jsonl", "*.json", "*.csv", "*.tsv", "*.txt", "*.gz", "*.zst", "*.arrow", "README.md"]


@dataclass(frozen=True)
class FetchedDataset:
    """A dataset in the local directory, either downloaded or already there."""

    name: str
    revision: str  # commit; empty if the dataset was put there by other means
    directory: Path


def fetch_datasets(datasets: Sequence[TaskDataset], root: Path, on_dataset: Callable[[FetchedDataset], None]) -> None:
    """Download every dataset that is missing or incomplete in ``root``, and call ``on_dataset`` with each complete one.

    Raises:
        InvalidInput: If the network is forbidden, a dataset is not on the Hub or not accessible, two tasks need
            different revisions of a dataset, or data at a web address is missing from ``root``.
    """
    pinned: dict[str, str] = {}
    if (root / REVISIONS).exists():
        content = parse_json(read_plain(root / REVISIONS, 1 << 20), str(root / REVISIONS))
        if isinstance(content, dict):
            pinned = {str(name): str(revision) for name, revision in content.items()}
    by_name: dict[str, list[TaskDataset]] = {}
    for dataset in datasets:
        by_name.setdefault(dataset.path, []).append(dataset)
    at_addresses = by_name.pop("", [])
    for name, requests in by_name.items():
        tasks_by_revision = {dataset.revision: dataset.task for dataset in requests if dataset.revision}
        if len(tasks_by_revision) > 1:
            raise InvalidInput(
                f"dataset {name}",
                found=" and ".join(f"{revision} for task {task}" for revision, task in tasks_by_revision.items()),
                expected="one revision of a dataset in a directory",
                remedy="use one revision in both tasks, or add a file of its own for one of them to the directory",
            )
        try:
            is_complete = root.is_dir() and all(find_dataset(root, dataset).files for dataset in requests)
        except InvalidInput:
            is_complete = False
        if name in pinned or not is_complete:
            on_dataset(_fetch(name, next(iter(tasks_by_revision), ""), root, pinned))
        else:
            on_dataset(FetchedDataset(name, "", root / name))
    find_datasets(root, [*(dataset for requests in by_name.values() for dataset in requests), *at_addresses])


def _fetch(name: str, requested_revision: str, root: Path, revisions: dict[str, str]) -> FetchedDataset:
    """Download one dataset. A pinned dataset that exists is verified, which is fast if it is complete."""
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]  # httpx's or httpx2's

    directory, access = root / name, hub_access(writing=False)
    api: Any = access.api()
    try:
        revision = revisions.get(name) or str(
            api.dataset_info(name, revision=requested_revision or None, timeout=20).sha
        )
        if len(requested_revision) == _COMMIT_LENGTH and requested_revision != revision:
            raise InvalidInput(
                f"{root / REVISIONS}: {name}",
                found=revision,
                expected=f"{requested_revision}, the revision of a task",
                remedy="remove that line and the directory of the dataset, and run the command again",
            )
        is_new = not directory.is_dir() or not any(directory.iterdir())
        if not is_new and name not in revisions:
            raise InvalidInput(
                str(directory),
                found="a directory without the data that its tasks need",
                expected="the complete dataset, or no such directory",
                remedy="move it away, and run the command again",
            )
        download_path = directory
        if is_new:  # an earlier download of this revision continues
            download_path = root / _INCOMPLETE / f"{name.replace('/', '--')}@{revision[:40].replace('/', '-')}"
            download_path.mkdir(parents=True, exist_ok=True)
        api.snapshot_download(
            name, repo_type="dataset", revision=revision, local_dir=download_path, allow_patterns=_DATA_FILES
        )
    except (HTTPError, HFValidationError, ConnectionError, FileNotFoundError) as error:
        raise InvalidInput(
            f"dataset {name}",
            found=describe_hub_error(error, access),
            expected="a dataset on the Hub that this account may read",
            remedy="set HF_TOKEN of an account with access; or remove its task",
        ) from error
    revisions[name] = revision
    write_state(root / REVISIONS, (json.dumps(revisions, indent=1, sort_keys=True) + "\n").encode())
    if is_new:
        directory.parent.mkdir(parents=True, exist_ok=True)
        download_path.rename(directory)
    return FetchedDataset(name, revision, directory)
