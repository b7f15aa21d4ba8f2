"""Groups of tasks in local YAML files: which tasks are below one, and what it lays over them.

As in lm-eval, ``task`` lists names of tasks, tags and groups in files beside it, with settings of their own or without,
or whole tasks, which are called ``GROUP::TASK``. Under ``task_list`` a file has several tasks that share the rest of
it; lm-eval 0.4.13 drops that key without a word, so here each of them is written out for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.tasks.evaluation.task_file import Definition, as_list, modules_of, one_definition, read_task_file


@dataclass(frozen=True)
class _Group:
    path: Path
    name: str
    config: Mapping[str, Any]
    data_root: Path


@dataclass(frozen=True)
class _Place:
    """Where a task or a group is written."""

    path: Path
    name: str
    own: Mapping[str, Any] = field(default_factory=dict)  # of a task in a list: what it says in place of the file


# What lm-eval reads as of the group itself; everything else that a group says is laid over its tasks.
_OF_A_GROUP = ("group", "group_alias", "task", "aggregate_metric_list", "metadata", "tag", "task_list")


def group_members(
    path: Path, config: Mapping[str, Any], data_root: Path, files: Sequence[Path]
) -> tuple[Definition, ...]:
    """All tasks below the group, or in the list, that a file defines, each once.

    Args:
        config: Of the file, with what it includes.
        data_root: What its data paths are relative to.
        files: That it is put together from.

    Raises:
        InvalidInput: naming the file and what is wrong with it.
    """
    if "task_list" in config:
        if "group" in config:
            raise InvalidInput(
                str(path),
                found="a group with a task_list",
                expected="tasks under 'task', or a task_list without 'group'",
                remedy="a group draws in a list by the names of its tasks: task: [NAME, NAME]",
            )
        places = _places_in_list(path, config)
        found = [_task_at(place, config, _data_root(place, data_root), {}, list(files)) for place in places]
    else:
        name, task = config["group"], config.get("task")
        is_task = isinstance(task, str) and {"doc_to_text", "output_type", "test_split"} & config.keys()
        if is_task and (not isinstance(name, str) or task not in _beside(path.parent)):
            raise InvalidInput(
                f"{path}: group",
                found=f"{name!r:.60}, in the file of the task {task!r}",
                expected="'tag' for names that several tasks share; 'group' only in a file that lists tasks",
                remedy="rename 'group' to 'tag'",
            )
        if not isinstance(name, str):
            raise InvalidInput(f"{path}: group", found=f"{name!r:.60}", expected="one name", remedy="group: NAME")
        found = list(_members(_Group(path, name, config, data_root), {}, (name,)))
    every: dict[str, Definition] = {}
    for member in found:
        known = every.setdefault(member.name, member)
        if (known.path, known.config) != (member.path, member.config):
            raise InvalidInput(
                f"{path}: task",
                found=f"{member.name!r} twice, with other settings",
                expected="each task once",
                remedy="a task of its own for the other settings: {task: NAME, include: FILE, …}",
            )
    if not every:
        raise InvalidInput(
            f"{path}: task", found="no task", expected="the names of tasks beside it, or whole tasks, each once"
        )
    return tuple(every.values())


def laid_over_tasks(group: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says of its tasks and not of itself, with ``overrides`` of the groups above it, which win."""
    return {key: value for key, value in group.items() if key not in _OF_A_GROUP} | dict(overrides)


def _members(group: _Group, overrides: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[Definition]:
    """The tasks below a group, in its order; ``overrides`` is what groups above it say, and wins."""
    beside = _beside(group.path.parent)
    laid_over = laid_over_tasks(group.config, overrides)
    for item in as_list(group.config.get("task") or []):
        own = dict(item) if isinstance(item, Mapping) else {"task": item}
        kind = "group" if "group" in own else "task"
        if not isinstance(own.get(kind), str):
            raise InvalidInput(f"{group.path}: task", found=f"{item!r}", expected="a name, or a task or group with one")
        name = str(own.pop(kind))
        if kind == "group" and name not in beside:
            inline = _Group(group.path, f"{group.name}::{name}", own, group.data_root)
            yield from _members(inline, laid_over, (*above, inline.name))
            continue
        settings = {**laid_over, **own}
        if name in above:
            raise InvalidInput(f"{group.path}: task", found=f"{name!r}, a group within itself", expected="no circle")
        if name in beside:
            for place in beside[name]:
                yield from _named(place, group, settings, above)
        elif own:  # a whole task
            files: list[Path] = modules_of(settings, group.path.parent)
            inline_name = f"{group.name}::{name}"
            yield one_definition(
                group.path, inline_name, settings, group.data_root, files, overrides=settings, is_inline=True
            )
        else:
            raise InvalidInput(
                f"{group.path}: task",
                found=f"{name!r}, which no YAML file beside it defines",
                expected="the names of tasks beside it, or whole tasks",
                remedy=suggest(name, beside) or "a task that lm-eval ships is a guard of its own",
            )


def _named(place: _Place, group: _Group, settings: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[Definition]:
    """What a file beside a group defines, with ``settings`` laid over it."""
    files: list[Path] = []
    config, data_root = read_task_file(place.path, files, ())
    if "group" in config:
        below = _Group(place.path, place.name, config, data_root)
        for member in _members(below, settings, (*above, place.name)):
            yield replace(member, files=(*files, *member.files))
        return
    root = group.data_root if _says_data(settings) else _data_root(place, data_root)
    yield _task_at(place, config, root, settings, [*files, *modules_of(settings, group.path.parent)])


def _task_at(
    place: _Place, config: Mapping[str, Any], root: Path, settings: Mapping[str, Any], files: list[Path]
) -> Definition:
    """One task of a file, with ``settings`` laid over what the file, and its entry in a list, say of it."""
    overrides = {**place.own, **settings}
    merged = {key: value for key, value in config.items() if key != "task_list"} | overrides
    return one_definition(place.path, place.name, merged, root, files, overrides=overrides)


def _data_root(place: _Place, of_file: Path) -> Path:
    return place.path.parent if _says_data(place.own) else of_file


def _says_data(config: Mapping[str, Any]) -> bool:
    return "dataset_path" in config or "dataset_kwargs" in config


def _places_in_list(path: Path, config: Mapping[str, Any]) -> Iterator[_Place]:
    """The tasks of a file with a ``task_list``: the one that it names itself, if it does, and those in the list."""
    if isinstance(config.get("task"), str):
        yield _Place(path, config["task"])
    for item in as_list(config["task_list"] or []):
        own = dict(item) if isinstance(item, Mapping) else {"task": item}
        name = own.pop("task", None)
        if not isinstance(name, str):
            raise InvalidInput(f"{path}: task_list", found=f"{item!r:.80}", expected="a name, or a task with one")
        yield _Place(path, name, own)


def _beside(directory: Path) -> dict[str, list[_Place]]:
    """What the files of a directory define, by the name of the task or the group, and by the tags of tasks."""
    found: dict[str, list[_Place]] = {}
    for path in sorted([*directory.glob("*.yaml"), *directory.glob("*.yml")]):
        try:
            config, _ = read_task_file(path, [], ())
            places = list(_places(path, config))
        except InvalidInput:
            continue  # if it is needed, it is missed by name
        for place in places:
            found.setdefault(place.name, [place])
            tags = [*as_list(config.get("tag") or []), *as_list(place.own.get("tag") or [])]
            for tag in dict.fromkeys(map(str, tags if "group" not in config else [])):
                found.setdefault(tag, []).append(place)
    return found


def _places(path: Path, config: Mapping[str, Any]) -> Iterator[_Place]:
    if "group" in config:
        yield _Place(path, str(config["group"]))
    elif "task_list" in config:
        yield from _places_in_list(path, config)
    elif isinstance(config.get("task"), str):
        yield _Place(path, config["task"])
