"""What a task's Python file draws in from beside it, found from its text alone: nothing of it is run.

A function that a task names may import other files of its directory. They decide what the task asks as much as it
does, so they are pinned with it. What is imported under a name that only running tells (``importlib``) is not found;
such a file has to be named in the YAML.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

from mergegate.merge_core.parsing import parsing_errors, read_plain

_MOST = 1 << 20


def imported_beside(path: Path, directory: Path) -> tuple[Path, ...]:
    """Files in ``directory``, or beside ``path``, that the module in ``path`` imports; packages with all their modules.

    Raises:
        InvalidInput: Not a plain file, or not Python.
    """
    content = read_plain(path, _MOST, expected="a Python file that a task names")
    with parsing_errors(str(path), "not Python"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a stranger's style
        found: dict[Path, None] = {}
        for name in dict.fromkeys(_imported(ast.parse(content))):
            for start in dict.fromkeys((path.parent, directory)):
                found |= dict.fromkeys(_places(start, name))
        return tuple(found)


def _imported(tree: ast.AST) -> Iterator[tuple[str, ...]]:
    """Names of modules, as the parts between their dots; of ``from x import y`` both ``x`` and ``x.y``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = tuple((node.module or "").split(".")) if node.module else ()
            up = ("..",) * max(0, node.level - 1)
            if module:
                yield (*up, *module)
            yield from ((*up, *module, alias.name) for alias in node.names)


def _places(start: Path, name: tuple[str, ...]) -> Iterator[Path]:
    """The file of a module, and those that make the packages around it."""
    place = start
    for part in name[:-1]:
        place = place / part
        if part != ".." and (place / "__init__.py").is_file():
            yield place / "__init__.py"
        if part != ".." and (single := place.with_suffix(".py")).is_file():
            yield single
    if name[-1] == "*":
        return
    place = place / name[-1]
    if place.with_suffix(".py").is_file():
        yield place.with_suffix(".py")
    if (place / "__init__.py").is_file():
        yield place / "__init__.py"
