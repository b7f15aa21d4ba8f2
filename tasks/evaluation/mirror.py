"""Data of tasks by name where there is no network: a directory with datasets as the Hub lays them out, or files.

A profile says ``evaluate.data: DIR``. A dataset ``org/name`` is looked for, in this order:

1. ``DIR/org/name/``, ``DIR/org--name/``, ``DIR/name/`` or ``DIR/name_hub/``: a snapshot as it lies on the Hub;
2. files called by task, configuration or dataset, then the split: ``arc_easy_test.jsonl``, ``gsm8k_train.parquet``, in
   any spelling of capitals and dashes. Where only one file is there, it is the split that the task evaluates. Examples
   may lack: then nothing can be asked with examples.

Files of choices in the plain form ``{question, choices: [...], answer: 0}`` are put into the fields of the datasets
whose tasks want others (``_FIELDS``). What is found is hashed into the key of every measurement.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from merge_core.errors import InvalidInput
from tasks.evaluation.shipped import LeafConfig

_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_DATA = {*_KINDS, ".csv", ".tsv", ".txt", ".gz", ".zst", ".arrow"}  # in a directory, where datasets reads them
_SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation", "dev": "dev"}
_SPLITS |= {"test": "test"}
_VERSION_WORDS = re.compile(r"raw|v\d+|main|default")  # at the end of a configuration: they name no other documents


@dataclass(frozen=True)
class AskedDataset:
    """A dataset that a task is loaded from, and which parts of it."""

    task: str
    path: str  # 'cais/mmlu'
    config: str | None  # 'anatomy'
    evaluated: str  # the split whose documents are asked
    examples: str | None  # the split that few-shot examples are drawn from; None: none is named

    @property
    def key(self) -> tuple[str, str | None]:
        return self.path, self.config


@dataclass(frozen=True)
class FoundDataset:
    """Where a dataset lies: a directory like one of the Hub, or a file by split."""

    asked: AskedDataset
    directory: Path | None
    by_split: Mapping[str, Path]

    @property
    def files(self) -> tuple[Path, ...]:
        """All that may decide which documents it has."""
        if self.directory is None:
            return tuple(self.by_split.values())
        return _files_of(self.directory, self.asked.config)


def asked_dataset(leaf: LeafConfig) -> AskedDataset | None:
    """The dataset of a task; None for one that loads none by name."""
    config = leaf.config
    if not config.get("dataset_path") or config.get("custom_dataset"):
        return None
    name = config.get("dataset_name")
    splits = [config.get(key) for key in ("test_split", "validation_split", "training_split")]
    return AskedDataset(
        task=leaf.name,
        path=str(config["dataset_path"]),
        config=None if name is None else str(name),
        evaluated=str(splits[0] or splits[1] or "test"),
        examples=config.get("fewshot_split") or splits[2] or splits[1],
    )


def find_dataset(root: Path, asked: AskedDataset) -> FoundDataset:
    """Where ``asked`` lies below ``root``.

    Raises:
        InvalidInput: naming what was looked for.
    """
    for directory in _directories(root, asked.path):
        if directory.is_dir() and _files_of(directory, asked.config):
            return FoundDataset(asked, directory, {})
    by_split = _named_files(root, asked)
    if len(by_split) == 1 and asked.evaluated not in by_split:
        by_split = {asked.evaluated: next(iter(by_split.values()))}
    if asked.evaluated not in by_split:
        tried = [f"{place.relative_to(root)}/" for place in _directories(root, asked.path)]
        tried += [f"{name}_{asked.evaluated}.jsonl" for name in dict.fromkeys(_names(asked))]
        raise InvalidInput(
            f"evaluate.data: {root}: task {asked.task}",
            found=f"no data of {asked.path}{f' ({asked.config})' if asked.config else ''}",
            expected=f"one of {', '.join(tried)} (or .parquet)",
            remedy="`mergegate fetch-data PROFILE` fills it where there is a network",
        )
    return FoundDataset(asked, None, by_split)


def find_datasets(root: Path, leaves: Sequence[LeafConfig]) -> tuple[FoundDataset, ...]:
    """Of all tasks below a task, group or tag, in their order. Raises as ``find_dataset``; without such a directory."""
    if not root.is_dir():
        raise InvalidInput("evaluate.data", found=f"no directory {root}", expected="a directory with datasets")
    asked = [found for leaf in leaves if (found := asked_dataset(leaf))]
    return tuple(find_dataset(root, each) for each in asked)


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
            remedy="`mergegate fetch-data PROFILE` where there is a network; or evaluate.num_fewshot: 0",
        )


@contextmanager
def datasets_from(found: Iterable[FoundDataset], scratch: Path) -> Iterator[None]:
    """Inside, those datasets are loaded from where they lie, and any other is refused: nothing asks a network.

    Args:
        scratch: Where they are read into: what datasets keeps under (path, time) could be served stale.
    """
    import datasets  # type: ignore[import-untyped]  # ships no types

    lying = {each.asked.key: each for each in found}
    load = datasets.load_dataset

    def load_here(path: str, name: str | None = None, *_: Any, **asked: Any) -> Any:
        place = lying.get((str(path), name if name is None else str(name)))
        if place is None:
            raise InvalidInput(
                "evaluate.data",
                found=f"a task that loads {path} ({name}) by code of its own",
                expected="datasets that its configuration names",
                remedy="leave the task out, or leave out evaluate.data",
            )
        whole = _load(place, load, scratch)
        split = asked.get("split")
        return whole[split] if split else whole

    datasets.load_dataset = load_here
    try:
        yield
    finally:
        datasets.load_dataset = load


def _load(place: FoundDataset, load: Callable[..., Any], scratch: Path) -> Any:
    import datasets

    kept = {"cache_dir": str(scratch / "cache")}
    asked = place.asked
    if place.directory is not None:
        if not _says_configs(place.directory) and (named := _by_split(place)):
            kind, files = named
            return load(kind, data_files=files, **kept)
        return load(str(place.directory), asked.config, **kept)
    splits = {
        split: load(_KINDS[file.suffix], data_files=str(file), split="train", **kept)
        for split, file in place.by_split.items()
    }
    if (fields := _FIELDS.get(asked.path)) is not None:
        splits = {
            split: datasets.Dataset.from_list([fields(row) for row in rows]) if _is_plain(rows.column_names) else rows
            for split, rows in splits.items()
        }
    evaluated = splits[asked.evaluated]
    for missing in ("train", "validation", "test", asked.examples):
        if missing and missing not in splits:
            splits[missing] = evaluated.select([])  # it is there, with nothing to draw from
    return datasets.DatasetDict(splits)


def _by_split(place: FoundDataset) -> tuple[str, dict[str, list[str]]] | None:
    """The format and the files by split of a directory without a card that says so; None where names do not tell.

    datasets would call ``dev.jsonl`` the split 'validation', which is not what a task that wants 'dev' finds.
    """
    files = [file for file in place.files if file.name != "README.md"]
    kinds = {_KINDS.get(file.suffix) for file in files}
    by_split: dict[str, list[str]] = {}
    for file in files:
        split = next((_SPLITS[word] for word in _words(file.stem) if word in _SPLITS), None)
        if split is None:
            return None
        by_split.setdefault(split, []).append(str(file))
    kind = kinds.pop() if len(kinds) == 1 else None
    return (kind, by_split) if kind else None


def _is_plain(columns: Sequence[str]) -> bool:
    return {"question", "choices", "answer"} <= set(columns) and "answerKey" not in columns


def _arc(row: Mapping[str, Any]) -> dict[str, Any]:
    labels = [chr(ord("A") + position) for position in range(len(row["choices"]))]
    choices = {"text": list(row["choices"]), "label": labels}
    return {"question": row["question"], "choices": choices, "answerKey": labels[row["answer"]]}


def _piqa(row: Mapping[str, Any]) -> dict[str, Any]:
    first, second = row["choices"]
    return {"goal": row["question"], "sol1": first, "sol2": second, "label": row["answer"]}


_FIELDS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "allenai/ai2_arc": _arc,
    "baber/piqa": _piqa,
}


def _directories(root: Path, dataset: str) -> tuple[Path, ...]:
    base = dataset.rpartition("/")[2]
    every = (root / dataset, root / dataset.replace("/", "--"), root / base, root / f"{base}_hub")
    return tuple(dict.fromkeys(every))


def _says_configs(directory: Path) -> bool:
    card = directory / "README.md"
    return card.is_file() and "configs:" in card.read_text(errors="replace")[:4096]


@lru_cache(maxsize=256)
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


def _names(asked: AskedDataset) -> Iterator[str]:
    """What a file of this dataset may be called by, most particular first."""
    yield asked.task
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


def _named_files(root: Path, asked: AskedDataset) -> dict[str, Path]:
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
        if file.suffix not in _KINDS or not file.is_file():
            continue
        words = _words(file.stem)
        at = next((place for place, word in enumerate(words) if place and word in _SPLITS), None)
        listing.append(("".join(words[:at]), _SPLITS[words[at]] if at is not None else "", file))
    return listing


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
