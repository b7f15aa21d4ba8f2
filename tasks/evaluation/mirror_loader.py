"""Data of tasks are read from where ``mirror`` found them, in place of the Hub.

Files of choices in the plain form ``{question, choices: [...], answer: 0}`` are put into the fields of the datasets
whose tasks want others (``_FIELDS``).
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
def datasets_from(found: Iterable[FoundDataset], scratch: Path) -> Iterator[None]:
    """Inside, those datasets are loaded from where they lie, and any other is refused: nothing asks a network.

    Args:
        scratch: Where they are read into: what datasets keeps under (path, time) could be served stale.
    """
    import datasets  # type: ignore[import-untyped]  # ships no types

    lying: dict[tuple[str, str | None], FoundDataset] = {}
    for each in found:
        other = lying.setdefault(each.asked.key, each)
        if (other.directory, other.by_split, other.asked.files) != (each.directory, each.by_split, each.asked.files):
            raise InvalidInput(
                "evaluate.data",
                found=f"tasks {other.asked.task} and {each.asked.task} with data of their own of one dataset",
                expected="the same data for both in this group",
                remedy="name the tasks of the group one by one",
            )
    load = datasets.load_dataset

    def load_here(path: str, name: str | None = None, *_: Any, **asked: Any) -> Any:
        place = lying.get((str(path), name if name is None else str(name)))
        if place is None and _lies_here(str(path), asked.get("data_files")):
            return load(path, name, **asked)
        if place is None:
            raise InvalidInput(
                "evaluate.data",
                found=f"a task that loads {path} ({name}) by code of its own",
                expected="datasets that its configuration names",
                remedy="leave the task out, or leave out evaluate.data",
            )
        whole = _load(place, load, scratch, {key: asked[key] for key in asked if key not in _OF_THE_HUB})
        split = asked.get("split")
        return whole[split] if split else whole

    datasets.load_dataset = load_here
    try:
        yield
    finally:
        datasets.load_dataset = load


# What a task may tell ``load_dataset`` that means nothing for what lies here, or is ours to say.
_OF_THE_HUB = frozenset(
    {"revision", "token", "trust_remote_code", "cache_dir", "download_mode", "streaming", "split", "data_files"}
)


def _lies_here(path: str, data_files: Any) -> bool:
    """Data beside a task, which need no mirror."""
    if data_files is None:
        return Path(path).is_absolute() and Path(path).is_dir()
    by_split = data_files.values() if isinstance(data_files, Mapping) else [data_files]
    files = [file for those in by_split for file in (those if isinstance(those, (list, tuple)) else [those])]
    return all(Path(str(file)).is_file() for file in files)


def _load(place: FoundDataset, load: Callable[..., Any], scratch: Path, further: Mapping[str, Any]) -> Any:
    import datasets

    kept = {"cache_dir": str(scratch / "cache")}
    asked = place.asked
    if place.directory is not None:
        if asked.files:
            where = (asked.reader,) if asked.reader else (str(place.directory), asked.config)
            return load(*where, data_files=place.named_files, **further, **kept)
        if "configs" not in read_card(place.directory).metadata and not further and (named := _by_split(place)):
            kind, files = named
            return load(kind, data_files=files, **kept)
        return load(str(place.directory), asked.config, **further, **kept)
    splits = {
        split: load(FORMATS[file.suffix], data_files=str(file), split="train", **kept)
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
