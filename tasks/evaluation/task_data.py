"""Identify the data of a task: the datasets from which it is loaded, their revisions, and a digest of its content.

Scores belong to documents, not to a name: replacing a file of a dataset on the Hub creates a different benchmark with
the same name. The cache key of a measurement therefore covers every document, the source of few-shot examples,
templates, filters and generation settings, in the form in which lm-eval loads them. Loading may take minutes, so
``revision_now`` first finds out whether it is necessary, from the commit of a dataset on the Hub, the content of a
local directory, or the local cache if the network is forbidden.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from re import search
from typing import Any

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.files import sha256_file
from mergegate.tasks.evaluation.pictures import has_pictures, hash_document, pictures_of
from mergegate.tasks.store import digest

_COMMIT = r"(?:^|[@/])([0-9a-f]{40})(?:/|$)"
# Keys of a configuration that are paths on this machine, or only labels.
_UNPINNED_KEYS = ("dataset_kwargs", "metadata", "tag", "task_alias")


class DataSource(BaseModel):
    """A dataset from which a task is loaded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str  # 'cais/mmlu', or another value of ``dataset_path``
    name: str | None = None  # configuration of the dataset, such as 'law'
    data_files: tuple[str, ...] = ()  # files that the task names, if any
    revision: str = ""  # commit on the Hub that was loaded; empty if unknown


class TaskData(BaseModel):
    """Digest and sources of the data on which a task was measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str  # sha256 over documents, examples, templates and settings
    sources: tuple[DataSource, ...] = ()  # empty for data next to the task, which is pinned by content


@dataclass(frozen=True)
class LoadedData:
    """Number of documents, data and metrics of a task after loading."""

    documents: int
    data: TaskData
    metrics: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)  # by leaf: label, whether higher is better


def digest_of_leaves(leaves: Mapping[str, Any]) -> str:
    """Return a sha256 over the documents, examples, templates and settings of lm-eval's task objects."""
    hasher = hashlib.sha256()
    for name in sorted(leaves):
        leaf = leaves[name]
        config = {key: value for key, value in _plain(leaf.config).items() if key not in _UNPINNED_KEYS}
        if Path(str(config.get("dataset_path"))).is_absolute():
            del config["dataset_path"]
        sampler = getattr(leaf, "sampler", None)
        hasher.update(_line({"task": name, "version": str(leaf.VERSION), "config": config}))
        for kind, documents in (("document", leaf.eval_docs), ("example", getattr(sampler, "df", None) or ())):
            for document in documents:
                if kind == "document" and has_pictures(leaf):  # a document may only name its pictures
                    pictures = pictures_of(leaf, document, f"task {name}")
                    hasher.update(_line({kind: hash_document(document, pictures)}))
                    continue
                hasher.update(_line({kind: _plain(document)}))
    return hasher.hexdigest()


def _line(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode(errors="surrogatepass") + b"\n"


def _plain(value: Any) -> Any:
    """Convert a value to plain types that are equal in every process: functions to their source, arrays to a hash."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping) and not is_dataclass(value):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, partial):
        return [_plain(value.func), _plain(value.args), _plain(value.keywords)]
    if callable(value):
        try:
            return inspect.getsource(value)
        except (TypeError, OSError):
            return getattr(value, "__qualname__", type(value).__qualname__)
    if hasattr(value, "tobytes"):  # images, audio, arrays
        return hashlib.sha256(value.tobytes()).hexdigest()
    return str(value)


@contextmanager
def record_sources() -> Iterator[list[DataSource]]:
    """Yield a list that records every dataset that is loaded inside the context."""
    import datasets  # type: ignore[import-untyped]  # ships no types

    sources: list[DataSource] = []
    load = datasets.load_dataset

    def load_and_record(path: str, name: str | None = None, *args: Any, **kwargs: Any) -> Any:
        dataset = load(path, name, *args, **kwargs)
        splits = dataset.values() if isinstance(dataset, Mapping) else [dataset]
        locations: list[object] = []  # of everything that was downloaded; those on the Hub contain the commit
        for split in splits:
            locations += getattr(getattr(split, "info", None), "download_checksums", None) or {}
            locations += [file.get("filename", "") for file in getattr(split, "cache_files", None) or ()]
        commit = next((match[1] for text in locations if (match := search(_COMMIT, str(text)))), "")
        source = DataSource(
            path=str(path),
            name=None if name is None else str(name),
            data_files=tuple(data_file_names(kwargs.get("data_files"))),
            revision=str(kwargs.get("revision") or commit),
        )
        if source not in sources:
            sources.append(source)
        return dataset

    datasets.load_dataset = load_and_record
    try:
        yield sources
    finally:
        datasets.load_dataset = load


def revision_now(source: DataSource) -> str | None:
    """Return a text that changes whenever a dataset may have changed, without loading the dataset.

    The result is None if only loading reveals a change.
    """
    from huggingface_hub.errors import HfHubHTTPError

    from mergegate.tasks.checkpoints.hub import hub_access, is_offline

    files: dict[str, Path] | None = None
    if (directory := Path(source.path)).is_dir():
        paths = sorted(path for path in directory.rglob("*") if path.is_file())
        files = {path.relative_to(directory).as_posix(): path for path in paths}
    elif any("://" in file for file in source.data_files):
        return None
    elif source.data_files and all(Path(file).is_file() for file in source.data_files):
        files = {file: Path(file) for file in source.data_files}
    if files is not None:
        return "files " + digest([[name, sha256_file(path)] for name, path in files.items()])
    if not is_offline():
        try:
            return f"commit {hub_access(writing=False).api().dataset_info(source.path, timeout=20).sha}"
        except (HfHubHTTPError, OSError, ValueError):
            pass  # The Hub is unavailable, so loading uses the newest of the cached copies.
    import datasets

    owner, _, name = source.path.rpartition("/")
    folder = "___".join([*([owner] if owner else []), datasets.naming.camelcase_to_snakecase(name)])
    directory = Path(datasets.config.HF_DATASETS_CACHE).expanduser() / folder
    entries = [
        (path.relative_to(directory).as_posix(), path.stat().st_mtime_ns) for path in sorted(directory.glob("*/*/*"))
    ]
    return f"cache {digest([list(entry) for entry in entries])}" if entries else None


def data_file_names(value: Any) -> list[str]:
    """Return the names in ``data_files``, which may be a name, a list of names, or either of them by split."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [name for inner in value.values() for name in data_file_names(inner)]
    if isinstance(value, (list, tuple)):
        return [name for inner in value for name in data_file_names(inner)]
    return [str(value)]
