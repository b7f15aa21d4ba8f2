"""Load the documents of a task through lm-eval: from local files, the Hub, or a directory of datasets.

lm-eval resolves names with an index that takes seven seconds to build, and caches data under a path that does not
depend on its content. This module therefore writes a separate definition for each task, with absolute data paths and
without a cache. The last loaded task stays in memory. ``LoadedTask.digest`` pins all documents, examples, templates
and settings.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.files import sha256_file
from mergegate.tasks.checkpoints import TellProgress
from mergegate.tasks.evaluation.built_in import BuiltInLeaf
from mergegate.tasks.evaluation.choice_probability import PROBABILITY, choices_of
from mergegate.tasks.evaluation.code_metric import CHECK, CodeEval, confine_code_eval, functions_in
from mergegate.tasks.evaluation.document_order import order_documents
from mergegate.tasks.evaluation.lm_eval_index import shipped_leaves
from mergegate.tasks.evaluation.lm_eval_tasks import DocumentText, judging_metrics, quiet, text_of
from mergegate.tasks.evaluation.mirror import FoundDataset, find_datasets
from mergegate.tasks.evaluation.mirror_loader import datasets_from
from mergegate.tasks.evaluation.splits import DocumentSet, split_documents
from mergegate.tasks.evaluation.task_data import (
    DataSource,
    LoadedData,
    TaskData,
    digest_of_leaves,
    record_sources,
    revision_now,
)
from mergegate.tasks.evaluation.task_definition import EvalTask, digest_definition, named_data, read_definition
from mergegate.tasks.evaluation.task_file import as_list, function_dumper
from mergegate.tasks.sandbox import ProgramLimits

_MAX_CLUSTER_NAME = 64  # longest cluster name, in characters, that is stored as text
_TEMPLATES = 1024  # size of the cache of compiled templates; a large group of tasks has a few per task

# datasets reports downloads of its file formats over the network. It reads this variable when it is first imported.
os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")


@dataclass(frozen=True)
class LoadedTask:
    """lm-eval's task objects for one task, and the original values of the settings that scoring overrides in them."""

    leaves: Mapping[str, Any]
    fewshot: Mapping[str, int | None]
    generation: Mapping[str, Mapping[str, Any] | None]  # settings of generation; None for a leaf that generates nothing
    scratch: Any  # directory into which local data was read; deleted together with this object
    sources: tuple[DataSource, ...]  # datasets that the task was loaded from
    revisions: tuple[str | None, ...]  # their revisions at that time
    digest: str  # digest of documents, examples, templates and settings
    examples: dict[tuple[str, int, int], list[Any]] = field(default_factory=dict)  # by leaf, number and seed
    sets: dict[DocumentSet, frozenset[tuple[str, int]]] = field(default_factory=dict)  # cache of document sets

    @property
    def sizes(self) -> dict[str, int]:
        """Number of documents in each leaf, by name."""
        return {name: len(leaf.eval_docs) for name, leaf in self.leaves.items()}


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

    try:
        datasets: dict[str, FoundDataset] = {}
        if task.mirror is not None:
            requests = named_data(task.in_lm_eval, task.definition)
            datasets = {each.request.task: each for each in find_datasets(task.mirror, requests)}
        shipped = () if task.definition else shipped_leaves(task.in_lm_eval)
        if any("/" in str(leaf.overrides) or "::" in leaf.name for leaf in shipped):
            # A group that overrides functions of its tasks, or defines tasks inline: only lm-eval's index can load it.
            with mirror(datasets.values()):
                return dict(_lm_eval_index().load([task.in_lm_eval])["tasks"])
        definitions: dict[str, Path] = {}
        for number, leaf in enumerate(shipped):
            definitions[leaf.name] = path = scratch / f"shipped{number}.yaml"
            path.write_text(yaml.safe_dump({"include": str(leaf.path), **leaf.overrides, "task": leaf.name}))
        if task.definition:
            definitions = _write_local_definitions(task, task.definition, scratch)
        manager = TaskManager(include_defaults=False)
        loaded: dict[str, Any] = {}
        for name, path in definitions.items():  # one at a time, so that each task sees only its own datasets
            with mirror([datasets[name]] if name in datasets else []):
                loaded |= manager.load([str(path)])["tasks"]
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


def _write_local_definitions(task: EvalTask, path: Path, scratch: Path) -> dict[str, Path]:
    """Write definitions that include local YAML files but load their data without a cache; return their paths by task.

    datasets caches data in the user's home directory under (path, mtime), so a replaced file with the same mtime would
    yield stale data. A group becomes one definition per task, because lm-eval's groups only add a mean over tasks,
    which mergegate does not use.
    """
    definition = read_definition(path)
    if digest_definition(definition, sha256_file, task.mirror) != task.digest:  # reads every byte
        raise InvalidInput(str(path), found="a file that changed during the run", remedy="run again")
    paths = {}
    for number, leaf in enumerate(definition.leaves):
        kwargs = dict(leaf.config.get("dataset_kwargs") or {})
        if leaf.data_files is not None:
            kwargs["data_files"] = leaf.data_files
        if leaf.is_local:
            kwargs["cache_dir"] = str(scratch / "cache")
        functions_link = scratch / f"functions{number}"  # lm-eval resolves functions relative to the file with the name
        functions_link.symlink_to(leaf.functions_from)
        config: dict[str, Any] = {} if leaf.is_inline else {"include": str(leaf.path)}
        config |= {**leaf.overrides, "task": leaf.name}
        if leaf.dataset_path:
            config["dataset_path"] = leaf.dataset_path
        if kwargs:
            config["dataset_kwargs"] = kwargs
        paths[leaf.name] = written = scratch / f"task{number}.yaml"
        written.write_text(yaml.dump(config, Dumper=function_dumper(functions_link)))
    return paths


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


def inspect_data(task: EvalTask, on_progress: TellProgress | None = None) -> LoadedData:
    """Load ``task``, count and pin its documents, and determine its metrics.

    For a group, all tasks below it count; for a task with a document set, only the documents in the set. If the
    datasets changed since the task was last loaded, it is loaded again. The metrics are all those that are means, once
    for each filter of the answers. Scoring may produce fewer metrics but never others.

    Raises:
        InvalidInput: If the task's data cannot be loaded, or a leaf has no metric that can judge it.
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
        return LoadedData(documents, TaskData(digest=loaded.digest, sources=sources), metrics)


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

    Raises:
        InvalidInput: If the task's data cannot be loaded, or a document lacks the field.
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

    Raises:
        InvalidInput: If the data of the task cannot be loaded.
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
