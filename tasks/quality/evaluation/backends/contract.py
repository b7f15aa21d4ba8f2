"""Define the interface of a backend, which opens a model for lm-eval and declares its own properties.

Another package adds a backend by registering a ``Backend`` object under the entry point ``mergegate.backends``::

    # pyproject.toml of that package:  [project.entry-points."mergegate.backends"]  mine = "my_package:MINE"
    MINE = Backend("mine", "our own engine", opened, libraries=("my-engine",))

Models are scored in a separate process, so that package must be installed or on ``PYTHONPATH``. Changes of
``sys.path`` in the main program have no effect there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mergegate.tasks.models.checkpoints import Model


class BackendScoring(Protocol):
    """Settings that a backend receives. ``Scoring`` implements this protocol."""

    @property
    def dtype(self) -> str:
        """A torch dtype, or ``auto`` for the dtype of the checkpoint."""

    @property
    def batch_size(self) -> int:
        """Number of requests that are answered together."""

    @property
    def max_length(self) -> int | None:
        """Largest number of tokens in a request. None: the limit of the model."""

    @property
    def own_settings(self) -> object:
        """Value of the field that ``Backend.settings`` names, or None if the profile does not set it."""


# (model, scoring, device) -> lm-eval's ``LM``, which answers requests while the context is open and has the model's
# transformers tokenizer as ``tokenizer``. ``device`` is ``cpu`` or ``cuda``; a backend may choose its own.
# mergegate sets these attributes before each task: ``chat_template_args``, which ``apply_chat_template`` must use, and
# ``think_end_token`` and ``thought_end`` (a ``ThoughtEnd``), by which the ``LM`` removes a thought from an answer.
# For an ``LM`` with a property ``max_scored_tokens``, mergegate counts truncated prompts. The property is the largest
# number of tokens in a prompt and its continuation for which the ``LM`` computes log-probabilities.
# An ``LM`` whose prompts and answers have separate limits has an attribute ``shared_context``, which is None. Then
# ``max_length`` and ``max_scored_tokens`` are limits of the prompt alone.
# Raises InvalidInput if the model cannot be loaded, or its server does not answer correctly.
Opened = Callable[["Model", BackendScoring, str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Backend:
    """An implementation that answers lm-eval's requests to a model.

    Args:
        name: Name in ``evaluate.backend`` and in every cache key.
        summary: One-line description for users.
        opened: Opens a model, see ``Opened``. It must import heavy modules only when called, because processes that
            score nothing also look up backends.
        settings: Field of ``Scoring`` with the settings of this backend. Empty: it has no settings.
        needs_settings: Whether the profile must contain these settings.
        libraries: Distributions, besides torch and transformers, that affect the scores. Their versions are part of the
            cache key. Missing distributions are omitted; ``opened`` then raises an error that says how to install them.
        frees_memory: Whether closing or replacing a model releases its memory. If not, each model gets its own process.
        loads_here: Whether the weights are loaded into this machine's memory in ``Scoring.dtype``, as in transformers.
            The preflight check of the machine uses this.
        draws_progress: Modules in which the backend calls ``tqdm``. mergegate replaces these progress bars.
        network: Whether the backend needs network access. If not, its process has none.
        environment: Environment variables that the backend needs in addition to the usual ones of libraries. The
            functions of a task can read them, too.
        computes_in: Methods of the ``LM`` that compute one batch each. Answers are recorded batch by batch, so that an
            interrupted part resumes with the same batches. Empty: answers do not depend on other requests.
        variants_only: Whether it evaluates only quantized variants, so that a profile cannot select it for the merge.
        reads_pictures: Whether the ``LM`` answers prompts with pictures (``pictures.PicturePrompt``) if the model reads
            pictures. mergegate sets its attribute ``reads_pictures`` before each task.
        encoder_decoders: Whether it evaluates encoder-decoders, such as T5.
        generation_settings: Returns the names of the generation settings that the backend accepts. None: the engine
            checks them.
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
    variants_only: bool = False
    encoder_decoders: bool = False
    reads_pictures: bool = False
    generation_settings: Callable[[], frozenset[str]] | None = field(default=None, repr=False)

    def library_versions(self) -> dict[str, str]:
        versions = {}
        for name in self.libraries:
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                continue
        return versions
