"""Find all tasks below a task, group or tag: a local YAML file, or a name that lm-eval ships.

Local files are read with everything on which they depend (``task_file``). As in lm-eval, ``task`` lists tasks, tags and
groups by their names in files next to the group, optionally with settings. It may also contain complete tasks, which
are named ``GROUP::TASK``. A ``task_list`` defines several tasks that share the rest of a file. lm-eval 0.4.13 silently
ignores this key, so mergegate writes a separate file for each of these tasks.

lm-eval's own index of shipped tasks parses about 14,000 files, which takes more than seven seconds. The index in this
module finds names by scanning the files as text, which takes a third of a second. It parses only the files that a
profile needs, and runs none of the tasks' Python code.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from mergegate.merge_core.architecture import TaskForm
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.parsing import parsing_errors
from mergegate.tasks.base.store import digest
from mergegate.tasks.quality.evaluation.definitions.datasets import TaskDataset, declared_dataset, find_datasets
from mergegate.tasks.quality.evaluation.definitions.task_file import (
    Function,
    as_list,
    modules_of,
    named_pictures,
    read_task_file,
    resolve_data_files,
    texts_in,
)

_NAMED = re.compile(rb"^['\"]?(task|group|tag|class)['\"]?[ \t]*:[ \t]*['\"]?([^\s'\"#\[]+)", re.MULTILINE)
_TAGS = re.compile(rb"^['\"]?tag['\"]?[ \t]*:[ \t]*\n((?:[ \t]*-[ \t]*\S+[ \t]*\n)+)", re.MULTILINE)
_INCLUDE = re.compile(rb"^['\"]?include['\"]?[ \t]*:[ \t]*['\"]?([^\s'\"#\[]+)", re.MULTILINE)
_DEEPEST = 16  # deepest nesting of groups
# Keys that lm-eval applies to the group itself. All other keys of a group override those of its tasks.
_GROUP_KEYS = ("group", "group_alias", "task", "aggregate_metric_list", "metadata", "tag", "task_list")


@dataclass(frozen=True)
class TaskLeaf:
    """One task, without groups: its settings, and for a local task everything that determines what it evaluates."""

    name: str
    config: Mapping[str, Any]  # merged: groups override the file, which overrides its includes
    path: Path  # YAML file
    overrides: Mapping[str, Any] = field(default_factory=dict)  # settings of groups that override the task's file
    is_inline: bool = False  # whether the task has no file and ``overrides`` is complete
    # For local tasks only:
    files: tuple[Path, ...] = ()  # all files that determine what the task evaluates, in the order of discovery
    dataset_path: str = ""  # absolute for a local directory
    data_files: Any = None  # as in the YAML file, with absolute paths; None if there are none

    @property
    def output_type(self) -> str:
        """Kind of requests, in lm-eval's words."""
        return str(self.config.get("output_type") or "generate_until")

    @property
    def is_local(self) -> bool:
        """Whether all data is on this machine, so that loading needs neither a network nor a cache."""
        if self.data_files is not None and not any("://" in text for text in texts_in(self.data_files)):
            return True
        return Path(self.dataset_path).is_absolute()

    @property
    def function_files(self) -> tuple[Path, ...]:
        """Files that define the task's functions: next to the YAML files of a local task, or shipped by lm-eval."""
        if self.files:
            names = {text.file.as_posix() for text in texts_in(self.config) if isinstance(text, Function)}
            return tuple(
                file for file in self.files if any(f"/{file.as_posix()}".endswith(f"/{name}") for name in names)
            )
        files = {Path(text.rpartition(".")[0] + ".py") for text in texts_in(self.config) if text.startswith("/")}
        return tuple(file for file in sorted(files) if file.is_file())


@dataclass(frozen=True)
class TaskTree:
    """A task, group or tag with all tasks below it."""

    name: str  # in lm-eval
    path: Path | None  # local YAML file; None for a name that lm-eval ships
    leaves: tuple[TaskLeaf, ...]
    files: tuple[Path, ...] = ()  # all files that determine what a local task or group evaluates
    group_config: Mapping[str, Any] = field(default_factory=dict)  # settings of a group itself; empty if it is none

    @property
    def is_local(self) -> bool:
        """Whether all data is on this machine, so that loading needs neither a network nor a cache."""
        return self.path is not None and all(leaf.is_local for leaf in self.leaves)

    @property
    def form(self) -> TaskForm:
        """What the task asks of a model: to read text, or text with pictures."""
        return "pictures" if any(leaf.config.get("doc_to_image") for leaf in self.leaves) else "text"

    @property
    def output_types(self) -> set[str]:
        """Kinds of requests of all tasks, in lm-eval's words."""
        return {leaf.output_type for leaf in self.leaves}

    @property
    def generates_answers(self) -> bool:
        """Whether every task lets the model generate its answers."""
        return self.output_types == {"generate_until"}

    @property
    def datasets(self) -> tuple[TaskDataset, ...]:
        """Named datasets from which the tasks are loaded. ``evaluate.data`` must have them."""
        datasets = (declared_dataset(leaf.name, leaf.config) for leaf in self.leaves if not leaf.is_local)
        return tuple(dataset for dataset in datasets if dataset)

    def digest(self, sha256: Callable[[Path], str], mirror: Path | None) -> str:
        """Return a digest over the files and the local data of all tasks, including their datasets in ``mirror``."""
        # Hash only contents, so that a task that is moved or renamed together with its data stays the same task.
        pinned: dict[str, object] = {"task": self.name, "lm_eval": version("lm_eval")}
        if self.path is not None:
            pinned["files"] = [sha256(file) for file in self.files]
        if mirror is not None:
            data = dict.fromkeys(file for dataset in find_datasets(mirror, self.datasets) for file in dataset.files)
            pinned["data"] = [sha256(file) for file in data]
        return digest(pinned)


def is_file_name(task: str | Path) -> bool:
    """Return whether a task in a profile is a YAML file rather than the name of a task that lm-eval ships."""
    return str(task).endswith((".yaml", ".yml"))


def task_tree(task: str | Path, root: Path = Path()) -> TaskTree:
    """Find all tasks below the task that a profile names, without loading their data.

    ``task`` is a YAML file relative to ``root``, or the name of a task, group or tag that lm-eval ships.

    Raises:
        InvalidInput: If the name is unknown, or a definition is invalid; the message names the file and the problem.
    """
    if not is_file_name(task):
        return _shipped_tree(str(task))
    path = (root / task).absolute()
    files: list[Path] = []
    config, data_root = read_task_file(path, files, ())
    if "group" not in config and "task_list" not in config:
        if not isinstance(name := config.get("task"), str):
            raise InvalidInput(str(path), found="no name under 'task'", expected="a task with 'task: <name>'")
        leaf = _resolve_leaf(path, name, config, data_root, files)
        return TaskTree(name, path, (leaf,), leaf.files)
    leaves = _group_leaves(path, config, data_root, files)
    all_files = dict.fromkeys([*files, *(file for leaf in leaves for file in leaf.files)])
    name = str(config.get("group") or path.stem)
    return TaskTree(name, path, leaves, tuple(all_files), config if "group" in config else {})


# Local files


@dataclass(frozen=True)
class _Group:
    path: Path
    name: str
    config: Mapping[str, Any]
    data_root: Path


@dataclass(frozen=True)
class _TaskSource:
    """Location of the definition of a task or a group."""

    path: Path
    name: str
    own: Mapping[str, Any] = field(default_factory=dict)  # for a task in a list: settings that override the file

    def resolve(
        self, config: Mapping[str, Any], data_root: Path, files: list[Path], settings: Mapping[str, Any] | None = None
    ) -> TaskLeaf:
        """Return the task in ``config``, overridden by its list entry (``own``) and by ``settings``.

        Data paths in ``config`` and ``settings`` are relative to ``data_root``.
        """
        overrides = {**self.own, **(settings or {})}
        merged = {key: value for key, value in config.items() if key != "task_list"} | overrides
        root = self.path.parent if _has_data(self.own) and not _has_data(settings or {}) else data_root
        return _resolve_leaf(self.path, self.name, merged, root, files, overrides=overrides)


def _resolve_leaf(
    path: Path, name: str, config: Mapping[str, Any], data_root: Path, files: list[Path], **group_settings: Any
) -> TaskLeaf:
    """Make the data paths of one local task absolute. Appends local data files to ``files``."""
    dataset_path = str(config.get("dataset_path") or "")
    kwargs = config.get("dataset_kwargs") or {}
    if not isinstance(kwargs, Mapping):
        raise InvalidInput(f"{path}: dataset_kwargs", found=f"{kwargs!r:.60}", expected="a mapping")
    data_files = kwargs.get("data_files")
    if data_files is not None:
        first = len(files)
        data_files = resolve_data_files(data_files, data_root, str(path), files)
        if config.get("doc_to_image"):
            files += [picture for file in files[first:] for picture in named_pictures(file)]
    elif dataset_path:
        with parsing_errors(f"{path}: dataset_path", "not the name of a directory or a dataset"):
            directory = data_root / dataset_path if (data_root / dataset_path).is_dir() else None
        if directory is not None:
            dataset_path = str(directory)
            files += sorted(file for file in directory.rglob("*") if file.is_file() and not file.name.startswith("."))
    return TaskLeaf(
        name, config, path, files=tuple(files), dataset_path=dataset_path, data_files=data_files, **group_settings
    )


def _group_leaves(path: Path, config: Mapping[str, Any], data_root: Path, files: list[Path]) -> tuple[TaskLeaf, ...]:
    """Return all tasks below the group that a file defines, or in its ``task_list``, without duplicates.

    ``config`` is the configuration in the file ``path``, merged with its includes. Its data paths are relative to
    ``data_root``. ``files`` are all files that define the group.
    """
    if "task_list" in config:
        if "group" in config:
            raise InvalidInput(
                str(path),
                found="a group with a task_list",
                expected="tasks under 'task', or a task_list without 'group'",
                remedy="list the tasks of the other file by their names: task: [NAME, NAME]",
            )
        leaves = [source.resolve(config, data_root, list(files)) for source in _sources_in_list(path, config)]
    else:
        name, task = config["group"], config.get("task")
        is_task = isinstance(task, str) and {"doc_to_text", "output_type", "test_split"} & config.keys()
        if is_task and (not isinstance(name, str) or task not in _definitions_in(path.parent)):
            raise InvalidInput(
                f"{path}: group",
                found=f"{name!r:.60}, in the file of the task {task!r}",
                expected="'tag' for names that several tasks share; 'group' only in a file that lists tasks",
                remedy="rename 'group' to 'tag'",
            )
        if not isinstance(name, str):
            raise InvalidInput(f"{path}: group", found=f"{name!r:.60}", expected="one name", remedy="group: NAME")
        leaves = list(_local_members(_Group(path, name, config, data_root), {}, (name,)))
    members: dict[str, TaskLeaf] = {}
    for leaf in leaves:
        first = members.setdefault(leaf.name, leaf)
        if (first.path, first.config) != (leaf.path, leaf.config):
            raise InvalidInput(
                f"{path}: task",
                found=f"{leaf.name!r} twice, with different settings",
                expected="each task once",
                remedy="define another task for the other settings: {task: NAME, include: FILE, …}",
            )
    if not members:
        raise InvalidInput(
            f"{path}: task", found="no task", expected="names of tasks in the same directory, or complete tasks"
        )
    return tuple(members.values())


def _task_overrides(group: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a group applies to its tasks. ``overrides`` from enclosing groups take precedence."""
    return {key: value for key, value in group.items() if key not in _GROUP_KEYS} | dict(overrides)


def _local_members(group: _Group, overrides: Mapping[str, Any], enclosing: tuple[str, ...]) -> Iterator[TaskLeaf]:
    """Yield the tasks below a group, in the group's order. ``overrides`` from enclosing groups take precedence."""
    directory = group.path.parent
    definitions = _definitions_in(directory)
    group_settings = _task_overrides(group.config, overrides)
    for item in as_list(group.config.get("task") or []):
        own = dict(item) if isinstance(item, Mapping) else {"task": item}
        kind = "group" if "group" in own else "task"
        if not isinstance(own.get(kind), str):
            raise InvalidInput(
                f"{group.path}: task", found=f"{item!r}", expected="a name, or a task or group with a name"
            )
        name = str(own.pop(kind))
        if kind == "group" and name not in definitions:
            inline = _Group(group.path, f"{group.name}::{name}", own, group.data_root)
            yield from _local_members(inline, group_settings, (*enclosing, inline.name))
            continue
        settings = {**group_settings, **own}
        if name in enclosing:
            raise InvalidInput(
                f"{group.path}: task",
                found=f"{name!r}, a group that contains itself",
                expected="groups without a cycle",
            )
        if name not in definitions:
            if not own:
                raise InvalidInput(
                    f"{group.path}: task",
                    found=f"{name!r}, which no YAML file in its directory defines",
                    expected="names of tasks in the same directory, or complete tasks",
                    remedy=suggest(name, definitions) or "add a guard of its own for a task that lm-eval ships",
                )
            modules, full_name = modules_of(settings, directory), f"{group.name}::{name}"
            yield _resolve_leaf(
                group.path, full_name, settings, group.data_root, modules, overrides=settings, is_inline=True
            )
        for source in definitions.get(name, ()):
            files: list[Path] = []
            config, data_root = read_task_file(source.path, files, ())
            if "group" in config:
                inner = _Group(source.path, source.name, config, data_root)
                for member in _local_members(inner, settings, (*enclosing, source.name)):
                    yield replace(member, files=(*files, *member.files))
                continue
            root = group.data_root if _has_data(settings) else data_root
            yield source.resolve(config, root, [*files, *modules_of(settings, directory)], settings)


def _has_data(config: Mapping[str, Any]) -> bool:
    return "dataset_path" in config or "dataset_kwargs" in config


def _sources_in_list(path: Path, config: Mapping[str, Any]) -> Iterator[_TaskSource]:
    """Yield the task that a file with a ``task_list`` itself names, if any, and the tasks in the list."""
    if isinstance(config.get("task"), str):
        yield _TaskSource(path, config["task"])
    for item in as_list(config["task_list"] or []):
        own = dict(item) if isinstance(item, Mapping) else {"task": item}
        name = own.pop("task", None)
        if not isinstance(name, str):
            raise InvalidInput(f"{path}: task_list", found=f"{item!r:.80}", expected="a name, or a task with a name")
        yield _TaskSource(path, name, own)


def _definitions_in(directory: Path) -> dict[str, list[_TaskSource]]:
    """Return the definitions in the files of a directory, by task name, group name and tag."""
    definitions: dict[str, list[_TaskSource]] = {}
    for path in sorted([*directory.glob("*.yaml"), *directory.glob("*.yml")]):
        try:
            config, _ = read_task_file(path, [], ())
            if "task_list" in config and "group" not in config:
                sources = list(_sources_in_list(path, config))
            else:
                name = str(config["group"]) if "group" in config else config.get("task")
                sources = [_TaskSource(path, name)] if isinstance(name, str) else []
        except InvalidInput:
            continue  # a task in it that is needed is reported as missing
        for source in sources:
            definitions.setdefault(source.name, [source])
            tags = [*as_list(config.get("tag") or []), *as_list(source.own.get("tag") or [])]
            for tag in dict.fromkeys(map(str, tags if "group" not in config else [])):
                definitions.setdefault(tag, []).append(source)
    return definitions


# Tasks that lm-eval ships


@dataclass(frozen=True)
class ShippedNames:
    """Names of the tasks, groups and tags that lm-eval ships, with the files that define them."""

    tasks: Mapping[str, Path]
    groups: Mapping[str, Path]
    tags: Mapping[str, tuple[str, ...]]  # names of tasks

    def __contains__(self, name: str) -> bool:
        return name in self.tasks or name in self.groups or name in self.tags

    def __iter__(self) -> Iterator[str]:
        return iter({**self.tasks, **self.groups, **self.tags})


@lru_cache(maxsize=64)
def _shipped_tree(name: str) -> TaskTree:
    names = shipped_names()
    if name not in names:
        matches = get_close_matches(name, names, n=1)
        raise InvalidInput(
            f"task {name}",
            found=f"not a task of lm-eval {version('lm_eval')}",
            expected="a task, group or tag that lm-eval ships, or your own YAML file",
            remedy=f"did you mean {matches[0]!r}?" if matches else "list all tasks with `lm-eval ls tasks`",
        )
    is_group = name in names.groups and name not in names.tasks
    leaves = {leaf.name: leaf for leaf in _shipped_leaves(name, {}, 0)}
    return TaskTree(
        name, None, tuple(leaves.values()), group_config=read_shipped(names.groups[name]) if is_group else {}
    )


def _shipped_leaves(name: str, overrides: Mapping[str, Any], depth: int) -> Iterator[TaskLeaf]:
    names = shipped_names()
    if depth > _DEEPEST:
        return
    if name in names.tasks:
        path = names.tasks[name]
        yield TaskLeaf(name, {**read_shipped(path), **overrides}, path, overrides)
    elif name in names.groups:
        path = names.groups[name]
        yield from _shipped_members(name, read_shipped(path), path, overrides, depth)
    else:
        for task in names.tags.get(name, ()):
            yield from _shipped_leaves(task, overrides, depth + 1)


def _shipped_members(
    group: str, config: Mapping[str, Any], path: Path, overrides: Mapping[str, Any], depth: int
) -> Iterator[TaskLeaf]:
    """Yield the tasks below a group, as lm-eval builds it; ``overrides`` from enclosing groups take precedence."""
    group_settings = _task_overrides(config, overrides)
    for member in as_list(config.get("task") or []):
        own = dict(member) if isinstance(member, Mapping) else {"task": member}
        kind = "group" if "group" in own else "task"
        name = str(own.pop(kind, ""))
        settings = {**group_settings, **own}
        if name in shipped_names():
            yield from _shipped_leaves(name, settings, depth + 1)
        elif kind == "group":
            yield from _shipped_members(f"{group}::{name}", own, path, group_settings, depth + 1)
        elif own:  # a complete task, defined inline
            yield TaskLeaf(f"{group}::{name}", settings, path, settings, is_inline=True)


@lru_cache(maxsize=1)
def shipped_names() -> ShippedNames:
    """Return the names of all tasks, groups and tags that the installed lm-eval ships."""
    tasks: dict[str, Path] = {}
    groups: dict[str, Path] = {}
    tags: dict[str, list[str]] = {}
    inherited: dict[Path, tuple[str, ...]] = {}
    for path in sorted(_shipped_tasks().rglob("*.yaml")):
        text = path.read_bytes()
        values: dict[str, str] = {}
        for key, value in _NAMED.findall(text):
            values.setdefault(key.decode(), value.decode())
        if "group" in values and "class" not in values:
            groups.setdefault(values["group"], path)
        elif "task" in values and values["task"] != "-":
            tasks.setdefault(values["task"], path)
            for tag in _tags_of(path, inherited, text):
                tags.setdefault(tag, []).append(values["task"])
    return ShippedNames(tasks, groups, {tag: tuple(dict.fromkeys(members)) for tag, members in tags.items()})


def read_shipped(path: Path) -> dict[str, Any]:
    """Return the configuration in a YAML file that lm-eval ships, including its includes, with functions as text."""
    config: dict[str, Any] = _shipped_reader().load_yaml(path, resolve_func=False)
    return config


@lru_cache(maxsize=1)
def _shipped_reader() -> ModuleType:
    """Import lm-eval's reader of YAML files without the package around it, whose import takes 1.7 seconds."""
    spec = importlib.util.spec_from_file_location("lm_eval_yaml_loader", _shipped_tasks() / "_yaml_loader.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _shipped_tasks() -> Path:
    """Return the directory of the tasks that lm-eval ships."""
    spec = importlib.util.find_spec("lm_eval")
    assert spec is not None  # lm-eval is a dependency
    assert spec.origin is not None
    return Path(spec.origin).parent / "tasks"


def _tags_of(path: Path, cache: dict[Path, tuple[str, ...]], text: bytes | None, depth: int = 0) -> tuple[str, ...]:
    """Return the tags in a file, or else in the files that it includes. ``text`` is its content if already read."""
    if path not in cache:
        if text is None:
            text = path.read_bytes() if path.is_file() else b""
        tags = [value.decode() for key, value in _NAMED.findall(text) if key == b"tag" and value != b"-"]
        for block in _TAGS.findall(text):
            tags += [line.strip().lstrip(b"- ").strip(b"'\"").decode() for line in block.split(b"\n") if line.strip()]
        if not tags and depth < _DEEPEST:
            for include in _INCLUDE.findall(text):
                tags += _tags_of(path.parent / include.decode(), cache, None, depth + 1)
        cache[path] = tuple(dict.fromkeys(tags))
    return cache[path]
