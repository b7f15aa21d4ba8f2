"""How a task runs the code that a model wrote, read from its Python without running any of it.

Two ways are bounded here (``code_metric``): Hugging Face's ``code_eval``, and a function ``check_correctness`` that
takes a program. A task that says ``unsafe_code: true`` and whose functions can come to ``exec``, ``subprocess`` and
their like in any other way would run code in the process that holds models, with all that it may reach.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from mergegate.merge_core.parsing import MAX_CODE_BYTES, read_plain

EVERY = "*"  # function of a module
_CHECK = "check_correctness"
# As names and modules, and as what is asked of a module: ``re.compile`` runs nothing.
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


def runs_in_its_own_way(functions: Iterable[tuple[Path, str]]) -> str:
    """What a task's functions would run code by that is not bounded; empty where there is nothing.

    Args:
        functions: Each as the file that it is in and its name there, or ``EVERY``.
    """
    for file, name in functions:
        if not file.is_file():
            return f"{name}, in a module that is not beside its definition"
        if found := next(_reached(file, name), None):
            return f"{found} in {file.name}"
    return ""


def _reached(file: Path, name: str) -> Iterator[str]:
    """Ways of running code that a function of a module comes to, itself or by others of the module."""
    names = _names_by_function(read_plain(file, MAX_CODE_BYTES))
    # Its own copy of what is put in its place may do what it likes.
    roots = [name] if name != EVERY else [each for each in names if each not in _below(names, [_CHECK])]
    for function in _below(names, [*roots, ""], without=_CHECK):  # and what is run when the module is imported
        yield from sorted(way.lstrip(".") for way in names[function] & _RUNS)


def _below(names: Mapping[str, frozenset[str]], roots: Iterable[str], without: str = "") -> dict[str, None]:
    """Those functions and all that they name, in the order in which they are come to."""
    waiting, found = list(roots), dict[str, None]()
    while waiting:
        function = waiting.pop()
        if function in names and function not in found and (not without or function != without):
            found[function] = None
            waiting += sorted(names[function])
    return found


@lru_cache(maxsize=256)
def _names_by_function(source: bytes) -> dict[str, frozenset[str]]:
    """What is named in the body of each function and class of a module, attributes with a dot; under '' what is named
    outside of them, but for what it only imports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a stranger's style
        module = ast.parse(source)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found: dict[str, frozenset[str]] = {}
    outside: list[ast.AST] = []
    for node in module.body:
        if isinstance(node, kinds):
            found[node.name] = frozenset(_named(node))
        elif not isinstance(node, (ast.Import, ast.ImportFrom)):
            outside.append(node)
    found[""] = frozenset(name for node in outside for name in _named(node))
    return found


def _named(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id in _ATTRIBUTES:
            yield f".{inner.id}"  # imported from its module
        if isinstance(inner, ast.Name):
            yield inner.id
        elif isinstance(inner, ast.Attribute):
            yield f".{inner.attr}"
        elif isinstance(inner, (ast.Import, ast.ImportFrom)):
            yield from (alias.name.partition(".")[0] for alias in inner.names)
            if isinstance(inner, ast.ImportFrom) and inner.module:
                yield inner.module.partition(".")[0]
