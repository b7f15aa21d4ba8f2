"""Find the packages and NLTK data that the functions of a task require but that are not installed."""

from __future__ import annotations

import ast
import importlib.util
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from importlib.metadata import metadata, requires
from pathlib import Path
from typing import NamedTuple

from mergegate.merge_core.errors import pip_command
from mergegate.merge_core.parsing import MAX_CODE_BYTES, read_plain
from mergegate.tasks.evaluation.task_file import local_imports

_LM_EVAL_TASKS = "lm_eval.tasks."
OWN_EXTRAS = frozenset({"ifeval", "math"})
"""Extras that mergegate has under the same name as lm-eval."""


class Requirements(NamedTuple):
    """Required packages, and required NLTK data, such as ``tokenizers/punkt_tab`` or only ``punkt_tab``."""

    packages: tuple[str, ...] = ()
    nltk_data: tuple[str, ...] = ()


NO_REQUIREMENTS = Requirements()


def missing_requirements(files: Sequence[Path]) -> Requirements:
    """Return the requirements of the modules in ``files`` that are not installed."""
    needs = [_requirements_of(file) for file in files]
    packages = {name for need in needs for name in need.packages if importlib.util.find_spec(name) is None}
    resources = {name for need in needs for name in need.nltk_data} if "nltk" not in packages else set()
    missing_data = []
    for resource in sorted(resources):
        from nltk import data  # type: ignore[import-untyped]  # ships no types

        names = (resource, f"{resource}.zip")
        if "/" not in resource:  # the directory that names the kind of data is unknown
            if not any(list(Path(root).glob(f"*/{name}")) for root in data.path for name in names):
                missing_data.append(resource)
            continue
        for name in names:
            try:
                data.find(name)
                break
            except LookupError:
                continue
        else:
            missing_data.append(resource)
    return Requirements(tuple(sorted(packages)), tuple(missing_data))


@lru_cache(maxsize=1024)
def _requirements_of(file: Path) -> Requirements:
    """Return the requirements for importing a module, including the modules of lm-eval's tasks that it imports."""
    lm_eval = importlib.util.find_spec("lm_eval")
    queue, visited = [file], set[Path]()
    packages: set[str] = set()
    # NLTK data that a module looks up or downloads, by function.
    resources: dict[str, set[str]] = {"nltk.data.find": set(), "nltk.download": set()}
    while queue:
        path = queue.pop()
        if path in visited:
            continue
        visited.add(path)
        queue += local_imports(path, path.parent)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about other people's code
            tree = ast.parse(read_plain(path, MAX_CODE_BYTES))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                resource = node.args[0].value
                if isinstance(resource, str) and (function := ast.unparse(node.func)) in resources:
                    resources[function].add(resource)
        for name in _required_modules(tree.body):
            if name.startswith(_LM_EVAL_TASKS) and lm_eval is not None and lm_eval.origin is not None:
                module = Path(lm_eval.origin).parent.joinpath(*name.split(".")[1:]).with_suffix(".py")
                queue += [module] if module.is_file() else []
            top = name.partition(".")[0]
            if not ((path.parent / top).is_dir() or (path.parent / f"{top}.py").is_file()):
                packages.add(top)
    found_names = {path.rpartition("/")[2] for path in resources["nltk.data.find"]}
    nltk_data = resources["nltk.data.find"] | (resources["nltk.download"] - found_names)
    return Requirements(tuple(packages), tuple(nltk_data))


def _required_modules(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the modules that the statements in ``body`` cannot do without.

    These are the modules imported outside of functions, except in a ``try`` whose handlers continue without them.
    """
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Try) and all(
            any(isinstance(statement, ast.Raise) for statement in handler.body) for handler in node.handlers
        ):
            yield from _required_modules([*node.body, *node.orelse])


def install_command(packages: Sequence[str]) -> str:
    """Return the command that installs ``packages``, with an extra of lm-eval if one provides all of them."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    extras: dict[str, list[str]] = {}
    requirements = [Requirement(text) for text in requires("lm_eval") or ()]
    for extra in metadata("lm_eval").get_all("Provides-Extra") or ():
        distributions = [each.name for each in requirements if each.marker and each.marker.evaluate({"extra": extra})]
        # The distribution antlr4-python3-runtime provides antlr4.
        names = [f"{canonicalize_name(distribution)}-" for distribution in distributions]
        if all(any(name.startswith(f"{canonicalize_name(package)}-") for name in names) for package in packages):
            extras[extra] = distributions
    if not extras:
        return pip_command(*packages)
    extra = min(extras, key=lambda extra: len(extras[extra]))
    return pip_command(f"{'mergegate' if extra in OWN_EXTRAS else 'lm_eval'}[{extra}]")
