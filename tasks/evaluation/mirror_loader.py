"""Load the data of tasks from the location where ``mirror`` found it instead of the Hub.

Choice data in the plain form ``{question, choices: [...], answer: 0}`` is converted to the fields of datasets whose
tasks expect other fields (``_FIELDS``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.checkpoints import read_card
from mergegate.tasks.evaluation.mirror import FORMATS, FoundDataset, split_named


@contextmanager
def datasets_from(found_datasets: Iterable[FoundDataset], scratch: Path) -> Iterator[None]:
    """Load the given datasets from the mirror inside the context, and refuse all others, so that no network is needed.

    Args:
        found_datasets: Datasets in the mirror.
        scratch: Directory for the converted data. The cache of datasets is keyed by (path, time) and may be stale.
    """
    import datasets  # type: ignore[import-untyped]  # ships no types

    mirrored: dict[tuple[str, str | None], FoundDataset] = {}
    for each in found_datasets:
        first = mirrored.setdefault(each.request.key, each)
        if (first.directory, first.by_split, first.request.files) != (
            each.directory,
            each.by_split,
            each.request.files,
        ):
            raise InvalidInput(
                "evaluate.data",
                found=f"tasks {first.request.task} and {each.request.task} with data of their own of one dataset",
                expected="the same data for both in this group",
                remedy="name the tasks of the group one by one",
            )
    load = datasets.load_dataset

    def load_from_mirror(path: str, name: str | None = None, *_: Any, **arguments: Any) -> Any:
        dataset = mirrored.get((str(path), name if name is None else str(name)))
        if dataset is None and _is_local(str(path), arguments.get("data_files")):
            return load(path, name, **arguments)
        if dataset is None:
            raise InvalidInput(
                "evaluate.data",
                found=f"a task that loads {path} ({name}) by code of its own",
                expected="datasets that its configuration names",
                remedy="leave the task out, or leave out evaluate.data",
            )
        splits = _load(dataset, load, scratch, {key: arguments[key] for key in arguments if key not in _OF_THE_HUB})
        split = arguments.get("split")
        return splits[split] if split else splits

    datasets.load_dataset = load_from_mirror
    try:
        yield
    finally:
        datasets.load_dataset = load


# Arguments of ``load_dataset`` that mean nothing for local data, or that mergegate sets itself.
_OF_THE_HUB = frozenset(
    {"revision", "token", "trust_remote_code", "cache_dir", "download_mode", "streaming", "split", "data_files"}
)


def _is_local(path: str, data_files: Any) -> bool:
    """Return whether data is local to a task, which needs no mirror."""
    if data_files is None:
        return Path(path).is_absolute() and Path(path).is_dir()
    by_split = data_files.values() if isinstance(data_files, Mapping) else [data_files]
    files = [file for names in by_split for file in (names if isinstance(names, (list, tuple)) else [names])]
    return all(Path(str(file)).is_file() for file in files)


def _load(dataset: FoundDataset, load: Callable[..., Any], scratch: Path, options: Mapping[str, Any]) -> Any:
    import datasets

    cache = {"cache_dir": str(scratch / "cache")}
    request = dataset.request
    if dataset.directory is not None:
        if request.files:
            arguments = (request.reader,) if request.reader else (str(dataset.directory), request.config)
            return load(*arguments, data_files=dataset.named_files, **options, **cache)
        if "configs" not in read_card(dataset.directory).metadata and not options and (named := _by_split(dataset)):
            kind, files = named
            return load(kind, data_files=files, **cache)
        return load(str(dataset.directory), request.config, **options, **cache)
    splits = {
        split: load(FORMATS[file.suffix], data_files=str(file), split="train", **cache)
        for split, file in dataset.by_split.items()
    }
    if (fields := _FIELDS.get(request.path)) is not None:
        splits = {
            split: datasets.Dataset.from_list([fields(row) for row in rows]) if _is_plain(rows.column_names) else rows
            for split, rows in splits.items()
        }
    evaluated = splits[request.evaluated]
    for missing in ("train", "validation", "test", request.examples):
        if missing and missing not in splits:
            splits[missing] = evaluated.select([])  # present but empty
    return datasets.DatasetDict(splits)


def _by_split(dataset: FoundDataset) -> tuple[str, dict[str, list[str]]] | None:
    """Return the format and the files by split of a directory without a card that declares them.

    The result is None if the file names do not indicate splits. datasets itself would assign ``dev.jsonl`` to the split
    'validation', which a task that uses 'dev' does not find.
    """
    files = [file for file in dataset.files if file.name != "README.md"]
    kinds = {FORMATS.get(file.suffix) for file in files}
    by_split: dict[str, list[str]] = {}
    for file in files:
        split = split_named(file.stem)
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
