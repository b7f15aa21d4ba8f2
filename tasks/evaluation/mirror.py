"""Find the data of tasks in a local directory (``evaluate.data: DIR``), for machines without a network.

The directory serves every task that is loaded from a named dataset: tasks that lm-eval ships, local YAML files and
tasks of a sweep. mergegate looks for a dataset ``org/name`` in this order:

1. ``DIR/org/name/``, ``DIR/org--name/``, ``DIR/name/`` or ``DIR/name_hub/``: a snapshot with the layout of the Hub;
2. files named after the task, configuration or dataset, followed by the split, such as ``arc_easy_test.jsonl`` or
   ``gsm8k_train.parquet``. Case and punctuation are ignored. A single file counts as the split that the task
   evaluates. Without a file for few-shot examples, the task can be evaluated only without examples.

The content of these files is part of the cache key of every score. ``mirror_loader`` loads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.evaluation.task_datasets import TaskDataset

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_DATA = {*FORMATS, ".csv", ".tsv", ".txt", ".gz", ".zst", ".arrow"}  # formats that datasets reads from a directory
SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation", "dev": "dev"}
SPLITS |= {"test": "test"}
_VERSION_WORDS = re.compile(r"raw|v\d+|main|default")  # suffixes of a configuration that do not change the documents


@dataclass(frozen=True)
class FoundDataset:
    """Location of a dataset: a directory with the layout of the Hub, or one file per split."""

    request: TaskDataset
    directory: Path | None
    by_split: Mapping[str, Path]

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that may determine the documents of the dataset."""
        if self.directory is None:
            return tuple(self.by_split.values())
        return _data_in(self.directory, self.request)

    def matching(self, pattern: str) -> list[Path]:
        """Return the files in ``directory`` that match ``pattern``, a path or pattern in the task's configuration."""
        return sorted(file for file in (self.directory or Path()).glob(pattern) if file.is_file())


def find_dataset(root: Path, request: TaskDataset) -> FoundDataset:
    """Find the dataset of a task below ``root``.

    Raises:
        InvalidInput: If the dataset is missing; the message lists the paths that were tried.
    """
    for directory in _directories(root, request.path):
        if directory.is_dir() and _data_in(directory, request):
            return FoundDataset(request, directory, {})
    by_split: dict[str, Path] = {}
    for name in dict.fromkeys("".join(words_in(name)) for name in base_names(request)):
        for file in sorted(root.iterdir()):
            if file.suffix not in FORMATS or not file.is_file():
                continue
            words = words_in(file.stem)
            index = next((index for index, word in enumerate(words) if index and word in SPLITS), None)
            if "".join(words[:index]) == name:
                by_split.setdefault(request.evaluated if index is None else SPLITS[words[index]], file)
        if by_split:
            break
    if len(by_split) == 1 and request.evaluated not in by_split:
        by_split = {request.evaluated: next(iter(by_split.values()))}
    if request.evaluated not in by_split:
        within = request.files[0][1] if request.files else ""
        tried = [f"{directory.relative_to(root)}/{within}" for directory in _directories(root, request.path)]
        tried += [f"{name}_{request.evaluated}.jsonl" for name in base_names(request)]
        raise InvalidInput(
            f"evaluate.data: {root}: task {request.task}",
            found=f"no data for {request}",
            expected=f"{'one of ' if len(tried) > 1 else ''}{', '.join(tried)} (or .parquet)",
            remedy="run `mergegate fetch-data PROFILE` on a machine with a network"
            if request.path
            else "put its documents there: mergegate does not download data from web addresses",
        )
    return FoundDataset(request, None, by_split)


def find_datasets(root: Path, requests: Sequence[TaskDataset]) -> tuple[FoundDataset, ...]:
    """Find several datasets below ``root``.

    Raises:
        InvalidInput: If ``root`` does not exist or a dataset is missing.
    """
    if requests and not root.is_dir():
        raise InvalidInput(
            "evaluate.data",
            found=f"no directory {root}",
            expected=f"a directory with datasets, such as {requests[0]} for task {requests[0].task}",
            remedy="run `mergegate fetch-data PROFILE` on a machine with a network to create and fill it",
        )
    return tuple(find_dataset(root, dataset) for dataset in requests)


def _directories(root: Path, dataset: str) -> tuple[Path, ...]:
    if not dataset:
        return ()
    base = dataset.rpartition("/")[2]
    every = (root / dataset, root / dataset.replace("/", "--"), root / base, root / f"{base}_hub")
    return tuple(dict.fromkeys(every))


def _data_in(directory: Path, request: TaskDataset) -> tuple[Path, ...]:
    """Return the files from which a task would be loaded; empty if a file that the task names is missing.

    For a task that names no files, these are the dataset card and all data files of its configuration, which may have a
    directory of its own.
    """
    if request.files:
        dataset = FoundDataset(request, directory, {})
        matches = [dataset.matching(pattern) for _, pattern in request.files]
        return tuple(file for files in matches for file in files) if all(matches) else ()
    inner = directory / request.config if request.config else directory
    data_directory = inner if inner.is_dir() else directory
    data = [
        file
        for file in sorted(data_directory.rglob("*"))
        if file.suffix in _DATA
        and file.is_file()
        and not any(part[0] == "." for part in file.relative_to(data_directory).parts)
    ]
    card = directory / "README.md"
    return (*data, *([card] if data and card.is_file() else []))


def base_names(request: TaskDataset) -> tuple[str, ...]:
    """Return the base names that a file of this dataset may have, most specific first, without duplicates."""
    if not request.path:
        return (request.task,)
    base = request.path.rpartition("/")[2]
    words = words_in(request.config) if request.config else []
    while len(words) > 1 and _VERSION_WORDS.fullmatch(words[-1]):
        words = words[:-1]
    if words and not _VERSION_WORDS.fullmatch(words[-1]):
        return tuple(dict.fromkeys((request.task, "_".join(words), f"{base}_{request.config}")))
    return tuple(dict.fromkeys((request.task, base)))


def words_in(name: str) -> list[str]:
    """Return the words of a name, in lower case and without punctuation."""
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
