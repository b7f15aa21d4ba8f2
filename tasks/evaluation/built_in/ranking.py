"""Measure rankings: how high a model ranks the relevant texts of a query, and how high a random ranking would."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

TextScores = NDArray[np.float64]

METRICS = "ndcg@k, mrr, mrr@k, map@k, recall@k, hit_rate@k or accuracy, with k from 1 to 1000"
_METRIC = re.compile(r"(ndcg|mrr|map|recall|hit_rate)@([1-9]\d{0,2}|1000)")
# Scores are rounded to multiples of about this share of the largest one of a query, so that noise in float32 rarely
# breaks ties.
_RESOLUTION = 2.0**-20


class RankedQuery(dict[str, Any]):
    """One document of a ranking task: a query, the texts that a model ranks for it, and which of them are relevant.

    As a mapping, it is the plain data of the document, which identifies it.

    Args:
        data: Plain data, with the text of the query under ``query``.
        texts: Texts that all queries of the task share.
        gains: Relevance of the relevant texts by position in ``texts``. All values are positive.
        candidates: Positions of the texts to rank. None: all texts.
        lost_gains: Relevance of texts that are not among the candidates, so that no model can find them.
        own_text: Position of the query itself in ``texts``, if it is not a candidate and all others are.
    """

    __slots__ = ("candidates", "gains", "lost_gains", "own_text", "texts")

    def __init__(
        self,
        data: Mapping[str, Any],
        texts: Sequence[str],
        gains: Mapping[int, float],
        candidates: Sequence[int] | None = None,
        lost_gains: Sequence[float] = (),
        own_text: int | None = None,
    ) -> None:
        super().__init__(data)
        self.texts, self.gains, self.candidates = texts, gains, candidates
        self.lost_gains, self.own_text = tuple(lost_gains), own_text

    @property
    def size(self) -> int:
        """Number of texts to rank."""
        if self.candidates is None:
            return len(self.texts) - (self.own_text is not None)
        return len(self.candidates)

    @property
    def ideal(self) -> tuple[float, ...]:
        """Relevance of all relevant texts, the largest first. It includes those that no model can find."""
        return tuple(sorted((*self.gains.values(), *self.lost_gains), reverse=True))


@dataclass(frozen=True)
class RankMetric:
    """A metric of one ranking, in [0, 1]. Only the first ``k`` texts count; None: all."""

    name: str
    k: int | None = None

    def measure(self, relevant_texts: Sequence[tuple[int, float]], ideal: Sequence[float]) -> float:
        """Return the score of a ranking.

        Args:
            relevant_texts: Rank (from 0) and relevance of each relevant text in the ranking, in the order of the ranks.
            ideal: See ``RankedQuery.ideal``. Empty: the query has no relevant text and scores 0.
        """
        k = math.inf if self.k is None else self.k
        ranks = [rank for rank, _ in relevant_texts if rank < k]
        if self.name == "mrr":
            return 1 / (ranks[0] + 1) if ranks else 0.0
        if self.name == "hit_rate":
            return float(bool(ranks))
        if not ideal:
            return 0.0
        if self.name == "recall":
            return len(ranks) / len(ideal)
        if self.name == "map":
            return sum(count / (rank + 1) for count, rank in enumerate(ranks, 1)) / len(ideal)
        gain = sum(relevance / math.log2(rank + 2) for rank, relevance in relevant_texts if rank < k)
        return gain / sum(relevance / math.log2(rank + 2) for rank, relevance in enumerate(islice(ideal, self.k)))

    def chance(self, size: int, gains: Sequence[float], ideal: Sequence[float]) -> float:
        """Return the expected score of a random ranking of ``size`` texts, of which some have these ``gains``."""
        relevant, last = len(gains), size if self.k is None else min(self.k, size)
        if not relevant:
            return 0.0
        if self.name in ("mrr", "hit_rate"):
            return _expected_first(size, relevant, last, self.name == "mrr")
        if self.name == "recall":
            return relevant * last / size / len(ideal)
        ranks = np.arange(last)
        if self.name == "map":
            # The share (relevant - 1) / (size - 1) of the texts before a relevant one is relevant.
            before = ranks * (relevant - 1) / max(size - 1, 1)
            return float(np.sum((1 + before) / (ranks + 1)) * relevant / size / len(ideal))
        best = sum(relevance / math.log2(rank + 2) for rank, relevance in enumerate(islice(ideal, self.k)))
        return float(np.sum(1 / np.log2(ranks + 2)) * sum(gains) / size / best)


@lru_cache(maxsize=4096)
def _expected_first(size: int, relevant: int, last: int, is_reciprocal: bool) -> float:
    """Return the expected reciprocal rank of the first relevant text within ``last`` ranks.

    If not ``is_reciprocal``, return the probability that a relevant text is within them.
    """
    ranks = np.arange(min(last, size - relevant + 1))
    # Probability that no text up to each rank is relevant, if ``relevant`` of ``size`` texts are.
    missed = np.cumprod((size - relevant - ranks) / (size - ranks))
    first = np.concatenate([[1.0], missed[:-1]]) - missed
    return float(np.sum(first / (ranks + 1)) if is_reciprocal else np.sum(first))


def parse_metric(text: str) -> RankMetric:
    """Parse the name of a metric. mteb's names, such as ``ndcg_at_10``, are also accepted.

    Raises:
        ValueError: The metric is unknown.
    """
    name = text.replace("_at_", "@")
    if name == "accuracy":
        return RankMetric("hit_rate", 1)
    if name == "mrr":
        return RankMetric("mrr")
    if match := _METRIC.fullmatch(name):
        return RankMetric(match[1], int(match[2]))
    raise ValueError(f"{text!r} is not a metric of rankings. Use {METRICS}")


def find_relevant_texts(query: RankedQuery, scores: TextScores) -> list[tuple[int, float]]:
    """Return rank (from 0) and relevance of the relevant texts of a query, in the order of the ranks.

    Ties count against the model: of texts with equal scores, the least relevant comes first. The order
    in a file therefore does not help a model that gives all texts the same score.

    Args:
        query: Query and candidates.
        scores: Scores of the candidates. Higher is better.
    """
    largest = float(np.abs(scores).max(initial=0.0))
    step = _RESOLUTION * 2.0 ** math.ceil(math.log2(largest)) if largest > 0 else 1.0
    scores = np.round(scores / step)
    if query.candidates is None:
        gains = np.zeros(len(scores))
        gains[list(query.gains)] = list(query.gains.values())
        if query.own_text is not None:
            scores[query.own_text] = -np.inf
    else:
        gains = np.array([query.gains.get(text, 0.0) for text in query.candidates])
    relevant = np.flatnonzero(gains)
    ranks = (
        int(np.sum(scores > scores[at]) + np.sum((scores == scores[at]) & (gains < gains[at])))
        + int(np.sum((scores[:at] == scores[at]) & (gains[:at] == gains[at])))
        for at in relevant
    )
    return sorted(zip(ranks, gains[relevant].tolist(), strict=True))


def best_candidate(query: RankedQuery, scores: TextScores) -> str:
    """Return the text with the highest score."""
    if query.candidates is not None:
        return query.texts[query.candidates[int(np.argmax(scores))]]
    if query.own_text is not None:
        scores = scores.copy()
        scores[query.own_text] = -np.inf
    return query.texts[int(np.argmax(scores))]
