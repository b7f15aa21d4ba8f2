"""Decide from its configuration alone whether an lm-eval task can guard a release.

A gate compares models document by document. A task is therefore supported if lm-eval's score is the mean of one
number per document, under a metric with a direction, for text or pictures, with software that is installed here.
Every other task is refused with a reason before anything is loaded. Problems that only the data or the task's Python
code reveal, such as a dataset without the fields that a template names, are reported when the data is loaded.

lm-eval's own metrics are tied to output types: a choice task has no BLEU, even if it declares BLEU. Some metrics (F1,
Matthews correlation, BLEU) collect pairs of reference and prediction and score them together at the end. Pairs have
no mean, and lm-eval fails if a task requests one. The configuration does not reveal which metrics the task's own
functions return.
"""

from __future__ import annotations

import ast
import importlib.util
import shlex
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from importlib.metadata import metadata, requires
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mergegate.merge_core.errors import InvalidInput, pip_command
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.parsing import MAX_CODE_BYTES, read_plain
from mergegate.tasks.models.checkpoints import expect_inputs, import_lean
from mergegate.tasks.quality.evaluation.backends import find_backend
from mergegate.tasks.quality.evaluation.definitions.code import allow_code, allow_code_advice, find_unconfined_code
from mergegate.tasks.quality.evaluation.definitions.datasets import base_names, find_dataset
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask, pin_task
from mergegate.tasks.quality.evaluation.definitions.task_file import Function, local_imports, texts_in
from mergegate.tasks.quality.evaluation.definitions.tree import TaskTree, task_tree
from mergegate.tasks.quality.evaluation.settings import PromptSettings, Scoring, fewshot_count, resolve_prompt_settings

MeanOver = Literal["documents"]

_LM_EVAL_TASKS = "lm_eval.tasks."
OWN_EXTRAS = frozenset({"ifeval", "math"})
"""Extras that mergegate has under the same name as lm-eval."""
_DEFAULTS = {  # lm-eval's defaults for a task that lists no metrics
    "multiple_choice": ("acc", "acc_norm"),
    "loglikelihood": ("perplexity", "acc"),
    "generate_until": ("exact_match",),
}
# Values that lm-eval itself computes for a document, by output type: numbers, or pairs that are scored at the end.
_NUMBERS = {
    "multiple_choice": ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match"),
    "loglikelihood": ("acc", "perplexity"),
    "generate_until": ("exact_match",),
}
_PAIRS = {"multiple_choice": ("f1", "mcc", "brier_score", "likelihood")}


class UnsupportedReason(StrEnum):
    """Reason for refusing a task."""

    PERPLEXITY = "perplexity of running text"
    CODE = "code (allow_code)"
    UNCONFINED_CODE = "runs code outside the sandbox"
    SOUND = "sound"
    PYTHON_CLASS = "written in Python, without a configuration"
    OTHER_LIBRARY = "another library's tasks"
    GENERATED_DATA = "makes its documents on lm-eval's command line"
    NO_DOCUMENTS = "no documents to evaluate"
    NO_MEAN = "no metric that is a mean over documents"
    PACKAGE = "a package that is not installed"
    NLTK_DATA = "NLTK data that is not installed"
    UNREADABLE = "a definition that cannot be read"


@dataclass(frozen=True)
class Refusal:
    """Reason why one task is refused, with the texts for the error message."""

    reason: UnsupportedReason
    found: str
    remedy: str = "remove it, or name another task"


class Requirements(NamedTuple):
    """Required packages, and required NLTK data, such as ``tokenizers/punkt_tab`` or only ``punkt_tab``."""

    packages: tuple[str, ...] = ()
    nltk_data: tuple[str, ...] = ()


NO_REQUIREMENTS = Requirements()


def missing_requirements(files: Sequence[Path]) -> Requirements:
    """Return the requirements of the modules in ``files`` that are not installed."""
    needs = [_requirements_of(file) for file in files]
    packages = {name for need in needs for name in need.packages if importlib.util.find_spec(name) is None}
    resources = {name for need in needs for name in need.nltk_data} if "nltk" not in packages else set()
    missing_data = []
    for resource in sorted(resources):
        from nltk import data  # type: ignore[import-untyped]  # ships no types

        names = (resource, f"{resource}.zip")
        if "/" not in resource:  # the directory that names the kind of data is unknown
            if not any(list(Path(root).glob(f"*/{name}")) for root in data.path for name in names):
                missing_data.append(resource)
            continue
        for name in names:
            try:
                data.find(name)
                break
            except LookupError:
                continue
        else:
            missing_data.append(resource)
    return Requirements(tuple(sorted(packages)), tuple(missing_data))


@lru_cache(maxsize=1024)
def _requirements_of(file: Path) -> Requirements:
    """Return the requirements for importing a module, including the modules of lm-eval's tasks that it imports."""
    lm_eval = importlib.util.find_spec("lm_eval")
    queue, visited = [file], set[Path]()
    packages: set[str] = set()
    # NLTK data that a module looks up or downloads, by function.
    resources: dict[str, set[str]] = {"nltk.data.find": set(), "nltk.download": set()}
    while queue:
        path = queue.pop()
        if path in visited:
            continue
        visited.add(path)
        queue += local_imports(path, path.parent)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about other people's code
            tree = ast.parse(read_plain(path, MAX_CODE_BYTES))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                resource = node.args[0].value
                if isinstance(resource, str) and (function := ast.unparse(node.func)) in resources:
                    resources[function].add(resource)
        for name in _required_modules(tree.body):
            if name.startswith(_LM_EVAL_TASKS) and lm_eval is not None and lm_eval.origin is not None:
                module = Path(lm_eval.origin).parent.joinpath(*name.split(".")[1:]).with_suffix(".py")
                queue += [module] if module.is_file() else []
            top = name.partition(".")[0]
            if not ((path.parent / top).is_dir() or (path.parent / f"{top}.py").is_file()):
                packages.add(top)
    found_names = {path.rpartition("/")[2] for path in resources["nltk.data.find"]}
    nltk_data = resources["nltk.data.find"] | (resources["nltk.download"] - found_names)
    return Requirements(tuple(packages), tuple(nltk_data))


def _required_modules(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the modules that the statements in ``body`` cannot do without.

    These are the modules imported outside of functions, except in a ``try`` whose handlers continue without them.
    """
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Try) and all(
            any(isinstance(statement, ast.Raise) for statement in handler.body) for handler in node.handlers
        ):
            yield from _required_modules([*node.body, *node.orelse])


def install_command(packages: Sequence[str]) -> str:
    """Return the command that installs ``packages``, with an extra of lm-eval if one provides all of them."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    extras: dict[str, list[str]] = {}
    requirements = [Requirement(text) for text in requires("lm_eval") or ()]
    for extra in metadata("lm_eval").get_all("Provides-Extra") or ():
        distributions = [each.name for each in requirements if each.marker and each.marker.evaluate({"extra": extra})]
        # The distribution antlr4-python3-runtime provides antlr4.
        names = [f"{canonicalize_name(distribution)}-" for distribution in distributions]
        if all(any(name.startswith(f"{canonicalize_name(package)}-") for name in names) for package in packages):
            extras[extra] = distributions
    if not extras:
        return pip_command(*packages)
    extra = min(extras, key=lambda extra: len(extras[extra]))
    return pip_command(f"{'mergegate' if extra in OWN_EXTRAS else 'lm_eval'}[{extra}]")


@dataclass(frozen=True)
class DeclaredMetric:
    """A metric of a task, as far as the configuration describes it."""

    name: str
    is_mean: bool  # a mean of per-document numbers, with a direction
    averages_pairs: bool  # declared as a mean of pairs, which lm-eval cannot compute


def declared_metrics(config: Mapping[str, Any], kind: str) -> tuple[DeclaredMetric, ...] | None:
    """Return the metrics that a task declares, or lm-eval's defaults; None if the list is malformed.

    ``config`` is the configuration in the task's YAML file, with functions as text. ``kind`` is the output type.
    """
    entries = config.get("metric_list")
    if entries is None:
        entries = [{"metric": name} for name in _DEFAULTS.get(kind, ())]
    if not isinstance(entries, Sequence) or not all(
        isinstance(entry, Mapping) and entry.get("metric") for entry in entries
    ):
        return None
    metrics = []
    for entry in entries:
        metric, aggregation = entry["metric"], entry.get("aggregation")
        # A metric of the library `evaluate`, or a function, is never lm-eval's own, even if the names are equal.
        is_foreign = entry.get("hf_evaluate") is True or isinstance(metric, Function) or "/" in str(metric)
        own_mean, own_direction = (None, False) if is_foreign else registered_metric(str(metric))
        # A function is judged by its name, as lm-eval does when it loads the task; numpy's mean counts.
        mean = bool(own_mean) if aggregation is None else str(aggregation).rpartition(".")[2] == "mean"
        has_direction = own_direction or entry.get("higher_is_better") is not None
        has_own_function = bool(config.get("process_results"))
        if has_own_function or kind not in _NUMBERS:  # lm-eval reports an unknown output type itself
            is_number, is_pair = True, False
        elif kind == "generate_until":  # a metric that lm-eval lacks comes from the library `evaluate`
            is_pair = not is_foreign and _is_in_registry(str(metric)) and metric not in _NUMBERS[kind]
            is_number = not is_pair
        else:
            is_number = metric in _NUMBERS[kind]
            is_pair = not is_number and metric in _PAIRS.get(kind, ())
        # The perplexity of an answer is a number per document, but lm-eval's score is not the mean of these numbers.
        is_own_sum = own_mean is False and not has_own_function
        metrics.append(
            DeclaredMetric(
                name=str(metric).rpartition(".")[2] or str(metric),
                is_mean=mean and has_direction and is_number and not is_own_sum,
                averages_pairs=mean and is_pair,
            )
        )
    return tuple(metrics)


@lru_cache(maxsize=256)
def registered_metric(metric: str) -> tuple[bool | None, bool]:
    """Return whether lm-eval averages a metric over documents (None: unknown metric) and whether it has a direction."""
    from lm_eval.api.registry import get_metric_aggregation, is_higher_better

    if not _is_in_registry(metric):  # lm-eval would log a warning
        return None, False
    aggregation = get_metric_aggregation(metric)
    return getattr(aggregation, "__name__", "") == "mean", is_higher_better(metric) is not None


def _is_in_registry(metric: str) -> bool:
    import_lean("portalocker", "lm_eval.api.metrics")  # fills the registries
    from lm_eval.api.registry import METRIC_REGISTRY

    return metric in METRIC_REGISTRY


def refusal_of(
    config: Mapping[str, Any], missing: Requirements = NO_REQUIREMENTS, *, code_allowed: bool = False
) -> Refusal | None:
    """Return why a task cannot guard a release, or None if it can.

    ``config`` is the configuration in the task's YAML file, with functions as text. ``missing`` are requirements of the
    task's functions that are not installed. ``code_allowed`` tells whether code that the model generates may be run.
    """
    kind = config.get("output_type") or "generate_until"
    if "recipe" in config:
        return Refusal(UnsupportedReason.OTHER_LIBRARY, "a task of unitxt, which loads data and computes scores itself")
    if "class" in config:
        return Refusal(UnsupportedReason.PYTHON_CLASS, "a Python class, which does not declare its metrics")
    if config.get("doc_to_audio"):
        return Refusal(
            UnsupportedReason.SOUND,
            "documents with sound",
            "judge speech by a transcription task (kind: transcription), or name a task without sound",
        )
    if config.get("doc_to_image") and importlib.util.find_spec("PIL") is None:
        return Refusal(
            UnsupportedReason.PACKAGE,
            "documents with pictures, for which Pillow is not installed",
            f"{pip_command('mergegate[pictures]')}; or remove the task",
        )
    if config.get("unsafe_code"):
        functions = [text.rpartition(".") for text in texts_in(config) if text.startswith("/")]
        if way := find_unconfined_code((Path(f"{file}.py"), function) for file, _, function in functions):
            return Refusal(UnsupportedReason.UNCONFINED_CODE, f"a task that runs code outside the sandbox ({way})")
        if not code_allowed:
            return Refusal(
                UnsupportedReason.CODE, "a task that runs code generated by the model", "allow_code under evaluate"
            )
    if kind == "loglikelihood_rolling":
        return Refusal(
            UnsupportedReason.PERPLEXITY,
            "a perplexity task, which has no score per document",
            "list its documents under 'perplexity:'",
        )
    if config.get("custom_dataset"):
        return Refusal(UnsupportedReason.GENERATED_DATA, "documents that depend on settings of lm-eval's --metadata")
    if not config.get("test_split") and not config.get("validation_split"):
        return Refusal(UnsupportedReason.NO_DOCUMENTS, "neither 'test_split' nor 'validation_split'")
    metrics = declared_metrics(config, kind)
    if metrics is None:
        return Refusal(UnsupportedReason.UNREADABLE, "a metric_list that is not a list of metrics with names")
    if pair := next((metric.name for metric in metrics if metric.averages_pairs), None):
        return Refusal(
            UnsupportedReason.NO_MEAN,
            f"a mean of {pair}, for which lm-eval computes no number per document in a task of {kind}",
            "declare another aggregation for it (aggregation: f1 for f1), and add a metric that is a mean",
        )
    if not any(metric.is_mean for metric in metrics):
        names = ", ".join(sorted({metric.name for metric in metrics})) or "none at all"
        return Refusal(
            UnsupportedReason.NO_MEAN,
            f"no metric that is a mean over documents with a direction, only {names}",
            "add one under metric_list (aggregation: mean, higher_is_better: ...), in your own YAML file "
            "(docs/how-to/gate-on-a-task.md)",
        )
    if missing.packages:
        return Refusal(
            UnsupportedReason.PACKAGE,
            f"functions that import {', '.join(missing.packages)}, which is not installed",
            f"{install_command(missing.packages)}; or remove the task",
        )
    if missing.nltk_data:
        resources = " ".join(name.rpartition("/")[2] for name in missing.nltk_data)
        return Refusal(
            UnsupportedReason.NLTK_DATA,
            f"functions that need NLTK data that is not installed: {', '.join(missing.nltk_data)}",
            f"with a network, run `{shlex.quote(sys.executable)} -m nltk.downloader {resources}` as the user who runs "
            "mergegate, or copy ~/nltk_data from another machine (NLTK_DATA names another directory); or remove the "
            "task",
        )
    return None


def pin_sound_tasks(
    names: Iterable[str],
    root: Path,
    hashes: HashMemo,
    data: Path | None,
    code_of: Collection[str] = (),
    location: str = "evaluate.tasks",
) -> dict[str, EvalTask]:
    """Check that each task in a profile can guard a release, pin the tasks by content, and return them by name.

    ``data`` is the directory with datasets (``evaluate.data``), or None for the Hub. It and the files in ``names`` are
    relative to ``root``. ``code_of`` lists the tasks whose generated code may be run. ``location`` is the location in
    the profile for messages. Raises InvalidInput as ``pin_task``, ``require_supported`` and ``allow_code`` do.
    """
    mirror = None if data is None else (root / data).absolute()
    distinct_names = tuple(dict.fromkeys(names))
    for task in distinct_names:
        tree = require_supported(task, root, location, code_allowed=task in code_of)
        if tree.path is not None:
            expect_inputs(tree.files, mirror)
    return {task: allow_code(pin_task(task, root, hashes, mirror), task, code_of) for task in distinct_names}


def require_supported(
    task: str, root: Path = Path(), location: str = "evaluate.tasks", *, code_allowed: bool = False
) -> TaskTree:
    """Return a task with all tasks below it, if each of them can guard a release.

    ``task`` is the name of a task, group or tag that lm-eval ships, or a YAML file relative to ``root``. ``location``
    is the location in the profile for messages. ``code_allowed`` tells whether ``evaluate.allow_code`` lists the task.

    Raises:
        InvalidInput: If a task is unsupported or a file cannot be read. The message names the first such task and the
            reason.
    """
    tree = task_tree(task, root)
    for leaf in tree.leaves:
        refusal = refusal_of(leaf.config, missing_requirements(leaf.function_files), code_allowed=code_allowed)
        if refusal is None:
            continue
        is_member = leaf.name != tree.name
        expected, remedy = "a task whose score is a mean over documents", refusal.remedy
        if refusal.reason is UnsupportedReason.CODE:
            expected, remedy = f"{task} under evaluate.allow_code", allow_code_advice(task)
        elif refusal.reason in (UnsupportedReason.PACKAGE, UnsupportedReason.NLTK_DATA):
            expected = "everything that its functions need"
        if is_member and refusal.reason is not UnsupportedReason.CODE:
            remedy += ", or name the other tasks of the group individually"
        raise InvalidInput(
            f"{location}: {task}" + (f": {leaf.name}" if is_member else ""),
            found=refusal.found,
            expected=expected,
            remedy=remedy,
        )
    return tree


def require_effect(
    task: str, settings: PromptSettings | None, root: Path = Path(), scoring: Scoring | None = None
) -> None:
    """Check that the prompt settings of a guard have an effect on its task, and that the task permits them.

    ``scoring`` holds the settings of the profile. Default: none.

    Raises:
        InvalidInput: If few-shot examples are set for a task that fixes their number at 0, generation settings for
            a task that generates no answers, or ``enable_thinking`` for a task that scores given answers; or if a task
            with pictures has another backend than ``hf``, no chat template, or few-shot examples.
    """
    scoring = scoring or Scoring()
    resolved = resolve_prompt_settings(settings, scoring)
    tree = task_tree(task, root)
    if tree.form == "pictures":
        location = f"evaluate.tasks: {task}"
        if not find_backend(scoring.backend).reads_pictures:
            raise InvalidInput(
                f"{location}: backend {scoring.backend}",
                found="a task with pictures, which this backend does not pass to the model",
                expected="evaluate.backend: hf",
                remedy="use backend: hf, or a task with text only",
            )
        if not resolved.is_chat:
            raise InvalidInput(
                f"{location}: apply_chat_template",
                found="no chat template for a task with pictures",
                expected="a chat template, which inserts the model's own tokens for each picture",
                remedy="apply_chat_template: true for this task, or evaluate.chat_template: true",
            )
        if resolved.num_fewshot:
            raise InvalidInput(
                f"{location}: num_fewshot",
                found=f"{resolved.num_fewshot} for a task with pictures",
                expected="0, because lm-eval passes no pictures of few-shot examples",
                remedy="num_fewshot: 0 for this task",
            )
    if resolved.enable_thinking and not tree.generates_answers:
        raise InvalidInput(
            f"evaluate.tasks: {task}: enable_thinking",
            found="true for a task that scores given answers by their log-likelihood, before which no model thinks",
            expected="a task with output_type: generate_until",
            remedy="set enable_thinking: false for this task, or name a variant of the task with generated answers",
        )
    if settings is None:
        return
    if settings.num_fewshot and all(leaf.config.get("num_fewshot") == 0 for leaf in tree.leaves):
        raise InvalidInput(
            f"evaluate.tasks: {task}: num_fewshot",
            found=f"{settings.num_fewshot}, although the task sets 0",
            expected="no setting: lm-eval keeps a 0 that the task sets",
            remedy="remove it, or include the task in your own YAML file with num_fewshot",
        )
    for name in ("gen_kwargs", "think_end_token"):
        if getattr(settings, name) and "generate_until" not in tree.output_types:
            raise InvalidInput(
                f"evaluate.tasks: {task}: {name}",
                found="a setting for generated answers, but the task has none",
                expected="a task with output_type: generate_until",
                remedy=f"remove {name}",
            )


def require_examples(task: EvalTask, num_fewshot: int | None) -> None:
    """Check that ``evaluate.data`` has the few-shot examples of a task. For data from the Hub, loading checks this.

    ``num_fewshot`` is the number of examples in the profile, or None for the task's own number.
    """
    if task.mirror is None:
        return
    for dataset in task.tree.datasets:
        if not (count := fewshot_count(dataset.num_fewshot, num_fewshot)):
            continue
        source = find_dataset(task.mirror, dataset)
        if dataset.examples and source.directory is None and dataset.examples not in source.by_split:
            raise InvalidInput(
                f"evaluate.data: task {dataset.task}",
                found=f"no file with split {dataset.examples!r}, from which its {count} few-shot examples are drawn",
                expected=" or ".join(f"{name}_{dataset.examples}.jsonl" for name in base_names(dataset)),
                remedy="add one of these files, or set evaluate.num_fewshot: 0",
            )


def require_declared_mean(task: str, mean_over: MeanOver | None, root: Path) -> None:
    """Check that the mean over documents, which a guard tests, is the group's own score, or that the guard requests it.

    lm-eval gives a group a score if its file has an ``aggregate_metric_list``. This score is the mean over all
    documents or, with ``weight_by_size: false``, the mean of the tasks' scores. A guard pairs documents, which all have
    equal weight, so it must request this mean (``mean_over``) if the group's own score differs. ``task`` is a name that
    lm-eval ships, or a YAML file relative to ``root``.

    Raises:
        InvalidInput: If all tasks of the group have equal weight and ``mean_over`` is None, or if the list is invalid.
    """
    tree = task_tree(task, root)
    location = f"evaluate.tasks: {task}: aggregate_metric_list"
    metric_list = tree.group_config.get("aggregate_metric_list") or []
    entries = metric_list if isinstance(metric_list, list) else [metric_list]
    if not all(isinstance(entry, Mapping) and isinstance(entry.get("metric"), str) for entry in entries):
        raise InvalidInput(
            location, found=f"{metric_list!r:.80}", expected="a list of {metric: NAME, weight_by_size: true or false}"
        )
    weights = [entry.get("weight_by_size", True) for entry in entries]
    for entry, weight in zip(entries, weights, strict=True):
        if entry.get("aggregation", "mean") != "mean" or not isinstance(weight, bool):
            raise InvalidInput(
                location,
                found=f"aggregation: {entry.get('aggregation', 'mean')}, weight_by_size: {weight}",
                expected="aggregation: mean, the only one of lm-eval, and weight_by_size: true or false",
            )
    if not all(weights) and mean_over is None:
        raise InvalidInput(
            f"evaluate.tasks: {task}",
            found="a group with weight_by_size: false: its own score weights tasks equally, a guard weights documents "
            "equally",
            expected="a guard that requests the mean over documents",
            remedy="mean_over: documents in the guard"
            + (", or weight_by_size: true in the file" if tree.path else "")
            + "; or a guard for each of its tasks",
        )
