"""The data of a task: which datasets it is loaded from, in which revision, and one digest over all that it asks.

Scores are of documents, not of a name: who exchanges a file of a dataset on the Hub makes another benchmark under the
old name. So what was loaded goes into the key of a measurement: every document, what few-shot examples are drawn from,
templates, filters and settings of generation, as lm-eval has them after loading. Loading may take minutes; so whether
it is worth while is found out first, from what is cheap to ask (``revision_now``): the commit of a dataset on the Hub,
the content of a local directory, what lies in the cache where the network is forbidden.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from re import search
from typing import Any

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.files import sha256_file
from mergegate.tasks.store import digest

_COMMIT = r"(?:^|[@/])([0-9a-f]{40})(?:/|$)"
# Of a configuration: where things lie on this machine, and what only names it.
_NOT_ASKED = ("dataset_kwargs", "metadata", "tag", "task_alias")


class DataSource(BaseModel):
    """A dataset that a task is loaded from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str  # 'cais/mmlu', or what else the task calls it
    name: str | None = None  # of its configurations: 'law'
    data_files: tuple[str, ...] = ()  # as the task names them, if it does
    revision: str = ""  # commit on the Hub of what was loaded; empty where it is not known


class TaskData(BaseModel):
    """What a task asked when it was measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str  # sha256 over documents, examples, templates, settings
    sources: tuple[DataSource, ...] = ()  # empty for data that lie beside the task, which are pinned by content


@dataclass(frozen=True)
class LoadedData:
    """What loading a task has shown."""

    documents: int
    data: TaskData
    metrics: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)  # by leaf: label, whether more is better


def digest_of_leaves(leaves: Mapping[str, Any]) -> str:
    """sha256 over all that lm-eval's task objects ask: documents, examples, templates, settings."""
    running = hashlib.sha256()
    for name in sorted(leaves):
        leaf = leaves[name]
        config = {key: value for key, value in _plain(leaf.config).items() if key not in _NOT_ASKED}
        if Path(str(config.get("dataset_path"))).is_absolute():
            del config["dataset_path"]
        sampler = getattr(leaf, "sampler", None)
        running.update(_line({"task": name, "version": str(leaf.VERSION), "config": config}))
        for kind, documents in (("document", leaf.eval_docs), ("example", getattr(sampler, "df", None) or ())):
            for document in documents:
                running.update(_line({kind: _plain(document)}))
    return running.hexdigest()


def _line(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode(errors="surrogatepass") + b"\n"


def _plain(value: Any) -> Any:
    """``value`` in plain types that say the same in every process: functions by their text, other objects by bytes."""
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
        return _source(value)
    if hasattr(value, "tobytes"):  # pictures, sounds, arrays
        return hashlib.sha256(value.tobytes()).hexdigest()
    return str(value)


def _source(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except (TypeError, OSError):
        return getattr(function, "__qualname__", type(function).__qualname__)


@contextmanager
def sources_noted() -> Iterator[list[DataSource]]:
    """Every dataset that is loaded inside, whoever loads it."""
    import datasets  # type: ignore[import-untyped]  # ships no types

    noted: list[DataSource] = []
    load = datasets.load_dataset

    def listen(path: str, name: str | None = None, *args: Any, **kwargs: Any) -> Any:
        found = load(path, name, *args, **kwargs)
        named = kwargs.get("data_files")
        source = DataSource(
            path=str(path),
            name=None if name is None else str(name),
            data_files=tuple(_listed(named)),
            revision=str(kwargs.get("revision") or _commit_of(found)),
        )
        if source not in noted:
            noted.append(source)
        return found

    datasets.load_dataset = listen
    try:
        yield noted
    finally:
        datasets.load_dataset = load


def revision_now(source: DataSource) -> str | None:
    """What a dataset is at this moment, cheaply: another text where loading it anew may give other documents. None
    where only loading can tell."""
    if Path(source.path).is_dir():
        files = sorted(file for file in Path(source.path).rglob("*") if file.is_file())
        return _of_files(files, Path(source.path))
    if any("://" in file for file in source.data_files):
        return None
    if source.data_files and all(Path(file).is_file() for file in source.data_files):
        return _of_files([Path(file) for file in source.data_files], Path())
    return _commit_now(source.path) or _in_cache(source.path)


def _of_files(files: Iterable[Path], root: Path) -> str:
    return "files " + digest([[file.relative_to(root).as_posix(), sha256_file(file)] for file in files])


def _commit_now(repo: str) -> str | None:
    """The commit that the Hub would serve; None where it cannot be asked, and the cache is used by whoever loads."""
    from huggingface_hub.errors import HfHubHTTPError

    from mergegate.tasks.checkpoints.hub import hub_access, is_offline

    if is_offline():
        return None
    try:
        return f"commit {hub_access(writing=False).api().dataset_info(repo, timeout=20).sha}"
    except (HfHubHTTPError, OSError, ValueError):
        return None


def _in_cache(repo: str) -> str | None:
    """What lies in the cache of datasets: loading takes the newest of it."""
    import datasets

    owner, _, name = repo.rpartition("/")
    folder = "___".join([*([owner] if owner else []), datasets.naming.camelcase_to_snakecase(name)])
    place = Path(datasets.config.HF_DATASETS_CACHE).expanduser() / folder
    found = [(each.relative_to(place).as_posix(), each.stat().st_mtime_ns) for each in sorted(place.glob("*/*/*"))]
    return f"cache {digest([list(each) for each in found])}" if found else None


def _commit_of(loaded: Any) -> str:
    """The commit that a dataset was loaded from, as far as it says so itself."""
    splits = loaded.values() if isinstance(loaded, Mapping) else [loaded]
    for split in splits:
        checksums = getattr(getattr(split, "info", None), "download_checksums", None) or {}
        cached = [str(file.get("filename", "")) for file in getattr(split, "cache_files", None) or ()]
        for text in (*checksums, *cached):
            if found := search(_COMMIT, str(text)):
                return found.group(1)
    return ""


def _listed(value: Any) -> list[str]:
    """Names of data files, however they are given."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [name for inner in value.values() for name in _listed(inner)]
    return [name for inner in value for name in _listed(inner)] if isinstance(value, (list, tuple)) else [str(value)]
