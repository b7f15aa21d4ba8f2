"""One task as its YAML file says it, and what that file draws in: other YAML files, Python files, data.

Everything is found and nothing is run. Relative data paths are relative to the YAML file that names them (lm-eval
itself takes them relative to wherever it happens to be started).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import StrictLoader, parsing_errors, plain_file, read_yaml_mapping
from mergegate.tasks.evaluation.task_code import imported_beside

_MAX_INCLUDES = 32
_MAX_FILES = 1000


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


def one_definition(
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
    with parsing_errors(f"{where}: dataset_path", "no name of a directory or a dataset"):
        return root / name if (root / name).is_dir() else None


def modules_of(config: object, directory: Path) -> list[Path]:
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


def read_task_file(path: Path, files: list[Path], above: tuple[Path, ...]) -> tuple[dict[str, Any], Path]:
    """The merged configuration, and the directory that its data paths are relative to. Appends to ``files``."""
    where = str(path)
    if path in above:
        raise InvalidInput(where, found="includes itself", expected="includes without a circle")
    functions: list[Function] = []
    remedy = f"it is included by {above[-1]}" if above else "paths are relative to the profile"
    own = read_yaml_mapping(path, "an lm-eval task definition (YAML)", remedy=remedy, loader=_loader(functions))
    files.append(path)
    files += modules_of(functions, path.parent)  # one that is not there is of an installed package
    config: dict[str, Any] = {}
    data_root = path.parent
    for include in as_list(own.pop("include", [])):
        if len(above) >= _MAX_INCLUDES or len(files) > _MAX_FILES:
            raise InvalidInput(where, found="includes without an end", expected=f"at most {_MAX_INCLUDES} deep")
        included, included_root = read_task_file((path.parent / str(include)).absolute(), files, (*above, path))
        included.pop("task_list", None)
        config.update(included)
        data_root = included_root
    if "task_list" in own:
        config.pop("task", None)  # of what it includes; the tasks are those of the list
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
        return [found for inner in data_files for found in as_list(_resolve(inner, base, where, files))]
    text = str(data_files)
    if "://" in text:
        return text  # fetched by datasets; only its address can be pinned here
    with parsing_errors(f"{where}: dataset_kwargs.data_files", "no name of a file"):
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


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
