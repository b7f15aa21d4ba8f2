"""lm-eval as a library: one task, one model, scores by document. The only file that knows lm-eval's interfaces.

What lm-eval does by default and a gate cannot use is turned off here: log-softmax in the model's own dtype (rounds a
bf16 model's likelihoods by up to half a nat), its request cache (whose key lacks the model), its prompt cache (whose
key lacks the data), ``limit`` (takes the first documents), look-ups of the repository it happens to run in, progress
bars of its own, and data cached for all time under a path that says nothing about its content.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from merge_core.errors import InvalidInput
from tasks.loaded import Loaded, in_memory
from tasks.model import Model
from tasks.outcomes import DocumentOutcome
from tasks.scoring import Scoring
from tasks.task_definition import EvalTask, read_definition, still_as_pinned

FEWSHOT_SEED = 1234  # lm-eval's own default: with ``seed: 0`` the prompts are those of its command line


@dataclass(frozen=True)
class Scored:
    """All outcomes of one task, and for each metric whether more is better."""

    outcomes: tuple[DocumentOutcome, ...]
    higher_is_better: Mapping[str, bool]


def score(
    model: Model, task: EvalTask, scoring: Scoring, device: str, on_progress: Callable[[int, int], None]
) -> Scored:
    """Score every chosen document of ``task`` with ``model``.

    Only metrics that are means over documents are kept: a gate needs each document's share in the score.

    Args:
        device: ``cpu`` or ``cuda``.
        on_progress: Told how many of how many requests are answered.

    Raises:
        InvalidInput: when the model or the task's data cannot be loaded, or the task has no such metric.
    """
    # datasets counts uses of its file formats over the network; read when it is first imported.
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    with (
        in_memory(model, dtype=scoring.dtype, device=device) as loaded,
        _quiet(on_progress),
        tempfile.TemporaryDirectory(prefix="mergegate-task-") as scratch,
    ):
        leaves = _load_tasks(task, Path(scratch))
        chosen = _choose({name: len(leaf.eval_docs) for name, leaf in leaves.items()}, scoring)
        return _run({name: leaves[name] for name in chosen}, chosen, loaded, task, scoring)


def _run(
    leaves: Mapping[str, Any], chosen: Mapping[str, list[int]], loaded: Loaded, task: EvalTask, scoring: Scoring
) -> Scored:
    import numpy as np
    import torch
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    if scoring.chat_template and not loaded.tokenizer.chat_template:
        raise InvalidInput(
            "evaluate.chat_template",
            found=f"a tokenizer without one ({loaded.tokenizer.name_or_path})",
            remedy="chat_template: false",
        )
    for leaf in leaves.values():
        if leaf.OUTPUT_TYPE == "loglikelihood_rolling":
            raise InvalidInput(
                f"task {task.name}",
                found="a perplexity task, which has no score of a single document",
                remedy="name its documents under 'perplexity:'",
            )
        # A task that sets no examples at all keeps none, as on lm-eval's command line.
        if scoring.num_fewshot is not None and leaf.get_config("num_fewshot") != 0:
            leaf.set_config(key="num_fewshot", value=scoring.num_fewshot)
        elif leaf.get_config("num_fewshot") is None:
            leaf.set_config(key="num_fewshot", value=0)
        leaf.set_fewshot_seed(seed=FEWSHOT_SEED + scoring.seed)
    random.seed(scoring.seed)
    np.random.seed(scoring.seed)  # the global state, because lm-eval's tasks draw from it
    torch.manual_seed(scoring.seed)
    lm = HFLM(
        pretrained=loaded.network,
        tokenizer=loaded.tokenizer,
        backend="causal",
        softmax_dtype="float32",
        batch_size=scoring.batch_size,
        max_length=scoring.max_length,
    )
    results = evaluate(
        lm=lm,
        task_dict={"tasks": dict(leaves)},
        samples=dict(chosen),
        bootstrap_iters=0,  # errors are ours to compute, paired
        log_samples=True,
        apply_chat_template=scoring.chat_template,
        fewshot_as_multiturn=scoring.chat_template,
    )
    outcomes: list[DocumentOutcome] = []
    better: dict[str, bool] = {}
    for name, samples in results["samples"].items():
        means = {metric for metric, how in leaves[name].aggregation().items() if _is_mean(how)}
        directions = leaves[name].higher_is_better()
        for sample in samples:
            for metric in (metric for metric in sample["metrics"] if metric in means):
                key = f"{metric},{sample['filter']}"
                better[key] = bool(directions.get(metric, True))
                outcomes.append(_outcome(name, key, metric, sample))
    if not outcomes:
        raise InvalidInput(f"task {task.name}", found="no metric that is a mean over documents", expected="acc, …")
    return Scored(tuple(outcomes), better)


def _outcome(task: str, key: str, metric: str, sample: Mapping[str, Any]) -> DocumentOutcome:
    value = float(sample[metric])
    if value != value or value in (float("inf"), float("-inf")):
        raise InvalidInput(
            f"task {task}", found=f"{key} of document {sample['doc_id']} is {value}", expected="a number"
        )
    return DocumentOutcome(
        task=task,
        metric=key,
        doc_id=int(sample["doc_id"]),
        doc_hash=str(sample["doc_hash"]),
        prompt_hash=str(sample["prompt_hash"]),
        target_hash=str(sample["target_hash"]),
        outcome=value,
    )


def _is_mean(aggregation: Any) -> bool:
    return getattr(aggregation, "__name__", "") == "mean"


def _choose(sizes: Mapping[str, int], scoring: Scoring) -> dict[str, list[int]]:
    """Which documents of each task: all, or a fixed random sample in which a smaller one is contained.

    Ordered by a hash rather than drawn by a generator: the first 100 are among the first 200, on any Python.
    """
    every = [(task, doc) for task, size in sizes.items() for doc in range(size)]
    if scoring.documents is not None:
        every.sort(key=lambda item: hashlib.sha256(f"{scoring.seed}/{item[0]}/{item[1]}".encode()).digest())
        every = every[: scoring.documents]
    chosen: dict[str, list[int]] = {}
    for task, doc in sorted(every):  # ascending: lm-eval numbers its answers by position in this list
        chosen.setdefault(task, []).append(doc)
    return chosen  # a task without a document is left out: to lm-eval an empty list means all of them


def _load_tasks(task: EvalTask, scratch: Path) -> dict[str, Any]:
    """lm-eval's own task objects by name: one, or those below a group."""
    from lm_eval.tasks import TaskManager

    try:
        if task.definition is None:
            loaded = _shipped_tasks().load([task.name])
        else:
            loaded = TaskManager(include_defaults=False).load([str(_prepare(task, task.definition, scratch))])
    except InvalidInput:
        raise
    except Exception as error:
        # Definition and data are the user's, and pass through YAML, jinja, datasets and Python code of the task.
        cause = " ".join(str(error).split()) or type(error).__name__
        offline = isinstance(error, OSError)
        raise InvalidInput(
            str(task.definition or f"task {task.name}"),
            found=f"cannot be loaded: {type(error).__name__}: {cause[:300]}",
            remedy="fetch its dataset while the network is there, or point a YAML at local data" if offline else "",
        ) from error
    return dict(loaded["tasks"])


def _prepare(task: EvalTask, path: Path, scratch: Path) -> Path:
    """A definition that includes the user's, with data found beside it, and read anew instead of from a cache.

    datasets keeps what it has read in the user's home under (path, mtime): a file replaced by one of equal mtime would
    be served stale. A few megabytes of jsonl are read again in no time.
    """
    definition = read_definition(path)
    if not still_as_pinned(task, definition):
        raise InvalidInput(str(path), found="changed while the run was going on", remedy="run again")
    kwargs = dict(definition.config.get("dataset_kwargs") or {})
    if definition.data_files is not None:
        kwargs["data_files"] = definition.data_files
    if definition.is_local:
        kwargs["cache_dir"] = str(scratch / "cache")
    config: dict[str, Any] = {"include": str(path), "task": task.name, "dataset_path": definition.dataset_path}
    prepared = scratch / "task.yaml"
    prepared.write_text(yaml.safe_dump({**config, "dataset_kwargs": kwargs} if kwargs else config))
    return prepared


@lru_cache(maxsize=1)
def _shipped_tasks() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager()  # parses every definition it ships: seven seconds, once a process


@contextmanager
def _quiet(on_progress: Callable[[int, int], None]) -> Iterator[None]:
    """lm-eval and datasets without logs and bars; lm-eval's own bars are its only account of progress, so they are
    replaced by ``on_progress``."""
    import datasets  # type: ignore[import-untyped]  # ships no types
    import lm_eval.api.model
    import lm_eval.api.task
    import lm_eval.models.huggingface

    class Bar:
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

    modules = (lm_eval.api.model, lm_eval.api.task, lm_eval.models.huggingface)
    before = [module.tqdm for module in modules]
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "transformers")]
    levels = [logger.level for logger in loggers]
    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    for module in modules:
        module.tqdm = Bar
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for module, bar in zip(modules, before, strict=True):
            module.tqdm = bar
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()
