"""Define the order of a task's documents, which of them are evaluated, and the data that they come from.

The documents of a task have a fixed random order. They are scored in parts, and each interim look uses a longer
stretch of the order from the start of the sample. The order is a hash of seed, task and document, so the first 100
documents are among the first 200 on any machine and any version of Python. Scores have no influence: the settings, the
size of the task and the start of the sample alone determine the documents of a look. ``cover_documents`` assembles them
from ranges that are already scored, possibly under other look settings, and ranges to score.

A sample starts at the beginning of the order, or after the documents that judged an earlier merge (``SampleUse``). It
continues at the beginning when it reaches the end. The order itself never changes, so every model answers each document
once, however many samples contain it.

A search that evaluates the same documents sixty times finds a candidate that is good on these documents. If a profile
searches, each document therefore belongs permanently to one of three disjoint sets: for the search, for confirming its
winner, and for the gate. A hash of the document's text determines the set, so reordering the data or adding a document
moves no other document. Documents of one cluster (questions about one passage, one subject, equal documents) are in the
same set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mergegate.merge_core.errors import InvalidInput

CHUNK_SIZE = 500  # largest number of documents in one part
SetName = Literal["search", "confirmation", "gate"]
D = TypeVar("D")


class DataSource(BaseModel):
    """A dataset from which a task is loaded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str  # 'cais/mmlu', or another value of ``dataset_path``
    name: str | None = None  # configuration of the dataset, such as 'law'
    data_files: tuple[str, ...] = ()  # files that the task names, if any
    revision: str = ""  # commit on the Hub that was loaded; empty if unknown


class TaskData(BaseModel):
    """Digest and sources of the data on which a task was measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str  # sha256 over documents, examples, templates and settings
    sources: tuple[DataSource, ...] = ()  # empty for data next to the task, which is pinned by content


class DocumentRange(BaseModel):
    """Documents ``first`` to ``last`` (exclusive) in a task's order, scored and cached as a unit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: int = Field(ge=0)
    last: int = Field(ge=1)

    @model_validator(mode="after")
    def _check_not_empty(self) -> Self:
        if self.last <= self.first:
            raise ValueError(f"an empty range of documents: {self.first} to {self.last}")
        return self

    def __len__(self) -> int:
        return self.last - self.first

    def __str__(self) -> str:
        return f"documents {self.first + 1} to {self.last}"


class SampleUse(BaseModel):
    """Documents of a task that judged a merge: ``documents`` of them from position ``start`` of the order."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    start: int = Field(default=0, ge=0)
    documents: int = Field(default=0, ge=0)

    def next_start(self, total: int, first: int | None) -> int:
        """Return the position at which the sample for the next merge starts.

        ``total`` is the number of documents in the task, and ``first`` the number in the first look. The result is 0 if
        the first look uses all documents, so that no other sample exists.
        """
        return 0 if first is None or first >= total else (self.start + self.documents) % total


class Piece(NamedTuple):
    """A range that is scored as a unit, and the part of it that counts in a look."""

    scored: DocumentRange
    counted: DocumentRange


def interim_looks(total: int, first: int | None) -> tuple[int, ...]:
    """Return the cumulative number of documents after each interim look.

    The first look uses ``first`` of the ``total`` documents, each further one doubles the number, and the last one uses
    all. If ``first`` is None or more than ``total``, there is only one look. Both numbers must be at least 1.

    >>> interim_looks(1319, 500)
    (500, 1000, 1319)
    """
    if total < 1 or (first is not None and first < 1):
        raise ValueError(f"{total} documents, {first} in the first look: both must be at least 1")
    ends = []
    end = total if first is None else first
    while end < total:
        ends.append(end)
        end *= 2
    return (*ends, total)


def sample_ranges(total: int, start: int, documents: int) -> tuple[DocumentRange, ...]:
    """Return the ranges of the first ``documents`` documents of a sample that starts at position ``start``.

    >>> [str(part) for part in sample_ranges(1319, 1000, 500)]
    ['documents 1001 to 1319', 'documents 1 to 181']
    """
    if not (0 <= start < total and 1 <= documents <= total):
        raise ValueError(f"{documents} documents from position {start} of {total}")
    head = DocumentRange(first=start, last=min(start + documents, total))
    rest = documents - len(head)
    return (head, DocumentRange(first=0, last=rest)) if rest else (head,)


def document_ranges(total: int, first: int | None, start: int = 0) -> tuple[DocumentRange, ...]:
    """Divide a task's order into the ranges in which it is scored, without gaps or overlaps, in order of the sample.

    Every look (see ``interim_looks``) ends at the end of a range, and no range is longer than ``CHUNK_SIZE``. The
    sample starts at position ``start``.

    >>> [part.last for part in document_ranges(1319, 200)]
    [200, 400, 800, 1300, 1319]
    """
    cut: list[DocumentRange] = []
    for begin, end in pairwise((0, *interim_looks(total, first))):
        for at in range(begin, end, CHUNK_SIZE):
            cut += sample_ranges(total, (start + at) % total, min(CHUNK_SIZE, end - at))
    return tuple(cut)


def cover_documents(
    sample: Sequence[DocumentRange], parts: Sequence[DocumentRange], scored_ranges: Sequence[DocumentRange]
) -> tuple[Piece, ...]:
    """Cover the documents of ``sample`` (from ``sample_ranges``) with pieces that do not overlap, in its order.

    ``scored_ranges``, which may overlap, are used first, starting with the longest. ``parts`` (from
    ``document_ranges``) fill the gaps. If a scored range extends beyond the documents or overlaps a longer one, only a
    part of it counts.

    >>> parts, scored = document_ranges(1319, 500), [DocumentRange(first=0, last=200)]
    >>> [str(piece.counted) for piece in cover_documents(sample_ranges(1319, 0, 500), parts, scored)]
    ['documents 1 to 200', 'documents 201 to 500']
    """
    pieces: list[Piece] = []
    missing = [(each.first, each.last) for each in sample]
    # A range that is still to be scored is cut to the missing documents, so all of it counts.
    for part in sorted(scored_ranges, key=lambda each: (-len(each), each.first)):
        missing = _add_pieces(part, missing, pieces, is_scored=True)
    for part in parts:
        missing = _add_pieces(part, missing, pieces, is_scored=False)
    start = sample[0].first
    return tuple(sorted(pieces, key=lambda piece: (piece.counted.first < start, piece.counted.first)))


def _add_pieces(
    part: DocumentRange, missing: Sequence[tuple[int, int]], pieces: list[Piece], *, is_scored: bool
) -> list[tuple[int, int]]:
    """Add the overlap of ``part`` with the missing documents to ``pieces``, and return the remaining gaps.

    A part that is not scored yet is cut to the overlap; a scored one is kept whole.
    """
    gaps = []
    for begin, end in missing:
        first, last = max(begin, part.first), min(end, part.last)
        if first >= last:
            gaps.append((begin, end))
            continue
        counted = DocumentRange(first=first, last=last)
        pieces.append(Piece(part if is_scored else counted, counted))
        gaps += [gap for gap in ((begin, first), (last, end)) if gap[0] < gap[1]]
    return gaps


def order_documents(sizes: Mapping[str, int], seed: int) -> list[tuple[str, int]]:
    """Return all documents in the order in which they are scored, shuffled across tasks.

    Each document is a pair of task name and position in the task's data. The same arguments always give the same order.
    ``sizes`` holds the number of documents by task name.
    """
    every = [(task, doc) for task, size in sizes.items() for doc in range(size)]
    return sorted(every, key=lambda item: document_sort_key(item[0], item[1], seed))


def document_sort_key(task: str, doc: int, seed: int = 0) -> bytes:
    """Return a hash that identifies a document. Sorting documents by it yields a fixed random order."""
    return hashlib.sha256(f"{seed}/{task}/{doc}".encode()).digest()


def documents_of_range(
    sizes: Mapping[str, int], seed: int, part: DocumentRange, only: Container[tuple[str, int]] | None = None
) -> dict[str, list[int]]:
    """Return the ascending positions of the documents in one range of the scoring order, by task.

    ``sizes`` holds the number of documents by task name. ``only`` holds the documents that belong to the order, as
    pairs of task name and position. None: all documents.
    """
    every = order_documents(sizes, seed)
    counted = every if only is None else [document for document in every if document in only]
    by_task: dict[str, list[int]] = {}
    for task, doc in sorted(counted[part.first : part.last]):
        by_task.setdefault(task, []).append(doc)
    return by_task


class DocumentSplits(BaseModel):
    """Sizes and seed of the division of a task's documents.

    Args:
        search, confirmation: Smallest number of documents in these sets. The last cluster of a set may exceed it. The
            remaining documents belong to the gate.
        seed: Seed of the division.
        together: Document field whose value names the cluster, or ``task`` to keep each task of a group together. None:
            only equal documents stay together, as they always do.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    search: int = Field(ge=1)
    confirmation: int = Field(ge=1)
    seed: int = Field(default=0, ge=0)
    together: str | None = None

    def of(self, name: SetName) -> DocumentSet:
        """Return the set with this name."""
        return DocumentSet(division=self, name=name)


class DocumentSet(BaseModel):
    """One of the three sets of a task's documents."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    division: DocumentSplits
    name: SetName


def split_documents(
    documents: Iterable[tuple[D, str]], division: DocumentSplits, task: str
) -> Mapping[SetName, frozenset[D]]:
    """Assign each document to one set.

    ``documents`` holds pairs of a document and its cluster's name; a document without a cluster needs a unique name.
    Clusters are sorted by a hash of their name. The first ones fill ``search``, the next ones ``confirmation``.

    Raises:
        InvalidInput: If no document would be left for the gate.
    """
    clusters: dict[str, list[D]] = {}
    for document, cluster in documents:
        clusters.setdefault(cluster, []).append(document)
    sets: dict[SetName, list[D]] = {"search": [], "confirmation": [], "gate": []}
    names = {name: f"division {division.seed}/{name}".encode(errors="surrogatepass") for name in clusters}
    for cluster in sorted(clusters, key=lambda name: hashlib.sha256(names[name]).digest()):
        if len(sets["search"]) < division.search:
            sets["search"] += clusters[cluster]
        elif len(sets["confirmation"]) < division.confirmation:
            sets["confirmation"] += clusters[cluster]
        else:
            sets["gate"] += clusters[cluster]
    if not sets["gate"]:
        total = sum(map(len, clusters.values()))
        raise InvalidInput(
            f"{task}: sweep.documents",
            found=f"{total:,} documents in {len(clusters):,} clusters, which leaves no document for the gate",
            expected=f"more than the {division.search:,} of the search and the {division.confirmation:,} of the "
            "confirmation",
            remedy="reduce sweep.documents.search and confirmation, or use a task with more documents",
        )
    return {name: frozenset(members) for name, members in sets.items()}
