"""Estimate on how many documents a merge that is as good as its reference will differ from it.

The first source with data provides the estimate: merges of recent runs, evaluated models with a similar score, or
``evaluate.discordance`` of the profile.

Two models of different skill differ on more documents than an equal merge and its reference, because the better one
also wins documents. The estimate removes this part: each document that the weaker model wins is paired with a document
that it loses, and the other losses do not count. Models with less than half or more than twice the score of the
reference are ignored. If several models remain, the nearest to the reference is used, because a merge is between its
parents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.evaluation import SCORES_FILE, DocumentScore, Scores, choose_metrics, read_document_scores
from mergegate.tasks.gate.settings import BEST_PARENT, Guard
from mergegate.tasks.store import Artifact

MIN_DOCUMENTS = 20  # Smallest number of documents from which a share is estimated.
_MAX_RUNS = 5  # Number of recent runs to use.
_COMPARABLE = 0.5  # Smallest comparable score, as a share of the better score.


class PastGuardOutcome(NamedTuple):
    """Comparison of an earlier merge with its reference, for a guard that did not fail.

    Args:
        documents: Number of documents on which merge and reference were compared.
        differing: Number of those documents on which they differed.
    """

    task: str
    reference: str
    documents: int
    differing: int


class Discordance(BaseModel):
    """Expected share of the documents of a task on which a merge and its reference disagree.

    For graded scores it is the mean squared difference. For scores of 0 or 1 the two are equal.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    share: float  # In (0, 1].
    documents: int = 0  # Number of compared documents; 0 if the share is an assumption.
    models: tuple[str, ...] = ()  # The two compared models; empty for merges of earlier runs.
    nights: int = 0  # Number of earlier runs whose merges were compared.

    def __str__(self) -> str:
        """Return ``7 % of answers differ (estimated from how math and base disagree on 400 documents, …)``."""
        if not self.documents:
            return f"{100 * self.share:g} % of answers differ (assumed, see evaluate.discordance)"
        share = f"{100 * self.share:.1f}".removesuffix(".0")
        if self.nights == 1:
            source = "the merge of the last run differed"
        elif self.nights:
            source = f"the merges of the last {self.nights} runs differed"
        else:
            source = f"{' and '.join(self.models)} disagree"
        correction = "" if self.nights else ", net of their skill gap"
        return f"{share} % of answers differ (estimated from how {source} on {self.documents:,} documents{correction})"


def find_past_discordance(guard: Guard, outcomes: Sequence[PastGuardOutcome]) -> Discordance | None:
    """Return the discordance of recent merges with the guard's reference on its task, or None with too few documents.

    One document that counts as half different is added, because no difference in 100 documents does not prove that
    there will never be one. ``outcomes`` come from earlier runs of the profile, oldest first.
    """
    matching = [
        outcome
        for outcome in outcomes
        if outcome.task == guard.task and guard.guarded_by in (outcome.reference, BEST_PARENT)
    ]
    recent = matching[-_MAX_RUNS:]
    documents = sum(outcome.documents for outcome in recent)
    if documents < MIN_DOCUMENTS:
        return None
    share = (sum(outcome.differing for outcome in recent) + 0.5) / (documents + 1)
    return Discordance(share=share, documents=documents, nights=len(recent))


def estimate_discordance(guard: Guard, scores: Mapping[str, Sequence[Artifact[Scores]]], guess: float) -> Discordance:
    """Return the discordance of the guard's reference with the evaluated model that differs least from it.

    ``scores`` holds the stored scores on the guard's task, by model. If no model with a similar score shares at least
    ``MIN_DOCUMENTS`` documents with the reference, the result is ``guess``.
    """
    by_model = {name: scored for name, parts in scores.items() if (scored := _read_scores(guard, parts))}
    if not by_model:
        return Discordance(share=guess)
    # If the guard names 'best parent' or a model without scores, the best model with scores is the reference.
    means = {name: fmean(scored.values()) for name, scored in by_model.items()}
    reference = guard.guarded_by if guard.guarded_by in by_model else max(means, key=means.__getitem__)
    reference_scores = by_model.pop(reference)
    shares: dict[str, tuple[float, int]] = {}  # Share and number of documents, by model.
    for name, scored in by_model.items():
        shared = reference_scores.keys() & scored.keys()
        if len(shared) < MIN_DOCUMENTS:
            continue
        sums = [math.fsum(values[document] for document in shared) for values in (reference_scores, scored)]
        if min(sums) < _COMPARABLE * max(sums):
            continue
        # Count as many losses as wins, plus half a document as in ``find_past_discordance``.
        differences = [reference_scores[document] - scored[document] for document in shared]
        won = math.fsum(change**2 for change in differences if change > 0)
        lost = math.fsum(change**2 for change in differences if change < 0)
        shares[name] = (2 * min(won, lost) + 0.5) / (len(shared) + 1), len(shared)
    if not shares:
        return Discordance(share=guess)
    nearest = min(shares, key=lambda name: shares[name][0])
    share, documents = shares[nearest]
    return Discordance(share=share, documents=documents, models=(reference, nearest))


def _read_scores(guard: Guard, parts: Sequence[Artifact[Scores]]) -> dict[tuple[str, ...], float]:
    """Return each document's score by the guard's metric, in [0, 1]. Empty if the model has no such scores."""
    rows: dict[tuple[str, int, str], DocumentScore] = {}
    for part in parts:
        for row in read_document_scores(part.directory / SCORES_FILE):
            rows[row.task, row.doc_id, row.metric] = row
    if not rows:
        return {}
    low, high = guard.score_range
    try:
        rows_of_metric = choose_metrics(rows.values(), guard.metric, guard.task).select(rows.values())
    except InvalidInput:  # The gate reports this error. The estimate works without these scores.
        return {}
    return {
        (row.task, str(row.doc_id), row.doc_hash, row.prompt_hash): (row.outcome - low) / (high - low)
        for row in rows_of_metric
    }
