"""What a backend promises: to open a model for lm-eval, and to say of itself what others must know.

A backend of another package is an object like ours under the entry point ``mergegate.backends``::

    # pyproject.toml of that package:  [project.entry-points."mergegate.backends"]  mine = "my_package:MINE"
    MINE = Backend("mine", "our own engine", opened, libraries=("my-engine",))

Models are scored in a process of their own, so that package must be installed, or on ``PYTHONPATH``: what a program
adds to its own ``sys.path`` is not seen there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from mergegate.tasks.checkpoints import Model


AnswerReason = Literal["stop", "eos", "length", "context", ""]


class AnswerEnd(NamedTuple):
    """How a generated answer ended.

    An ``LM`` that knows this has an attribute ``answer_ends``, a deque of the ends of the answers that it is about to
    report to its cache hook, in the same order. An ``LM`` without it leaves them unknown.
    """

    # stop: a stop string; eos: an end-of-text token; length: the most tokens that an answer may have; context: the end
    # of the model's context before that; '': unknown. A server's 'stop' may also be an end-of-text token.
    reason: AnswerReason = ""
    tokens: int | None = None  # that were generated, with the one that ended it; None: unknown


CUT_OFF = ("length", "context")  # reasons for which an answer is not what the model would have said in the end


class BackendScoring(Protocol):
    """What a backend is told of how a model is scored; ``Scoring`` has it."""

    @property
    def dtype(self) -> str:
        """``auto``: as the checkpoint is stored; else a dtype of torch."""

    @property
    def batch_size(self) -> int:
        """Requests that are answered together."""

    @property
    def max_length(self) -> int | None:
        """Tokens of a request; None: what the model was made for."""

    @property
    def own_settings(self) -> object:
        """The value of the field that ``Backend.settings`` names; None where it is absent."""


# (model, scoring, device) -> lm-eval's ``LM``, ready to be asked while the context is open, with the model's tokenizer
# (of transformers) under ``tokenizer``. ``device`` is ``cpu`` or ``cuda``, for whoever does not find its own.
# Raises InvalidInput: when the model cannot be loaded, or whatever answers for it does not answer as it must.
Opened = Callable[["Model", BackendScoring, str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Backend:
    """What answers lm-eval's requests about a model.

    Args:
        name: As written under ``evaluate.backend``, and in every key.
        summary: One line for people.
        opened: Opens a model, see ``Opened``. Imports what is heavy when it is called: a backend is also looked at by
            processes that score nothing.
        settings: Field of ``Scoring`` that is this backend's own; empty: it has none.
        needs_settings: Whether there is nothing to ask without them.
        libraries: Distributions beside torch and transformers that decide its numbers; their versions are in the key
            of its scores. One that is not installed here is left out: ``opened`` says so, with what to do.
        frees_memory: Whether closing or replacing a model gives back its memory; otherwise only the death of the
            process does, and each model gets a process of its own.
        loads_here: Whether the weights are loaded into this machine's memory in ``Scoring.dtype``, as transformers
            does it: what a look at the machine beforehand counts with.
        draws_progress: Modules in which it calls ``tqdm``, whose bars are replaced by progress of our own.
        network: Whether it asks anybody: otherwise there is no network where it runs.
        environment: Variables of our environment that it needs, beside those that a library needs to run at all. The
            functions of a task see them as well.
        computes_in: Methods of its ``LM`` that compute one batch each. What is answered is kept batch by batch, so that
            a part that was killed goes on with the same batches. None: an answer does not depend on what else is asked.
        generation_settings: Names of the settings of generation that it takes; None: whatever its engine takes, which
            says so itself.
    """

    name: str
    summary: str
    opened: Opened = field(repr=False)
    settings: str = ""
    needs_settings: bool = False
    libraries: tuple[str, ...] = ()
    frees_memory: bool = True
    loads_here: bool = False
    draws_progress: tuple[str, ...] = ()
    network: bool = False
    environment: tuple[str, ...] = ()
    computes_in: tuple[str, ...] = ()
    generation_settings: Callable[[], frozenset[str]] | None = field(default=None, repr=False)

    def library_versions(self) -> dict[str, str]:
        """Of ``libraries``, as far as they are installed."""
        found = {}
        for name in self.libraries:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                continue
        return found
