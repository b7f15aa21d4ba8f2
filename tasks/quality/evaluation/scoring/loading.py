"""Load the documents of a task through lm-eval: from local files, the Hub, or a directory of datasets.

lm-eval resolves names with an index that takes seven seconds to build, and caches data under a path that does not
depend on its content. This module therefore writes a separate definition for each task, with absolute data paths and
without a cache. The last loaded task stays in memory.

Scores belong to documents, not to a name: replacing a file of a dataset on the Hub creates a different benchmark with
the same name. ``LoadedTask.digest``, which is part of the cache key of a measurement, therefore covers every document,
the source of few-shot examples, templates, filters and generation settings, in the form in which lm-eval loads them.
Loading may take minutes, so ``revision_now`` first finds out whether it is necessary, from the commit of a dataset on
the Hub, the content of a local directory, or the local cache if the network is forbidden.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from re import search
from typing import Annotated, Any, TypeVar
from unittest.mock import patch

import yaml
from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.files import sha256_file
from mergegate.tasks.base.sandbox import ProgramLimits
from mergegate.tasks.base.stage import StageValue
from mergegate.tasks.base.store import NotInKey, digest
from mergegate.tasks.models.checkpoints import CallNeeds, TellProgress, call_model_process
from mergegate.tasks.quality.evaluation.backends.pictures import has_pictures, hash_document, pictures_of
from mergegate.tasks.quality.evaluation.built_in import BuiltInLeaf
from mergegate.tasks.quality.evaluation.definitions.code import CHECK, CodeEval, confine_code_eval, functions_in
from mergegate.tasks.quality.evaluation.definitions.datasets import (
    FoundDataset,
    data_file_names,
    datasets_from,
    find_datasets,
)
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask
from mergegate.tasks.quality.evaluation.definitions.task_file import as_list, function_dumper
from mergegate.tasks.quality.evaluation.definitions.tree import TaskLeaf
from mergegate.tasks.quality.evaluation.document_order import DataSource, TaskData, order_documents, split_documents
from mergegate.tasks.quality.evaluation.scoring.lm_eval_tasks import (
    DocumentText,
    LoadedTask,
    judging_metrics,
    quiet,
    text_of,
)
from mergegate.tasks.quality.evaluation.scoring.metrics import PROBABILITY, choices_of

_MAX_CLUSTER_NAME = 64  # longest cluster name, in characters, that is stored as text
_TEMPLATES = 1024  # size of the cache of compiled templates; a large group of tasks has a few per task

# datasets reports downloads of its file formats over the network. It reads this variable when it is first imported.
os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
_COMMIT = r"(?:^|[@/])([0-9a-f]{40})(?:/|$)"
# Keys of a configuration that are paths on this machine, or only labels.
_UNPINNED_KEYS = ("dataset_kwargs", "metadata", "tag", "task_alias")
A = TypeVar("A")
LOADED_WITHIN = 1800.0  # default limit in seconds for loading the data of one task, downloads included


class CountLimit(BaseModel):
    """Time limit for loading the data of a task."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: Annotated[float | None, NotInKey] = None


class TaskSize(StageValue):
    """Number of documents in a task, its metrics, and the digest that pins the documents."""

    documents: int
    data: TaskData
    metrics: dict[str, dict[str, bool]]  # by leaf: metrics that can judge it, and whether higher is better

    def summary(self) -> str:
        return f"{self.documents:,}"

    def pin(self, task: EvalTask) -> EvalTask:
        """Return ``task`` with its data pinned."""
        data = {"data_digest": self.data.digest, "sources": self.data.sources, "documents": self.documents}
        return task.model_copy(update=data)


_last_loaded: tuple[tuple[str, Path | None, ProgramLimits | None], LoadedTask] | None = None


def load_task(task: EvalTask) -> LoadedTask:
    """Load a task, or return it from memory if it is the last loaded one.

    Raises:
        InvalidInput: If the task cannot be loaded, or its data differs from the pinned data.
    """
    global _last_loaded
    key = (task.digest, task.definition, task.code)
    accepted = (None, _last_loaded[1].digest if _last_loaded else None)
    if _last_loaded is None or _last_loaded[0] != key or task.data_digest not in accepted:
        _last_loaded = None
        scratch = tempfile.TemporaryDirectory(prefix="mergegate-task-")
        with record_sources() as sources, confine_code_eval(task.code):
            leaves = _load_leaves(task, Path(scratch.name))
        if task.built_in is not None:
            sources += task.built_in.sources()
        for name, leaf in leaves.items():
            if task.code is not None:  # confine the functions with which a task runs programs itself
                for function in functions_in(leaf.config.to_dict(keep_callable=True)):
                    namespace = getattr(function, "__globals__", {})
                    if callable(namespace.get(CHECK)):
                        namespace[CHECK] = CodeEval(task.code).check
            if leaf.OUTPUT_TYPE == "loglikelihood_rolling":
                is_member = name != task.in_lm_eval
                raise InvalidInput(
                    f"task {task.name}" + (f": {name}" if is_member else ""),
                    found="a perplexity task, which has no score per document",
                    remedy="list its documents under 'perplexity:'"
                    + (", and name the other tasks of the group individually" if is_member else ""),
                )
        fewshot = {name: leaf.get_config("num_fewshot") for name, leaf in leaves.items()}
        generation = {
            name: deepcopy(leaf.get_config("generation_kwargs") or {}) if leaf.OUTPUT_TYPE == "generate_until" else None
            for name, leaf in leaves.items()
        }
        revisions = () if task.is_local else tuple(map(revision_now, sources))
        loaded = LoadedTask(leaves, fewshot, generation, scratch, tuple(sources), revisions, digest_of_leaves(leaves))
        _last_loaded = (key, loaded)
    if task.data_digest not in (None, _last_loaded[1].digest):
        _last_loaded = None
        raise InvalidInput(
            f"task {task.name}: its data",
            found="documents, examples or templates that differ from those at the start of the run",
            expected="the pinned data",
            remedy="its dataset was replaced during the run: run again",
        )
    return _last_loaded[1]


def _load_leaves(task: EvalTask, scratch: Path) -> dict[str, Any]:
    """Return lm-eval's task objects by name."""
    if task.built_in is not None:
        return {task.in_lm_eval: BuiltInLeaf(task.built_in)}
    from lm_eval.tasks import TaskManager

    _cache_templates()

    def mirror(datasets: Iterable[FoundDataset]) -> AbstractContextManager[None]:
        return nullcontext() if task.mirror is None else datasets_from(datasets, scratch)

    tree = task.tree
    try:
        datasets: dict[str, FoundDataset] = {}
        if task.mirror is not None:
            datasets = {each.request.task: each for each in find_datasets(task.mirror, tree.datasets)}
        if tree.path is None and any("/" in str(leaf.overrides) or leaf.is_inline for leaf in tree.leaves):
            # A group that overrides functions of its tasks, or defines tasks inline: only lm-eval's index can load it.
            with mirror(datasets.values()):
                return dict(_lm_eval_index().load([task.in_lm_eval])["tasks"])
        if tree.path is not None and tree.digest(sha256_file, task.mirror) != task.digest:  # reads every byte
            raise InvalidInput(str(tree.path), found="a file that changed during the run", remedy="run again")
        manager = TaskManager(include_defaults=False)
        loaded: dict[str, Any] = {}
        for number, leaf in enumerate(tree.leaves):  # one at a time, so that each task sees only its own datasets
            with mirror([datasets[leaf.name]] if leaf.name in datasets else []):
                loaded |= manager.load([str(_write_definition(leaf, scratch, number))])["tasks"]
        return loaded
    except InvalidInput:
        raise
    except Exception as error:
        # The user's definition and data pass through YAML, jinja, datasets and Python code of the task. Libraries wrap
        # an exception in less specific ones, so report the first of the chain.
        cause: BaseException = error
        while inner := cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__):
            cause = inner
        message = " ".join(str(cause).split()) or type(cause).__name__
        raise InvalidInput(
            str(task.definition or f"task {task.name}"),
            found=f"cannot be loaded: {f'missing key {message}' if isinstance(cause, KeyError) else message}"[:320],
            remedy="download its dataset while the network is available, or use a YAML file with local data"
            if isinstance(error, OSError)
            else "check the task and its data: `lm-eval run --tasks` with it fails in the same way",
        ) from error


def _write_definition(leaf: TaskLeaf, scratch: Path, number: int) -> Path:
    """Write a definition that includes that of a task, but loads its local data without a cache; return its path.

    datasets caches data in the user's home directory under (path, mtime), so a replaced file with the same mtime would
    yield stale data. A group becomes one definition per task, because lm-eval's groups only add a mean over tasks,
    which mergegate does not use.
    """
    functions_link = scratch / f"functions{number}"  # lm-eval resolves functions relative to the file with the name
    functions_link.symlink_to(leaf.path.parent)
    config: dict[str, Any] = {} if leaf.is_inline else {"include": str(leaf.path)}
    config |= {**leaf.overrides, "task": leaf.name}
    kwargs = dict(leaf.config.get("dataset_kwargs") or {}) if leaf.files else {}
    if leaf.data_files is not None:
        kwargs["data_files"] = leaf.data_files
    if leaf.is_local:
        kwargs["cache_dir"] = str(scratch / "cache")
    if leaf.dataset_path:
        config["dataset_path"] = leaf.dataset_path
    if kwargs:
        config["dataset_kwargs"] = kwargs
    path = scratch / f"task{number}.yaml"
    path.write_text(yaml.dump(config, Dumper=function_dumper(functions_link)))
    return path


@lru_cache(maxsize=1)
def _cache_templates() -> None:
    """Cache compiled templates in lm-eval.

    lm-eval compiles a template for every document that it renders, which takes ten times as long as rendering.
    """
    from lm_eval import utils

    compile_template: Any = utils.env.from_string
    compile_cached = lru_cache(maxsize=_TEMPLATES)(compile_template)

    def from_string(source: Any, *args: Any, **kwargs: Any) -> Any:
        return compile_template(source, *args, **kwargs) if args or kwargs else compile_cached(source)

    vars(utils.env)["from_string"] = from_string


@lru_cache(maxsize=1)
def _lm_eval_index() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager()  # parses every definition that lm-eval ships: seven seconds, once per process


def inspect_data(task: EvalTask, on_progress: TellProgress | None = None) -> TaskSize:
    """Load ``task``, count and pin its documents, and determine its metrics.

    For a group, all tasks below it count; for a task with a document set, only the documents in the set. If the
    datasets changed since the task was last loaded, it is loaded again. The metrics are all those that are means, once
    for each filter of the answers. Scoring may produce fewer metrics but never others.
    """
    global _last_loaded
    with quiet():
        loaded = load_task(task)
        if not task.is_local and tuple(map(revision_now, loaded.sources)) != loaded.revisions:
            _last_loaded = None
            loaded = load_task(task)
        metrics: dict[str, dict[str, bool]] = {}
        for name, leaf in loaded.leaves.items():
            if task.cluster_field:
                for document in islice(leaf.eval_docs, 1):
                    cluster_of(name, document, task.cluster_field)
            # Scores of generated code have other names: `pass_at_k` with `k: [1, 8]` yields `pass@1` and `pass@8`.
            kwargs = getattr(leaf, "_metric_fn_kwargs", {}) if getattr(leaf, "UNSAFE_CODE", False) else {}
            directions: dict[str, bool] = {}
            for metric, higher in judging_metrics(name, leaf, leaf.aggregation()).items():
                counts = as_list(kwargs[metric]["k"]) if "k" in kwargs.get(metric, {}) else None
                labels = [metric] if counts is None else [f"pass@{k}" for k in counts]
                directions |= dict.fromkeys(labels, higher)
            filters = [str(getattr(each, "name", "none")) for each in getattr(leaf, "_filters", None) or ()] or ["none"]
            metrics[name] = {f"{metric},{label}": higher for label in filters for metric, higher in directions.items()}
            if len(leaf.eval_docs) and choices_of(leaf, leaf.eval_docs[0]) is not None:
                metrics[name] |= {f"{PROBABILITY},{label}": True for label in filters}
        counted = documents_in_set(loaded, task)
        documents = sum(loaded.sizes.values()) if counted is None else len(counted)
        sources = () if task.is_local else loaded.sources
        return TaskSize(documents=documents, data=TaskData(digest=loaded.digest, sources=sources), metrics=metrics)


def documents_in_set(loaded_task: LoadedTask, task: EvalTask) -> frozenset[tuple[str, int]] | None:
    """Return the documents in the task's document set as (leaf, position), or None if the task uses all documents."""
    if task.only is None:
        return None
    if task.only not in loaded_task.sets:
        cluster_field = task.only.division.together
        documents = (
            ((name, position), _cluster_name(leaf, name, document, cluster_field))
            for name, leaf in loaded_task.leaves.items()
            for position, document in enumerate(leaf.eval_docs)
        )
        sets = split_documents(documents, task.only.division, f"task {task.name}")
        loaded_task.sets[task.only] = sets[task.only.name]
    return loaded_task.sets[task.only]


def documents_by_leaf(loaded_task: LoadedTask, task: EvalTask) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield each leaf by name, with its documents in the task's document set, in the order of the data."""
    members = documents_in_set(loaded_task, task)
    for name, leaf in loaded_task.leaves.items():
        documents = enumerate(leaf.eval_docs)
        yield name, leaf, [document for at, document in documents if members is None or (name, at) in members]


def evaluated_documents(loaded_task: LoadedTask, task: EvalTask, seed: int) -> Iterator[tuple[str, int]]:
    """Yield the documents in the task's document set as (leaf, position), in the scoring order of ``seed``."""
    members = documents_in_set(loaded_task, task)
    return (key for key in order_documents(loaded_task.sizes, seed) if members is None or key in members)


def clusters_in_order(
    task: EvalTask, cluster_field: str, seed: int, on_progress: TellProgress | None = None
) -> tuple[str, ...]:
    """Return the cluster of each document in the task's document set, in the scoring order of ``seed``.

    ``cluster_field`` is the document field that names the cluster, or ``task`` to cluster by the tasks of a group.
    """
    with quiet():
        loaded = load_task(task)
        return tuple(
            _cluster_name(loaded.leaves[leaf], leaf, loaded.leaves[leaf].eval_docs[position], cluster_field)
            for leaf, position in evaluated_documents(loaded, task, seed)
        )


def _cluster_name(leaf: Any, name: str, document: Mapping[str, Any], cluster_field: str | None) -> str:
    if cluster_field is None:  # documents with the same prompt and target belong together
        text = text_of(leaf, document)
        return f"{text.prompt}\0{text.target}"
    return name if cluster_field == "task" else cluster_of(name, document, cluster_field)


def cluster_of(task: str, document: Mapping[str, Any], cluster_field: str) -> str:
    """Return the value of ``cluster_field`` in a document, or a digest of a value that is long, such as a passage."""
    if cluster_field not in document:
        raise InvalidInput(
            f"evaluate.tasks: {task}: cluster_by",
            found=f"{cluster_field!r}, which is not a field of its documents",
            expected="'task', or a field of the documents",
            remedy=suggest(cluster_field, document),
        )
    text = str(document[cluster_field])
    return text if len(text) <= _MAX_CLUSTER_NAME else hashlib.sha256(text.encode()).hexdigest()


def document_texts(task: EvalTask, positions: Mapping[str, Sequence[int]]) -> dict[tuple[str, int], DocumentText]:
    """Return the texts of documents by (leaf, position). ``positions`` lists the documents by leaf.

    Documents that no longer exist are left out.
    """
    with quiet():
        leaves = load_task(task).leaves
        return {
            (name, doc_id): text_of(leaves[name], leaves[name].eval_docs[doc_id])
            for name, doc_ids in positions.items()
            if name in leaves
            for doc_id in doc_ids
            if doc_id < len(leaves[name].eval_docs)
        }


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

    with patch.object(datasets, "load_dataset", load_and_record):
        yield sources


def revision_now(source: DataSource) -> str | None:
    """Return a text that changes whenever a dataset may have changed, without loading the dataset.

    The result is None if only loading reveals a change.
    """
    from huggingface_hub.errors import HfHubHTTPError

    from mergegate.tasks.models.checkpoints.hub import hub_access, is_offline

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


def inspect_in_child(task: EvalTask, time_limit: float | None = None) -> TaskSize:
    """Run ``inspect_data`` in the model process, because loading untrusted data can hang or crash."""
    return call_with_task_data(task, inspect_data, (task,), "its data", time_limit)


def call_with_task_data(
    task: EvalTask, function: Callable[..., A], arguments: tuple[object, ...], subject: str, time_limit: float | None
) -> A:
    """Call ``function`` with ``arguments`` and ``on_progress`` in the model process, where it may load a task's data.

    ``subject`` describes the work in messages. ``time_limit`` is in seconds. None: ``LOADED_WITHIN``.
    """
    return call_model_process(
        function,
        arguments,
        location=f"task {task.name}: {subject}",
        needs=CallNeeds(
            network=not task.is_local,  # data that is loaded now needs no network later
            time_limit=LOADED_WITHIN if time_limit is None else time_limit,
        ),
    )
