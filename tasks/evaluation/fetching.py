"""Fill a directory of datasets for tasks by name (``evaluate.data``), where there is a network.

Each dataset comes whole and as it lies on the Hub, in the commit that ``datasets.json`` in the directory names: what
was fetched once is the same next time, on any machine that the file is copied to. A dataset that is not in it yet is
fetched as the Hub has it now, and noted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from merge_core.errors import InvalidInput
from tasks.checkpoints.hub import describe, hub_access
from tasks.evaluation.mirror import asked_dataset, find_dataset
from tasks.evaluation.shipped import shipped_leaves

REVISIONS = "datasets.json"  # in the directory: the commit of each dataset by name
_WANTED = ["*.parquet", "*.jsonl", "*.json", "*.csv", "*.tsv", "*.txt", "*.gz", "*.zst", "*.arrow", "README.md"]


@dataclass(frozen=True)
class FetchedDataset:
    """What came of one dataset."""

    name: str
    revision: str  # commit; empty: it was there already, by other means
    directory: Path


def fetch_datasets(tasks: Sequence[str], root: Path, on_dataset: Callable[[FetchedDataset], None]) -> None:
    """Fetch every dataset that tasks by name are loaded from and that is not complete in ``root``.

    Args:
        tasks: Names of tasks, groups or tags that lm-eval ships; YAML files are passed over.
        on_dataset: Told of each as it is there.

    Raises:
        InvalidInput: when the network is forbidden, or a dataset is not on the Hub, or not for us.
    """
    from httpx import HTTPError  # what the client of the Hub lets through of its own
    from huggingface_hub.errors import HfHubHTTPError

    pinned = _revisions(root)
    datasets: dict[str, bool] = {}
    for leaf in (leaf for task in tasks for leaf in shipped_leaves(task)):
        if asked := asked_dataset(leaf):
            datasets[asked.path] = datasets.get(asked.path, False) or _is_missing(root, leaf.name, asked.path, pinned)
    for name, is_missing in datasets.items():
        directory = root / name
        if not is_missing:
            on_dataset(FetchedDataset(name, "", directory))
            continue
        access = hub_access(writing=False)
        api = access.api()
        try:
            revision = pinned.get(name) or str(api.dataset_info(name, timeout=20).sha)
            api.snapshot_download(
                name, repo_type="dataset", revision=revision, local_dir=directory, allow_patterns=_WANTED
            )
        except (HfHubHTTPError, HTTPError, ConnectionError, FileNotFoundError) as error:
            raise InvalidInput(
                f"dataset {name}",
                found=describe(error, access),
                expected="a dataset of the Hub that may be read from here",
                remedy="HF_TOKEN of an account that may read it; or leave its task out",
            ) from error
        pinned[name] = revision
        root.mkdir(parents=True, exist_ok=True)
        (root / REVISIONS).write_text(json.dumps(pinned, indent=1, sort_keys=True) + "\n")
        on_dataset(FetchedDataset(name, revision, directory))


def _is_missing(root: Path, task: str, dataset: str, pinned: dict[str, str]) -> bool:
    """Not there in any form; a snapshot of ours is asked for again, which costs nothing where it is complete."""
    if dataset in pinned:
        return True
    leaf = next(leaf for leaf in shipped_leaves(task) if leaf.name == task)
    asked = asked_dataset(leaf)
    try:
        return (asked is not None and root.is_dir() and not find_dataset(root, asked).files) or not root.is_dir()
    except InvalidInput:
        return True


def _revisions(root: Path) -> dict[str, str]:
    place = root / REVISIONS
    if not place.is_file():
        return {}
    try:
        found = json.loads(place.read_text())
    except ValueError as error:
        raise InvalidInput(str(place), found=f"no JSON: {error}", expected="a commit by dataset") from error
    return {str(name): str(revision) for name, revision in found.items()} if isinstance(found, dict) else {}
