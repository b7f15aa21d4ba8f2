"""Find the named datasets of tasks, in a local directory (``evaluate.data: DIR``) or on the Hub.

A task names a dataset on the Hub (``dataset_path: org/name``), files in one (``dataset_path: json`` with ``data_files:
hf://datasets/org/name/…``), or files at a web address. The directory serves every such task on machines without a
network. mergegate looks for a dataset ``org/name`` in this order:

1. ``DIR/org/name/``, ``DIR/org--name/``, ``DIR/name/`` or ``DIR/name_hub/``: a snapshot with the layout of the Hub;
2. files named after the task, configuration or dataset, followed by the split, such as ``arc_easy_test.jsonl`` or
   ``gsm8k_train.parquet``. Case and punctuation are ignored. A single file counts as the split that the task
   evaluates. Without a file for few-shot examples, the task can be evaluated only without examples. Choice data in the
   plain form ``{question, choices: [...], answer: 0}`` is converted to the fields that tasks of ARC and PIQA expect.

The content of these files is part of the cache key of every score. ``fetch_datasets`` fills the directory on a machine
with network access. Each dataset is downloaded whole, and ``datasets.json`` pins its commit, so a copy of this file
makes every machine download the same data. A dataset without an entry is downloaded at its current commit, or at the
revision that its task requires, and gets an entry. A dataset is moved to its final directory only when it is complete,
because an incomplete dataset would be a different benchmark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import write_state
from mergegate.merge_core.parsing import parse_json, read_plain
from mergegate.tasks.models.checkpoints import read_card
from mergegate.tasks.models.checkpoints.hub import describe_hub_error, hub_access

# A file of a dataset on the Hub: repository, optional revision, path in the repository.
_ON_THE_HUB = re.compile(
    r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<commit>[^/]+))?/(?P<file>.+)"
    r"|https://huggingface\.co/datasets/(?P<web>[^/]+/[^/]+)/(?:resolve|raw|blob)/(?P<branch>[^/]+)/(?P<path>[^?]+).*"
)
FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_DATA = {*FORMATS, ".csv", ".tsv", ".txt", ".gz", ".zst", ".arrow"}  # formats that datasets reads from a directory
# Words in the names of files, and the splits that they name.
SPLITS = {name: name for name in ("train", "validation", "dev", "test")} | dict.fromkeys(("valid", "val"), "validation")
_VERSION_WORDS = re.compile(r"raw|v\d+|main|default")  # suffixes of a configuration that do not change the documents
# Arguments of ``load_dataset`` that mean nothing for local data, or that mergegate sets itself.
_HUB_ARGUMENTS = frozenset(
    {"revision", "token", "trust_remote_code", "cache_dir", "download_mode", "streaming", "split", "data_files"}
)
REVISIONS = "datasets.json"  # file in the directory with the commit of each dataset, by name
_INCOMPLETE = ".arriving"  # subdirectory for incomplete datasets
_COMMIT_LENGTH = 40
_DATA_FILES = ["*.parquet", "*.jsonl", "*.json", "*.csv", "*.tsv", "*.txt", "*.gz", "*.zst", "*.arrow", "README.md"]


@dataclass(frozen=True)
class TaskDataset:
    """A dataset from which a task is loaded, and the parts of it that the task uses."""

    task: str
    path: str  # 'cais/mmlu'; empty for files at web addresses, which only files named after the task can replace
    config: str | None  # 'anatomy'
    evaluated: str  # split with the documents to evaluate
    examples: str | None  # split to draw few-shot examples from; None: not named
    files: tuple[tuple[str, str], ...] = ()  # (split, file in the dataset), if the task names files
    reader: str = ""  # format, such as 'json', if the task names it; empty: the dataset's own
    revision: str = ""  # revision that the task requires; empty: any
    num_fewshot: int | None = None  # number of examples in the task's configuration; None: absent

    @property
    def key(self) -> tuple[str, str | None]:
        """Arguments of ``load_dataset`` that identify the dataset."""
        return self.reader or self.path, self.config

    def __str__(self) -> str:
        return f"{self.path or 'files at a web address'}{f' ({self.config})' if self.config else ''}"


def declared_dataset(task: str, config: Mapping[str, Any]) -> TaskDataset | None:
    """Return the dataset that ``task`` declares, or None if it does not load a dataset by name.

    ``config`` is the configuration of the task, merged with the files that it includes.
    """
    dataset_path = str(config.get("dataset_path") or "")
    if not dataset_path or config.get("custom_dataset"):
        return None
    splits = [config.get(key) for key in ("test_split", "validation_split", "training_split")]
    fewshot_config = config.get("fewshot_config")
    fewshot = fewshot_config if isinstance(fewshot_config, Mapping) else {}
    examples = config.get("fewshot_split") or fewshot.get("split")
    if not examples and not fewshot.get("samples"):  # samples are listed in the configuration itself
        examples = splits[2] or splits[1]
    name = config.get("dataset_name")
    kwargs = config.get("dataset_kwargs")
    kwargs = kwargs if isinstance(kwargs, Mapping) else {}
    # Files without a split belong to 'train', as in datasets.
    data_files = kwargs.get("data_files")
    by_split = data_files if isinstance(data_files, Mapping) else {"train": data_files}
    files = tuple(
        (str(split), str(file))
        for split, split_files in by_split.items()
        for file in (split_files if isinstance(split_files, (list, tuple)) else [split_files])
        if file
    )
    path, reader, revision = dataset_path, "", str(kwargs.get("revision") or "")
    if any("://" in file or file.startswith("/") for _, file in files):
        # Repository, revision and files in the repository; all empty if it is not a single one on the Hub.
        reader = dataset_path
        matches = [(split, _ON_THE_HUB.fullmatch(file)) for split, file in files]
        hits = [(split, match) for split, match in matches if match]
        repositories = {(match["repo"] or match["web"], match["commit"] or match["branch"] or "") for _, match in hits}
        path, revision, files = "", "", ()
        if len(repositories) == 1 and len(hits) == len(matches):
            ((path, branch),) = repositories
            revision = "" if branch == "main" else branch
            files = tuple((split, match["file"] or match["path"]) for split, match in hits)
    return TaskDataset(
        task=task,
        path=path,
        config=None if name is None else str(name),
        evaluated=str(splits[0] or splits[1] or "test"),
        examples=str(examples) if examples else None,
        files=files,
        reader=reader,
        revision=revision,
        num_fewshot=config.get("num_fewshot"),
    )


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
    """Find the dataset of a task below ``root``."""
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
    """Find several datasets below ``root``."""
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


@contextmanager
def datasets_from(found_datasets: Iterable[FoundDataset], scratch: Path) -> Iterator[None]:
    """Make datasets load from the mirror inside the context, and refuse datasets that would need the network.

    ``scratch`` is a directory for converted data. The default cache is keyed by path and time, and may be stale.
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

    with patch.object(datasets, "load_dataset", load_from_mirror):
        yield


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


def data_file_names(value: Any) -> list[str]:
    """Return the names in ``data_files``, which may be a name, a list of names, or either of them by split."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [name for inner in value.values() for name in data_file_names(inner)]
    if isinstance(value, (list, tuple)):
        return [name for inner in value for name in data_file_names(inner)]
    return [str(value)]
