"""Resolve groups of tasks in local YAML files, to the tasks below each group and the settings that the group overrides.

As in lm-eval, ``task`` lists tasks, tags and groups by their names in files next to the group, optionally with
settings. It may also contain complete tasks, which are named ``GROUP::TASK``. A ``task_list`` defines several tasks
that share the rest of a file. lm-eval 0.4.13 silently ignores this key, so mergegate writes a separate file for each
of these tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.tasks.evaluation.task_file import Definition, as_list, modules_of, read_task_file, resolve_definition


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
    ) -> Definition:
        """Return the definition of a task in ``config``, overridden by its list entry (``own``) and by ``settings``.

        Data paths in ``config`` and ``settings`` are relative to ``data_root``.
        """
        overrides = {**self.own, **(settings or {})}
        merged = {key: value for key, value in config.items() if key != "task_list"} | overrides
        root = self.path.parent if _has_data(self.own) and not _has_data(settings or {}) else data_root
        return resolve_definition(self.path, self.name, merged, root, files, overrides=overrides)


# Keys that lm-eval applies to the group itself. All other keys of a group override those of its tasks.
_GROUP_KEYS = ("group", "group_alias", "task", "aggregate_metric_list", "metadata", "tag", "task_list")


def group_members(
    path: Path, config: Mapping[str, Any], data_root: Path, files: Sequence[Path]
) -> tuple[Definition, ...]:
    """Return all tasks below the group that a file defines, or in its ``task_list``, without duplicates.

    ``config`` is the configuration in the file ``path``, merged with its includes. Its data paths are relative to
    ``data_root``. ``files`` are all files that define the group.

    Raises:
        InvalidInput: If a definition is invalid; the message names the file and the problem.
    """
    if "task_list" in config:
        if "group" in config:
            raise InvalidInput(
                str(path),
                found="a group with a task_list",
                expected="tasks under 'task', or a task_list without 'group'",
                remedy="list the tasks of the other file by their names: task: [NAME, NAME]",
            )
        definitions = [source.resolve(config, data_root, list(files)) for source in _sources_in_list(path, config)]
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
        definitions = list(_members(_Group(path, name, config, data_root), {}, (name,)))
    members: dict[str, Definition] = {}
    for member in definitions:
        first = members.setdefault(member.name, member)
        if (first.path, first.config) != (member.path, member.config):
            raise InvalidInput(
                f"{path}: task",
                found=f"{member.name!r} twice, with different settings",
                expected="each task once",
                remedy="define another task for the other settings: {task: NAME, include: FILE, …}",
            )
    if not members:
        raise InvalidInput(
            f"{path}: task", found="no task", expected="names of tasks in the same directory, or complete tasks"
        )
    return tuple(members.values())


def task_overrides(group: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a group applies to its tasks. ``overrides`` from enclosing groups take precedence."""
    return {key: value for key, value in group.items() if key not in _GROUP_KEYS} | dict(overrides)


def _members(group: _Group, overrides: Mapping[str, Any], enclosing: tuple[str, ...]) -> Iterator[Definition]:
    """Yield the tasks below a group, in the group's order. ``overrides`` from enclosing groups take precedence."""
    directory = group.path.parent
    definitions = _definitions_in(directory)
    group_settings = task_overrides(group.config, overrides)
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
            yield from _members(inline, group_settings, (*enclosing, inline.name))
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
            yield resolve_definition(  # a complete task
                group.path,
                f"{group.name}::{name}",
                settings,
                group.data_root,
                modules_of(settings, directory),
                overrides=settings,
                is_inline=True,
            )
        for source in definitions.get(name, ()):
            files: list[Path] = []
            config, data_root = read_task_file(source.path, files, ())
            if "group" in config:
                inner = _Group(source.path, source.name, config, data_root)
                for member in _members(inner, settings, (*enclosing, source.name)):
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
