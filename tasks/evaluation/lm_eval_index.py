"""Index the tasks that lm-eval ships, to look up the YAML files of a task, group or tag by name.

lm-eval's own index parses about 14,000 files, which takes more than seven seconds. This index finds names by scanning
the files as text, which takes a third of a second. It parses only the files that a profile needs, and runs none of
the tasks' Python code.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from mergegate.tasks.evaluation.local_groups import task_overrides

_NAMED = re.compile(rb"^['\"]?(task|group|tag|class)['\"]?[ \t]*:[ \t]*['\"]?([^\s'\"#\[]+)", re.MULTILINE)
_TAGS = re.compile(rb"^['\"]?tag['\"]?[ \t]*:[ \t]*\n((?:[ \t]*-[ \t]*\S+[ \t]*\n)+)", re.MULTILINE)
_INCLUDE = re.compile(rb"^['\"]?include['\"]?[ \t]*:[ \t]*['\"]?([^\s'\"#\[]+)", re.MULTILINE)
_DEEPEST = 16  # deepest nesting of groups


@dataclass(frozen=True)
class LeafConfig:
    """Configuration of one task as in its YAML file, with functions as ``file.function`` text."""

    name: str
    config: Mapping[str, Any]
    path: Path  # YAML file
    overrides: Mapping[str, Any] = field(default_factory=dict)  # settings that groups override


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
def shipped_leaves(name: str) -> tuple[LeafConfig, ...]:
    """Return the tasks that belong to a task, group or tag of lm-eval, without duplicates."""
    leaves = {leaf.name: leaf for leaf in _leaves(name, {}, 0)}
    return tuple(leaves.values())


def _leaves(name: str, leaf_overrides: Mapping[str, Any], depth: int) -> Iterator[LeafConfig]:
    names = shipped_names()
    if depth > _DEEPEST:
        return
    if name in names.tasks:
        path = names.tasks[name]
        yield LeafConfig(name, {**read_shipped(path), **leaf_overrides}, path, leaf_overrides)
    elif name in names.groups:
        path = names.groups[name]
        yield from _members(name, read_shipped(path), path, leaf_overrides, depth)
    else:
        for task in names.tags.get(name, ()):
            yield from _leaves(task, leaf_overrides, depth + 1)


def _members(
    group: str, config: Mapping[str, Any], path: Path, overrides: Mapping[str, Any], depth: int
) -> Iterator[LeafConfig]:
    """Yield the tasks below a group, as lm-eval builds it; ``overrides`` from enclosing groups take precedence."""
    leaf_overrides = task_overrides(config, overrides)
    members = config.get("task") or []
    for member in [members] if isinstance(members, str) else members:
        own = dict(member) if isinstance(member, Mapping) else {"task": member}
        kind = "group" if "group" in own else "task"
        name = str(own.pop(kind, ""))
        settings = {**leaf_overrides, **own}
        if name in shipped_names():
            yield from _leaves(name, settings, depth + 1)
        elif kind == "group":
            yield from _members(f"{group}::{name}", own, path, leaf_overrides, depth + 1)
        elif own:  # a complete task, defined inline
            yield LeafConfig(f"{group}::{name}", settings, path, settings)


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
