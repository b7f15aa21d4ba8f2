"""How a model is scored, and on which documents: what must be equal on both sides of every comparison.

The documents of a task are scored in a fixed random order, looked at in steps, scored in parts. The order is a hash of
seed, task and document, so the first 100 documents are among the first 200 on any machine and Python. Nothing here
depends on a score: which documents a look sees is a function of settings and the task's size. What was scored before,
under whatever settings of looks, is not scored again: ``cover`` puts a look together from ranges that are known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.evaluation.backends import find_backend
from mergegate.tasks.evaluation.backends.server import ServerSettings
from mergegate.tasks.evaluation.backends.vllm import VllmSettings
from mergegate.tasks.store import NotInKey

CHUNK_SIZE = 500  # documents of one part at most
_BACKEND_SETTINGS = ("vllm", "server")  # fields that are one backend's own


class Scoring(BaseModel):
    """How a model is scored. Equal on both sides of every comparison, and part of the key: it moves scores."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: str = Field(
        default="hf",
        description="hf: transformers here; vllm: vLLM here; served: a server that is running already; or one that an "
        "installed package adds.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto",
        description="auto: as the checkpoint is stored, which is how it will be used; float32 on a processor without "
        "units for that format.",
    )
    batch_size: int = Field(default=16, ge=1)
    max_length: int | None = Field(default=None, ge=1, description="Tokens; absent: what the model was made for.")
    num_fewshot: int | None = Field(default=None, ge=0, description="Absent: as the task says.")
    chat_template: bool = False
    documents: Annotated[Annotated[int, Field(ge=1)] | Literal["all"] | None, NotInKey] = Field(  # the part is in keys
        default=None,
        description="A fixed random sample of so many per task or group is looked at first, then more where it does "
        "not decide; absent: 500. all: every document at once.",
    )
    # NumPy, which lm-eval draws with, takes 32 bits.
    seed: int = Field(default=0, ge=0, lt=2**32, description="Seed of the sample and the few-shot examples.")
    time_limit: Annotated[float | None, NotInKey] = Field(
        default=None, gt=0, description="Seconds for one part (500 documents at most), loading included; absent: none."
    )
    vllm: VllmSettings | None = Field(default=None, description="Only for backend: vllm.")
    server: Annotated[ServerSettings | None, NotInKey] = Field(default=None, description="Only for backend: served.")

    @property
    def first_look(self) -> int | None:
        """Documents of a task that are looked at first; None: all of them at once."""
        return None if self.documents == "all" else self.documents or CHUNK_SIZE

    @property
    def own_settings(self) -> BaseModel | None:
        """Those of the backend, where it has any and the profile says something about them."""
        name = find_backend(self.backend).settings
        found: BaseModel | None = getattr(self, name) if name else None
        return found

    @field_validator("backend")
    @classmethod
    def _is_known(cls, backend: str) -> str:
        try:
            return find_backend(backend).name
        except InvalidInput as error:
            raise ValueError(f"{error.found}; expected: {error.expected}") from None

    @model_validator(mode="after")
    def _settings_belong_to_the_backend(self) -> Self:
        backend = find_backend(self.backend)
        for name in _BACKEND_SETTINGS:
            if getattr(self, name) is not None and backend.settings != name:
                raise ValueError(f"{name!r} is not for backend: {self.backend}")
        if backend.needs_settings and self.own_settings is None:
            raise ValueError(f"backend: {self.backend} needs {backend.settings!r}")
        return self


class DocumentRange(BaseModel):
    """Documents ``first`` to ``last`` (exclusive) of a task's order: what is scored, and cached, at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: int = Field(ge=0)
    last: int = Field(ge=1)

    @model_validator(mode="after")
    def _is_not_empty(self) -> Self:
        if self.last <= self.first:
            raise ValueError(f"documents {self.first} to {self.last} are none")
        return self

    def __len__(self) -> int:
        return self.last - self.first

    def __str__(self) -> str:
        return f"documents {self.first + 1} to {self.last}"


class Piece(NamedTuple):
    """A range that is scored at once, and those of its documents that a look takes from it."""

    scored: DocumentRange
    counted: DocumentRange


def interim_looks(total: int, first: int | None) -> tuple[int, ...]:
    """Cumulative numbers of documents after each look at a task: ``first``, then doublings, at last ``total``.

    Args:
        total: Documents that the task has, at least 1.
        first: Documents of the first look, at least 1; None or more than there are: all at once.

    >>> looks(1319, 500)
    (500, 1000, 1319)
    """
    if total < 1 or (first is not None and first < 1):
        raise ValueError(f"looks at {total} documents, the first at {first}: both must be at least 1")
    ends = []
    end = total if first is None else first
    while end < total:
        ends.append(end)
        end *= 2
    return (*ends, total)


def document_ranges(total: int, first: int | None) -> tuple[DocumentRange, ...]:
    """Slices of the order, without gap or overlap, in which a task is scored: every look ends a part, and
    no part is longer than ``CHUNK_SIZE``.

    >>> [part.last for part in document_ranges(1319, 200)]
    [200, 400, 800, 1300, 1319]
    """
    cut = []
    for begin, end in pairwise((0, *interim_looks(total, first))):
        cut += [DocumentRange(first=at, last=min(at + CHUNK_SIZE, end)) for at in range(begin, end, CHUNK_SIZE)]
    return tuple(cut)


def cover(documents: int, parts: Sequence[DocumentRange], known: Sequence[DocumentRange]) -> tuple[Piece, ...]:
    """The first ``documents`` documents, each in one piece: of what is known the longest ranges first, then what of
    ``parts`` is not. Where a known range goes beyond the documents, or into a longer one, only a part of it counts.

    Args:
        documents: At least 1, and no more than the parts have.
        parts: As ``document_ranges`` cuts them.
        known: Ranges that were scored before; they may overlap.

    >>> [str(piece.counted) for piece in cover(500, document_ranges(1319, 500), [DocumentRange(first=0, last=200)])]
    ['documents 1 to 200', 'documents 201 to 500']
    """
    pieces: list[Piece] = []
    missing = [(0, documents)]
    # Those that will be scored are no longer than what is missing of them: so they are their own pieces.
    for one in sorted(known, key=lambda each: (-len(each), each.first)):
        missing = _taken(one, missing, pieces, whole=True)
    for one in parts:
        missing = _taken(one, missing, pieces, whole=False)
    return tuple(sorted(pieces, key=lambda piece: piece.counted.first))


def _taken(
    one: DocumentRange, missing: Sequence[tuple[int, int]], pieces: list[Piece], *, whole: bool
) -> list[tuple[int, int]]:
    """What is still missing without ``one``; pieces are added for what was. ``whole``: it has been scored as it is."""
    left = []
    for begin, end in missing:
        first, last = max(begin, one.first), min(end, one.last)
        if first >= last:
            left.append((begin, end))
            continue
        counted = DocumentRange(first=first, last=last)
        pieces.append(Piece(one if whole else counted, counted))
        left += [gap for gap in ((begin, first), (last, end)) if gap[0] < gap[1]]
    return left


def ordered(sizes: Mapping[str, int], seed: int) -> list[tuple[str, int]]:
    """All documents, as (task, position in its data), in the order in which they are scored.

    Args:
        sizes: Documents of each task; several are those below a group, whose documents are mixed.
    """
    every = [(task, doc) for task, size in sizes.items() for doc in range(size)]
    return sorted(every, key=lambda item: mixed(item[0], item[1], seed))


def mixed(task: str, doc: int, seed: int = 0) -> bytes:
    """What documents are sorted by to come in random order."""
    return hashlib.sha256(f"{seed}/{task}/{doc}".encode()).digest()


def documents_in(
    sizes: Mapping[str, int], seed: int, part: DocumentRange, only: Container[tuple[str, int]] | None = None
) -> dict[str, list[int]]:
    """The documents of a part, by task, ascending; a task without one is left out.

    Args:
        only: Documents that count, as (task, position in its data); None: all of them.
    """
    every = ordered(sizes, seed)
    counted = every if only is None else [document for document in every if document in only]
    by_task: dict[str, list[int]] = {}
    for task, doc in sorted(counted[part.first : part.last]):
        by_task.setdefault(task, []).append(doc)
    return by_task
