"""Measure rankings: score texts for queries, and compute how high the relevant ones rank, or would by chance.

An embedding model scores with its own prompts, pooling and similarity function, as in sentence-transformers. It reads
each text once, in batches of similar length. The embeddings are held in float32, which takes 400 MB for 100,000 texts
with 1,024 dimensions, and those of a whole corpus stay in memory for the next sample of queries. A cross-encoder reads
each pair of query and text. Its scores are those before the activation function, because a sigmoid rounds all high
scores to 1, which ties them. The activation function does not change the order.

Padding changes scores by about the precision of the dtype: about 1e-7 of the largest score in
float32, and 1e-2 in bfloat16.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from mergegate.merge_core.errors import InvalidInput

if TYPE_CHECKING:
    from mergegate.tasks.models.checkpoints import LoadedModel, TellProgress

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
    if query.candidates is not None:
        return query.texts[query.candidates[int(np.argmax(scores))]]
    if query.own_text is not None:
        scores = scores.copy()
        scores[query.own_text] = -np.inf
    return query.texts[int(np.argmax(scores))]


_BATCHES = 32  # Number of batches that are tokenized together.
_QUERIES = 32  # Number of queries that are compared with all texts at the same time.
# Largest number of texts that a cross-encoder reads for one query.
_MOST_PAIRS = 1000


@dataclass(frozen=True)
class _CorpusEmbeddings:
    """Embeddings of a whole corpus, with the prompt that precedes each text. ``matrix`` is ``[texts, dimensions]``."""

    texts: Sequence[str]
    prompt: str | None
    matrix: Any


# Cached embeddings of the last whole corpus, which several samples of queries need. They live as long as their model.
_last_corpus: WeakKeyDictionary[Any, _CorpusEmbeddings] = WeakKeyDictionary()


def score_texts(
    model: LoadedModel,
    queries: Sequence[RankedQuery],
    batch_size: int,
    on_progress: TellProgress,
    prompts: Mapping[str, str | None] | None = None,
) -> Iterator[TextScores]:
    """Yield the scores of the candidates of each query, in the order of the candidates. Higher is better.

    Args:
        model: Embedding model or cross-encoder.
        queries: Queries that share their texts.
        batch_size: Number of texts or pairs in a batch.
        on_progress: Function that is called with the number of texts or pairs that were read, and the total number.
        prompts: Texts that precede each ``query`` and ``document``. Default: those of the model.
    """
    if model.kind.name == "cross-encoder":
        return _score_pairs(model, queries, batch_size, on_progress)
    return _compare_embeddings(model, queries, batch_size, on_progress, prompts or {})


def _compare_embeddings(
    model: LoadedModel,
    queries: Sequence[RankedQuery],
    batch_size: int,
    on_progress: TellProgress,
    prompts: Mapping[str, str | None],
) -> Iterator[TextScores]:
    import torch

    texts, prompt = queries[0].texts, prompts.get("document")
    is_whole = any(query.candidates is None for query in queries)
    if is_whole:
        positions = list(range(len(texts)))
    else:
        positions = sorted({at for query in queries for at in query.candidates or ()})
    corpus = _last_corpus.get(model.network) if is_whole else None
    if corpus and (corpus.texts is not texts or corpus.prompt != prompt):
        corpus = None
    total = len(queries) + (0 if corpus else len(positions))
    query_parts = _embed(
        model.network.encode_query, [str(query["query"]) for query in queries], batch_size, prompts.get("query")
    )
    query_matrix = _join(query_parts, len(queries), lambda done: on_progress(done, total))
    if corpus is None:
        parts = _embed(model.network.encode_document, [texts[at] for at in positions], batch_size, prompt)
        matrix = _join(parts, len(positions), lambda done: on_progress(len(queries) + done, total))
        corpus = _CorpusEmbeddings(texts, prompt, matrix)
    if is_whole:
        _last_corpus.clear()
        _last_corpus[model.network] = corpus
    row_of = {at: row for row, at in enumerate(positions)}
    for start in range(0, len(queries), _QUERIES):
        block = queries[start : start + _QUERIES]
        block_matrix = query_matrix.index_select(0, torch.arange(start, start + len(block)))
        similarity = model.network.similarity(block_matrix, corpus.matrix)
        dense = (similarity.to_dense() if similarity.is_sparse else similarity).double().numpy()
        for query, scores in zip(block, dense, strict=True):
            if query.candidates is not None:
                scores = scores[[row_of[at] for at in query.candidates]]
            _require_finite(scores, query)
            yield scores


def _embed(encode: Any, texts: Sequence[str], batch_size: int, prompt: str | None) -> Iterator[tuple[list[int], Any]]:
    """Yield embeddings in float32 on the CPU, with the positions of their texts, those of long texts first."""
    import torch

    order = sorted(range(len(texts)), key=lambda at: -len(texts[at]))
    step = _BATCHES * batch_size
    for start in range(0, len(order), step):
        chunk = order[start : start + step]
        options: dict[str, Any] = {"batch_size": batch_size, "show_progress_bar": False, "convert_to_tensor": True}
        if prompt is not None:
            options["prompt"] = prompt
        embeddings = encode([texts[at] for at in chunk], **options).detach().cpu().float()
        values = embeddings.coalesce() if embeddings.is_sparse else embeddings
        finite = torch.isfinite(values.values() if embeddings.is_sparse else values)
        if not bool(finite.all()):
            row = values.indices()[0][~finite][0] if embeddings.is_sparse else (~finite.all(dim=1)).nonzero()[0]
            raise _not_finite(texts[chunk[int(row)]], "its embedding")
        yield chunk, values


def _join(parts: Iterator[tuple[list[int], Any]], count: int, on_progress: Any) -> Any:
    """Return a matrix with the embedding of each text in the row of its position."""
    import torch

    joined: Any = None
    sparse: list[Any] = []
    order: list[int] = []
    for chunk, embeddings in parts:
        if embeddings.is_sparse:
            sparse.append(embeddings)
        else:
            joined = torch.empty(count, embeddings.shape[1]) if joined is None else joined
            joined[chunk] = embeddings
        order += chunk
        on_progress(len(order))
    if not sparse:
        return joined
    rows = torch.empty(count, dtype=torch.long)
    rows[order] = torch.arange(count)
    return torch.cat(sparse).index_select(0, rows).coalesce()


def _score_pairs(
    model: LoadedModel, queries: Sequence[RankedQuery], batch_size: int, on_progress: TellProgress
) -> Iterator[TextScores]:
    import torch

    largest = max(queries, key=lambda query: query.size)
    if largest.size > _MOST_PAIRS:
        raise InvalidInput(
            f"query {_quote(largest['query'])}",
            found=f"{largest.size} texts to rank, and a cross-encoder reads each of them with the query",
            expected=f"at most {_MOST_PAIRS}",
            remedy="list candidates under 'negatives', such as the best texts of an embedding model",
        )
    total, done = sum(query.size for query in queries), 0
    remaining = iter(queries)
    options = {"batch_size": batch_size, "show_progress_bar": False, "convert_to_tensor": True}
    while block := list(islice(remaining, max(1, _BATCHES * batch_size // max(largest.size, 1)))):
        pairs = [
            (str(query["query"]), query.texts[at])
            for query in block
            for at in (range(len(query.texts)) if query.candidates is None else query.candidates)
        ]
        scores = model.network.predict(pairs, activation_fn=torch.nn.Identity(), **options)
        values = scores.detach().float().cpu().double().reshape(len(pairs), -1)
        if values.shape[1] != 1:
            raise InvalidInput("the cross-encoder", found=f"{values.shape[1]} scores for a pair", expected="one score")
        start = 0
        for query in block:
            row = values[start : start + query.size, 0].numpy()
            start += query.size
            _require_finite(row, query)
            yield row
        done += len(pairs)
        on_progress(done, total)


def _require_finite(scores: TextScores, query: RankedQuery) -> None:
    if not np.isfinite(scores).all():
        raise _not_finite(str(query["query"]), "its similarity to a text")


def _not_finite(text: str, quantity: str) -> InvalidInput:
    return InvalidInput(
        f"text {_quote(text)}",
        found=f"{quantity} contains NaN or infinity",
        expected="finite numbers",
        remedy="check the weights of the model, or use dtype: float32",
    )


def _quote(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")
