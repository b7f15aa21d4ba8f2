"""Write, pin and score tiny tasks, all in this process."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import invalidate_caches
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from tiny_models import write_jsonl

from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.models.checkpoints.model import Model
from mergegate.tasks.models.checkpoints.model_process import end_model_process
from mergegate.tasks.quality.evaluation.backends import added_backends
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask, pin_task
from mergegate.tasks.quality.evaluation.document_order import DocumentRange
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore
from mergegate.tasks.quality.evaluation.scoring.harness import ScoringJob, score_documents
from mergegate.tasks.quality.evaluation.scoring.loading import inspect_data
from mergegate.tasks.quality.evaluation.settings import Scoring

A = TypeVar("A")


def mean_of(metric: str, **more: Any) -> dict[str, Any]:
    """Return the entry of a ``metric_list`` whose mean over documents is judged."""
    return {"metric": metric, "aggregation": "mean", "higher_is_better": True} | more


def write_task(directory: Path, name: str, rows: Iterable[dict[str, Any]] | None = None, **config: Any) -> Path:
    """Write the task ``name``. With ``rows``, also write its data next to it.

    In ``config``, a text ``!function module.name`` names a function.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if rows is not None:
        write_jsonl(directory / f"{name}.jsonl", rows)
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}}}
        config = {**data, "test_split": "test", **config}
    path = directory / f"{name}.yaml"
    path.write_text(re.sub(r"'(!function [\w.]+)'", r"\1", yaml.safe_dump({"task": name, **config})))
    return path


def pin(path: Path, **changes: Any) -> EvalTask:
    """Pin a local task, group or list, and change fields of the pinned task."""
    task = pin_task(path.name, path.parent, HashMemo(path.parent / "hashes.db"))
    return task.model_copy(update=changes) if changes else task


def model_in(directory: Path, name: str = "m") -> Model:
    return Model(name=name, digest=str(directory), directory=directory)


def quiet(done: int, total: int) -> None:
    """Ignore progress."""


def scoring_job(model: Model, task: EvalTask, part: tuple[int, int] | None = None, **scoring: Any) -> ScoringJob:
    """Return the job of all documents, or of those from the first to before the last in ``part``."""
    first, last = part or (0, inspect_data(task).documents)
    settings = Scoring.model_validate(scoring)
    return ScoringJob(model, task, settings, DocumentRange(first=first, last=last), "cpu")


def score(
    model: Model, task: EvalTask, part: tuple[int, int] | None = None, **scoring: Any
) -> tuple[DocumentScore, ...]:
    """Score the documents of ``scoring_job``."""
    return score_documents(scoring_job(model, task, part, **scoring), quiet)


def without_probability(rows: Iterable[DocumentScore]) -> tuple[DocumentScore, ...]:
    """Return the scores under lm-eval's own metrics."""
    return tuple(row for row in rows if row.metric != "prob,none")


def call_here(
    function: Callable[..., A], arguments: Sequence[Any], *, on_progress: Callable[..., None] = quiet, **_: Any
) -> A:
    """Replace ``call_model_process``, and run the call in this process."""
    return function(*arguments, on_progress)


@contextmanager
def backend_site(site: Path) -> Iterator[Callable[..., None]]:
    """Make packages in ``site`` visible to this process and to model processes, and yield ``install_backend``."""

    def install_backend(module: str, version: str = "1.0", entry: str = "BACKEND") -> None:
        """Install the backend ``extra``, as an installer would. ``module`` is the source of its module."""
        facts = site / "mergegate_extra.dist-info"
        facts.mkdir(parents=True, exist_ok=True)
        (site / "extra_backend.py").write_text(module)
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mergegate-extra\nVersion: {version}\n")
        (facts / "entry_points.txt").write_text(f"[mergegate.backends]\nextra = extra_backend:{entry}\n")
        forget()

    def forget() -> None:
        """Let the next look-up of a backend scan the installed packages again."""
        sys.modules.pop("extra_backend", None)
        invalidate_caches()
        added_backends.cache_clear()

    site.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))))
        end_model_process()  # a process from before would not see the directory
        yield install_backend
        end_model_process()
    forget()
