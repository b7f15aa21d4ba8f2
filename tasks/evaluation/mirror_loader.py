"""Load the data of tasks from the local files that ``mirror`` found, instead of the Hub.

Choice data in the plain form ``{question, choices: [...], answer: 0}`` is converted to the fields of datasets whose
tasks expect other fields (ARC and PIQA).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.checkpoints import read_card
from mergegate.tasks.evaluation.mirror import FORMATS, SPLITS, FoundDataset, words_in
from mergegate.tasks.evaluation.task_data import data_file_names

# Arguments of ``load_dataset`` that mean nothing for local data, or that mergegate sets itself.
_HUB_ARGUMENTS = frozenset(
    {"revision", "token", "trust_remote_code", "cache_dir", "download_mode", "streaming", "split", "data_files"}
)


@contextmanager
def datasets_from(found_datasets: Iterable[FoundDataset], scratch: Path) -> Iterator[None]:
    """Make datasets load from the mirror inside the context, and refuse datasets that would need the network.

    ``scratch`` is a directory for converted data. The default cache is keyed by path and time, and may be stale.

    Raises:
        InvalidInput: If two tasks use different data of the same dataset.
    """
    import datasets  # type: ignore[import-untyped]  # ships no types

    mirrored: dict[tuple[str, str | None], FoundDataset] = {}
    for each in found_datasets:
        first = mirrored.setdefault(each.request.key, each)
        sources = [(dataset.directory, dataset.by_split, dataset.request.files) for dataset in (first, each)]
        if sources[0] != sources[1]:
            raise InvalidInput(
                "evaluate.data",
                found=f"different data of one dataset for the tasks {first.request.task} and {each.request.task}",
                expected="the same data for both in this group",
                remedy="name the tasks of the group individually",
            )
    load = datasets.load_dataset

    def load_from_mirror(path: str, name: str | None = None, *_: Any, **arguments: Any) -> Any:
        dataset = mirrored.get((str(path), name if name is None else str(name)))
        if dataset is None:
            # Data that is local to a task needs no mirror.
            data_files = arguments.get("data_files")
            files = [Path(file) for file in data_file_names(data_files)]
            is_directory = Path(path).is_absolute() and Path(path).is_dir()
            if is_directory if data_files is None else all(file.is_file() for file in files):
                return load(path, name, **arguments)
            raise InvalidInput(
                "evaluate.data",
                found=f"a task whose code loads {path} ({name})",
                expected="datasets that the configuration of the task names",
                remedy="remove the task, or remove evaluate.data",
            )
        options = {key: value for key, value in arguments.items() if key not in _HUB_ARGUMENTS}
        splits = _load(dataset, load, scratch, options)
        split = arguments.get("split")
        return splits[split] if split else splits

    datasets.load_dataset = load_from_mirror
    try:
        yield
    finally:
        datasets.load_dataset = load


def _load(dataset: FoundDataset, load: Callable[..., Any], scratch: Path, options: Mapping[str, Any]) -> Any:
    import datasets

    cache = {"cache_dir": str(scratch / "cache")}
    request = dataset.request
    if dataset.directory is not None:
        if request.files:
            arguments = (request.reader,) if request.reader else (str(dataset.directory), request.config)
            data_files: dict[str, list[str]] = {}
            for split, pattern in request.files:
                data_files.setdefault(split, []).extend(map(str, dataset.matching(pattern)))
            return load(*arguments, data_files=data_files, **options, **cache)
        if "configs" not in read_card(dataset.directory).metadata and not options:
            # datasets itself would assign ``dev.jsonl`` to the split 'validation', which a task that uses 'dev' does
            # not find.
            files = [file for file in dataset.files if file.name != "README.md"]
            formats = {FORMATS.get(file.suffix) for file in files}
            file_splits = [next(filter(SPLITS.get, words_in(file.stem)), None) for file in files]
            if len(formats) == 1 and (file_format := formats.pop()) and None not in file_splits:
                data_files = {}
                for file_split, file in zip(file_splits, files, strict=True):
                    data_files.setdefault(SPLITS[str(file_split)], []).append(str(file))
                return load(file_format, data_files=data_files, **cache)
        return load(str(dataset.directory), request.config, **options, **cache)
    loaded = {
        split: load(FORMATS[file.suffix], data_files=str(file), split="train", **cache)
        for split, file in dataset.by_split.items()
    }
    for split, rows in loaded.items():
        columns = set(rows.column_names)
        if not {"question", "choices", "answer"} <= columns or "answerKey" in columns:
            continue
        converted: list[dict[str, Any]] = []
        if request.path == "allenai/ai2_arc":
            for row in rows:
                labels = [chr(ord("A") + position) for position in range(len(row["choices"]))]
                choices = {"text": list(row["choices"]), "label": labels}
                converted.append({"question": row["question"], "choices": choices, "answerKey": labels[row["answer"]]})
        elif request.path == "baber/piqa":
            for row in rows:
                first, second = row["choices"]
                converted.append({"goal": row["question"], "sol1": first, "sol2": second, "label": row["answer"]})
        if converted:
            loaded[split] = datasets.Dataset.from_list(converted)
    evaluated = loaded[request.evaluated]
    for missing in ("train", "validation", "test", request.examples):
        if missing and missing not in loaded:
            loaded[missing] = evaluated.select([])  # present but empty
    return datasets.DatasetDict(loaded)
