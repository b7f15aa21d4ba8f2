"""Run lm-eval on tiny models the way its users do, with its own loader, tracker and result files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from mergegate.tasks.quality.evaluation.definitions.tree import task_tree

# Fields that are not read from lm-eval's files.
UNWRITTEN: dict[str, Any] = {"answer": "", "prompt_cut": None} | dict.fromkeys(
    ("ended", "answer_tokens", "thinking_tokens", "budgets"), ()
)


def run_lm_eval(out: Path, model: Path, definitions: Sequence[Path], scratch: Path, **options: Any) -> Path:
    """Write what ``lm_eval run --model hf --output_path OUT --log_samples`` writes for one model, and return ``out``.

    The steps match lm-eval's command line, but skip the index of the 14,000 tasks that lm-eval ships.
    """
    from lm_eval.loggers import EvaluationTracker

    tracker = EvaluationTracker(output_path=str(out))
    results = evaluate_here(model, definitions, scratch, evaluation_tracker=tracker, bootstrap_iters=1, **options)
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for task in results["configs"]:
        tracker.save_results_samples(task_name=task, samples=samples[task])
    return out


def run_lm_eval_here(model: Any, definitions: Sequence[Path], scratch: Path, **options: Any) -> dict[str, Any]:
    """Return lm-eval's samples of each task without writing files."""
    samples: dict[str, Any] = evaluate_here(model, definitions, scratch, bootstrap_iters=0, **options)["samples"]
    return samples


def evaluate_here(model: Any, definitions: Sequence[Path], scratch: Path, **options: Any) -> Any:
    """Call lm-eval's ``simple_evaluate`` on definitions that ``prepare`` writes.

    Args:
        model: Directory of a model, or an ``LM`` of lm-eval.
        definitions: Files of tasks.
        scratch: Directory for files.
        **options: Arguments of ``simple_evaluate``. Default for ``tasks``: those in ``definitions``.
    """
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    folder = prepare(definitions, scratch)
    tasks = options.pop("tasks", None) or [task_tree(path).name for path in definitions]
    if isinstance(model, Path):
        # Softmax in float32, as in mergegate; in bf16, near ties may resolve differently.
        arguments = {"pretrained": str(model), "dtype": "auto", "softmax_dtype": "float32"}
        options = {"model_args": arguments, "device": "cpu", "batch_size": 16, **options}
        model = "hf"
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return simple_evaluate(model, tasks=list(tasks), task_manager=manager, log_samples=True, verbosity=None, **options)


def simple_evaluate(*arguments: Any, **options: Any) -> Any:
    """Run lm-eval's ``simple_evaluate`` without its list of installed packages, which takes longer than the models."""
    import lm_eval

    with mock.patch("torch.utils.collect_env.get_pretty_env_info", str):
        return lm_eval.simple_evaluate(*arguments, **options)


def prepare(definitions: Sequence[Path], scratch: Path) -> Path:
    """Write the definitions for plain lm-eval, with absolute data paths and without a dataset cache."""
    folder = scratch / "include"
    folder.mkdir(parents=True, exist_ok=True)
    for path in definitions:
        (leaf,) = task_tree(path).leaves
        data = {"data_files": leaf.data_files, "cache_dir": str(scratch / "cache")}
        config = {"include": str(path), "task": leaf.name, "dataset_path": leaf.dataset_path}
        (folder / f"{leaf.name}.yaml").write_text(yaml.safe_dump({**config, "dataset_kwargs": data}))
    return folder
