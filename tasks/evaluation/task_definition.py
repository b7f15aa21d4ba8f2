"""Evaluation tasks, pinned by content: which files define a task, and one digest over them.

A task is either shipped by lm-eval and known by name, or a YAML file of the user. For the latter everything it draws in
is hashed: YAMLs it includes, Python files its ``!function`` tags name, and local data. Relative data paths are relative
to the YAML file that names them (lm-eval itself takes them relative to wherever it happens to be started).

A YAML file may also be a group of such tasks: ``group: NAME`` and under ``task`` the names of tasks, tags or groups in
files beside it, with settings of their own or without, or whole tasks written inline, which lm-eval calls
``NAME::TASK``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict

from merge_core.errors import InvalidInput, suggest
from merge_core.parsing import StrictLoader, edge, plain_file, read_yaml_mapping
from merge_core.store import HashMemo, NotInKey, digest, sha256_file
from tasks.evaluation.asking import AskedHow
from tasks.evaluation.division import DocumentSet
from tasks.evaluation.mirror import find_datasets
from tasks.evaluation.shipped import shipped_leaves, shipped_names
from tasks.evaluation.task_code import imported_beside
from tasks.evaluation.task_data import DataSource, LoadedData, TaskData

_MAX_INCLUDES = 32
_MAX_FILES = 1000


class EvalTask(BaseModel):
    """An lm-eval task pinned by content: definition and local data are hashed, so a changed document is a new task.
    What only loading shows (data of the Hub, templates of a task by name) is pinned where ``data`` is there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # what lm-eval calls it, or the profile, where it asks one task in two ways
    digest: str  # sha256 over the definition and its local data
    definition: Annotated[Path | None, NotInKey]  # a local YAML, None for a task that lm-eval ships
    cluster_field: str | None = None  # of a document: what it shares with those that it belongs together with
    data_digest: str | None = None  # sha256 over what it asks when it is loaded; None: nobody has looked
    sources: Annotated[tuple[DataSource, ...], NotInKey] = ()  # that it was loaded from
    documents: Annotated[int | None, NotInKey] = None  # that it has; known with ``data_digest``
    mirror: Annotated[Path | None, NotInKey] = None  # directory with its datasets, which are in ``digest``
    only: DocumentSet | None = None  # of its documents; None: all of them
    asked: AskedHow | None = None  # what is said of it alone; None: it is asked as all others
    known_as: Annotated[str | None, NotInKey] = None  # by lm-eval, where ``name`` is the profile's

    def content_key(self) -> object:
        # What was measured before there were sets, and settings of one task, keeps its key.
        said = {"name", "digest", "cluster_field", "data_digest"} | ({"only"} if self.only else set())
        known = self.model_dump(mode="json", include=said)
        return {**known, "asked": self.asked} if self.asked else known

    @property
    def in_lm_eval(self) -> str:
        """What lm-eval calls it."""
        return self.known_as or self.name

    @property
    def data(self) -> TaskData | None:
        """What it asks, once somebody has looked."""
        return TaskData(digest=self.data_digest, sources=self.sources) if self.data_digest else None

    def loaded(self, found: LoadedData) -> EvalTask:
        """The same task, with what loading it has shown."""
        data = found.data
        return self.model_copy(
            update={"data_digest": data.digest, "sources": data.sources, "documents": found.documents}
        )

    @property
    def is_local(self) -> bool:
        """All of its data lies here, and is in its digest."""
        if self.mirror is not None:
            return True
        return self.definition is not None and read_definition(self.definition).is_local


class Function(str):
    """The name under a ``!function`` tag: a module beside the YAML file, or an installed one, and what it defines."""

    @property
    def file(self) -> Path:
        """Of the module, relative to the YAML file, if it lies there."""
        return Path(self.rpartition(".")[0].replace(".", "/") + ".py")


@dataclass(frozen=True)
class Definition:
    """A local task as its YAML and those it includes say it, or a group of them."""

    path: Path
    name: str
    config: Mapping[str, Any]  # merged: what a file says itself wins over what it includes
    files: tuple[Path, ...]  # everything that decides what the task asks, in the order in which it is found
    dataset_path: str  # absolute where it is a local directory
    data_files: Any  # as in the YAML, with absolute paths; None where there are none
    members: tuple[Definition, ...] = ()  # of a group: all tasks below it
    overrides: Mapping[str, Any] = field(default_factory=dict)  # what a group says in place of the task's own file
    is_inline: bool = False  # it has no file: ``overrides`` is all of it
    functions_from: Path = Path()  # the directory that functions in ``overrides`` are looked for in

    @property
    def leaves(self) -> tuple[Definition, ...]:
        """The tasks below a group, or the task itself."""
        return self.members or (self,)

    @property
    def is_local(self) -> bool:
        """All of its data lies here: nothing is asked of a network, and nothing need be kept for another time."""
        if self.members:
            return all(member.is_local for member in self.members)
        return (self.data_files is not None and not any("://" in text for text in texts_in(self.data_files))) or Path(
            self.dataset_path
        ).is_absolute()


def pin_task(task: str, root: Path, hashes: HashMemo, mirror: Path | None = None) -> EvalTask:
    """The task that ``task`` names, with its digest.

    Args:
        task: A YAML file, relative to ``root``; otherwise the name of a task, group or tag that lm-eval ships.
        root: Directory of the profile.
        mirror: Of datasets (``tasks.evaluation.mirror``), which those of a task by name are taken from; None: the Hub.

    Raises:
        InvalidInput: for an unknown name, a dataset that is not in ``mirror``, a definition that cannot be read, or
            data that is not there.
    """
    if task.endswith((".yaml", ".yml")):
        path = (root / task).absolute()
        definition = read_definition(path)
        return EvalTask(name=definition.name, digest=_digest(definition, hashes.sha256), definition=path)
    if task not in (known := shipped_names()):
        near = get_close_matches(task, known, n=1)
        raise InvalidInput(
            f"task {task}",
            found=f"no task of lm-eval {version('lm_eval')}",
            expected="a task, group or tag that lm-eval ships, or a YAML file of your own",
            remedy=f"did you mean {near[0]!r}?" if near else "`lm-eval ls tasks` lists them",
        )
    pinned: dict[str, object] = {"task": task, "lm_eval": version("lm_eval")}
    if mirror is not None:
        found = find_datasets(mirror, shipped_leaves(task))
        files = dict.fromkeys(file for each in found for file in each.files)
        pinned["data"] = [hashes.sha256(file) for file in files]
    return EvalTask(name=task, digest=digest(pinned), definition=None, mirror=mirror)


def still_as_pinned(task: EvalTask, definition: Definition) -> bool:
    """Whether the files of a local task are those that were pinned; every byte is read."""
    return _digest(definition, sha256_file) == task.digest


def read_definition(path: Path) -> Definition:
    """Read a local task definition, and find all that it draws in.

    Raises:
        InvalidInput: naming the file and what is wrong with it.
    """
    files: list[Path] = []
    config, data_root = _read(path, files, ())
    name = config.get("task")
    if isinstance(name, str):
        return _definition(path, name, config, data_root, files)
    if "group" not in config:
        raise InvalidInput(str(path), found="no name under 'task'", expected="one task with 'task: <name>'")
    group = str(config["group"])
    members = tuple(_members(_Group(path, group, config, data_root), {}, (group,)))
    names = [member.name for member in members]
    if not members or len(set(names)) < len(names):
        twice = next((name for name in names if names.count(name) > 1), None)
        raise InvalidInput(
            f"{path}: task",
            found=f"{twice!r} twice" if twice else "no task",
            expected="the names of tasks beside it, or whole tasks, each once",
        )
    every = dict.fromkeys([*files, *(file for member in members for file in member.files)])
    return Definition(path, group, config, tuple(every), "", None, members)


def _definition(
    path: Path,
    name: str,
    config: Mapping[str, Any],
    data_root: Path,
    files: list[Path],
    **of_a_group: Any,
) -> Definition:
    dataset_path = str(config.get("dataset_path") or "")
    kwargs = config.get("dataset_kwargs") or {}
    if not isinstance(kwargs, Mapping):
        raise InvalidInput(f"{path}: dataset_kwargs", found=f"{kwargs!r:.60}", expected="a mapping")
    data_files = kwargs.get("data_files")
    if data_files is not None:
        data_files = _resolve(data_files, data_root, str(path), files)
    elif dataset_path and (directory := _directory(data_root, dataset_path, str(path))) is not None:
        dataset_path = str(directory)
        files += sorted(file for file in directory.rglob("*") if file.is_file() and not file.name.startswith("."))
    where_functions = {"functions_from": path.parent, **of_a_group}
    return Definition(path, name, config, tuple(files), dataset_path, data_files, **where_functions)


def _directory(root: Path, name: str, where: str) -> Path | None:
    with edge(f"{where}: dataset_path", "no name of a directory or a dataset"):
        return root / name if (root / name).is_dir() else None


@dataclass(frozen=True)
class _Group:
    path: Path
    name: str
    config: Mapping[str, Any]
    data_root: Path


# What lm-eval reads as of the group itself; everything else that a group says is laid over its tasks.
_OF_A_GROUP = ("group", "group_alias", "task", "aggregate_metric_list", "metadata", "tag", "task_list")


def _members(group: _Group, overrides: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[Definition]:
    """The tasks below a group, in its order; ``overrides`` is what groups above it say, and wins."""
    beside = _beside(group.path.parent)
    laid_over = {key: value for key, value in group.config.items() if key not in _OF_A_GROUP} | dict(overrides)
    for item in _listed(group.config.get("task") or []):
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
            for path in beside[name]:
                yield from _named(path, name, group, settings, above)
        elif own:  # a whole task
            files: list[Path] = _modules(settings, group.path.parent)
            inline_name = f"{group.name}::{name}"
            yield _definition(
                group.path, inline_name, settings, group.data_root, files, overrides=settings, is_inline=True
            )
        else:
            raise InvalidInput(
                f"{group.path}: task",
                found=f"{name!r}, which no YAML file beside it defines",
                expected="the names of tasks beside it, or whole tasks",
                remedy=suggest(name, beside) or "a task that lm-eval ships is a guard of its own",
            )


def _named(
    path: Path, name: str, group: _Group, settings: Mapping[str, Any], above: tuple[str, ...]
) -> Iterator[Definition]:
    """What a file beside a group defines, with ``settings`` laid over it."""
    files: list[Path] = []
    config, data_root = _read(path, files, ())
    if isinstance(config.get("task"), str):
        files += _modules(settings, group.path.parent)
        says_data = "dataset_path" in settings or "dataset_kwargs" in settings
        root = group.data_root if says_data else data_root
        merged = {**config, **settings}
        yield _definition(
            path, config["task"], merged, root, files, overrides=settings, functions_from=group.path.parent
        )
        return
    for member in _members(_Group(path, name, config, data_root), settings, (*above, name)):
        yield replace(member, files=(*files, *member.files))


def _beside(directory: Path) -> dict[str, list[Path]]:
    """The files of a directory by the name of the task or the group that they define, and by their tags."""
    found: dict[str, list[Path]] = {}
    for path in sorted([*directory.glob("*.yaml"), *directory.glob("*.yml")]):
        try:
            config, _ = _read(path, [], ())
        except InvalidInput:
            continue  # if it is needed, it is missed by name
        task, group = config.get("task"), config.get("group")
        if isinstance(task, str):
            found.setdefault(task, [path])
            for tag in _listed(config.get("tag") or []):
                found.setdefault(str(tag), []).append(path)
        elif group is not None:
            found.setdefault(str(group), [path])
    return found


def _modules(config: object, directory: Path) -> list[Path]:
    """Files of the functions that a configuration names, if they lie in ``directory``, and what they import there."""
    waiting = [
        directory / text.file
        for text in texts_in(config)
        if isinstance(text, Function) and (directory / text.file).is_file()
    ]
    found: dict[Path, None] = {}
    while waiting:
        path = waiting.pop(0)
        if path not in found:
            found[path] = None
            waiting += imported_beside(path, directory)
    return list(found)


def texts_in(value: object) -> Iterator[str]:
    """Every text in plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from texts_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from texts_in(inner)


def function_dumper(beside: Path) -> type[yaml.SafeDumper]:
    """Writes plain data in which functions are found in ``beside``, a directory (or link to one) next to the file."""

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def represent(dumper: yaml.SafeDumper, function: Function) -> yaml.Node:
        name = f"{beside.name}/{function}" if (beside / function.file).is_file() else str(function)
        return dumper.represent_scalar("!function", name)

    Dumper.add_representer(Function, represent)
    return Dumper


def _digest(definition: Definition, sha256: Callable[[Path], str]) -> str:
    # Contents only: a task that is moved or renamed with its data is the same task.
    contents = [sha256(file) for file in definition.files]
    return digest({"task": definition.name, "files": contents, "lm_eval": version("lm_eval")})


def _read(path: Path, files: list[Path], above: tuple[Path, ...]) -> tuple[dict[str, Any], Path]:
    """The merged configuration, and the directory that its data paths are relative to. Appends to ``files``."""
    where = str(path)
    if path in above:
        raise InvalidInput(where, found="includes itself", expected="includes without a circle")
    functions: list[Function] = []
    remedy = f"it is included by {above[-1]}" if above else "paths are relative to the profile"
    own = read_yaml_mapping(path, "an lm-eval task definition (YAML)", remedy=remedy, loader=_loader(functions))
    files.append(path)
    files += _modules(functions, path.parent)  # one that is not there is of an installed package
    config: dict[str, Any] = {}
    data_root = path.parent
    for include in _listed(own.pop("include", [])):
        if len(above) >= _MAX_INCLUDES or len(files) > _MAX_FILES:
            raise InvalidInput(where, found="includes without an end", expected=f"at most {_MAX_INCLUDES} deep")
        included, included_root = _read((path.parent / str(include)).absolute(), files, (*above, path))
        included.pop("task_list", None)
        config.update(included)
        data_root = included_root
    config.update(own)
    says_data = "dataset_path" in own or "dataset_kwargs" in own
    return config, path.parent if says_data else data_root


def _loader(functions: list[Function]) -> type[StrictLoader]:
    class Loader(StrictLoader):
        """Plain data; a function is noted by name and not imported."""

        text_keys = False

    def note(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
        functions.append(Function(loader.construct_scalar(node)))
        return functions[-1]

    Loader.add_constructor("!function", note)
    return Loader


def _resolve(data_files: Any, base: Path, where: str, files: list[Path]) -> Any:
    """``data_files`` of datasets (a path, a list, or either by split) with absolute paths; patterns become lists."""
    if isinstance(data_files, Mapping):
        return {split: _resolve(inner, base, where, files) for split, inner in data_files.items()}
    if isinstance(data_files, list):
        return [found for inner in data_files for found in _listed(_resolve(inner, base, where, files))]
    text = str(data_files)
    if "://" in text:
        return text  # fetched by datasets; only its address can be pinned here
    with edge(f"{where}: dataset_kwargs.data_files", "no name of a file"):
        has_pattern = not Path(text).is_absolute() and re.search(r"[*?\[]", text)
        found = sorted(base.glob(text)) if has_pattern else [base / text]
        missing = [file for file in found if not file.exists()]
        for file in found:
            if file.exists():
                plain_file(file)
    if missing or not found:
        raise InvalidInput(
            f"{where}: dataset_kwargs.data_files",
            found=f"no file {missing[0] if missing else base / text}",
            expected="data files, relative to the YAML file",
        )
    files += found
    return [str(file) for file in found] if len(found) > 1 else str(found[0])


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
