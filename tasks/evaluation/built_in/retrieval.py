"""Rank texts for queries: the built-in task of embedding models and cross-encoders."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field

from mergegate.merge_core.architecture import TaskForm
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import LocalPath, parse_json_object, plain_file, read_plain
from mergegate.tasks.evaluation.built_in.contract import BuiltInScore, BuiltInTask, TaskDocument

if TYPE_CHECKING:
    from mergegate.tasks.checkpoints import LoadedModel, TellProgress

_MOST_BYTES = 1 << 30
_METRIC = re.compile(r"(ndcg|recall)@([1-9]\d{0,2})|mrr|accuracy")


def _check_metric(metric: str) -> str:
    if not _METRIC.fullmatch(metric):
        raise ValueError(f"{metric!r} is not a metric of retrieval: ndcg@10, mrr, recall@k or accuracy")
    return metric


class RetrievalTask(BuiltInTask):
    """Retrieval task: a model ranks the positives and negatives of each query.

    A document is ``{"query": text, "positives": [texts], "negatives": [texts]}``.
    """

    kind: Literal["retrieval"]
    data: LocalPath = Field(description="File with one JSON object per line: query, positives, negatives.")
    metric: Annotated[str, AfterValidator(_check_metric)] = Field(
        default="ndcg@10", description="ndcg@k, mrr, recall@k or accuracy (of the first text). Default: ndcg@10."
    )

    form: ClassVar[TaskForm] = "retrieval"
    libraries: ClassVar[tuple[str, ...]] = ("sentence-transformers",)

    @property
    def name(self) -> str:
        return self.data.stem

    @property
    def judged_by(self) -> str:
        return self.metric

    @property
    def metrics(self) -> Mapping[str, bool]:
        return dict.fromkeys(dict.fromkeys((self.metric, "ndcg@10", "mrr", "accuracy")), True)

    def resolve(self, root: Path) -> Self:
        return self.model_copy(update={"data": plain_file((root / self.data).absolute())})

    def files(self) -> tuple[Path, ...]:
        return (self.data,)

    def documents(self) -> Sequence[TaskDocument]:
        documents = []
        for number, line in enumerate(read_plain(self.data, _MOST_BYTES).splitlines(), 1):
            document = parse_json_object(line, f"{self.data}: line {number}")
            for key in ("positives", "negatives"):
                texts = document.get(key)
                if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts) or not texts:
                    raise InvalidInput(
                        f"{self.data}: line {number}: {key}", found=f"{texts!r:.60}", expected="a list of texts"
                    )
            if not isinstance(document.get("query"), str):
                raise InvalidInput(
                    f"{self.data}: line {number}: query", found=f"{document.get('query')!r:.60}", expected="a text"
                )
            documents.append(document)
        return documents

    def prompt_of(self, document: TaskDocument) -> str:
        return str(document["query"])

    def target_of(self, document: TaskDocument) -> str:
        return " | ".join(document["positives"])

    def score(
        self, model: LoadedModel, documents: Sequence[TaskDocument], batch_size: int, on_progress: TellProgress
    ) -> Iterator[BuiltInScore]:
        pools = [(*document["positives"], *document["negatives"]) for document in documents]
        similarities = _pair_scores if model.kind.name == "cross-encoder" else _embedding_scores
        rows = similarities(model, [str(document["query"]) for document in documents], pools, batch_size)
        for done, (document, pool, row) in enumerate(zip(documents, pools, rows, strict=True), 1):
            positives = len(document["positives"])
            # Ties count against the model: equal scores must not be right because of the order in the file.
            order = sorted(range(len(pool)), key=lambda at: (-row[at], at < positives))
            hits = [at < positives for at in order]
            on_progress(done, len(documents))
            yield BuiltInScore({metric: _measure(metric, hits) for metric in self.metrics}, pool[order[0]])


def _measure(metric: str, hits: Sequence[bool]) -> float:
    """Return the score of a ranking. ``hits`` tells for each rank whether its text is right."""
    if metric == "mrr":
        return 1 / (hits.index(True) + 1)
    if metric == "accuracy":
        return float(hits[0])
    name, _, k = metric.partition("@")
    right = sum(hits)
    if name == "recall":
        return sum(hits[: int(k)]) / right
    gain = sum(1 / math.log2(rank + 2) for rank, hit in enumerate(islice(hits, int(k))) if hit)
    return gain / sum(1 / math.log2(rank + 2) for rank in range(min(int(k), right)))


def _embedding_scores(
    model: LoadedModel, queries: Sequence[str], pools: Sequence[Sequence[str]], batch_size: int
) -> Iterator[list[float]]:
    texts = list(dict.fromkeys(text for pool in pools for text in pool))
    encode = {"batch_size": batch_size, "show_progress_bar": False, "convert_to_tensor": True}
    documents = model.network.encode_document(texts, **encode)
    position = {text: at for at, text in enumerate(texts)}
    for vector, pool in zip(model.network.encode_query(list(queries), **encode), pools, strict=True):
        candidates = documents[[position[text] for text in pool]]
        yield [round(float(score), 6) for score in model.network.similarity(vector[None], candidates)[0]]


def _pair_scores(
    model: LoadedModel, queries: Sequence[str], pools: Sequence[Sequence[str]], batch_size: int
) -> Iterator[list[float]]:
    pairs = [(query, text) for query, pool in zip(queries, pools, strict=True) for text in pool]
    scores = iter(model.network.predict(pairs, batch_size=batch_size, show_progress_bar=False).tolist())
    for pool in pools:
        yield [round(next(scores), 6) for _ in pool]
