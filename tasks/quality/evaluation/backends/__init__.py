"""Answer lm-eval's requests to a model, with one module per backend.

All backends tokenize a prompt in the same way: a tokenizer that adds a begin-of-text token does so unless the prompt,
for example from a chat template, already begins with one. Log-probabilities are sums of float32 log-softmax.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points

from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.tasks.quality.evaluation.backends import hf, llama_cpp, server, vllm
from mergegate.tasks.quality.evaluation.backends.answer_ends import (
    CUT_OFF,
    DEFAULT_BUDGET,
    AnswerEnd,
    ThoughtEnd,
    find_thought_end,
)
from mergegate.tasks.quality.evaluation.backends.contract import Backend

GROUP = "mergegate.backends"
_OWN = {backend.name: backend for backend in (hf.BACKEND, vllm.BACKEND, server.BACKEND, llama_cpp.BACKEND)}


def find_backend(name: str) -> Backend:
    """Return the backend ``name``. Other packages are loaded only if the name is not built in.

    Raises:
        InvalidInput: If no backend has the name (the message lists all names), or an installed package registers an
            object that is not a ``Backend`` or whose name is taken.
    """
    backend = _OWN.get(name) or added_backends().get(name)
    if backend is None:
        own = [name for name, each in _OWN.items() if not each.variants_only]
        names = (*own, *sorted(added_backends()))
        raise InvalidInput(
            "evaluate.backend",
            found=f"unknown backend {name!r}",
            expected=f"one of {', '.join(names)}",
            remedy=suggest(name, names),
        )
    return backend


@cache
def added_backends() -> Mapping[str, Backend]:
    """Return the backends that other packages add, by name. Raises InvalidInput as ``find_backend`` does."""
    backends: dict[str, Backend] = {}
    for point in entry_points(group=GROUP):
        backend = point.load()
        if not isinstance(backend, Backend) or backend.name in {**_OWN, **backends}:
            problem = f"the name {backend.name!r} is taken" if isinstance(backend, Backend) else "not a Backend"
            raise InvalidInput(f"entry point {GROUP}:{point.name}", found=problem, remedy="remove that package")
        backends[backend.name] = backend
    return backends
