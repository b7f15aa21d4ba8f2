"""Find the result files of one model, in the format of lm-eval or of inspect_ai, and read the scores of a task.

::

    files = find_results(Path("DIR"))
    results = read_task(files, "gsm8k")          # for a group such as mmlu: the documents of all tasks below it
    require_same_conditions(reference, results, "gsm8k: merge against reverser")

The content of a file tells its format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.parsing import open_plain
from mergegate.tasks.quality.evaluation.results.contract import LoggedResults, TaskResults
from mergegate.tasks.quality.evaluation.results.inspect_scores import combine_logs, open_log
from mergegate.tasks.quality.evaluation.results.lm_eval import RESULTS_NAME, read_results

_MAX_FILES = 10_000
_EXPECTED = "the output of lm-eval with --log_samples, or logs of inspect_ai"
_WRITE = "run lm-eval with --output_path and --log_samples, or name a directory with .eval or .json logs of inspect_ai"
# The first keys of a log of inspect_ai, whose order is part of its format.
_LOG_START = re.compile(rb'\s*\{\s*"version"\s*:\s*\d+\s*,\s*"status"\s*:')


def find_results(output_path: Path) -> tuple[LoggedResults, ...]:
    """Find the results of one model, newest first.

    ``output_path`` is a directory with the files, a directory above it, or one file: a results file or a log.

    Raises:
        InvalidInput: If there are no results, a file cannot be read, or the files belong to several models.
    """
    if output_path.is_file():
        paths = [output_path]
    elif output_path.is_dir():
        patterns = ("*.json", "*/*.json", "*.eval", "*/*.eval")
        paths = [path for pattern in patterns for path in sorted(output_path.glob(pattern))]
    else:
        raise InvalidInput(str(output_path), found="no such directory", expected=_EXPECTED, remedy=_WRITE)
    if len(paths) > _MAX_FILES:
        raise InvalidInput(
            str(output_path), found=f"{len(paths)} files", expected=f"at most {_MAX_FILES}, all of one model"
        )
    files = [file for path in paths if (file := _open(path, is_named=path == output_path)) is not None]
    if not files:
        raise InvalidInput(str(output_path), found="no results_DATE.json and no log", expected=_EXPECTED, remedy=_WRITE)
    formats = {type(file): file for file in files}
    models = {(type(file), file.model): file for file in files}
    if len(models) > 1:
        several = sorted(str(file.path.relative_to(output_path)) for file in models.values())[:10]
        kind = "results in two formats" if len(formats) == len(models) else f"results of {len(models)} models"
        raise InvalidInput(
            str(output_path),
            found=f"{kind}: {', '.join(several)}",
            expected="results of one model, in one format",
            remedy="use the directory of one model, or one file",
        )
    return tuple(sorted(files, key=lambda file: file.date, reverse=True))


def read_task(files: Sequence[LoggedResults], task: str, cluster_field: str | None = None) -> TaskResults:
    """Read the newest results of a task or a group of tasks.

    The result contains only metrics that are means over documents, because a gate needs the contribution of each
    document. Choice tasks in lm-eval's files have an additional metric, the probability of the right answer, if the
    samples reveal which answer is right. ``cluster_field`` is the document field (for inspect_ai: a key of the sample's
    metadata) that names the cluster of a document.

    Raises:
        InvalidInput: If there are no results, or the files are truncated, altered or from another run.
    """
    if file := next((file for file in files if file.has(task)), None):
        return file.read(task, cluster_field)
    leaves: dict[str, LoggedResults] = {}
    for file in files:
        if file.group == task:
            leaves.setdefault(file.task_names[0], file)
    if leaves:
        return combine_logs([leaves[leaf].read(leaf, cluster_field) for leaf in sorted(leaves)], task)
    names = {name for file in files for name in file.task_names}
    names |= {file.group for file in files if file.group}
    raise InvalidInput(
        f"{files[0].path.parent}: task {task}", found="no results for this task", remedy=suggest(task, names)
    )


def _open(path: Path, *, is_named: bool) -> LoggedResults | None:
    """Open a results file or a log, or return None if a directory contains another file."""
    try:
        with open_plain(path) as file:
            start = file.read(4096)
    except FileNotFoundError:
        return None
    if start.startswith(b"PK\x03\x04") or _LOG_START.match(start):
        return open_log(path)
    if match := RESULTS_NAME.search(path.name):
        return read_results(path, match[1])
    return open_log(path) if path.suffix == ".eval" or is_named else None
