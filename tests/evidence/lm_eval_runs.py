"""lm-eval run as its users run it, on tiny models: its own loader, its own tracker, its own files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from mergegate.tasks.evaluation.task_definition import read_definition


def run_lm_eval(out: Path, model: Path, definitions: Sequence[Path], scratch: Path, **options: Any) -> Path:
    """What ``lm_eval run --model hf --output_path OUT --log_samples`` writes about one model; returns ``out``.

    The steps are those of its command line, without the index of the 14,000 tasks that it ships.
    """
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    folder = prepare(definitions, scratch)
    tasks = options.pop("tasks", None) or [read_definition(path).name for path in definitions]
    tracker = EvaluationTracker(output_path=str(out))
    results = simple_evaluate(
        model="hf",
        # softmax in float32, as mergegate does: otherwise the near ties of a bf16 model may fall the other way.
        model_args={"pretrained": str(model), "dtype": "auto", "softmax_dtype": "float32"},
        tasks=list(tasks),
        device="cpu",
        batch_size=16,
        evaluation_tracker=tracker,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=1,
        verbosity=None,
        **options,
    )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for task in results["configs"]:
        tracker.save_results_samples(task_name=task, samples=samples[task])
    return out


def simple_evaluate(*arguments: Any, **options: Any) -> Any:
    """lm-eval's own, without a list of all packages, which takes longer than the models' answers."""
    import lm_eval

    with mock.patch("torch.utils.collect_env.get_pretty_env_info", str):
        return lm_eval.simple_evaluate(*arguments, **options)


def prepare(definitions: Sequence[Path], scratch: Path) -> Path:
    """A folder of the definitions in lm-eval's own terms: data by absolute path, read anew and not from a cache."""
    folder = scratch / "include"
    folder.mkdir(parents=True, exist_ok=True)
    for path in definitions:
        definition = read_definition(path)
        config = {
            "include": str(path),
            "task": definition.name,
            "dataset_path": definition.dataset_path,
            "dataset_kwargs": {"data_files": definition.data_files, "cache_dir": str(scratch / "cache")},
        }
        (folder / f"{definition.name}.yaml").write_text(yaml.safe_dump(config))
    return folder
