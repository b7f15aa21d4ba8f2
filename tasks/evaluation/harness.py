"""Run lm-eval as a library: one task, one model, a score for every document.

This module turns off lm-eval defaults that a gate cannot use:

* log-softmax in the model's own dtype, which rounds the likelihoods of a bf16 model by up to half a nat;
* the request cache, whose key lacks the model, and the prompt cache, whose key lacks the data;
* ``limit``, which takes the first documents instead of a random sample;
* lookups in the git repository that lm-eval happens to run in;
* lm-eval's own progress bars;
* the data cache, which never expires and whose path says nothing about the content.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from traceback import extract_tb
from typing import Any

import yaml

from mergegate.merge_core.errors import InvalidInput, MergegateError, suggest
from mergegate.merge_core.files import JournalPlace, open_journal
from mergegate.tasks.checkpoints import Model
from mergegate.tasks.evaluation.answer_journal import is_answer_record, journalled
from mergegate.tasks.evaluation.backends import AnswerEnd, find_backend
from mergegate.tasks.evaluation.choice_probability import PROBABILITY, choice_from_task, choices_of, probabilities
from mergegate.tasks.evaluation.code_metric import code_labels, confine_checks, confine_code_eval, report_programs
from mergegate.tasks.evaluation.document_order import DocumentRange, documents_of_range, order_documents
from mergegate.tasks.evaluation.document_scores import DocumentScore, score_of_sample
from mergegate.tasks.evaluation.lm_eval_index import LeafConfig, shipped_leaves
from mergegate.tasks.evaluation.metrics import check_all_scored, checked_score
from mergegate.tasks.evaluation.mirror import FoundDataset, find_datasets
from mergegate.tasks.evaluation.mirror_loader import datasets_from
from mergegate.tasks.evaluation.settings import Scoring, resolve_prompt_settings
from mergegate.tasks.evaluation.splits import DocumentSet
from mergegate.tasks.evaluation.task_data import (
    DataSource,
    LoadedData,
    TaskData,
    digest_of_leaves,
    record_sources,
    revision_now,
)
from mergegate.tasks.evaluation.task_definition import EvalTask, matches_digest, named_data, read_definition
from mergegate.tasks.evaluation.task_file import Definition, function_dumper
from mergegate.tasks.evaluation.task_setup import set_up_tasks
from mergegate.tasks.evaluation.task_texts import question_text
from mergegate.tasks.sandbox import ProgramLimits

_READABLE = 64  # longest cluster name, in characters, that is stored as text
_TEMPLATES = 1024  # size of the cache of compiled templates; a large group of tasks has a few per task

# datasets reports downloads of its file formats over the network. It reads this variable when it is first imported.
os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")


@dataclass(frozen=True)
class ScoredDocuments:
    """Scores of all documents in one part of a task."""

    outcomes: tuple[DocumentScore, ...]


def inspect_data(task: EvalTask) -> LoadedData:
    """Load ``task``, count its documents and pin them, and return both with the metrics that it will have.

    For a group, all tasks below it count; for a task with a document set, only the documents in the set. If the
    datasets changed since the task was last loaded, it is loaded again.

    Raises:
        InvalidInput: If the task's data cannot be loaded.
    """
    global _last_loaded
    with quiet():
        loaded = load_task(task)
        if not task.is_local and _revisions(loaded.sources) != loaded.revisions:
            _last_loaded = None
            loaded = load_task(task)
        sources = () if task.is_local else loaded.sources
        if task.cluster_field:
            for name, leaf in loaded.leaves.items():
                for document in islice(leaf.eval_docs, 1):
                    _cluster(name, document, task.cluster_field)
        counted = documents_in_set(loaded, task)
        documents = sum(loaded.sizes.values()) if counted is None else len(counted)
        metrics = {name: expected_metrics(name, leaf) for name, leaf in loaded.leaves.items()}
        return LoadedData(documents, TaskData(digest=loaded.digest, sources=sources), metrics)


def count_documents(task: EvalTask) -> int:
    """Return the number of documents of ``task``, summed over the tasks of a group. See ``inspect_data``."""
    return inspect_data(task).documents


def _revisions(sources: Sequence[DataSource]) -> tuple[str | None, ...]:
    return tuple(revision_now(source) for source in sources)


def documents_in_set(loaded: LoadedTask, task: EvalTask) -> frozenset[tuple[str, int]] | None:
    """Return the documents in the task's document set as (leaf, position), None if the task uses all documents."""
    if task.only is None:
        return None
    if task.only not in loaded.sets:
        cluster_field = task.only.division.together
        clusters = (
            ((name, position), _cluster_of(leaf, name, document, cluster_field))
            for name, leaf in loaded.leaves.items()
            for position, document in enumerate(leaf.eval_docs)
        )
        loaded.sets[task.only] = task.only.among(clusters, f"task {task.name}")
    return loaded.sets[task.only]


def clusters_in_order(task: EvalTask, field: str, seed: int) -> tuple[str, ...]:
    """Return the cluster of each document in the task's document set, in scoring order.

    Args:
        field: Document field that names the cluster, or ``task`` to cluster by the tasks of a group.
        seed: Seed of the scoring order.

    Raises:
        InvalidInput: If the task's data cannot be loaded, or a document lacks the field.
    """
    with quiet():
        loaded = load_task(task)
        counted = documents_in_set(loaded, task)
        return tuple(
            _cluster_of(loaded.leaves[leaf], leaf, loaded.leaves[leaf].eval_docs[position], field)
            for leaf, position in order_documents(loaded.sizes, seed)
            if counted is None or (leaf, position) in counted
        )


def _cluster_of(leaf: Any, name: str, document: Mapping[str, Any], field: str | None) -> str:
    if field is None:
        return question_text(leaf, document)
    return name if field == "task" else _cluster(name, document, field)


@contextmanager
def open_tasks(task: EvalTask) -> Iterator[Mapping[str, Any]]:
    """Open a task and yield lm-eval's task objects by name, with lm-eval's output silenced until the context closes.

    A group yields one object for each task below it.

    Raises:
        InvalidInput: If the task's data cannot be loaded.
    """
    with quiet():
        yield load_task(task).leaves


def score_documents(
    model: Model,
    task: EvalTask,
    scoring: Scoring,
    part: DocumentRange,
    device: str,
    on_progress: Callable[[int, int], None],
    journal: JournalPlace | None = None,
) -> ScoredDocuments:
    """Score one part of the documents of ``task`` with ``model``.

    The result contains only metrics that are means over documents, because a gate needs the contribution of each
    document. Choice tasks have an additional metric, the probability of the right answer
    (``tasks.evaluation.choice_probability``).

    Args:
        device: ``cpu`` or ``cuda``.
        on_progress: Called with the number of answered requests and the total number.
        journal: Location of the journal that stores answers as they arrive and from which a killed run resumes.
            None: no journal.

    Raises:
        InvalidInput: If the model or the task's data cannot be loaded, or the task has no such metric.
    """
    backend = find_backend(scoring.backend)
    with (
        quiet(),
        backend.opened(model, scoring, device) as opened,
        open_journal(journal, is_answer_record) as records,
        journalled(opened, records, backend.computes_in) as lm,
        progress_to(lambda done, of: on_progress(lm.restored + done, lm.restored + of), backend.draws_progress),
        report_programs(lambda count: on_progress(count, count)),
    ):
        loaded = load_task(task)
        documents = documents_of_range(loaded.sizes, scoring.seed, part, documents_in_set(loaded, task))
        if (count := sum(map(len, documents.values()))) != part.last - part.first:
            raise InvalidInput(
                f"task {task.name}: {part}",
                found=f"{count} documents",
                expected=f"{part.last - part.first}, as when they were counted",
                remedy="its data changed: pin it, or delete 'documents' from the store",
            )
        return score_loaded_documents(loaded, documents, lm, model.name, task, scoring)


def score_loaded_documents(
    loaded: LoadedTask, documents: Mapping[str, list[int]], lm: Any, model: str, task: EvalTask, scoring: Scoring
) -> ScoredDocuments:
    from lm_eval.evaluator import evaluate

    settings = resolve_prompt_settings(task.asked, scoring)
    leaves = set_up_tasks(loaded, documents, lm, settings, scoring.seed)
    with user_errors(task):
        results = evaluate(
            lm=lm,
            task_dict={"tasks": dict(leaves)},
            samples=dict(documents),
            bootstrap_iters=0,  # mergegate computes its own standard errors, from paired scores
            log_samples=True,
            system_instruction=settings.system_instruction,
            apply_chat_template=settings.is_chat,
            fewshot_as_multiturn=settings.is_multiturn,
            confirm_run_unsafe_code=task.code is not None,
        )
    ends: dict[tuple[str, int], list[AnswerEnd]] = {}
    for request, end in getattr(lm, "ended_answers", ()):  # lm-eval numbers the documents of this call from 0
        ends.setdefault((request.task_name, documents[request.task_name][request.doc_id]), []).append(end)
    outcomes: list[DocumentScore] = []
    for name, samples in results["samples"].items():
        measured = {metric for sample in samples for metric in sample["metrics"]}
        directions = _judging_metrics(name, leaves[name], measured)
        answers = [choice_from_task(leaves[name], sample) for sample in samples]
        right_probabilities = probabilities([sample.get("acc") for sample in samples], answers)
        for sample, probability in zip(samples, right_probabilities or [None] * len(samples), strict=True):
            for metric in (metric for metric in sample["metrics"] if metric in directions):
                outcomes.append(_scored(f"{model}: task {name}", name, metric, directions[metric], sample, task))
            if probability is not None and PROBABILITY not in measured:
                with_probability = {**sample, PROBABILITY: probability}
                outcomes.append(_scored(f"{model}: task {name}", name, PROBABILITY, True, with_probability, task))
    expected = [(name, document) for name, positions in documents.items() for document in positions]
    check_all_scored(f"task {task.name}", expected, outcomes)
    return ScoredDocuments(tuple(_with_ends(row, ends.get((row.task, row.doc_id), ())) for row in outcomes))


def _with_ends(row: DocumentScore, ends: Sequence[AnswerEnd]) -> DocumentScore:
    return row._replace(ended=tuple(end.reason for end in ends), answer_tokens=tuple(end.tokens for end in ends))


@contextmanager
def user_errors(task: EvalTask) -> Iterator[None]:
    """Report exceptions from the user's functions and templates, and lm-eval's from averaging, as InvalidInput."""
    from jinja2 import TemplateError

    try:
        yield
    except MergegateError:
        raise
    except Exception as error:
        user_files = {str(file) for file in read_definition(task.definition).files} if task.definition else set()
        frames = extract_tb(error.__traceback__)
        locations = [f"{frame.filename}: line {frame.lineno}" for frame in frames if frame.filename in user_files]
        if not locations and any(frame.filename.endswith("lm_eval/api/metrics.py") for frame in frames):
            raise InvalidInput(
                f"task {task.name}",
                found=f"scores of documents that lm-eval cannot sum up: {type(error).__name__}: {error!s:.200}",
                expected="a number of each document for a metric with aggregation: mean",
                remedy="correct the task's process_results, or the aggregation of the metric",
            ) from error
        if not locations and not (task.definition and isinstance(error, TemplateError)):
            raise
        raise InvalidInput(
            locations[-1] if locations else str(task.definition),
            found=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            expected="an answer for every document",
            remedy="correct the task; `lm-eval run --tasks` with it shows the same",
        ) from error


def _scored(
    location: str, leaf: str, metric: str, higher_is_better: bool, sample: Mapping[str, Any], task: EvalTask
) -> DocumentScore:
    key = f"{metric},{sample['filter']}"
    try:
        score = float(sample[metric])
    except (TypeError, ValueError):
        raise InvalidInput(
            location,
            found=f"{key} of document {sample['doc_id']} is {sample[metric]!r:.60}",
            expected="a number, of which the task's score is the mean",
            remedy="name another metric of the task, or correct its process_results",
        ) from None
    value = checked_score(location, key, sample["doc_id"], score)
    cluster = _cluster(leaf, sample["doc"], task.cluster_field) if task.cluster_field else ""
    return score_of_sample(leaf, key, sample, value, cluster, higher_is_better)


def _judging_metrics(name: str, leaf: Any, measured: Iterable[str]) -> dict[str, bool]:
    """Return the metrics of a leaf that can judge it, and whether higher is better for each.

    Raises:
        InvalidInput: If there is none; the message lists the metrics that the leaf has.
    """
    aggregations, directions = leaf.aggregation(), leaf.higher_is_better()
    metrics = {
        metric: bool(directions[metric])
        for metric, aggregation in aggregations.items()
        if _is_mean(aggregation) and directions.get(metric) is not None
    }
    if not metrics.keys() & set(measured):
        names = sorted({*measured, *aggregations})
        raise InvalidInput(
            f"task {name}",
            found=f"no metric that is a mean over documents with a direction, only {', '.join(names) or 'none at all'}",
            expected="a score of each document, of which the task's is the mean",
            remedy="give it one under metric_list (aggregation: mean, higher_is_better: ...), or leave it out",
        )
    return metrics


def expected_metrics(name: str, leaf: Any) -> dict[str, bool]:
    """Return the metrics that a leaf will have once it is scored, and whether higher is better for each.

    These are all metrics that are means, once for each filter of the answers. Scoring may produce fewer of them but
    never others.

    Raises:
        InvalidInput: If there is none.
    """
    directions = _judging_metrics(name, leaf, leaf.aggregation())
    code_names = code_labels(leaf)
    directions = {label: higher for metric, higher in directions.items() for label in code_names.get(metric, (metric,))}
    filters = [str(getattr(each, "name", "none")) for each in getattr(leaf, "_filters", None) or ()] or ["none"]
    metrics = {f"{metric},{filter_name}": higher for filter_name in filters for metric, higher in directions.items()}
    if len(leaf.eval_docs) and choices_of(leaf, leaf.eval_docs[0]) is not None:
        metrics |= {f"{PROBABILITY},{filter_name}": True for filter_name in filters}
    return metrics


def _check_leaves(task: EvalTask, leaves: Mapping[str, Any]) -> None:
    for name, leaf in leaves.items():
        if leaf.OUTPUT_TYPE == "loglikelihood_rolling":
            raise InvalidInput(
                f"task {task.name}" if name == task.in_lm_eval else f"task {task.name}: {name}",
                found="a perplexity task, which has no score of a single document",
                remedy="name its documents under 'perplexity:'"
                + ("" if name == task.in_lm_eval else ", and the other tasks of the group one by one"),
            )


def _cluster(task: str, document: Mapping[str, Any], field: str) -> str:
    """Return the value of ``field``, or its digest if it is a long text such as a passage."""
    if field not in document:
        raise InvalidInput(
            f"evaluate.tasks: {task}: cluster_by",
            found=f"{field!r}, which is no field of its documents",
            expected="'task', or a field",
            remedy=suggest(field, document),
        )
    text = str(document[field])
    return text if len(text) <= _READABLE else hashlib.sha256(text.encode()).hexdigest()


def _is_mean(aggregation: Any) -> bool:
    return getattr(aggregation, "__name__", "") == "mean"


@dataclass(frozen=True)
class LoadedTask:
    """lm-eval's task objects for one task, by name, and the original settings that scoring overrides in them."""

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
        return {name: len(leaf.eval_docs) for name, leaf in self.leaves.items()}


_last_loaded: tuple[tuple[str, Path | None, ProgramLimits | None], LoadedTask] | None = None


def load_task(task: EvalTask) -> LoadedTask:
    """Load a task, or return the last loaded task if it is the same.

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
            leaves = _load_tasks(task, Path(scratch.name))
        if task.code is not None:
            for leaf in leaves.values():
                confine_checks(leaf, task.code)
        _check_leaves(task, leaves)
        fewshot = {name: leaf.get_config("num_fewshot") for name, leaf in leaves.items()}
        generation = {
            name: deepcopy(leaf.get_config("generation_kwargs") or {}) if leaf.OUTPUT_TYPE == "generate_until" else None
            for name, leaf in leaves.items()
        }
        revisions = () if task.is_local else _revisions(sources)
        loaded = LoadedTask(leaves, fewshot, generation, scratch, tuple(sources), revisions, digest_of_leaves(leaves))
        _last_loaded = (key, loaded)
    if task.data_digest not in (None, _last_loaded[1].digest):
        _last_loaded = None
        raise InvalidInput(
            f"task {task.name}: its data",
            found="other documents, examples or templates than when the run began",
            expected="the data as they were pinned",
            remedy="its dataset was exchanged meanwhile: run again",
        )
    return _last_loaded[1]


def _load_tasks(task: EvalTask, scratch: Path) -> dict[str, Any]:
    """Return lm-eval's task objects by name: a single task, or all tasks below a group."""
    from lm_eval.tasks import TaskManager

    _cache_templates()
    try:
        shipped = () if task.definition else shipped_leaves(task.in_lm_eval)
        if _is_laid_over(shipped):
            with _from_mirror(task, _mirror_datasets(task).values(), scratch):
                return dict(_shipped_tasks().load([task.in_lm_eval])["tasks"])
        prepared = _prepare(task, task.definition, scratch) if task.definition else _prepare_shipped(shipped, scratch)
        datasets, manager = _mirror_datasets(task), TaskManager(include_defaults=False)
        loaded: dict[str, Any] = {}
        for name, path in prepared.items():  # one at a time, so that each task sees only its own datasets
            with _from_mirror(task, [datasets[name]] if name in datasets else [], scratch):
                loaded |= manager.load([str(path)])["tasks"]
        return loaded
    except InvalidInput:
        raise
    except Exception as error:
        # The user's definition and data pass through YAML, jinja, datasets and Python code of the task.
        offline = isinstance(error, OSError)
        raise InvalidInput(
            str(task.definition or f"task {task.name}"),
            found=f"cannot be loaded: {_first_cause(error)[:300]}",
            remedy="fetch its dataset while the network is there, or point a YAML at local data"
            if offline
            else "look at the task and at its data: `lm-eval run --tasks` with it shows the same",
        ) from error


def _mirror_datasets(task: EvalTask) -> dict[str, FoundDataset]:
    """Return the location of each leaf's data in ``evaluate.data``, by name; empty if that is not set."""
    if task.mirror is None:
        return {}
    return {
        each.request.task: each for each in find_datasets(task.mirror, named_data(task.in_lm_eval, task.definition))
    }


def _from_mirror(task: EvalTask, datasets: Iterable[FoundDataset], scratch: Path) -> AbstractContextManager[None]:
    return nullcontext() if task.mirror is None else datasets_from(datasets, scratch)


def _first_cause(error: BaseException) -> str:
    """Describe the exception at the root of a chain: libraries wrap it in less specific ones."""
    while (cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = cause
    message = " ".join(str(error).split())
    if isinstance(error, KeyError):
        return f"there is no {message} in it"
    return message or type(error).__name__


def _is_laid_over(shipped: Iterable[LeafConfig]) -> bool:
    """Return whether only lm-eval's own index can load the tasks of a shipped group.

    This is the case if the group overrides functions of its tasks or defines tasks inline.
    """
    return any("/" in str(leaf.laid_over) or "::" in leaf.name for leaf in shipped)


def _prepare_shipped(shipped: Iterable[LeafConfig], scratch: Path) -> dict[str, Path]:
    """Write definitions that load like those from lm-eval's index, but without parsing its 14,000 files."""
    prepared = {}
    for number, leaf in enumerate(shipped):
        path = scratch / f"shipped{number}.yaml"
        path.write_text(yaml.safe_dump({"include": str(leaf.path), **leaf.laid_over, "task": leaf.name}))
        prepared[leaf.name] = path
    return prepared


def _prepare(task: EvalTask, path: Path, scratch: Path) -> dict[str, Path]:
    """Write definitions that include the user's and load the data next to them without a cache; return them by name.

    A group becomes one definition per task. lm-eval's own groups only add a mean over tasks, which is not used.
    datasets caches what it reads in the user's home directory under (path, mtime), so a file replaced by one with the
    same mtime would yield stale data. Reading a few megabytes of jsonl again is fast.
    """
    definition = read_definition(path)
    if not matches_digest(task, definition):
        raise InvalidInput(str(path), found="changed while the run was going on", remedy="run again")
    return {leaf.name: _prepare_leaf(leaf, scratch, number) for number, leaf in enumerate(definition.leaves)}


def _prepare_leaf(leaf: Definition, scratch: Path, number: int) -> Path:
    kwargs = dict(leaf.config.get("dataset_kwargs") or {})
    if leaf.data_files is not None:
        kwargs["data_files"] = leaf.data_files
    if leaf.is_local:
        kwargs["cache_dir"] = str(scratch / "cache")
    functions_link = scratch / f"beside{number}"  # lm-eval resolves functions relative to the file that names them
    functions_link.symlink_to(leaf.functions_from)
    config: dict[str, Any] = {} if leaf.is_inline else {"include": str(leaf.path)}
    config |= {**leaf.overrides, "task": leaf.name}
    if leaf.dataset_path:
        config["dataset_path"] = leaf.dataset_path
    if kwargs:
        config["dataset_kwargs"] = kwargs
    prepared = scratch / f"task{number}.yaml"
    prepared.write_text(yaml.dump(config, Dumper=function_dumper(functions_link)))
    return prepared


@lru_cache(maxsize=1)
def _cache_templates() -> None:
    """Cache compiled templates.

    lm-eval compiles a template for every document that it renders, which takes ten times as long as rendering. The
    cached template yields the same text.
    """
    from lm_eval import utils

    compile_template: Any = utils.env.from_string
    compile_cached = lru_cache(maxsize=_TEMPLATES)(compile_template)

    def from_string(source: Any, *args: Any, **kwargs: Any) -> Any:
        return compile_template(source, *args, **kwargs) if args or kwargs else compile_cached(source)

    vars(utils.env)["from_string"] = from_string


@lru_cache(maxsize=1)
def _shipped_tasks() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager()  # parses every definition that lm-eval ships: seven seconds, once per process


@contextmanager
def quiet() -> Iterator[None]:
    """Silence logs and progress bars of lm-eval, datasets and transformers inside the context."""
    import datasets  # type: ignore[import-untyped]  # ships no types

    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "transformers")]
    levels = [logger.level for logger in loggers]
    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()


@contextmanager
def progress_to(on_progress: Callable[[int, int], None], drawn_by: Sequence[str]) -> Iterator[None]:
    """Replace lm-eval's progress bars, which are its only report of progress, by calls of ``on_progress``.

    Args:
        on_progress: Called with the number of finished requests and the total number.
        drawn_by: Modules of the backend that draw bars, in addition to the modules that always do.
    """
    import lm_eval.api.model
    import lm_eval.api.task  # noqa: F401  # import it now so that its bars are replaced, too

    class ProgressCounter:
        """The part of the tqdm interface that lm-eval uses. A bar with a total and no iterable counts requests."""

        def __init__(self, iterable: Any = None, *, total: int | None = None, **_: Any) -> None:
            self._iterable, self._total, self._done = iterable, total, 0

        def __iter__(self) -> Iterator[Any]:
            return iter(self._iterable)

        def update(self, n: int = 1) -> None:
            self._done += n
            if self._total:
                on_progress(self._done, self._total)

        def close(self) -> None:
            pass

        @staticmethod
        async def gather(*tasks: Awaitable[Any], **_: Any) -> list[Any]:
            """Replace ``tqdm_asyncio.gather``: await batches of requests that run concurrently."""
            counter = ProgressCounter(total=len(tasks))

            async def count(task: Awaitable[Any]) -> Any:
                answer = await task
                counter.update()
                return answer

            return list(await asyncio.gather(*map(count, tasks)))

    names = ("lm_eval.api.model", "lm_eval.api.task", *drawn_by)
    modules = [sys.modules[name] for name in names if name in sys.modules]
    drawn = [(module, name) for module in modules for name in ("tqdm", "tqdm_asyncio") if hasattr(module, name)]
    before = [getattr(module, name) for module, name in drawn]
    for module, name in drawn:
        setattr(module, name, ProgressCounter)
    try:
        yield
    finally:
        for (module, name), bar in zip(drawn, before, strict=True):
            setattr(module, name, bar)
