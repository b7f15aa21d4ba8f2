"""lm-eval as a library: one task, one model, scores by document.

What lm-eval does by default and a gate cannot use is turned off here: log-softmax in the model's own dtype (rounds a
bf16 model's likelihoods by up to half a nat), its request cache (whose key lacks the model), its prompt cache (whose
key lacks the data), ``limit`` (takes the first documents), look-ups of the repository it happens to run in, progress
bars of its own, and data cached for all time under a path that says nothing about its content.
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
from mergegate.tasks.evaluation.choice_probability import PROBABILITY, answered_now, choices_of, probabilities
from mergegate.tasks.evaluation.code_metric import bound_checks, code_bounded, code_labels, programs_told
from mergegate.tasks.evaluation.document_scores import DocumentScore, score_of_sample
from mergegate.tasks.evaluation.lm_eval_index import LeafConfig, shipped_leaves
from mergegate.tasks.evaluation.metrics import check_all_scored, checked_score
from mergegate.tasks.evaluation.mirror import FoundDataset, find_datasets
from mergegate.tasks.evaluation.mirror_loader import datasets_from
from mergegate.tasks.evaluation.prompt_settings import resolve_prompt_settings
from mergegate.tasks.evaluation.scoring import DocumentRange, Scoring, documents_in, ordered
from mergegate.tasks.evaluation.splits import DocumentSet
from mergegate.tasks.evaluation.task_data import (
    DataSource,
    LoadedData,
    TaskData,
    digest_of_leaves,
    revision_now,
    sources_noted,
)
from mergegate.tasks.evaluation.task_definition import EvalTask, named_data, read_definition, still_as_pinned
from mergegate.tasks.evaluation.task_file import Definition, function_dumper
from mergegate.tasks.evaluation.task_setup import arrange
from mergegate.tasks.evaluation.task_texts import asked_of
from mergegate.tasks.sandbox import ProgramLimits

_READABLE = 64  # characters of a cluster's name
_TEMPLATES = 1024  # that are kept compiled: a large group of tasks has a few of each

# datasets counts uses of its file formats over the network; read when it is first imported.
os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")


@dataclass(frozen=True)
class ScoredDocuments:
    """All outcomes of one part of a task."""

    outcomes: tuple[DocumentScore, ...]


def look_at_data(task: EvalTask) -> LoadedData:
    """How many documents ``task`` has (of a group, all below it; of a set, those in it), and what pins them. Loaded
    anew where what was loaded before is no longer what its datasets are.

    Raises:
        InvalidInput: when the task's data cannot be loaded.
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
        counted = counted_documents(loaded, task)
        documents = sum(loaded.sizes.values()) if counted is None else len(counted)
        metrics = {name: metrics_to_come(name, leaf) for name, leaf in loaded.leaves.items()}
        return LoadedData(documents, TaskData(digest=loaded.digest, sources=sources), metrics)


def count_documents(task: EvalTask) -> int:
    """Documents that ``task`` has; of a group, all below it. Raises as ``look_at_data``."""
    return look_at_data(task).documents


def _revisions(sources: Sequence[DataSource]) -> tuple[str | None, ...]:
    return tuple(revision_now(source) for source in sources)


def counted_documents(loaded: LoadedTask, task: EvalTask) -> frozenset[tuple[str, int]] | None:
    """The documents that a task with a set means, as (leaf, position); None: all of them."""
    if task.only is None:
        return None
    if task.only not in loaded.sets:
        together = task.only.division.together
        clusters = (
            ((name, position), _together(leaf, name, document, together))
            for name, leaf in loaded.leaves.items()
            for position, document in enumerate(leaf.eval_docs)
        )
        loaded.sets[task.only] = task.only.among(clusters, f"task {task.name}")
    return loaded.sets[task.only]


def clusters_in_order(task: EvalTask, field: str, seed: int) -> tuple[str, ...]:
    """What each document of a task's set shares with others, in the order in which they are scored.

    Args:
        field: Of its documents; ``task``: the task below a group that it is of.
        seed: Of the order.

    Raises:
        InvalidInput: when the task's data cannot be loaded, or a document has no such field.
    """
    with quiet():
        loaded = load_task(task)
        counted = counted_documents(loaded, task)
        return tuple(
            _together(loaded.leaves[leaf], leaf, loaded.leaves[leaf].eval_docs[position], field)
            for leaf, position in ordered(loaded.sizes, seed)
            if counted is None or (leaf, position) in counted
        )


def _together(leaf: Any, name: str, document: Mapping[str, Any], field: str | None) -> str:
    if field is None:
        return asked_of(leaf, document)
    return name if field == "task" else _cluster(name, document, field)


@contextmanager
def open_tasks(task: EvalTask) -> Iterator[Mapping[str, Any]]:
    """lm-eval's own task objects by name, those below a group each on its own; quiet as long as they are used.

    Raises:
        InvalidInput: when the task's data cannot be loaded.
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

    Only metrics that are means over documents are kept: a gate needs each document's share in the score. Choice tasks
    have one more, the probability of the right answer (``tasks.evaluation.choice_probability``).

    Args:
        device: ``cpu`` or ``cuda``.
        on_progress: Told how many of how many requests are answered.
        journal: Where answers are kept as they come, and those of a run that was killed are found; None: nowhere.

    Raises:
        InvalidInput: when the model or the task's data cannot be loaded, or the task has no such metric.
    """
    backend = find_backend(scoring.backend)
    with (
        quiet(),
        backend.opened(model, scoring, device) as opened,
        open_journal(journal, is_answer_record) as kept,
        journalled(opened, kept, backend.computes_in) as lm,
        progress_to(lambda done, of: on_progress(lm.restored + done, lm.restored + of), backend.draws_progress),
        programs_told(lambda count: on_progress(count, count)),
    ):
        loaded = load_task(task)
        documents = documents_in(loaded.sizes, scoring.seed, part, counted_documents(loaded, task))
        if (found := sum(map(len, documents.values()))) != part.last - part.first:
            raise InvalidInput(
                f"task {task.name}: {part}",
                found=f"{found} documents",
                expected=f"{part.last - part.first}, as when they were counted",
                remedy="its data changed: pin it, or delete 'documents' from the store",
            )
        return ask_documents(loaded, documents, lm, model.name, task, scoring)


def ask_documents(
    loaded: LoadedTask, documents: Mapping[str, list[int]], lm: Any, model: str, task: EvalTask, scoring: Scoring
) -> ScoredDocuments:
    from lm_eval.evaluator import evaluate

    how = resolve_prompt_settings(task.asked, scoring)
    leaves = arrange(loaded, documents, lm, how, scoring.seed)
    with mistakes_of(task):
        results = evaluate(
            lm=lm,
            task_dict={"tasks": dict(leaves)},
            samples=dict(documents),
            bootstrap_iters=0,  # errors are ours to compute, paired
            log_samples=True,
            system_instruction=how.system_instruction,
            apply_chat_template=how.is_chat,
            fewshot_as_multiturn=how.is_multiturn,
            confirm_run_unsafe_code=task.code is not None,
        )
    ends: dict[tuple[str, int], list[AnswerEnd]] = {}
    for request, end in getattr(lm, "ended_answers", ()):  # lm-eval numbers the documents that it was given
        ends.setdefault((request.task_name, documents[request.task_name][request.doc_id]), []).append(end)
    outcomes: list[DocumentScore] = []
    for name, samples in results["samples"].items():
        measured = {metric for sample in samples for metric in sample["metrics"]}
        directions = _judging_metrics(name, leaves[name], measured)
        answers = [answered_now(leaves[name], sample) for sample in samples]
        sure = probabilities([sample.get("acc") for sample in samples], answers)
        for sample, probability in zip(samples, sure or [None] * len(samples), strict=True):
            for metric in (metric for metric in sample["metrics"] if metric in directions):
                outcomes.append(_scored(f"{model}: task {name}", name, metric, directions[metric], sample, task))
            if probability is not None and PROBABILITY not in measured:
                with_it = {**sample, PROBABILITY: probability}
                outcomes.append(_scored(f"{model}: task {name}", name, PROBABILITY, True, with_it, task))
    every = [(name, document) for name, those in documents.items() for document in those]
    check_all_scored(f"task {task.name}", every, outcomes)
    return ScoredDocuments(tuple(_with_ends(row, ends.get((row.task, row.doc_id), ())) for row in outcomes))


def _with_ends(row: DocumentScore, ends: Sequence[AnswerEnd]) -> DocumentScore:
    return row._replace(ended=tuple(end.reason for end in ends), answer_tokens=tuple(end.tokens for end in ends))


@contextmanager
def mistakes_of(task: EvalTask) -> Iterator[None]:
    """What the user's own functions and templates raise while documents are asked, said as a mistake in them; and what
    lm-eval raises where it is to sum up what they returned."""
    from jinja2 import TemplateError

    try:
        yield
    except MergegateError:
        raise
    except Exception as error:
        own = {str(file) for file in read_definition(task.definition).files} if task.definition else set()
        frames = extract_tb(error.__traceback__)
        places = [f"{frame.filename}: line {frame.lineno}" for frame in frames if frame.filename in own]
        if not places and any(frame.filename.endswith("lm_eval/api/metrics.py") for frame in frames):
            raise InvalidInput(
                f"task {task.name}",
                found=f"scores of documents that lm-eval cannot sum up: {type(error).__name__}: {error!s:.200}",
                expected="a number of each document for a metric with aggregation: mean",
                remedy="correct the task's process_results, or the aggregation of the metric",
            ) from error
        if not places and not (task.definition and isinstance(error, TemplateError)):
            raise
        raise InvalidInput(
            places[-1] if places else str(task.definition),
            found=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            expected="an answer for every document",
            remedy="correct the task; `lm-eval run --tasks` with it shows the same",
        ) from error


def _scored(
    where: str, leaf: str, metric: str, higher_is_better: bool, sample: Mapping[str, Any], task: EvalTask
) -> DocumentScore:
    key = f"{metric},{sample['filter']}"
    try:
        number = float(sample[metric])
    except (TypeError, ValueError):
        raise InvalidInput(
            where,
            found=f"{key} of document {sample['doc_id']} is {sample[metric]!r:.60}",
            expected="a number, of which the task's score is the mean",
            remedy="name another metric of the task, or correct its process_results",
        ) from None
    value = checked_score(where, key, sample["doc_id"], number)
    cluster = _cluster(leaf, sample["doc"], task.cluster_field) if task.cluster_field else ""
    return score_of_sample(leaf, key, sample, value, cluster, higher_is_better)


def _judging_metrics(name: str, leaf: Any, measured: Iterable[str]) -> dict[str, bool]:
    """Metrics of a leaf that can judge, and whether more of each is better.

    Raises:
        InvalidInput: when there is none, saying what the leaf has.
    """
    how, directions = leaf.aggregation(), leaf.higher_is_better()
    found = {
        metric: bool(directions[metric])
        for metric, aggregation in how.items()
        if _is_mean(aggregation) and directions.get(metric) is not None
    }
    if not found.keys() & set(measured):
        has = sorted({*measured, *how})
        raise InvalidInput(
            f"task {name}",
            found=f"no metric that is a mean over documents with a direction, only {', '.join(has) or 'none at all'}",
            expected="a score of each document, of which the task's is the mean",
            remedy="give it one under metric_list (aggregation: mean, higher_is_better: ...), or leave it out",
        )
    return found


def metrics_to_come(name: str, leaf: Any) -> dict[str, bool]:
    """Labels under which the documents of a leaf can be judged once they are scored, and whether more of each is
    better: each metric that is a mean, after each filter of the answers. There may be fewer, never others.

    Raises:
        InvalidInput: when there is none.
    """
    directions = _judging_metrics(name, leaf, leaf.aggregation())
    expanded = code_labels(leaf)
    directions = {own: higher for metric, higher in directions.items() for own in expanded.get(metric, (metric,))}
    filters = [str(getattr(one, "name", "none")) for one in getattr(leaf, "_filters", None) or ()] or ["none"]
    found = {f"{metric},{one}": higher for one in filters for metric, higher in directions.items()}
    if len(leaf.eval_docs) and choices_of(leaf, leaf.eval_docs[0]) is not None:
        found |= {f"{PROBABILITY},{one}": True for one in filters}
    return found


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
    """What stands in ``field``; of a long text (a passage) a digest."""
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
    """lm-eval's task objects of one task by name, and what they say themselves, which scoring changes in them."""

    leaves: Mapping[str, Any]
    fewshot: Mapping[str, int | None]
    generation: Mapping[str, Mapping[str, Any] | None]  # settings of it; None where nothing is written
    scratch: Any  # the directory that local data were read into; deleted with this
    sources: tuple[DataSource, ...]  # that it was loaded from
    revisions: tuple[str | None, ...]  # of these, when they were loaded
    digest: str  # of all that it asks
    examples: dict[tuple[str, int, int], list[Any]] = field(default_factory=dict)  # by name, number and seed
    sets: dict[DocumentSet, frozenset[tuple[str, int]]] = field(default_factory=dict)  # that were asked for

    @property
    def sizes(self) -> dict[str, int]:
        return {name: len(leaf.eval_docs) for name, leaf in self.leaves.items()}


_last_loaded: tuple[tuple[str, Path | None, ProgramLimits | None], LoadedTask] | None = None


def load_task(task: EvalTask) -> LoadedTask:
    """The last task stays loaded for its next part."""
    global _last_loaded
    wanted = (task.digest, task.definition, task.code)
    asked = (None, _last_loaded[1].digest if _last_loaded else None)
    if _last_loaded is None or _last_loaded[0] != wanted or task.data_digest not in asked:
        _last_loaded = None
        scratch = tempfile.TemporaryDirectory(prefix="mergegate-task-")
        with sources_noted() as sources, code_bounded(task.code):
            leaves = _load_tasks(task, Path(scratch.name))
        if task.code is not None:
            for leaf in leaves.values():
                bound_checks(leaf, task.code)
        _check_leaves(task, leaves)
        fewshot = {name: leaf.get_config("num_fewshot") for name, leaf in leaves.items()}
        generation = {
            name: deepcopy(leaf.get_config("generation_kwargs") or {}) if leaf.OUTPUT_TYPE == "generate_until" else None
            for name, leaf in leaves.items()
        }
        revisions = () if task.is_local else _revisions(sources)
        found = LoadedTask(leaves, fewshot, generation, scratch, tuple(sources), revisions, digest_of_leaves(leaves))
        _last_loaded = (wanted, found)
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
    """lm-eval's own task objects by name: one, or those below a group."""
    from lm_eval.tasks import TaskManager

    _keep_templates()
    try:
        shipped = () if task.definition else shipped_leaves(task.in_lm_eval)
        if _is_laid_over(shipped):
            with _from_mirror(task, _found_in_mirror(task).values(), scratch):
                return dict(_shipped_tasks().load([task.in_lm_eval])["tasks"])
        prepared = _prepare(task, task.definition, scratch) if task.definition else _prepare_shipped(shipped, scratch)
        found, manager = _found_in_mirror(task), TaskManager(include_defaults=False)
        loaded: dict[str, Any] = {}
        for name, path in prepared.items():  # one after another: each with the data that are its own
            with _from_mirror(task, [found[name]] if name in found else [], scratch):
                loaded |= manager.load([str(path)])["tasks"]
        return loaded
    except InvalidInput:
        raise
    except Exception as error:
        # Definition and data are the user's, and pass through YAML, jinja, datasets and Python code of the task.
        offline = isinstance(error, OSError)
        raise InvalidInput(
            str(task.definition or f"task {task.name}"),
            found=f"cannot be loaded: {_first_cause(error)[:300]}",
            remedy="fetch its dataset while the network is there, or point a YAML at local data"
            if offline
            else "look at the task and at its data: `lm-eval run --tasks` with it shows the same",
        ) from error


def _found_in_mirror(task: EvalTask) -> dict[str, FoundDataset]:
    """Where the data of each task below it lie, by name; none without ``evaluate.data``."""
    if task.mirror is None:
        return {}
    return {each.asked.task: each for each in find_datasets(task.mirror, named_data(task.in_lm_eval, task.definition))}


def _from_mirror(task: EvalTask, found: Iterable[FoundDataset], scratch: Path) -> AbstractContextManager[None]:
    return nullcontext() if task.mirror is None else datasets_from(found, scratch)


def _first_cause(error: BaseException) -> str:
    """What was wrong to begin with: libraries wrap it, and say less."""
    while (cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = cause
    said = " ".join(str(error).split())
    if isinstance(error, KeyError):
        return f"there is no {said} in it"
    return said or type(error).__name__


def _is_laid_over(shipped: Iterable[LeafConfig]) -> bool:
    """Whether a group of lm-eval's lays functions over its tasks, or has whole ones inline: only its index reads it."""
    return any("/" in str(leaf.laid_over) or "::" in leaf.name for leaf in shipped)


def _prepare_shipped(shipped: Iterable[LeafConfig], scratch: Path) -> dict[str, Path]:
    """Definitions by name that load as lm-eval's own index loads them, without parsing 14,000 files."""
    prepared = {}
    for number, leaf in enumerate(shipped):
        path = scratch / f"shipped{number}.yaml"
        path.write_text(yaml.safe_dump({"include": str(leaf.path), **leaf.laid_over, "task": leaf.name}))
        prepared[leaf.name] = path
    return prepared


def _prepare(task: EvalTask, path: Path, scratch: Path) -> dict[str, Path]:
    """Definitions by name that include the user's, with data found beside them, and read anew instead of from a cache.

    Of a group one for each task below it: all that lm-eval's own groups add is a mean over tasks, which is not used.
    datasets keeps what it has read in the user's home under (path, mtime): a file replaced by one of equal mtime would
    be served stale. A few megabytes of jsonl are read again in no time.
    """
    definition = read_definition(path)
    if not still_as_pinned(task, definition):
        raise InvalidInput(str(path), found="changed while the run was going on", remedy="run again")
    return {leaf.name: _prepare_leaf(leaf, scratch, number) for number, leaf in enumerate(definition.leaves)}


def _prepare_leaf(leaf: Definition, scratch: Path, number: int) -> Path:
    kwargs = dict(leaf.config.get("dataset_kwargs") or {})
    if leaf.data_files is not None:
        kwargs["data_files"] = leaf.data_files
    if leaf.is_local:
        kwargs["cache_dir"] = str(scratch / "cache")
    beside = scratch / f"beside{number}"  # lm-eval looks for functions relative to the file that names them
    beside.symlink_to(leaf.functions_from)
    config: dict[str, Any] = {} if leaf.is_inline else {"include": str(leaf.path)}
    config |= {**leaf.overrides, "task": leaf.name}
    if leaf.dataset_path:
        config["dataset_path"] = leaf.dataset_path
    if kwargs:
        config["dataset_kwargs"] = kwargs
    prepared = scratch / f"task{number}.yaml"
    prepared.write_text(yaml.dump(config, Dumper=function_dumper(beside)))
    return prepared


@lru_cache(maxsize=1)
def _keep_templates() -> None:
    """lm-eval compiles a template for every document that it fills in, which takes ten times as long as filling it in;
    compiled once, it gives the same text."""
    from lm_eval import utils

    compile_anew: Any = utils.env.from_string
    kept = lru_cache(maxsize=_TEMPLATES)(compile_anew)

    def from_string(source: Any, *more: Any, **named: Any) -> Any:
        return compile_anew(source, *more, **named) if more or named else kept(source)

    vars(utils.env)["from_string"] = from_string


@lru_cache(maxsize=1)
def _shipped_tasks() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager()  # parses every definition it ships: seven seconds, once a process


@contextmanager
def quiet() -> Iterator[None]:
    """lm-eval, datasets and transformers without logs and bars."""
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
    """lm-eval's own bars are its only account of progress, so they are replaced by ``on_progress``.

    Args:
        drawn_by: Modules of the backend that draw bars, beside those that always do.
    """
    import lm_eval.api.model
    import lm_eval.api.task  # noqa: F401  # now, so that it is among those that draw

    class ProgressCounter:
        """What lm-eval uses of tqdm. One with a total and nothing to iterate over counts requests."""

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
        async def gather(*waiting: Awaitable[Any], **_: Any) -> list[Any]:
            """Of tqdm_asyncio: batches of requests that are under way together."""
            counter = ProgressCounter(total=len(waiting))

            async def counted(one: Awaitable[Any]) -> Any:
                answer = await one
                counter.update()
                return answer

            return list(await asyncio.gather(*map(counted, waiting)))

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
