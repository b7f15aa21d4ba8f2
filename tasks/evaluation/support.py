"""Decide from its configuration alone whether an lm-eval task can guard a release.

A gate compares models document by document. A task is therefore supported if each document gets a number whose mean is
lm-eval's score, under a metric with a direction, from text alone, using software that is installed here. Every other
task is refused with a reason before anything is loaded. Problems that only the data or the task's Python code reveal,
such as a dataset without the fields that a template names, are reported when the data is loaded.
"""

from __future__ import annotations

import ast
import importlib.util
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from importlib.metadata import metadata, requires
from pathlib import Path
from typing import Any, NamedTuple

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo
from mergegate.merge_core.parsing import MAX_CODE_BYTES, read_plain
from mergegate.tasks.evaluation.code_permission import allow_code, allow_code_advice, find_unconfined_code_of_shipped
from mergegate.tasks.evaluation.declared_metrics import declared_metrics
from mergegate.tasks.evaluation.lm_eval_index import LeafConfig, shipped_leaves
from mergegate.tasks.evaluation.mirror import check_examples, find_dataset
from mergegate.tasks.evaluation.settings import PromptSettings
from mergegate.tasks.evaluation.task_code import local_imports
from mergegate.tasks.evaluation.task_definition import EvalTask, is_file_name, named_data, pin_task, read_definition
from mergegate.tasks.evaluation.task_file import Definition, Function, texts_in

_SHIPPED = "lm_eval.tasks."


class UnsupportedReason(StrEnum):
    """Reason why a task is refused."""

    PERPLEXITY = "perplexity of running text"
    CODE = "code (allow_code)"
    OWN_CODE = "runs code in a way of its own"
    SEES = "pictures or sound"
    WRITTEN_IN_PYTHON = "written in Python, without a configuration"
    OTHER_LIBRARY = "another library's tasks"
    MADE_DATA = "makes its documents on lm-eval's command line"
    NO_DOCUMENTS = "no documents to evaluate"
    NO_MEAN = "no metric that is a mean over documents"
    PACKAGE = "a package that is not installed"
    NLTK_DATA = "NLTK data that is not installed"
    UNREADABLE = "a definition that cannot be read"


@dataclass(frozen=True)
class Refusal:
    """Refusal of one task, with the texts for the error message."""

    reason: UnsupportedReason
    found: str
    remedy: str


def refusal_of(
    config: Mapping[str, Any],
    missing: tuple[str, ...] = (),
    missing_data: tuple[str, ...] = (),
    *,
    code_allowed: bool = False,
) -> Refusal | None:
    """Return why a task cannot guard a release, or None if it can.

    Args:
        config: Configuration as in the task's YAML file, with functions as text.
        missing: Packages that the task's functions import and that are not installed.
        missing_data: NLTK data that the task's functions look for and that is not installed.
        code_allowed: Whether code that the model writes may be run.
    """
    kind = config.get("output_type") or "generate_until"
    if "recipe" in config:
        return Refusal(
            UnsupportedReason.OTHER_LIBRARY, "a task of unitxt, whose data and scores are that library's own", _LEAVE
        )
    if "class" in config:
        return Refusal(
            UnsupportedReason.WRITTEN_IN_PYTHON, "a Python class, which does not state what it measures", _LEAVE
        )
    if config.get("doc_to_image") or config.get("doc_to_audio"):
        return Refusal(UnsupportedReason.SEES, "documents with pictures or sound", "name a task of text alone")
    if config.get("unsafe_code"):
        if way := find_unconfined_code_of_shipped(config):
            return Refusal(UnsupportedReason.OWN_CODE, f"a task that runs code in a way of its own ({way})", _LEAVE)
        if not code_allowed:
            return Refusal(
                UnsupportedReason.CODE, "a task that runs code which the model wrote", "allow_code under evaluate"
            )
    if kind == "loglikelihood_rolling":
        return Refusal(
            UnsupportedReason.PERPLEXITY,
            "a perplexity task, which has no score of a single document",
            "name its documents under 'perplexity:'",
        )
    if config.get("custom_dataset"):
        return Refusal(
            UnsupportedReason.MADE_DATA, "documents that are made anew with settings of lm-eval's --metadata", _LEAVE
        )
    if not config.get("test_split") and not config.get("validation_split"):
        return Refusal(UnsupportedReason.NO_DOCUMENTS, "neither 'test_split' nor 'validation_split'", _LEAVE)
    metrics = declared_metrics(config, kind)
    if metrics is None:
        return Refusal(
            UnsupportedReason.UNREADABLE, "a metric_list that is no list of metrics, each with its name", _LEAVE
        )
    if pair := next((metric.name for metric in metrics if metric.averages_pairs), None):
        return Refusal(
            UnsupportedReason.NO_MEAN,
            f"a mean of {pair}, of which lm-eval has no number for a document in a task of {kind}, and fails",
            "say how it is summed up instead (aggregation: f1 for f1), with a metric that is a mean beside it",
        )
    if not any(metric.is_mean for metric in metrics):
        named = ", ".join(sorted({metric.name for metric in metrics})) or "none at all"
        return Refusal(
            UnsupportedReason.NO_MEAN,
            f"no metric that is a mean over documents with a direction, only {named}",
            "give it one under metric_list (aggregation: mean, higher_is_better: ...), in a YAML file of your own "
            "(docs/evaluation.md)",
        )
    if missing:
        return Refusal(
            UnsupportedReason.PACKAGE,
            f"functions that import {', '.join(missing)}, not installed here",
            f"{_install_command(missing)}; or leave it out",
        )
    if missing_data:
        names = " ".join(name.rpartition("/")[2] for name in missing_data)
        return Refusal(
            UnsupportedReason.NLTK_DATA,
            f"functions that need NLTK data: {', '.join(missing_data)}, not installed here",
            f"with a network, run `python -m nltk.downloader {names}` as the user who runs mergegate, or copy "
            "~/nltk_data from another machine (NLTK_DATA names another directory); or leave it out",
        )
    return None


_LEAVE = "leave it out, or name another task"


def refusal_of_leaf(leaf: LeafConfig, *, code_allowed: bool = False) -> Refusal | None:
    """Return why a task cannot guard a release, taking into account what its functions need. See ``refusal_of``."""
    return refusal_of(leaf.config, *_lacking(_function_files(leaf.config)), code_allowed=code_allowed)


def pin_sound_tasks(
    written: Iterable[str],
    root: Path,
    hashes: HashMemo,
    data: Path | None,
    code_of: Collection[str] = (),
    where: str = "evaluate.tasks",
) -> dict[str, EvalTask]:
    """Pin the tasks of a profile by content after checking that each can guard a release; return them by name.

    Args:
        written: Tasks as the profile names them.
        data: Directory with datasets, relative to ``root`` (``evaluate.data``). None: the Hub.
        code_of: Tasks whose generated code may be run.
        where: Location in the profile for messages.

    Raises:
        InvalidInput: See ``pin_task``, ``require_supported`` and ``allow_code``.
    """
    mirror = None if data is None else (root / data).absolute()
    names = tuple(dict.fromkeys(written))
    for task in names:
        require_supported(task, root, where, code_allowed=task in code_of)
    return {task: allow_code(pin_task(task, root, hashes, mirror), task, code_of) for task in names}


def require_supported(
    task: str, root: Path = Path(), where: str = "evaluate.tasks", *, code_allowed: bool = False
) -> None:
    """Check that a task, with all tasks below it, can guard a release.

    Args:
        task: Task, group or tag that lm-eval ships, or a YAML file.
        root: Directory that a YAML file is relative to.
        where: Location in the profile for messages.
        code_allowed: Whether the profile names the task under ``evaluate.allow_code``.

    Raises:
        InvalidInput: If a task is unsupported or a file cannot be read; the message names the first task and why.
    """
    group_name, leaves = _leaves(task, root)
    for name, config, files in leaves:
        refusal = refusal_of(config, *_lacking(files), code_allowed=code_allowed)
        if refusal is None:
            continue
        is_member = name != group_name
        location = f"{where}: {task}" + (f": {name}" if is_member else "")
        if refusal.reason is UnsupportedReason.CODE:
            allowed = f"{task} under evaluate.allow_code"
            raise InvalidInput(location, found=refusal.found, expected=allowed, remedy=allow_code_advice(task))
        raise InvalidInput(
            location,
            found=refusal.found,
            expected="what its functions need"
            if refusal.reason in (UnsupportedReason.PACKAGE, UnsupportedReason.NLTK_DATA)
            else "a task whose score is a mean over documents",
            remedy=refusal.remedy + (", or name the other tasks of the group one by one" if is_member else ""),
        )


def require_effect(task: str, settings: PromptSettings | None, root: Path = Path()) -> None:
    """Check that the prompt settings of a guard change how its task is evaluated.

    Raises:
        InvalidInput: For few-shot examples of a task that sets none, or for generation settings of a task that
            generates nothing.
    """
    if settings is None:
        return
    configs = [config for _, config, _ in _leaves(task, root)[1]]
    if settings.num_fewshot and all(config.get("num_fewshot") == 0 for config in configs):
        raise InvalidInput(
            f"evaluate.tasks: {task}: num_fewshot",
            found=f"{settings.num_fewshot}, of a task that says 0 itself",
            expected="nothing: lm-eval keeps 0 where a task says so",
            remedy="leave it out, or include the task in a YAML file of your own with num_fewshot",
        )
    if settings.gen_kwargs and not any(_writes(config) for config in configs):
        raise InvalidInput(
            f"evaluate.tasks: {task}: gen_kwargs",
            found="settings of generation for a task that has nothing written out",
            expected="a task with output_type: generate_until",
            remedy="leave gen_kwargs out",
        )


def require_examples(task: EvalTask, num_fewshot: int | None) -> None:
    """Check that ``evaluate.data`` has the few-shot examples of a task. For data from the Hub, loading checks this.

    Args:
        num_fewshot: Number of examples that the profile asks for. None: the task's own number.

    Raises:
        InvalidInput: Naming the missing file.
    """
    if task.mirror is None:
        return
    for dataset in named_data(task.in_lm_eval, task.definition):
        own = dataset.num_fewshot
        if count := num_fewshot if num_fewshot is not None and own != 0 else own:
            check_examples(find_dataset(task.mirror, dataset), int(count))


def _writes(config: Mapping[str, Any]) -> bool:
    return (config.get("output_type") or "generate_until") == "generate_until"


def _leaves(task: str, root: Path) -> tuple[str, list[tuple[str, Mapping[str, Any], tuple[Path, ...]]]]:
    """Return lm-eval's name of a task, and the name, configuration and function files of each task below it."""
    if not is_file_name(task):
        shipped = shipped_leaves(task)
        return task, [(leaf.name, leaf.config, _function_files(leaf.config)) for leaf in shipped]
    definition = read_definition((root / task).absolute())
    local = [(leaf.name, leaf.config, _files_beside(leaf)) for leaf in definition.leaves]
    return definition.name, local


def _files_beside(leaf: Definition) -> tuple[Path, ...]:
    """Return the files that define the functions of a local task; they are next to its YAML files."""
    named = {text.file.as_posix() for text in texts_in(leaf.config) if isinstance(text, Function)}
    return tuple(file for file in leaf.files if any(f"/{file.as_posix()}".endswith(f"/{name}") for name in named))


def _function_files(config: Mapping[str, Any]) -> tuple[Path, ...]:
    """Return the files that define the functions of a task that lm-eval ships."""
    files = {Path(text.rpartition(".")[0] + ".py") for text in texts_in(config) if text.startswith("/")}
    return tuple(file for file in sorted(files) if file.is_file())


def _lacking(files: Sequence[Path]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the packages and the NLTK data that modules need and that are not installed."""
    needs = [_needs(file) for file in files]
    packages = {name for need in needs for name in need.packages if importlib.util.find_spec(name) is None}
    resources = {name for need in needs for name in need.nltk_data} if "nltk" not in packages else set()
    return tuple(sorted(packages)), tuple(name for name in sorted(resources) if not _has_nltk_data(name))


class _Needs(NamedTuple):
    packages: frozenset[str]
    nltk_data: frozenset[str]


@lru_cache(maxsize=1024)
def _needs(file: Path) -> _Needs:
    """Return the requirements for importing a module, including the modules of lm-eval's tasks that it imports."""
    queue, seen = [file], set[Path]()
    packages: set[str] = set()
    nltk_data: set[str] = set()
    while queue:
        path = queue.pop()
        if path in seen:
            continue
        seen.add(path)
        queue += local_imports(path, path.parent)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about other people's code
            tree = ast.parse(read_plain(path, MAX_CODE_BYTES))
        nltk_data |= _nltk_data_in(tree)
        for name in _required_modules(tree.body):
            if name.startswith(_SHIPPED) and (shipped_path := _shipped_module(name)):
                queue.append(shipped_path)
            top = name.partition(".")[0]
            if not ((path.parent / top).is_dir() or (path.parent / f"{top}.py").is_file()):
                packages.add(top)
    return _Needs(frozenset(packages), frozenset(nltk_data))


def _required_modules(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the modules that must be importable for a module to be importable.

    These are the modules imported outside of functions, except in a ``try`` whose handlers continue without them.
    """
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Try) and all(_raises(handler.body) for handler in node.handlers):
            yield from _required_modules([*node.body, *node.orelse])


def _raises(body: Iterable[ast.stmt]) -> bool:
    """Return whether one of the statements is a ``raise``."""
    return any(isinstance(node, ast.Raise) for node in body)


def _nltk_data_in(tree: ast.AST) -> set[str]:
    """Return the NLTK data that a module finds or downloads, as ``tokenizers/punkt_tab`` or only ``punkt_tab``."""
    named: dict[str, set[str]] = {"nltk.data.find": set(), "nltk.download": set()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            resource = node.args[0].value
            if isinstance(resource, str) and (function := ast.unparse(node.func)) in named:
                named[function].add(resource)
    names = {path.rpartition("/")[2] for path in named["nltk.data.find"]}
    return named["nltk.data.find"] | (named["nltk.download"] - names)


def _has_nltk_data(resource: str) -> bool:
    from nltk import data  # type: ignore[import-untyped]  # ships no types

    if "/" not in resource:  # the directory that names the kind of data is unknown
        directories = [Path(root) for root in data.path]
        return any(list(root.glob(f"*/{resource}")) + list(root.glob(f"*/{resource}.zip")) for root in directories)
    try:
        data.find(resource)
    except LookupError:
        try:
            data.find(f"{resource}.zip")
        except LookupError:
            return False
    return True


def _install_command(packages: Sequence[str]) -> str:
    """Return the command that installs ``packages``, using an extra of lm-eval if one provides all of them."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    def provides(distribution: str, package: str) -> bool:  # distribution antlr4-python3-runtime provides antlr4
        return f"{canonicalize_name(distribution)}-".startswith(f"{canonicalize_name(package)}-")

    extras: dict[str, list[str]] = {}
    requirements = [Requirement(text) for text in requires("lm_eval") or ()]
    for extra in metadata("lm_eval").get_all("Provides-Extra") or ():
        distributions = [each.name for each in requirements if each.marker and each.marker.evaluate({"extra": extra})]
        if all(any(provides(name, package) for name in distributions) for package in packages):
            extras[extra] = distributions
    if not extras:
        return f"pip install {' '.join(packages)}"
    return f"pip install 'lm_eval[{min(extras, key=lambda extra: len(extras[extra]))}]'"


def _shipped_module(name: str) -> Path | None:
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent.joinpath(*name.split(".")[1:]).with_suffix(".py")
    return path if path.is_file() else None
