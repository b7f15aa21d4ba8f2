"""Store the score of each document as a table, and pair the tables of two models document by document.

Pairing gives a gate its power: the reference and the merge are scored on the same documents with the same prompts. A
pair is formed only if document, prompt and target have equal hashes on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.quality.evaluation.backends import CUT_OFF

SCORES_FILE = "outcomes.parquet"
_MAX_ANSWER = 2000  # characters of an answer that are stored
# Largest multiple of the task's own token budget with which cut-off answers are generated again by default.
BUDGET_FACTOR = 8


class DocumentScore(NamedTuple):
    """Score of one document under one metric."""

    task: str  # for a group: the task below it that has the document
    metric: str  # 'acc,none'
    doc_id: int  # position in the task's data
    doc_hash: str  # 64 hex digits, hash of the document in lm-eval's form
    prompt_hash: str  # hash of the prompt, which depends on the template and the few-shot examples
    target_hash: str
    outcome: float  # in [0, 1] for accuracies
    cluster: str = ""  # name shared by related documents (a passage, a subject), if a guard sets ``cluster_by``
    higher_is_better: bool = True  # direction of the metric in this task
    answer: str = ""  # generated or chosen answer, truncated; empty if it is not text
    ended: tuple[str, ...] = ()  # how each generated answer ended, see ``AnswerEnd``
    answer_tokens: tuple[int | None, ...] = ()  # length of each generated answer; None: unknown
    thinking_tokens: tuple[int | None, ...] = ()  # length of the thinking part of each generated answer
    prompt_cut: int | None = None  # tokens removed from the longest prompt of the document to fit; None: unknown
    chance: float = 0.0  # score of a random choice; 0 for free answers, or if it is unknown
    # Token budgets with which the answers were generated: the task's own first, the current one last. Empty: unknown.
    budgets: tuple[int, ...] = ()

    @property
    def tokens(self) -> int | None:
        """Number of generated tokens. None: no answer was generated, or a length is unknown."""
        known = [count for count in self.answer_tokens if count is not None]
        return sum(known) if known and len(known) == len(self.answer_tokens) else None

    @property
    def is_cut_off(self) -> bool:
        """Whether the token budget or the end of the context cut off a generated answer to this document."""
        return any(reason in CUT_OFF for reason in self.ended)

    def next_budget(self, limit: int | None) -> int | None:
        """Return the token budget with which cut-off answers may be generated again: twice the current one.

        ``limit`` is the largest allowed budget. None: ``BUDGET_FACTOR`` times the task's own. The result is None if no
        answer was cut off, the context ended it, or the limit is reached.
        """
        if not self.budgets or not self.is_cut_off or "context" in self.ended:
            return None
        largest = BUDGET_FACTOR * self.budgets[0] if limit is None else limit
        return min(2 * self.budgets[-1], largest) if self.budgets[-1] < largest else None

    def is_open(self, limit: int | None) -> bool:
        """Return whether a cut-off answer might have ended with a larger budget. ``limit`` is as in ``next_budget``."""
        return self.is_cut_off and not self.never_ends(limit)

    def never_ends(self, limit: int | None) -> bool:
        """Return whether no one who runs the model gets a complete answer.

        The answer reached the end of the context, or ``BUDGET_FACTOR`` times the task's own budget, or a larger
        ``limit``.
        """
        if not self.is_cut_off:
            return False
        exhausted = self.budgets and self.budgets[-1] >= max(BUDGET_FACTOR * self.budgets[0], limit or 0)
        return "context" in self.ended or bool(exhausted)


def answer_of(sample: Mapping[str, Any]) -> str:
    """Return the generated answer or the likeliest choice in a sample of lm-eval; empty if that is not text."""
    answers: Any = sample.get("filtered_resps") or ()
    arguments: Any = sample.get("arguments") or ()
    if not isinstance(answers, (list, tuple)) or not answers:
        return ""
    # For code that is run, the first of the programs that the answers were converted to.
    first = answers[0][0] if isinstance(answers[0], list) and answers[0] else answers[0]
    if isinstance(first, str):
        return first.strip()[:_MAX_ANSWER]
    try:
        # Some tasks score each choice a second time without the question; those requests have another context.
        with_question = [at for at in range(len(answers)) if arguments[at][0] == arguments[0][0]]
        if len(with_question) < 2:
            return ""
        best = max(with_question, key=lambda at: float(answers[at][0]))
        return str(arguments[best][1]).strip()[:_MAX_ANSWER]
    except (TypeError, ValueError, IndexError, KeyError):
        return ""


@dataclass(frozen=True)
class PairedScores:
    """Scores of the same documents by two models, in the merge's scoring order."""

    documents: tuple[tuple[str, int], ...]  # (task, doc_id)
    reference: tuple[float, ...]
    merge: tuple[float, ...]
    clusters: tuple[str, ...] = ()  # cluster of each document; empty texts if none was recorded
    rows: tuple[tuple[DocumentScore, DocumentScore], ...] = ()  # all of each document: reference, merge


def write_document_scores(path: Path, outcomes: Sequence[DocumentScore]) -> None:
    """Write scores to a parquet file with one row per score and the columns of ``DocumentScore``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {"doc_id": pa.int64(), "outcome": pa.float64(), "higher_is_better": pa.bool_(), "chance": pa.float64()}
    types |= {"ended": pa.list_(pa.string()), "prompt_cut": pa.int64()}
    types |= dict.fromkeys(("answer_tokens", "thinking_tokens", "budgets"), pa.list_(pa.int64()))
    columns = {
        name: pa.array([getattr(outcome, name) for outcome in outcomes], types.get(name, pa.string()))
        for name in DocumentScore._fields
    }
    pq.write_table(pa.table(columns), path, compression="zstd")


def read_document_scores(path: Path) -> tuple[DocumentScore, ...]:
    """Read the scores that ``write_document_scores`` stored."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:  # read_table would import pandas
        columns = file.read().to_pydict()
    for name in ("ended", "answer_tokens", "thinking_tokens", "budgets"):  # absent from older tables
        columns[name] = [tuple(each) for each in columns.get(name) or [()] * len(columns["task"])]
    defaults = {"answer": "", "cluster": "", "higher_is_better": True, "prompt_cut": None, "chance": 0.0}
    for name, default in defaults.items():
        columns.setdefault(name, [default] * len(columns["task"]))
    return tuple(DocumentScore(*row) for row in zip(*(columns[name] for name in DocumentScore._fields), strict=True))


def pair_documents(
    reference: Sequence[DocumentScore], merge: Sequence[DocumentScore], metric: str, location: str
) -> PairedScores:
    """Pair the scores of both models under ``metric``, document by document, in the order of ``merge``.

    ``location`` names the comparison in messages, such as ``'reverse: merge against reverser'``.

    Raises:
        InvalidInput: If the documents differ, or were not prompted in the same way.
    """
    left, right = ({(row.task, row.doc_id): row for row in side if row.metric == metric} for side in (reference, merge))
    if not left:
        raise InvalidInput(location, found=f"no document with a score under {metric!r}")
    if left.keys() != right.keys():
        task, doc_id = min(left.keys() ^ right.keys())
        raise InvalidInput(
            location,
            found=f"a score of document {doc_id} of {task} on one side only",
            expected="the same documents on both sides",
            remedy="evaluate both with the same settings",
        )
    for (task, doc_id), reference_row in sorted(left.items()):
        for name in ("doc_hash", "prompt_hash", "target_hash"):
            if getattr(reference_row, name) != getattr(right[task, doc_id], name):
                raise InvalidInput(
                    location,
                    found=f"a different {name[:-5]} on each side, first for document {doc_id} of {task}",
                    expected="the same document, prompt and target for both models",
                    remedy="compare chat templates and few-shot settings, or set chat_template: false",
                )
    documents = tuple(right)
    return PairedScores(
        documents,
        tuple(left[key].outcome for key in documents),
        tuple(right[key].outcome for key in documents),
        tuple(left[key].cluster for key in documents),
        tuple((left[key], right[key]) for key in documents),
    )
