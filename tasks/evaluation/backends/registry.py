"""Backends by name: ours, and those that other packages add under the entry point ``mergegate.backends``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.tasks.evaluation.backends import hf, server, vllm
from mergegate.tasks.evaluation.backends.contract import Backend

GROUP = "mergegate.backends"
_OWN = {backend.name: backend for backend in (hf.BACKEND, vllm.BACKEND, server.BACKEND)}


def find_backend(name: str) -> Backend:
    """The backend called ``name``. Other packages are only looked at for a name that is not ours.

    Raises:
        InvalidInput: when there is none, naming those that there are; or an installed package registers something that
            is no Backend, or a name that is taken.
    """
    backend = _OWN.get(name) or added_backends().get(name)
    if backend is None:
        known = backend_names()
        raise InvalidInput(
            "evaluate.backend",
            found=f"unknown backend {name!r}",
            expected=f"one of {', '.join(known)}",
            remedy=suggest(name, known),
        )
    return backend


def backend_names() -> tuple[str, ...]:
    """All that are known here. Raises as ``find_backend``."""
    return (*_OWN, *sorted(added_backends()))


@cache
def added_backends() -> Mapping[str, Backend]:
    """Those of other packages, by name. Raises as ``find_backend``."""
    found: dict[str, Backend] = {}
    for point in entry_points(group=GROUP):
        backend = point.load()
        if not isinstance(backend, Backend) or backend.name in {**_OWN, **found}:
            problem = f"the name {backend.name!r} is taken" if isinstance(backend, Backend) else "not a Backend"
            raise InvalidInput(f"entry point {GROUP}:{point.name}", found=problem, remedy="remove that package")
        found[backend.name] = backend
    return found
