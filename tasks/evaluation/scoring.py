"""Define how a model is scored and on which documents; both must be equal on both sides of every comparison.

The documents of a task have a fixed random order. They are scored in parts, and interim looks use growing prefixes of
the order. The order is a hash of seed, task and document, so the first 100 documents are among the first 200 on any
machine and any version of Python. Scores have no influence: settings and the task's size alone determine the
documents of a look. Documents that were scored before, under any look settings, are not scored again: ``cover``
assembles the documents of a look from ranges with known scores.
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

CHUNK_SIZE = 500  # largest number of documents in one part
_BACKEND_SETTINGS = ("vllm", "server")  # fields that belong to one backend each


class Scoring(BaseModel):
    """How a model is scored. It is equal on both sides of every comparison and part of the key, as it moves scores."""

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
    # lm-eval draws with NumPy, whose seeds have 32 bits.
    seed: int = Field(default=0, ge=0, lt=2**32, description="Seed of the sample and the few-shot examples.")
    time_limit: Annotated[float | None, NotInKey] = Field(
        default=None, gt=0, description="Seconds for one part (500 documents at most), loading included; absent: none."
    )
    vllm: VllmSettings | None = Field(default=None, description="Only for backend: vllm.")
    server: Annotated[ServerSettings | None, NotInKey] = Field(default=None, description="Only for backend: served.")

    @property
    def first_look(self) -> int | None:
        """Number of documents in the first look at a task. If it is None, a single look uses all documents."""
        return None if self.documents == "all" else self.documents or CHUNK_SIZE

    @property
    def own_settings(self) -> BaseModel | None:
        """Settings of the selected backend. It is None if the backend has none or the profile does not set them."""
        name = find_backend(self.backend).settings
        settings: BaseModel | None = getattr(self, name) if name else None
        return settings

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
    """Documents ``first`` to ``last`` (exclusive) in a task's order, which are scored and cached as a unit."""

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
    """A range that is scored as a unit, and the documents of this range that count in a look."""

    scored: DocumentRange
    counted: DocumentRange


def interim_looks(total: int, first: int | None) -> tuple[int, ...]:
    """Return the cumulative number of documents after each interim look.

    The first look uses ``first`` documents. Each further look doubles the number, and the last look uses all documents.

    Args:
        total: Number of documents of the task, at least 1.
        first: Number of documents in the first look, at least 1. If it is None or more than ``total``, there is only
            one look.

    >>> interim_looks(1319, 500)
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
    """Divide a task's order into the ranges in which it is scored, without gaps or overlaps.

    Every look ends at the end of a range, and no range is longer than ``CHUNK_SIZE``.

    >>> [part.last for part in document_ranges(1319, 200)]
    [200, 400, 800, 1300, 1319]
    """
    cut = []
    for begin, end in pairwise((0, *interim_looks(total, first))):
        cut += [DocumentRange(first=at, last=min(at + CHUNK_SIZE, end)) for at in range(begin, end, CHUNK_SIZE)]
    return tuple(cut)


def cover(documents: int, parts: Sequence[DocumentRange], scored: Sequence[DocumentRange]) -> tuple[Piece, ...]:
    """Cover the first ``documents`` documents with pieces that overlap nowhere.

    Scored ranges are used first, from the longest; ``parts`` fill the gaps. If a scored range extends beyond the
    documents or overlaps a longer one, only part of it counts.

    Args:
        documents: Number of documents, from 1 to the number in ``parts``.
        parts: Ranges from ``document_ranges``.
        scored: Ranges that were scored before; they may overlap.

    >>> [str(piece.counted) for piece in cover(500, document_ranges(1319, 500), [DocumentRange(first=0, last=200)])]
    ['documents 1 to 200', 'documents 201 to 500']
    """
    pieces: list[Piece] = []
    missing = [(0, documents)]
    # A range that is still to be scored is cut to the missing documents, so all of it counts.
    for part in sorted(scored, key=lambda each: (-len(each), each.first)):
        missing = _add_pieces(part, missing, pieces, is_scored=True)
    for part in parts:
        missing = _add_pieces(part, missing, pieces, is_scored=False)
    return tuple(sorted(pieces, key=lambda piece: piece.counted.first))


def _add_pieces(
    part: DocumentRange, missing: Sequence[tuple[int, int]], pieces: list[Piece], *, is_scored: bool
) -> list[tuple[int, int]]:
    """Add the overlap of ``part`` with the missing documents to ``pieces``, and return the remaining gaps.

    ``is_scored`` tells whether the part has been scored as a unit.
    """
    left = []
    for begin, end in missing:
        first, last = max(begin, part.first), min(end, part.last)
        if first >= last:
            left.append((begin, end))
            continue
        counted = DocumentRange(first=first, last=last)
        pieces.append(Piece(part if is_scored else counted, counted))
        left += [gap for gap in ((begin, first), (last, end)) if gap[0] < gap[1]]
    return left


def ordered(sizes: Mapping[str, int], seed: int) -> list[tuple[str, int]]:
    """Return all documents in the order in which they are scored.

    The documents of all tasks are shuffled together. The same arguments always give the same order.

    Args:
        sizes: Number of documents of each task, by task name.
        seed: Seed that determines the random order.

    Returns:
        One pair for each document: the name of its task and its position in the data of that task.
    """
    every = [(task, doc) for task, size in sizes.items() for doc in range(size)]
    return sorted(every, key=lambda item: document_sort_key(item[0], item[1], seed))


def document_sort_key(task: str, doc: int, seed: int = 0) -> bytes:
    """Return a hash of a document. Sorting documents by this key puts them into a fixed random order."""
    return hashlib.sha256(f"{seed}/{task}/{doc}".encode()).digest()


def documents_in(
    sizes: Mapping[str, int], seed: int, part: DocumentRange, only: Container[tuple[str, int]] | None = None
) -> dict[str, list[int]]:
    """Return the documents in one range of the scoring order.

    Args:
        sizes: Number of documents of each task, by task name.
        seed: Seed that determines the random order.
        part: Range of the scoring order.
        only: Documents to include, as pairs of task and position in its data. If it is None, all documents are
            included.

    Returns:
        Ascending positions of the documents, by task. Tasks without documents in the range are left out.
    """
    every = ordered(sizes, seed)
    counted = every if only is None else [document for document in every if document in only]
    by_task: dict[str, list[int]] = {}
    for task, doc in sorted(counted[part.first : part.last]):
        by_task.setdefault(task, []).append(doc)
    return by_task
