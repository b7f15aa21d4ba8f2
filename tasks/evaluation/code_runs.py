"""Determine how a task runs code that a model wrote, from the source of its Python modules alone.

mergegate can confine two ways (``code_metric``): Hugging Face's ``code_eval``, and a function ``check_correctness``
that takes a program. If a task declares ``unsafe_code: true`` and its functions can reach ``exec``, ``subprocess`` or
similar in any other way, they would run code in the process that holds models, with access to everything there.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from mergegate.merge_core.parsing import MAX_CODE_BYTES, read_plain

EVERY = "*"  # stands for all functions of a module
_CHECK = "check_correctness"
# Names and modules, and attributes with their dot: ``re.compile`` runs nothing.
_NAMES = {
    "exec",
    "eval",
    "compile",
    "__import__",
    "subprocess",
    "multiprocessing",
    "runpy",
    "pty",
    "importlib",
    "ctypes",
}
_ATTRIBUTES = {"Popen", "system", "popen", "fork", "forkpty", "posix_spawn", "posix_spawnp", "import_module"}
_ATTRIBUTES |= {f"{kind}{how}" for kind in ("exec", "spawn") for how in ("l", "le", "lp", "v", "ve", "vp", "vpe")}
_RUNS = _NAMES | {f".{name}" for name in _ATTRIBUTES}


def find_unconfined_code(functions: Iterable[tuple[Path, str]]) -> str:
    """Return how a task's functions run code that mergegate cannot confine; empty if they do not.

    Args:
        functions: File and name of each function, or ``EVERY``.
    """
    for file, name in functions:
        if not file.is_file():
            return f"{name}, in a module that is not beside its definition"
        if way := next(_reached(file, name), None):
            return f"{way} in {file.name}"
    return ""


def _reached(file: Path, name: str) -> Iterator[str]:
    """Yield the ways to run code that a function of a module reaches, directly or through others in the module."""
    names = _names_by_function(read_plain(file, MAX_CODE_BYTES))
    # A module's own check_correctness is replaced, so it may do anything.
    roots = [name] if name != EVERY else [each for each in names if each not in _below(names, [_CHECK])]
    for function in _below(names, [*roots, ""], without=_CHECK):  # '' is the code that runs on import
        yield from sorted(way.lstrip(".") for way in names[function] & _RUNS)


def _below(names: Mapping[str, frozenset[str]], roots: Iterable[str], without: str = "") -> dict[str, None]:
    """Return the given functions and all functions of the module that they name, in order of discovery."""
    queue, reached = list(roots), dict[str, None]()
    while queue:
        function = queue.pop()
        if function in names and function not in reached and (not without or function != without):
            reached[function] = None
            queue += sorted(names[function])
    return reached


@lru_cache(maxsize=256)
def _names_by_function(source: bytes) -> dict[str, frozenset[str]]:
    """Return the names in the body of each function and class of a module, attributes with a leading dot.

    The key '' has the names outside of them, except names in imports.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about other people's code
        module = ast.parse(source)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names: dict[str, frozenset[str]] = {}
    module_level: list[ast.AST] = []
    for node in module.body:
        if isinstance(node, kinds):
            names[node.name] = frozenset(_named(node))
        elif not isinstance(node, (ast.Import, ast.ImportFrom)):
            module_level.append(node)
    names[""] = frozenset(name for node in module_level for name in _named(node))
    return names


def _named(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id in _ATTRIBUTES:
            yield f".{inner.id}"  # imported from its module by name
        if isinstance(inner, ast.Name):
            yield inner.id
        elif isinstance(inner, ast.Attribute):
            yield f".{inner.attr}"
        elif isinstance(inner, (ast.Import, ast.ImportFrom)):
            yield from (alias.name.partition(".")[0] for alias in inner.names)
            if isinstance(inner, ast.ImportFrom) and inner.module:
                yield inner.module.partition(".")[0]
