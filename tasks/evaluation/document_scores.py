"""Outcomes: what a model scored on each document, as a table on disk, and two such tables paired document by document.

Pairing is what makes a gate sharp: the same documents, prompted alike, scored by the reference and by the merge. So a
pair is made only where document, prompt and target have equal hashes on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mergegate.merge_core.errors import InvalidInput

SCORES_FILE = "outcomes.parquet"


_ANSWER = 2000  # characters that are kept of an answer


class DocumentScore(NamedTuple):
    """Score of one document under one metric."""

    task: str  # of a group: the task below it that the document is from
    metric: str  # 'acc,none'
    doc_id: int  # position in the task's data
    doc_hash: str  # 64 hex digits, of the document as lm-eval sees it
    prompt_hash: str  # of what the model is shown: a changed template or few-shot example changes it
    target_hash: str
    outcome: float  # in [0, 1] for accuracies
    cluster: str = ""  # what the document shares with others (a passage, a subject), where a guard asks for it
    higher_is_better: bool = True  # as the task says of this metric
    answer: str = ""  # what the model said or chose, shortened; empty where that is no text
    ended: tuple[str, ...] = ()  # how each generated answer ended, see ``AnswerEnd``
    answer_tokens: tuple[int | None, ...] = ()  # length of each generated answer; None: unknown


def score_of_sample(
    task: str, metric: str, sample: Mapping[str, Any], outcome: float, cluster: str, higher_is_better: bool = True
) -> DocumentScore:
    """Return the score of one of the samples that lm-eval returns, or writes with ``--log_samples``."""
    return DocumentScore(
        task=task,
        metric=metric,
        doc_id=int(sample["doc_id"]),
        doc_hash=str(sample["doc_hash"]),
        prompt_hash=str(sample["prompt_hash"]),
        target_hash=str(sample["target_hash"]),
        outcome=outcome,
        cluster=cluster,
        higher_is_better=higher_is_better,
        answer=answer_of(sample),
    )


def answer_of(sample: Mapping[str, Any]) -> str:
    """What the model said to a document, or the choice that it found likeliest. Empty where that is no text."""
    answers: Any = sample.get("filtered_resps") or ()
    arguments: Any = sample.get("arguments") or ()
    if not isinstance(answers, (list, tuple)) or not answers:
        return ""
    # Of code that is run: the first of the programs that the answers were made into.
    said = answers[0][0] if isinstance(answers[0], list) and answers[0] else answers[0]
    if isinstance(said, str):
        return said.strip()[:_ANSWER]
    try:
        # Some tasks ask again without the question, to know how likely a choice is by itself: that is no answer.
        asked = [at for at in range(len(answers)) if arguments[at][0] == arguments[0][0]]
        if len(asked) < 2:
            return ""
        best = max(asked, key=lambda at: float(answers[at][0]))
        return str(arguments[best][1]).strip()[:_ANSWER]
    except (TypeError, ValueError, IndexError, KeyError):
        return ""


@dataclass(frozen=True)
class PairedScores:
    """Scores of the same documents by two models, in equal order: that in which they were scored."""

    documents: tuple[tuple[str, int], ...]  # (task, doc_id)
    reference: tuple[float, ...]
    merge: tuple[float, ...]
    clusters: tuple[str, ...] = ()  # of each document; empty texts where none was recorded


def write_document_scores(path: Path, outcomes: Sequence[DocumentScore]) -> None:
    """Store outcomes as parquet: one row each, columns as in ``DocumentScore``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {"doc_id": pa.int64(), "outcome": pa.float64(), "higher_is_better": pa.bool_()}
    types |= {"ended": pa.list_(pa.string()), "answer_tokens": pa.list_(pa.int64())}
    columns = {
        name: pa.array([getattr(outcome, name) for outcome in outcomes], types.get(name, pa.string()))
        for name in DocumentScore._fields
    }
    pq.write_table(pa.table(columns), path, compression="zstd")


def read_document_scores(path: Path) -> tuple[DocumentScore, ...]:
    """What ``write_document_scores`` stored."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:  # read_table would import pandas
        columns = file.read().to_pydict()
    for name in ("ended", "answer_tokens"):  # absent from a table that is older
        columns[name] = [tuple(each) for each in columns.get(name) or [()] * len(columns["task"])]
    columns.setdefault("answer", [""] * len(columns["task"]))  # a table from before they were kept
    columns.setdefault("cluster", [""] * len(columns["task"]))  # a table from before there were clusters
    columns.setdefault("higher_is_better", [True] * len(columns["task"]))
    return tuple(DocumentScore(*row) for row in zip(*(columns[name] for name in DocumentScore._fields), strict=True))


def pair_documents(
    reference: Sequence[DocumentScore], merge: Sequence[DocumentScore], metric: str, where: str
) -> PairedScores:
    """The documents of both under ``metric``, one by one, in the order in which those of ``merge`` stand.

    Args:
        where: What messages call this comparison: ``'reverse: merge against reverser'``.

    Raises:
        InvalidInput: when they are not the same documents, shown in the same way.
    """
    left, right = ({(o.task, o.doc_id): o for o in side if o.metric == metric} for side in (reference, merge))
    if not left:
        raise InvalidInput(where, found=f"no document scored by {metric!r}")
    if left.keys() != right.keys():
        task, doc_id = min(left.keys() ^ right.keys())
        raise InvalidInput(
            where,
            found=f"document {doc_id} of {task} scored on one side only",
            expected="the same documents on both sides",
            remedy="evaluate both with the same settings",
        )
    for (task, doc_id), ours in sorted(left.items()):
        theirs = right[task, doc_id]
        for what in ("doc_hash", "prompt_hash", "target_hash"):
            if getattr(ours, what) != getattr(theirs, what):
                raise InvalidInput(
                    where,
                    found=f"another {what.removesuffix('_hash')} on each side, first for document {doc_id} of {task}",
                    expected="both models asked the same question in the same words",
                    remedy="compare chat templates and few-shot settings; chat_template: false asks both plainly",
                )
    documents = tuple(right)
    return PairedScores(
        documents,
        tuple(left[key].outcome for key in documents),
        tuple(right[key].outcome for key in documents),
        tuple(left[key].cluster for key in documents),
    )
