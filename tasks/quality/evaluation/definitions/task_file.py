"""Read a task's YAML file and find the files on which it depends: other YAML files, Python files and data.

This module runs no code of the task. Relative data paths are relative to the YAML file that contains them, whereas
lm-eval resolves them relative to its working directory.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import (
    StrictLoader,
    parse_json_object,
    parsing_errors,
    plain_file,
    read_plain,
    read_yaml_mapping,
)

_MAX_INCLUDES = 32
_MAX_FILES = 1000
_MAX_CODE_BYTES = 1 << 20
_MAX_DATA_BYTES = 1 << 30
_PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


class Function(str):
    """Text under a ``!function`` tag: a module, next to the YAML file or installed, and an attribute of this module."""

    @property
    def file(self) -> Path:
        """Path of the module relative to the YAML file, if it is a local module."""
        return Path(self.rpartition(".")[0].replace(".", "/") + ".py")


def local_imports(path: Path, directory: Path) -> tuple[Path, ...]:
    """Return the files in ``directory``, or next to ``path``, that the module ``path`` imports.

    They affect a task as much as its functions do, so they are pinned with it. Imports whose names are known only at
    run time (``importlib``) are not found; the YAML file must name such files.
    """
    content = read_plain(path, _MAX_CODE_BYTES, expected="a Python file that a task names")
    names: dict[tuple[str, ...], None] = {}  # of modules, split at the dots; ``from x import y`` is both x and x.y
    with parsing_errors(str(path), "not Python"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about other people's code
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Import):
                names |= dict.fromkeys(tuple(alias.name.split(".")) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                module = (*("..",) * max(0, node.level - 1), *(node.module.split(".") if node.module else ()))
                if node.module:
                    names[module] = None
                names |= dict.fromkeys((*module, alias.name) for alias in node.names)
        files: dict[Path, None] = {}  # of modules, and the ``__init__.py`` files of the packages around them
        for name in names:
            for start in dict.fromkeys((path.parent, directory)):
                module_path = start
                for part in name[:-1]:
                    module_path = module_path / part
                    if part != "..":
                        files |= {module_path / "__init__.py": None, module_path.with_suffix(".py"): None}
                if name[-1] != "*":
                    module_path = module_path / name[-1]
                    files |= {module_path.with_suffix(".py"): None, module_path / "__init__.py": None}
        return tuple(file for file in files if file.is_file())


def modules_of(config: object, directory: Path) -> list[Path]:
    """Return the local files of the functions that a configuration names, and the local files that these import."""
    queue = [
        directory / text.file
        for text in texts_in(config)
        if isinstance(text, Function) and (directory / text.file).is_file()
    ]
    modules: dict[Path, None] = {}
    while queue:
        path = queue.pop(0)
        if path not in modules:
            modules[path] = None
            queue += local_imports(path, directory)
    return list(modules)


def texts_in(value: object) -> Iterator[str]:
    """Yield every text in nested plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from texts_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from texts_in(inner)


def function_dumper(directory: Path) -> type[yaml.SafeDumper]:
    """Return a YAML dumper for a file that will be next to ``directory`` and refers to the functions in it."""

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def represent(dumper: yaml.SafeDumper, function: Function) -> yaml.Node:
        name = f"{directory.name}/{function}" if (directory / function.file).is_file() else str(function)
        return dumper.represent_scalar("!function", name)

    Dumper.add_representer(Function, represent)
    return Dumper


def read_task_file(path: Path, files: list[Path], including: tuple[Path, ...]) -> tuple[dict[str, Any], Path]:
    """Return the merged configuration of a YAML file, and the directory for its relative data paths.

    The YAML file, its includes and its local Python modules are appended to ``files``. ``including`` holds the files
    that led to this one.
    """
    location = str(path)
    if path in including:
        raise InvalidInput(location, found="a file that includes itself", expected="includes without a cycle")
    functions: list[Function] = []
    remedy = f"it is included by {including[-1]}" if including else "paths are relative to the profile"

    class Loader(StrictLoader):
        """Loader of plain data that records functions by name instead of importing them."""

        text_keys = False

    def record_function(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
        functions.append(Function(loader.construct_scalar(node)))
        return functions[-1]

    Loader.add_constructor("!function", record_function)
    own = read_yaml_mapping(path, "an lm-eval task definition (YAML)", remedy=remedy, loader=Loader)
    files.append(path)
    files += modules_of(functions, path.parent)  # a missing module belongs to an installed package
    config: dict[str, Any] = {}
    data_root = path.parent
    for include in as_list(own.pop("include", [])):
        if len(including) >= _MAX_INCLUDES or len(files) > _MAX_FILES:
            raise InvalidInput(location, found="too many nested includes", expected=f"at most {_MAX_INCLUDES} levels")
        base, data_root = read_task_file((path.parent / str(include)).absolute(), files, (*including, path))
        base.pop("task_list", None)
        config.update(base)
    if "task_list" in own:
        config.pop("task", None)  # inherited from an include; the tasks are those in the list
    config.update(own)
    has_data = "dataset_path" in own or "dataset_kwargs" in own
    return config, path.parent if has_data else data_root


def resolve_data_files(data_files: Any, base: Path, location: str, files: list[Path]) -> Any:
    """Make the paths in ``data_files`` (a path, a list, or either by split) absolute, and expand patterns to lists."""
    if isinstance(data_files, Mapping):
        return {split: resolve_data_files(inner, base, location, files) for split, inner in data_files.items()}
    if isinstance(data_files, list):
        return [path for inner in data_files for path in as_list(resolve_data_files(inner, base, location, files))]
    text = str(data_files)
    if "://" in text:
        return text  # datasets downloads it; only the address can be pinned here
    with parsing_errors(f"{location}: dataset_kwargs.data_files", "not a file name"):
        has_pattern = not Path(text).is_absolute() and re.search(r"[*?\[]", text)
        paths = sorted(base.glob(text)) if has_pattern else [base / text]
        missing = [file for file in paths if not file.exists()]
        for file in paths:
            if file.exists():
                plain_file(file)
    if missing or not paths:
        raise InvalidInput(
            f"{location}: dataset_kwargs.data_files",
            found=f"no file {missing[0] if missing else base / text}",
            expected="existing data files, relative to the YAML file",
        )
    files += paths
    return [str(file) for file in paths] if len(paths) > 1 else str(paths[0])


def named_pictures(file: Path) -> list[Path]:
    """Return the existing pictures that the lines of a jsonl file name, relative to the file or absolute."""
    if file.suffix != ".jsonl":
        return []  # other formats contain their pictures
    pictures: dict[Path, None] = {}
    for number, line in enumerate(read_plain(file, _MAX_DATA_BYTES).splitlines(), 1):
        for text in texts_in(parse_json_object(line, f"{file}: line {number}")) if line.strip() else ():
            with suppress(OSError):  # a name that is too long
                if text.lower().endswith(_PICTURES) and (picture := file.parent / text).is_file():
                    pictures[picture] = None
    return list(pictures)


def as_list(value: Any) -> list[Any]:
    """Return ``value`` itself if it is a list, else a list that contains it."""
    return value if isinstance(value, list) else [value]
