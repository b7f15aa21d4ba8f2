"""Fill a directory of datasets for tasks that are loaded by name (``evaluate.data``), where there is a network.

Each dataset comes whole and as it lies on the Hub, in the commit that ``datasets.json`` in the directory names: what
was fetched once is the same next time, on any machine that the file is copied to. A dataset that is not in it yet is
fetched as the Hub has it now, or in the revision that its task names, and noted. It gets its name when all of it is
there: half a dataset would be another benchmark.
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

REVISIONS = "datasets.json"  # in the directory: the commit of each dataset by name
_ARRIVING = ".arriving"  # in the directory: datasets of which not all is there
_COMMIT = 40  # characters of one
_WANTED = ["*.parquet", "*.jsonl", "*.json", "*.csv", "*.tsv", "*.txt", "*.gz", "*.zst", "*.arrow", "README.md"]


@dataclass(frozen=True)
class FetchedDataset:
    """What came of one dataset."""

    name: str
    revision: str  # commit; empty: it was there already, by other means
    directory: Path


def fetch_datasets(asked: Sequence[TaskDataset], root: Path, on_dataset: Callable[[FetchedDataset], None]) -> None:
    """Fetch every dataset of ``asked`` that is not complete in ``root``.

    Args:
        asked: What tasks are loaded from (``named_data``).
        on_dataset: Told of each as it is there.

    Raises:
        InvalidInput: when the network is forbidden, a dataset is not on the Hub, or not for us; when two tasks want two
            revisions of one; for data at an address that nobody has put there.
    """
    pinned = _revisions(root)
    by_name: dict[str, list[TaskDataset]] = {}
    for each in asked:
        by_name.setdefault(each.path, []).append(each)
    elsewhere = by_name.pop("", [])
    for name, those in by_name.items():
        wanted = _one_revision(name, those)
        if name in pinned or not all(_is_there(root, each) for each in those):
            on_dataset(_fetch(name, wanted, root, pinned))
        else:
            on_dataset(FetchedDataset(name, "", root / name))
    find_datasets(root, [*(each for those in by_name.values() for each in those), *elsewhere])


def _fetch(name: str, wanted: str, root: Path, pinned: dict[str, str]) -> FetchedDataset:
    """One dataset; one that is noted and there is asked for again, which costs nothing where it is complete."""
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]  # httpx's or httpx2's

    directory, access = root / name, hub_access(writing=False)
    api: Any = access.api()
    try:
        revision = pinned.get(name) or str(api.dataset_info(name, revision=wanted or None, timeout=20).sha)
        if len(wanted) == _COMMIT and wanted != revision:
            raise InvalidInput(
                f"{root / REVISIONS}: {name}",
                found=revision,
                expected=f"{wanted}, which a task names",
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
        place = _arriving(root, name, revision) if is_new else directory
        api.snapshot_download(name, repo_type="dataset", revision=revision, local_dir=place, allow_patterns=_WANTED)
    except (HTTPError, HFValidationError, ConnectionError, FileNotFoundError) as error:
        raise _not_had(name, error, access) from error
    pinned[name] = revision
    write_state(root / REVISIONS, (json.dumps(pinned, indent=1, sort_keys=True) + "\n").encode())
    if is_new:
        directory.parent.mkdir(parents=True, exist_ok=True)
        place.rename(directory)
    return FetchedDataset(name, revision, directory)


def _arriving(root: Path, name: str, revision: str) -> Path:
    """Where a dataset lies until it is whole: what came of this revision before is still there."""
    place = root / _ARRIVING / f"{name.replace('/', '--')}@{revision[:40].replace('/', '-')}"
    place.mkdir(parents=True, exist_ok=True)
    return place


def _not_had(name: str, error: Exception, access: HubAccess) -> InvalidInput:
    return InvalidInput(
        f"dataset {name}",
        found=describe_hub_error(error, access),
        expected="a dataset of the Hub that may be read from here",
        remedy="HF_TOKEN of an account that may read it; or leave its task out",
    )


def _one_revision(name: str, asked: Iterable[TaskDataset]) -> str:
    wanted = {each.revision: each.task for each in asked if each.revision}
    if len(wanted) > 1:
        raise InvalidInput(
            f"dataset {name}",
            found=" and ".join(f"{revision} for task {task}" for revision, task in wanted.items()),
            expected="one revision of a dataset in a directory",
            remedy="name one in both tasks, or give one of them a file of its own in the directory",
        )
    return next(iter(wanted), "")


def _is_there(root: Path, asked: TaskDataset) -> bool:
    try:
        return root.is_dir() and bool(find_dataset(root, asked).files)
    except InvalidInput:
        return False


def _revisions(root: Path) -> dict[str, str]:
    if not (root / REVISIONS).exists():
        return {}
    found = parse_json(read_plain(root / REVISIONS, 1 << 20), str(root / REVISIONS))
    return {str(name): str(revision) for name, revision in found.items()} if isinstance(found, dict) else {}
