"""Which documents of a task are scored, and in what order: a fixed random order, looked at in steps, scored in parts.

The order is a hash of seed, task and document, so the first 100 documents are among the first 200 on any machine and
Python. Nothing here depends on a score: where a look or a part ends is a function of settings and the task's size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import pairwise
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

CHUNK_SIZE = 500  # documents of one part at most: what a crash can lose


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

    def __str__(self) -> str:
        return f"documents {self.first + 1} to {self.last}"


def looks(total: int, first: int | None) -> tuple[int, ...]:
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

    >>> [part.last for part in parts(1319, 200)]
    [200, 400, 800, 1300, 1319]
    """
    cut = []
    for begin, end in pairwise((0, *looks(total, first))):
        cut += [DocumentRange(first=at, last=min(at + CHUNK_SIZE, end)) for at in range(begin, end, CHUNK_SIZE)]
    return tuple(cut)


def ordered(sizes: Mapping[str, int], seed: int) -> list[tuple[str, int]]:
    """All documents, as (task, position in its data), in the order in which they are scored.

    Args:
        sizes: Documents of each task; several are those below a group, whose documents are mixed.
    """
    every = [(task, doc) for task, size in sizes.items() for doc in range(size)]
    return sorted(every, key=lambda item: hashlib.sha256(f"{seed}/{item[0]}/{item[1]}".encode()).digest())


def documents_in(sizes: Mapping[str, int], seed: int, part: DocumentRange) -> dict[str, list[int]]:
    """The documents of a part, by task, ascending; a task without one is left out."""
    by_task: dict[str, list[int]] = {}
    for task, doc in sorted(ordered(sizes, seed)[part.first : part.last]):
        by_task.setdefault(task, []).append(doc)
    return by_task
