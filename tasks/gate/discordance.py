"""On how many documents a merge that is as good as its reference will differ from it: as merges of the last nights did,
else as other models of the family do that are about as good, else as the profile guesses.

Models of different skills differ on far more documents than such a merge will: what one of them simply does better is
no difference that an equal merge has. So of a pair only that counts which is lost here and won there, and only of a
pair of which neither has less than half the other's score; the least of several pairs, because a merge lies between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.evaluation import SCORES_FILE, DocumentScore, Scores, choose_metrics, read_document_scores
from mergegate.tasks.gate.guards import BEST_PARENT, Guard
from mergegate.tasks.store import Artifact

FEWEST = 20  # documents from which a share of them is told
_NIGHTS = 5  # that count, the last ones
_COMPARABLE = 0.5  # of the better score

Judged = Mapping[tuple[str, ...], float]


class PastGuardOutcome(NamedTuple):
    """A guard of an earlier night that its merge did not fail.

    Args:
        documents: That merge and reference were compared on, and how many they differed on.
    """

    task: str
    reference: str
    documents: int
    differing: int


class Discordance(BaseModel):
    """Share of the documents of a task on which a merge and its reference are expected to disagree; of graded scores,
    the mean squared difference, which is the same thing where scores are 0 or 1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    share: float  # in (0, 1]
    documents: int = 0  # that it was counted on; 0: it is a guess
    models: tuple[str, ...] = ()  # the pair that it was counted on
    nights: int = 0  # whose merges it was counted on

    def __str__(self) -> str:
        """``7 % of answers differ (as of math and base on 400 documents, but for what one does better)``."""
        if not self.documents:
            return f"{100 * self.share:g} % of answers differ (a guess)"
        share = f"{100 * self.share:.1f}".removesuffix(".0")
        return f"{share} % of answers differ ({self._basis()})"

    def _basis(self) -> str:
        documents = f"{self.documents:,} documents"
        if self.nights:
            nights = "the last night's merge" if self.nights == 1 else f"the merges of the last {self.nights} nights"
            return f"as of {nights} on {documents}"
        return f"as of {' and '.join(self.models)} on {documents}, but for what one does better"


def find_past_discordance(guard: Guard, nights: Sequence[PastGuardOutcome]) -> Discordance | None:
    """As the merges of the last nights differed from the same reference on the same task; None where there are none.

    One document more, of which half differ, is added to what was seen: from none of 100 it does not follow that none
    ever will.

    Args:
        nights: Of the profile, in their order.
    """
    found = [one for one in nights if one.task == guard.task and guard.guarded_by in (one.reference, BEST_PARENT)]
    last = found[-_NIGHTS:]
    documents = sum(one.documents for one in last)
    if documents < FEWEST:
        return None
    share = (sum(one.differing for one in last) + 0.5) / (documents + 1)
    return Discordance(share=share, documents=documents, nights=len(last))


def known_discordance(guard: Guard, scores: Mapping[str, Sequence[Artifact[Scores]]], guess: float) -> Discordance:
    """As the guard's reference differs from the other model that is nearest to it, on documents that both share.

    Args:
        scores: By model, all that is known of its scores on that task.
        guess: Where no other model that is about as good has scores of ``FEWEST`` documents.
    """
    known = {name: judged for name, parts in scores.items() if (judged := _judged(guard, parts))}
    if not known:
        return Discordance(share=guess)
    # Of the best parent, and of a release that is not here, the best of those that are known stands for the reference.
    reference = guard.guarded_by if guard.guarded_by in known else max(known, key=lambda name: _mean(known[name]))
    own = known.pop(reference)
    pairs = {name: (len(own.keys() & other.keys()), _exchanged(own, other)) for name, other in known.items()}
    told = {name: (n, share) for name, (n, share) in pairs.items() if share is not None}
    if not told:
        return Discordance(share=guess)
    nearest = min(told, key=lambda name: told[name][1])
    documents, share = told[nearest]
    return Discordance(share=share, documents=documents, models=(reference, nearest))


def _exchanged(one: Judged, other: Judged) -> float | None:
    """Share of the documents that are lost in one direction and won in the other; None where the two do not compare.
    As in :func:`find_past_discordance`, with one document more."""
    common = one.keys() & other.keys()
    if len(common) < FEWEST:
        return None
    differences = [one[at] - other[at] for at in common]
    lower, higher = sorted(math.fsum(each[at] for at in common) for each in (one, other))
    if lower < _COMPARABLE * higher:
        return None
    won = math.fsum(change**2 for change in differences if change > 0)
    lost = math.fsum(change**2 for change in differences if change < 0)
    return (2 * min(won, lost) + 0.5) / (len(common) + 1)


def _mean(judged: Judged) -> float:
    return math.fsum(judged.values()) / len(judged)


def _judged(guard: Guard, parts: Sequence[Artifact[Scores]]) -> dict[tuple[str, ...], float]:
    """Score in [0, 1] of each document as it was asked, under the metric of the guard; empty where there is none."""
    rows: dict[tuple[str, int, str], DocumentScore] = {}
    for part in parts:
        for row in read_document_scores(part.directory / SCORES_FILE):
            rows[row.task, row.doc_id, row.metric] = row
    if not rows:
        return {}
    low, high = guard.score_range
    try:
        chosen = choose_metrics(rows.values(), guard.metric, guard.task).chosen(rows.values())
    except InvalidInput:  # the gate will say so; here it is only nothing to learn from
        return {}
    return {
        (row.task, str(row.doc_id), row.doc_hash, row.prompt_hash): (row.outcome - low) / (high - low) for row in chosen
    }
