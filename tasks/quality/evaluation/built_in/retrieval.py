"""Rank texts for queries: the built-in task of embedding models and cross-encoders.

Each line of the data is a query with the texts to rank::

    {"query": "capital of France", "positives": ["Paris is ..."], "negatives": ["Rome is ...", "Bread is ..."]}

A ``corpus`` file has a text in each line, ``{"id": ..., "text": ...}``. The positives and negatives are then ids. A
query without negatives is compared with all other texts of the corpus.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field

from mergegate.merge_core.architecture import TaskForm
from mergegate.merge_core.errors import InvalidInput, pip_command
from mergegate.merge_core.parsing import LocalPath, describe_kind, line_location, parse_line, plain_file, read_lines
from mergegate.tasks.quality.evaluation.built_in.contract import BuiltInScore, BuiltInTask, TaskDocument
from mergegate.tasks.quality.evaluation.built_in.ranking import (
    METRICS,
    RankedQuery,
    best_candidate,
    find_relevant_texts,
    parse_metric,
    score_texts,
)

if TYPE_CHECKING:
    from mergegate.tasks.models.checkpoints import LoadedModel, TellProgress

_LONGEST_LINE = 16 << 20
_MOST_LINES = 10_000_000
_MOST_SHOWN = 20  # Number of relevant texts that pages show.


def _check_metric(metric: str) -> str:
    parse_metric(metric)
    return metric.replace("_at_", "@")


RankMetricName = Annotated[str, AfterValidator(_check_metric)]
"""Name of a metric of rankings in a profile."""


class RankingTask(BuiltInTask):
    """Task in which a model ranks texts for queries."""

    metric: RankMetricName = Field(
        default="ndcg@10",
        description=f"Metric: {METRICS}. `accuracy` is the share of queries whose first text is relevant. Default: "
        "`ndcg@10`.",
    )

    form: ClassVar[TaskForm] = "retrieval"
    libraries: ClassVar[tuple[str, ...]] = ("sentence-transformers",)

    @property
    def judged_by(self) -> str:
        return self.metric

    @property
    def metrics(self) -> Mapping[str, bool]:
        return dict.fromkeys((self.metric, "ndcg@10", "mrr", "accuracy"), True)

    def resolve(self, root: Path) -> Self:
        require_package("sentence_transformers", "embeddings")
        return self

    def prompt_of(self, document: TaskDocument) -> str:
        return str(document["query"])

    def target_of(self, document: TaskDocument) -> str:
        query = _ranked_query(document)
        return " | ".join(query.texts[at] for at in list(query.gains)[:_MOST_SHOWN])

    def chance_of(self, document: TaskDocument) -> Mapping[str, float]:
        query = _ranked_query(document)
        gains, ideal = list(query.gains.values()), query.ideal
        return {metric: parse_metric(metric).chance(query.size, gains, ideal) for metric in self.metrics}

    def prompts_for(self, model: LoadedModel) -> Mapping[str, str | None]:
        """Return the prompts of ``query`` and ``document`` that replace the default ones of the model."""
        return {}

    def score(
        self, model: LoadedModel, documents: Sequence[TaskDocument], batch_size: int, on_progress: TellProgress
    ) -> Iterator[BuiltInScore]:
        queries = [_ranked_query(document) for document in documents]
        metrics = {name: parse_metric(name) for name in self.metrics}
        scores = score_texts(model, queries, batch_size, on_progress, self.prompts_for(model))
        for query, row in zip(queries, scores, strict=True):
            relevant_texts, ideal = find_relevant_texts(query, row), query.ideal
            values = {name: metric.measure(relevant_texts, ideal) for name, metric in metrics.items()}
            yield BuiltInScore(values, best_candidate(query, row))


def require_package(package: str, extra: str) -> Path:
    """Return the directory of an installed package without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise InvalidInput(
            "the environment",
            found=f"no package {package.replace('_', '-')}",
            expected="the package that evaluates this task",
            remedy=pip_command(f"mergegate[{extra}]"),
        )
    return Path(spec.origin).parent


def _ranked_query(document: TaskDocument) -> RankedQuery:
    assert isinstance(document, RankedQuery)
    return document


class RetrievalTask(RankingTask):
    """Retrieval task: a model ranks the positives and negatives of each query."""

    kind: Literal["retrieval"]
    data: LocalPath = Field(
        description='File with a query per line: `{"query": text, "positives": [texts], "negatives": [texts]}`.'
    )
    corpus: LocalPath | None = Field(
        default=None,
        description='File with a text per line: `{"id": id, "text": text}`. `positives` and `negatives` in `data` are '
        "then ids. A query without `negatives` is compared with all texts. Default: the texts are in `data`.",
    )

    path_fields: ClassVar[frozenset[str]] = frozenset({"data", "corpus"})

    @property
    def name(self) -> str:
        return self.data.stem

    def resolve(self, root: Path) -> Self:
        super().resolve(root)
        corpus = None if self.corpus is None else plain_file((root / self.corpus).absolute())
        return self.model_copy(update={"data": plain_file((root / self.data).absolute()), "corpus": corpus})

    def files(self) -> tuple[Path, ...]:
        return (self.data,) if self.corpus is None else (self.data, self.corpus)

    def documents(self) -> Sequence[TaskDocument]:
        lines = _read_objects(self.data)
        documents = _queries_with_texts(lines) if self.corpus is None else _queries_with_ids(lines, self.corpus)
        if not documents:
            raise InvalidInput(str(self.data), found="no line", expected="a query in each line")
        return documents


def _queries_with_texts(lines: Iterator[tuple[str, dict[str, Any]]]) -> list[RankedQuery]:
    """Return the queries of a file that contains their texts."""
    texts: dict[str, int] = {}
    parts = []
    for location, data in lines:
        _read_text(data, "query", location)
        positives = _read_texts(data, "positives", location)
        negatives = _read_texts(data, "negatives", location)
        _require_disjoint(positives, negatives, location)
        candidates = [texts.setdefault(text, len(texts)) for text in (*positives, *negatives)]
        parts.append((data, candidates, len(positives)))
    shared = tuple(texts)
    return [
        RankedQuery(data, shared, dict.fromkeys(candidates[:count], 1.0), candidates)
        for data, candidates, count in parts
    ]


def _queries_with_ids(lines: Iterator[tuple[str, dict[str, Any]]], corpus: Path) -> list[RankedQuery]:
    """Return the queries of a file that contains ids of texts in ``corpus``."""
    position: dict[str, int] = {}
    texts: list[str] = []
    content = hashlib.sha256()
    for location, entry in _read_objects(corpus):
        name = _read_text(entry, "id", location)
        if name in position:
            raise InvalidInput(
                f"{location}: id", found=f"{name!r}, which another line has", expected="a different id in each line"
            )
        position[name] = len(texts)
        texts.append(_read_text(entry, "text", location))
        content.update(f"{len(name)} {name} {len(texts[-1])} {texts[-1]}\n".encode())
    documents = []
    for location, data in lines:
        _read_text(data, "query", location)
        positives = _read_texts(data, "positives", location)
        negatives = _read_texts(data, "negatives", location) if "negatives" in data else ()
        _require_disjoint(positives, negatives, location)
        for key, ids in (("positives", positives), ("negatives", negatives)):
            if unknown := next((name for name in ids if name not in position), None):
                raise InvalidInput(
                    f"{location}: {key}",
                    found=f"{unknown!r}, which is not an id in {corpus.name}",
                    expected="ids of the corpus",
                )
        gains = {position[name]: 1.0 for name in positives}
        candidates = [position[name] for name in (*positives, *negatives)] if negatives else None
        if candidates is None and len(positives) == len(texts):
            raise InvalidInput(
                f"{location}: positives",
                found=f"all {len(texts)} texts of the corpus",
                expected="fewer, so that other texts can be ranked above them",
            )
        # Every text of the corpus affects the score of a query.
        documents.append(RankedQuery({**data, "corpus": content.hexdigest()}, texts, gains, candidates))
    return documents


def _read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in read_lines(path, longest=_LONGEST_LINE, most=_MOST_LINES):
        yield line_location(path, number), parse_line(line, path, number)


def _read_text(data: Mapping[str, Any], key: str, location: str) -> str:
    return _require_text(data.get(key), f"{location}: {key}", key in data)


def _read_texts(data: Mapping[str, Any], key: str, location: str) -> list[str]:
    values, field = data.get(key), f"{location}: {key}"
    if not isinstance(values, list):
        raise InvalidInput(field, found=describe_kind(values) if key in data else "missing", expected="a list of texts")
    if not values:
        raise InvalidInput(field, found="an empty list", expected="at least one text")
    for at, value in enumerate(values):
        _require_text(value, f"{field}[{at}]")
    seen: dict[str, int] = {}
    for at, value in enumerate(values):
        if (first := seen.setdefault(value, at)) != at:
            raise InvalidInput(
                f"{field}[{at}]", found=f"the same as {key}[{first}]", expected="each text once", remedy="remove it"
            )
    return values


def _require_text(value: object, location: str, is_present: bool = True) -> str:
    if not isinstance(value, str):
        raise InvalidInput(location, found=describe_kind(value) if is_present else "missing", expected="a text")
    if not value.strip():
        raise InvalidInput(location, found="an empty text", expected="a text")
    return value


def _require_disjoint(positives: Sequence[str], negatives: Sequence[str], location: str) -> None:
    known = {text: at for at, text in enumerate(positives)}
    for at, text in enumerate(negatives):
        if text in known:
            raise InvalidInput(
                f"{location}: negatives[{at}]",
                found=f"the same as positives[{known[text]}]",
                expected="a text that is not among the positives",
            )
