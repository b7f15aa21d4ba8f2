"""Divide the documents of a task into three disjoint sets: for a search, for confirming its winner, and for the gate.

A search that evaluates the same documents sixty times finds a candidate that is good on these documents. Each
document therefore belongs permanently to one set. A hash of the document's text determines the set, so reordering the
data or adding a document moves no other document. Documents of one cluster (questions about one passage, one subject,
equal documents) are in the same set.
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
