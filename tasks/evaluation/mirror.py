"""Data of tasks where there is no network: a directory with datasets as the Hub lays them out, or files.

A profile says ``evaluate.data: DIR``. It holds for every task that is loaded from a dataset by name: those that lm-eval
ships, YAML files of one's own, those of a sweep. A dataset ``org/name`` is looked for, in this order:

1. ``DIR/org/name/``, ``DIR/org--name/``, ``DIR/name/`` or ``DIR/name_hub/``: a snapshot as it lies on the Hub;
2. files called by task, configuration or dataset, then the split: ``arc_easy_test.jsonl``, ``gsm8k_train.parquet``, in
   any spelling of capitals and dashes. Where only one file is there, it is the split that the task evaluates. Examples
   may lack: then nothing can be asked with examples.

What is found is hashed into the key of every measurement; how it is read, ``mirror_loading`` says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.evaluation.task_datasets import TaskDataset

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_DATA = {*FORMATS, ".csv", ".tsv", ".txt", ".gz", ".zst", ".arrow"}  # in a directory, where datasets reads them
_SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation", "dev": "dev"}
_SPLITS |= {"test": "test"}
_VERSION_WORDS = re.compile(r"raw|v\d+|main|default")  # at the end of a configuration: they name no other documents


@dataclass(frozen=True)
class FoundDataset:
    """Where a dataset lies: a directory like one of the Hub, or a file by split."""

    asked: TaskDataset
    directory: Path | None
    by_split: Mapping[str, Path]

    @property
    def files(self) -> tuple[Path, ...]:
        """All that may decide which documents it has."""
        if self.directory is None:
            return tuple(self.by_split.values())
        return _data_in(self.directory, self.asked)

    @property
    def named_files(self) -> dict[str, list[str]]:
        """By split, the files that the task itself names."""
        assert self.directory is not None
        named: dict[str, list[str]] = {}
        for split, file in self.asked.files:
            named.setdefault(split, []).extend(map(str, _matching(self.directory, file)))
        return named


def find_dataset(root: Path, asked: TaskDataset) -> FoundDataset:
    """Where ``asked`` lies below ``root``.

    Raises:
        InvalidInput: naming what was looked for.
    """
    for directory in _directories(root, asked.path):
        if directory.is_dir() and _data_in(directory, asked):
            return FoundDataset(asked, directory, {})
    by_split = _named_files(root, asked)
    if len(by_split) == 1 and asked.evaluated not in by_split:
        by_split = {asked.evaluated: next(iter(by_split.values()))}
    if asked.evaluated not in by_split:
        within = asked.files[0][1] if asked.files else ""
        tried = [f"{place.relative_to(root)}/{within}" for place in _directories(root, asked.path)]
        tried += [f"{name}_{asked.evaluated}.jsonl" for name in dict.fromkeys(_names(asked))]
        raise InvalidInput(
            f"evaluate.data: {root}: task {asked.task}",
            found=f"no data of {asked}",
            expected=f"{'one of ' if len(tried) > 1 else ''}{', '.join(tried)} (or .parquet)",
            remedy="`mergegate fetch-data PROFILE` fills it where there is a network"
            if asked.path
            else "put its documents there: data at an address are not fetched",
        )
    return FoundDataset(asked, None, by_split)


def find_datasets(root: Path, asked: Sequence[TaskDataset]) -> tuple[FoundDataset, ...]:
    """Where each of ``asked`` lies. Raises as ``find_dataset``; where something is asked and there is no ``root``."""
    if asked and not root.is_dir():
        raise InvalidInput(
            "evaluate.data",
            found=f"no directory {root}",
            expected=f"a directory with datasets: of task {asked[0].task} {asked[0]}",
            remedy="`mergegate fetch-data PROFILE` makes and fills it where there is a network",
        )
    return tuple(find_dataset(root, each) for each in asked)


def files_of_all(found: Iterable[FoundDataset]) -> tuple[Path, ...]:
    """All that may decide which documents those datasets have, each file once."""
    return tuple(dict.fromkeys(file for each in found for file in each.files))


def check_examples(found: FoundDataset, wanted: int) -> None:
    """See that there is something to draw ``wanted`` few-shot examples from.

    Raises:
        InvalidInput: naming the split.
    """
    asked = found.asked
    if wanted and asked.examples and found.directory is None and asked.examples not in found.by_split:
        raise InvalidInput(
            f"evaluate.data: task {asked.task}",
            found=f"no file of split {asked.examples!r}, which its {wanted} examples are drawn from",
            expected=" or ".join(f"{name}_{asked.examples}.jsonl" for name in dict.fromkeys(_names(asked))),
            remedy="put one beside the others; or evaluate.num_fewshot: 0",
        )


def _directories(root: Path, dataset: str) -> tuple[Path, ...]:
    if not dataset:
        return ()
    base = dataset.rpartition("/")[2]
    every = (root / dataset, root / dataset.replace("/", "--"), root / base, root / f"{base}_hub")
    return tuple(dict.fromkeys(every))


def _data_in(directory: Path, asked: TaskDataset) -> tuple[Path, ...]:
    """What a task would be loaded from; nothing where a file lacks that it names."""
    if not asked.files:
        return _files_of(directory, asked.config)
    named = [_matching(directory, file) for _, file in asked.files]
    return tuple(file for those in named for file in those) if all(named) else ()


def _matching(directory: Path, file: str) -> list[Path]:
    return sorted(one for one in directory.glob(file) if one.is_file())


def _files_of(directory: Path, config: str | None) -> tuple[Path, ...]:
    """Of a configuration that has a directory of its own only that, and what says how to read it."""
    inner = directory / config if config else directory
    whole = inner if inner.is_dir() else directory
    data = [
        file
        for file in sorted(whole.rglob("*"))
        if file.suffix in _DATA and file.is_file() and not any(part[0] == "." for part in file.relative_to(whole).parts)
    ]
    card = directory / "README.md"
    return (*data, *([card] if data and card.is_file() else []))


def _names(asked: TaskDataset) -> Iterator[str]:
    """What a file of this dataset may be called by, most particular first."""
    yield asked.task
    if not asked.path:
        return
    base = asked.path.rpartition("/")[2]
    if asked.config:
        words = _words(asked.config)
        while len(words) > 1 and _VERSION_WORDS.fullmatch(words[-1]):
            words = words[:-1]
        if not _VERSION_WORDS.fullmatch(words[-1]):
            yield "_".join(words)
            yield f"{base}_{asked.config}"
            return
    yield base


def _named_files(root: Path, asked: TaskDataset) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for name in dict.fromkeys("".join(_words(name)) for name in _names(asked)):
        for called, split, file in _listing(root):
            if called == name:
                found.setdefault(split or asked.evaluated, file)
        if found:
            break
    return found


def _listing(root: Path) -> list[tuple[str, str, Path]]:
    """(name without its split, split or nothing, file) of every data file directly in ``root``."""
    listing = []
    for file in sorted(root.iterdir()):
        if file.suffix not in FORMATS or not file.is_file():
            continue
        words = _words(file.stem)
        at = next((place for place, word in enumerate(words) if place and word in _SPLITS), None)
        listing.append(("".join(words[:at]), _SPLITS[words[at]] if at is not None else "", file))
    return listing


def split_named(stem: str) -> str | None:
    """The split that a file's name tells; None where it tells none."""
    return next((_SPLITS[word] for word in _words(stem) if word in _SPLITS), None)


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
