"""Score texts for queries with an embedding model or a cross-encoder, as sentence-transformers does.

An embedding model scores with its own prompts, pooling and similarity function. It reads each text once, in batches of
similar length. The embeddings are held in float32, which takes 400 MB for 100,000 texts with 1,024 dimensions, and
those of a whole corpus stay in memory for the next sample of queries. A cross-encoder reads each pair of query and
text. Its scores are those before the activation function, because a sigmoid rounds all high scores to 1, which ties
them. The activation function does not change the order.

Padding changes scores by about the precision of the dtype: about 1e-7 of the largest score in
float32, and 1e-2 in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.evaluation.built_in.ranking import RankedQuery, TextScores

if TYPE_CHECKING:
    from mergegate.tasks.checkpoints import LoadedModel, TellProgress

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

    Raises:
        InvalidInput: A score is not a finite number, or a cross-encoder would read too many pairs.
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
