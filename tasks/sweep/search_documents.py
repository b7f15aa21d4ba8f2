"""What every trial of a study is asked, as batches of tokens; and how a network in memory answers. In the child only.

Built once for a tokenizer and a set of documents, then asked of one candidate after another. A document is asked for
the log-likelihood of its answers, so one forward pass a document gives four measures:

* ``log_likelihood``: ``log p(answer | prompt) / tokens of the answer``, of the best right answer. Nats a token, <= 0.
* ``probability``: of choices ``p(right) / p(all choices)``, else ``p(answer | prompt)``. In [0, 1].
* ``exact``: 1 where the greedy answer is the right one token by token; of choices, where the likeliest is a right one.
* ``entropy``: minus the entropy of what the model expects: of choices that of ``p(choice) / p(all choices)``, nats;
  else that of the next token, mean over the positions of the answers, nats a token. It does not look at which answer
  is right. Entropy of predictions is what AdaMerging minimises (Yang et al. 2024, https://arxiv.org/abs/2310.02575).

``metric`` has answers written out, by lm-eval; held-out text is read in the windows of ``tasks.perplexity``.

Documents are asked look by look, each look in batches of its own: what a candidate gets does not depend on whether it
was asked further, nor on who was asked before. Within a look all tasks go together, sorted by length and padded on the
right; what reads the same tokens (choices of one token) is read once. Softmax is taken in float32, whatever the format
of the network, at the positions that predict answers only.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.evaluation import AnsweredChoice, TokenizedDocument, TokenizedTask
from mergegate.tasks.perplexity import TokenizedText
from mergegate.tasks.sweep.trials import TEXT, MetricKey, Sheet

if TYPE_CHECKING:
    import torch

    from mergegate.tasks.checkpoints import LoadedModel

_TOKENS = 1 << 13  # of one batch, padding included
_LOGITS = 1 << 25  # elements of one batch's logits: 128 MB in float32
_SHORTEST = 0.6  # of the longest row: what is shorter is another batch's
_WORTH = 1 << 10  # tokens that a batch has before it is ended for that


@dataclass(frozen=True)
class _Batch:
    """Rows of tokens that are read together, and what is looked up in the answer.

    Args:
        tokens: What is read, padded on the right; int64 ``[rows, length]``.
        kept: So many last positions are wanted.
        row, position: Of each predicted token: its row, and where among the kept positions it is predicted; ``[n]``.
        target: The token itself; ``[n]``.
        answer: Number of the answer that it belongs to; ``[n]``.
    """

    tokens: torch.Tensor
    kept: int
    row: torch.Tensor
    position: torch.Tensor
    target: torch.Tensor
    answer: torch.Tensor


@dataclass(frozen=True)
class _Look:
    """What is asked at one look.

    Args:
        parts: Of each task, which documents, as positions in its set.
        batches: What is read for them.
        answers: How many answers are asked altogether; those of a document come one after another.
        lengths: Tokens of each.
    """

    parts: Mapping[str, range]
    batches: tuple[_Batch, ...]
    answers: int
    lengths: tuple[int, ...]


class SearchDocuments:
    """What is asked of the documents of one set, look by look.

    Args:
        asked: The numbers that are wanted of each document.
        tasks: The tasks by name, with all documents of the set.
        text: Held-out text; None where it is not asked.
        looks: Shares of each task's documents that have been asked after each look, rising; the last is 1.

    Raises:
        InvalidInput: A likelihood is asked of a right answer that is none of the choices; a task has no document.
    """

    def __init__(
        self,
        asked: Sequence[MetricKey],
        tasks: Mapping[str, TokenizedTask],
        text: TokenizedText | None,
        looks: Sequence[float],
    ) -> None:
        self._asked, self._tasks, self._text = tuple(asked), tasks, text
        self._asks_entropy = any(one.measure == "entropy" for one in asked)
        sizes = {name: len(task.order) for name, task in tasks.items()} | (
            {TEXT: len(text.documents)} if text is not None else {}
        )
        for name, size in sizes.items():
            if not size:
                raise InvalidInput(f"task {name}" if name else "perplexity.documents", found="no document to search on")
        self._require_answers()
        ends = [{name: math.ceil(share * size) for name, size in sizes.items()} for share in looks]
        before = [dict.fromkeys(sizes, 0), *ends]
        self._looks = [
            self._look({name: range(first[name], last[name]) for name in sizes})
            for first, last in zip(before, ends, strict=False)
        ]

    def _require_answers(self) -> None:
        for asked in self._asked:
            if asked.measure != "log_likelihood" or asked.task == TEXT:
                continue
            for document in self._tasks[asked.task].documents:
                if not document.right:
                    raise InvalidInput(
                        f"task {document.leaf}: document {document.doc_id}",
                        found="a right answer that is none of the choices",
                        expected="one that has a likelihood",
                        remedy="measure: exact, which counts it as wrong; or correct the task",
                    )

    def _look(self, parts: Mapping[str, range]) -> _Look:
        rows: dict[tuple[int, ...], list[tuple[int, int, tuple[int, ...]]]] = {}  # input -> answer, first, tokens
        lengths: list[int] = []
        for document in self._likely(parts):
            for context, continuation in document.pairs:
                read = (*context, *continuation)[:-1]
                rows.setdefault(read, []).append((len(lengths), len(context) - 1, continuation))
                lengths.append(len(continuation))
        return _Look(parts, tuple(_batch(part, rows) for part in _cut(rows)), len(lengths), tuple(lengths))

    def _likely(self, parts: Mapping[str, range]) -> Iterator[TokenizedDocument]:
        """The documents whose answers' likelihoods are wanted, task by task."""
        for name in dict.fromkeys(asked.task for asked in self._asked if _is_likelihood(asked)):
            yield from (self._tasks[name].documents[position] for position in parts[name])

    def ask(self, loaded: LoadedModel, alive: Callable[[], None] = lambda: None) -> Iterator[Sheet]:
        """Ask a model; after each look what is known of all documents so far. Nobody has to ask to the end.

        Args:
            alive: Called after each batch.
        """
        found: dict[MetricKey, list[float]] = {asked: [] for asked in self._asked}
        for look in self._looks:
            for asked, numbers in self._answers(loaded, look, alive).items():
                found[asked] += numbers
            yield {asked: np.array(numbers, np.float64) for asked, numbers in found.items()}

    def _answers(self, loaded: LoadedModel, look: _Look, alive: Callable[[], None]) -> dict[MetricKey, list[float]]:
        read = measure_answers(loaded.network, look.batches, look.answers, alive, entropy=self._asks_entropy)
        measured: dict[str, list[_Measures]] = {}
        answer = 0
        for name in dict.fromkeys(asked.task for asked in self._asked if _is_likelihood(asked)):
            measured[name] = []
            for position in look.parts[name]:
                document = self._tasks[name].documents[position]
                end = answer + len(document.pairs)
                measured[name].append(_measures(document, read.part(answer, end), look.lengths[answer:end]))
                answer = end
        found: dict[MetricKey, list[float]] = {}
        for asked in self._asked:
            part = look.parts[asked.task]
            if asked.task == TEXT:
                assert self._text is not None, "it was asked for"
                found[asked] = self._text.likelihoods(loaded, part)
            elif asked.measure == "metric":
                found[asked] = self._tasks[asked.task].outcomes(loaded, asked.metric, part, alive) if part else []
            else:
                found[asked] = [getattr(one, asked.measure) for one in measured[asked.task]]
        return found


class _AnswersRead(NamedTuple):
    """What was seen of answers, each in its place: log-likelihood in nats, whether it is what greedy decoding gives,
    and the sum of the entropies where its tokens are predicted, nats (zeros where nobody asks)."""

    sums: list[float]
    greedy: list[bool]
    entropies: list[float]

    def part(self, first: int, end: int) -> _AnswersRead:
        return _AnswersRead(*(numbers[first:end] for numbers in self))  # type: ignore[arg-type]


class _Measures(NamedTuple):
    log_likelihood: float
    probability: float
    exact: float
    entropy: float


def _is_likelihood(asked: MetricKey) -> bool:
    return asked.task != TEXT and asked.measure != "metric"


def _measures(document: TokenizedDocument, read: _AnswersRead, lengths: Sequence[int]) -> _Measures:
    """The measures of one document, see the module.

    Args:
        read: Its answers.
        lengths: Tokens of each.
    """
    sums = read.sums
    likely = max((sums[one] / lengths[one] for one in document.right), default=-math.inf)
    if document.is_choice:
        answered = AnsweredChoice(tuple(sums), document.right)
        probability, entropy = answered.probability, answered.entropy
        if probability is None or entropy is None:
            probability = entropy = math.nan
        return _Measures(likely, probability, float(answered.is_right), -entropy)
    certainty = -sum(read.entropies) / sum(lengths)
    return _Measures(likely, math.exp(max(sums)), float(any(read.greedy)), certainty)


def _cut(rows: Mapping[tuple[int, ...], object]) -> Iterator[list[tuple[int, ...]]]:
    """Rows of like length together, longest first; ties in their own order, which no hash decides."""
    batch: list[tuple[int, ...]] = []
    for row in sorted(rows, key=len, reverse=True):
        if batch:
            longest, tokens = len(batch[0]), len(batch) * len(batch[0])
            if tokens + longest > _TOKENS or (len(row) < _SHORTEST * longest and tokens > _WORTH):
                yield batch
                batch = []
        batch.append(row)
    if batch:
        yield batch


def _batch(
    part: Sequence[tuple[int, ...]], rows: Mapping[tuple[int, ...], Sequence[tuple[int, int, tuple[int, ...]]]]
) -> _Batch:
    import torch

    longest = len(part[0])
    tokens = torch.zeros((len(part), longest), dtype=torch.long)
    row: list[int] = []
    place: list[int] = []
    target: list[int] = []
    answer: list[int] = []
    for number, read in enumerate(part):
        tokens[number, : len(read)] = torch.tensor(read)
        for which, first, continuation in rows[read]:
            row += [number] * len(continuation)
            place += range(first, first + len(continuation))
            target += continuation
            answer += [which] * len(continuation)
    first_kept = min(place)
    found = [torch.tensor(numbers, dtype=torch.long) for numbers in (row, place, target, answer)]
    return _Batch(tokens, longest - first_kept, found[0], found[1] - first_kept, found[2], found[3])


def measure_answers(
    network: Any, batches: Sequence[_Batch], answers: int, alive: Callable[[], None], *, entropy: bool = False
) -> _AnswersRead:
    """Have a network read answers.

    Args:
        network: A causal language model of transformers, in evaluation mode.
        batches: What it reads.
        answers: How many answers there are in all batches together.
        alive: Called after each part of a batch.
        entropy: Whether entropies are wanted.
    """
    import torch

    sums, entropies = torch.zeros(answers, dtype=torch.float64), torch.zeros(answers, dtype=torch.float64)
    missed = torch.zeros(answers, dtype=torch.long)
    keeps = "logits_to_keep" in inspect.signature(network.forward).parameters
    vocabulary = int(network.get_input_embeddings().num_embeddings)
    with torch.inference_mode():
        for batch in batches:
            for rows in _slices(batch, batch.kept if keeps else batch.tokens.shape[1], vocabulary):
                mine = (batch.row >= rows.start) & (batch.row < rows.stop)
                some = {"logits_to_keep": batch.kept} if keeps else {}
                read = batch.tokens[rows.start : rows.stop].to(network.device)
                logits = network(input_ids=read, use_cache=False, **some).logits[:, -batch.kept :]
                row, place = batch.row[mine] - rows.start, batch.position[mine]
                target = batch.target[mine].to(logits.device)
                chosen = logits[row.to(logits.device), place.to(logits.device)].float()
                expected = chosen.log_softmax(-1)
                likely = expected.gather(1, target[:, None])[:, 0]
                sums.index_add_(0, batch.answer[mine], likely.double().cpu())
                if entropy:
                    doubt = torch.special.entr(expected.exp()).sum(-1)
                    entropies.index_add_(0, batch.answer[mine], doubt.double().cpu())
                missed.index_add_(0, batch.answer[mine], (chosen.argmax(-1) != target).long().cpu())
                alive()
    return _AnswersRead(sums.tolist(), (missed == 0).tolist(), entropies.tolist())


def _slices(batch: _Batch, positions: int, vocabulary: int) -> Iterator[range]:
    """Rows whose logits at so many ``positions`` fit into memory together."""
    step = max(1, _LOGITS // (positions * vocabulary))
    for first in range(0, len(batch.tokens), step):
        yield range(first, min(first + step, len(batch.tokens)))
