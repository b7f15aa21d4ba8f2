"""Three disjoint sets of documents: what a search may look at, what confirms its winner, and what the gate asks.

Whoever looks sixty times at the same documents finds something that is good on these documents. So each document is in
one set, for good: by a hash of what it says, not by its position, so that another order of the data or a document more
moves no other one. What belongs together (a passage's questions, a subject, equal documents) is in one set together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from mergegate.merge_core.errors import InvalidInput

SetName = Literal["search", "confirmation", "gate"]
D = TypeVar("D")


class DocumentSplits(BaseModel):
    """How the documents of a task are divided.

    Args:
        search, confirmation: Documents of these sets; as many more as the last cluster has. All others are the gate's.
        seed: Another one, another division.
        together: What keeps documents together beside being equal: ``task``, those of one task below a group; else a
            field of the documents. None: nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    search: int = Field(ge=1)
    confirmation: int = Field(ge=1)
    seed: int = Field(default=0, ge=0)
    together: str | None = None

    def of(self, name: SetName) -> DocumentSet:
        """One of the three sets."""
        return DocumentSet(division=self, name=name)


class DocumentSet(BaseModel):
    """One of the sets into which the documents of a task are divided."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    division: DocumentSplits
    name: SetName

    def among(self, documents: Iterable[tuple[D, str]], where: str) -> frozenset[D]:
        """The documents of this set, of all that there are.

        Raises:
            InvalidInput: as ``divide``.
        """
        return split_documents(documents, self.division, where)[self.name]


def split_documents(
    documents: Iterable[tuple[D, str]], division: DocumentSplits, where: str
) -> Mapping[SetName, frozenset[D]]:
    """All documents, each in one set.

    Clusters come in the order of a hash of their name; the first fill ``search``, those after them ``confirmation``.

    Args:
        documents: Each with the name of its cluster; of one that belongs with none, what tells it from all others.
        where: What messages call the task.

    Raises:
        InvalidInput: when nothing would be left for the gate.
    """
    clusters: dict[str, list[D]] = {}
    for document, cluster in documents:
        clusters.setdefault(cluster, []).append(document)
    sets: dict[SetName, list[D]] = {"search": [], "confirmation": [], "gate": []}
    for cluster in sorted(clusters, key=lambda name: _mixed(name, division.seed)):
        if len(sets["search"]) < division.search:
            sets["search"] += clusters[cluster]
        elif len(sets["confirmation"]) < division.confirmation:
            sets["confirmation"] += clusters[cluster]
        else:
            sets["gate"] += clusters[cluster]
    if not sets["gate"]:
        total = sum(map(len, clusters.values()))
        raise InvalidInput(
            f"{where}: sweep.documents",
            found=f"{total:,} documents in {len(clusters):,} clusters: none is left for the gate",
            expected=f"more than the {division.search:,} of the search and the {division.confirmation:,} of the "
            "confirmation",
            remedy="smaller sweep.documents.search and confirmation, or a task with more documents",
        )
    return {name: frozenset(members) for name, members in sets.items()}


def _mixed(cluster: str, seed: int) -> bytes:
    return hashlib.sha256(f"division {seed}/{cluster}".encode(errors="surrogatepass")).digest()
