"""Find the local modules that a task's Python file imports, from its source alone.

A task's function may import other files in its directory. They affect the task as much as the function does, so they
are pinned with it. Imports whose names are known only at run time (``importlib``) are not found; such a file must be
named in the YAML file.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

from mergegate.merge_core.parsing import parsing_errors, read_plain

_MOST = 1 << 20


def local_imports(path: Path, directory: Path) -> tuple[Path, ...]:
    """Return the files in ``directory``, or next to ``path``, that a module imports; packages with all their modules.

    Raises:
        InvalidInput: If ``path`` is not a plain file, or not Python.
    """
    content = read_plain(path, _MOST, expected="a Python file that a task names")
    with parsing_errors(str(path), "not Python"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about other people's code
        files: dict[Path, None] = {}
        for name in dict.fromkeys(_imported(ast.parse(content))):
            for start in dict.fromkeys((path.parent, directory)):
                files |= dict.fromkeys(_module_files(start, name))
        return tuple(files)


def _imported(tree: ast.AST) -> Iterator[tuple[str, ...]]:
    """Yield the names of imported modules, split at the dots; ``from x import y`` yields both ``x`` and ``x.y``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = tuple((node.module or "").split(".")) if node.module else ()
            up = ("..",) * max(0, node.level - 1)
            if module:
                yield (*up, *module)
            yield from ((*up, *module, alias.name) for alias in node.names)


def _module_files(start: Path, name: tuple[str, ...]) -> Iterator[Path]:
    """Yield the file of a module and the ``__init__.py`` files of the packages around it."""
    path = start
    for part in name[:-1]:
        path = path / part
        if part != ".." and (path / "__init__.py").is_file():
            yield path / "__init__.py"
        if part != ".." and (single := path.with_suffix(".py")).is_file():
            yield single
    if name[-1] == "*":
        return
    path = path / name[-1]
    if path.with_suffix(".py").is_file():
        yield path.with_suffix(".py")
    if (path / "__init__.py").is_file():
        yield path / "__init__.py"
