"""On how many documents two models disagree: from scores that are known before the night, else as the profile guesses.

Fine-tunes of one base differ from each other as a merge of them will differ from one of them, or more. So what is
measured errs to the safe side: an equal merge is published rather more often than is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from pydantic import BaseModel, ConfigDict

from merge_core.errors import InvalidInput
from merge_core.store import Artifact
from tasks.evaluation import SCORES_FILE, DocumentScore, Scores, choose_metrics, read_document_scores
from tasks.gate.guards import Guard

FEWEST = 20  # documents from which a share of them is told


class Discordance(BaseModel):
    """Share of the documents of a task on which two models disagree; of graded scores, the mean squared difference,
    which is the same thing where scores are 0 or 1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    share: float  # in (0, 1]
    documents: int = 0  # that it was counted on; 0: it is a guess
    models: tuple[str, ...] = ()

    def __str__(self) -> str:
        """``7 % of answers differ (from 400 documents of reverser and shifter)``."""
        if not self.documents:
            return f"{100 * self.share:g} % of answers differ (a guess)"
        *others, last = self.models
        share = f"{100 * self.share:.1f}".removesuffix(".0")
        return f"{share} % of answers differ (from {self.documents:,} documents of {', '.join(others)} and {last})"


def known_discordance(guard: Guard, scores: Mapping[str, Sequence[Artifact[Scores]]], guess: float) -> Discordance:
    """Discordance on the guard's task, the mean over all pairs of models on the documents that all of them share.

    One document more, of which half differ, is added to what was seen: from none of 100 it does not follow that none
    ever will.

    Args:
        scores: By model, all that is known of its scores on that task.
        guess: Where fewer than two models have scores of ``FEWEST`` documents that can be compared.
    """
    known = {name: judged for name, parts in scores.items() if (judged := _judged(guard, parts))}
    if len(known) < 2:
        return Discordance(share=guess)
    common = set.intersection(*(set(each) for each in known.values()))
    if len(common) < FEWEST:
        return Discordance(share=guess)
    pairs = list(combinations(known.values(), 2))
    squared = sum((one[at] - other[at]) ** 2 for one, other in pairs for at in common) / len(pairs)
    return Discordance(share=(squared + 0.5) / (len(common) + 1), documents=len(common), models=tuple(known))


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
