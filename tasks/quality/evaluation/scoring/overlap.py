"""Find texts that occur twice: within a task, in its few-shot examples, or in the calibration texts of a merge.

Texts are compared as sequences of words, after Unicode normalization (NFKC) and case folding, without punctuation.
A document of eight words or more *occurs* in a text if the text contains most of its 8-word sequences (8-grams): the
8-grams that the text shares must cover 70 % of the words. The length and the share are those of PaLM's contamination
analysis (Chowdhery et al. 2022, arXiv 2204.02311, section 8). Counting words instead of 8-grams makes the measure
robust: one inserted word breaks eight 8-grams but leaves most words covered (Touvron et al. 2023, arXiv 2307.09288,
appendix A.6). Shorter documents occur if the text contains all their words in order.

8-grams that many documents share, such as the instructions of a prompt template, do not identify a document and are
ignored. The time is linear in the texts, apart from the matches.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import Finding
from mergegate.tasks.base.stage import StageValue, value_stage
from mergegate.tasks.base.store import NotInKey
from mergegate.tasks.models.checkpoints import TellProgress
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask
from mergegate.tasks.quality.evaluation.scoring.lm_eval_tasks import quiet, text_of, user_errors
from mergegate.tasks.quality.evaluation.scoring.loading import (
    CountLimit,
    call_with_task_data,
    documents_by_leaf,
    load_task,
)
from mergegate.tasks.quality.evaluation.settings import fewshot_count

N = 8  # Words of a sequence that is compared.
SHARE = 0.7  # Share of a document's words that the common sequences must cover.
_MAX_SHARED = 0.1, 5  # Share and number of documents above which a sequence belongs to the template.
# Writing systems without spaces between words: every character counts as a word.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(f"[{_UNSPACED}]|(?:(?![{_UNSPACED}])[^\\W_])+")
_MAX_DUPLICATES = 0.01  # Share of documents with a repeated prompt above which ``check`` warns.
_PASSAGE = 200  # Characters from which the text of a field counts as a passage.
_MIN_SHARED = 0.05  # Share of documents with a repeated passage from which ``check`` suggests ``cluster_by``.
_MIN_PASSAGES = 14  # Number of passages below which ``cluster_by`` is refused, see ``gate.clusters``.
_MAX_EXAMPLES = 50_000  # Number of possible few-shot examples of a task that are compared.


def words_of(text: str) -> tuple[str, ...]:
    """Return the words of a text for comparison: normalized, case folded, without punctuation."""
    return tuple(_WORD.findall(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())))


def find_occurring(documents: Sequence[tuple[str, str]], texts: Sequence[str]) -> tuple[int, ...]:
    """Return the indices of the documents that occur in one of ``texts``, ascending.

    A document is a pair of prompt and answer. Either may be empty. In a text, up to eight other words may precede the
    answer of a short document.
    """
    by_ngram: dict[int, list[tuple[int, int]]] = defaultdict(list)  # Document and position of its first word.
    by_words: dict[int, dict[tuple[str, ...], list[tuple[int, tuple[str, ...]]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    lengths: dict[int, int] = {}
    contents = [(words_of(prompt), words_of(answer)) for prompt, answer in documents]
    shared = Counter(ngram for prompt, answer in contents for ngram in set(_ngrams((*prompt, *answer))))
    most = max(_MAX_SHARED[0] * len(documents), _MAX_SHARED[1])
    for document, (prompt, answer) in enumerate(contents):
        words = (*prompt, *answer)
        if len(words) < N:
            first, rest = (prompt, answer) if prompt else (answer, ())
            if first:
                by_words[len(first)][first].append((document, rest))
            continue
        own = [(position, ngram) for position, ngram in enumerate(_ngrams(words)) if shared[ngram] <= most]
        lengths[document] = len({word for position, _ in own for word in range(position, position + N)})
        for position, ngram in own:
            by_ngram[ngram].append((document, position))
    found: set[int] = set()
    for text in texts:
        words = words_of(text)
        matches: dict[int, set[int]] = defaultdict(set)
        for ngram in set(_ngrams(words)) & by_ngram.keys():
            for document, position in by_ngram[ngram]:
                matches[document].add(position)
        for document, positions in matches.items():
            if document not in found:
                covered = np.zeros(max(positions) + N, bool)
                for position in positions:
                    covered[position : position + N] = True
                if covered.sum() >= SHARE * lengths[document]:
                    found.add(document)
        for length, short in by_words.items():
            for start in range(len(words) - length + 1):
                for document, rest in short.get(words[start : start + length], ()):
                    end = start + length
                    gaps = range(end, end + N + 1)
                    if document not in found and any(words[gap : gap + len(rest)] == rest for gap in gaps):
                        found.add(document)
    return tuple(sorted(found))


def _ngrams(words: tuple[str, ...]) -> Iterator[int]:
    """Yield the hash of every sequence of ``N`` words."""
    return (hash(words[start : start + N]) for start in range(len(words) - N + 1))


class RepeatedPassage(BaseModel):
    """Field of a task's documents with a long text that several documents share."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    field: str
    documents: int  # Number of documents whose text another document has too.
    passages: int  # Number of different texts in the field.


class Repetition(StageValue):
    """Repetition in the documents of a task."""

    documents: int
    duplicates: int  # Number of documents whose prompt repeats that of an earlier one.
    first: str  # First repeated prompt, shortened.
    passages: tuple[RepeatedPassage, ...]
    as_examples: int  # Number of documents that are also possible few-shot examples.
    example: str  # First of them, shortened.
    example_split: str  # Split of the examples if it is the evaluated one, otherwise empty.

    def summary(self) -> str:
        return f"{self.duplicates:,} of {self.documents:,} prompts repeat"


@value_stage("repetition", version=1, subject="task")
def find_repetition(task: EvalTask, num_fewshot: int | None, limit: CountLimit) -> Repetition:
    """Compare the documents of ``task`` with each other and with its few-shot examples. The data must be pinned.

    Prompts are compared without few-shot examples. The comparison covers the first 50,000 possible examples.

    Args:
        task: Task with pinned data.
        num_fewshot: Number of few-shot examples. None: the number in the task's definition.
        limit: Time limit for loading the data.

    Raises:
        InvalidInput: If the data cannot be loaded, or a template of the task fails.
        Refused: If the comparison takes longer than ``limit``.
    """
    return call_with_task_data(task, _compare, (task, num_fewshot), "its documents", limit.seconds)


def repetition_findings(task: str, repetition: Repetition, clustered_by: str | None) -> Iterator[Finding]:
    """Yield a warning for each kind of repetition that weakens or biases the verdict on a task.

    ``clustered_by`` is the field that names the clusters of the guard, or None.
    """
    total, location = repetition.documents, f"evaluate.tasks: {task}"
    if repetition.duplicates > _MAX_DUPLICATES * total:
        yield Finding(
            "warn",
            location,
            found=f"{repetition.duplicates:,} of {total:,} documents ({100 * repetition.duplicates / total:.0f} %) "
            f"repeat the prompt of another one, such as {repetition.first!r}",
            expected=f"at most {100 * _MAX_DUPLICATES:.0f} %, because the gate counts equal prompts as one document",
            remedy="remove the copies from the data, so that no time is spent on them, or add distinct documents",
        )
    for passage in repetition.passages:
        if clustered_by is None:
            yield Finding(
                "warn",
                location,
                found=f"{passage.documents:,} of {total:,} documents share the text in {passage.field!r} with another "
                f"one ({passage.passages:,} different texts)",
                expected="independent documents, or clusters of the documents with the same text",
                remedy=f"set cluster_by: {passage.field} for this guard",
            )
    if repetition.as_examples:
        source = f", because the examples come from the evaluated split ({repetition.example_split})"
        yield Finding(
            "warn",
            location,
            found=f"{repetition.as_examples:,} of {total:,} documents are also few-shot examples"
            f"{source if repetition.example_split else ''}, such as {repetition.example!r}",
            expected="examples that are not evaluated: their answers are in the prompts of other documents",
            remedy="set fewshot_split to another split in the task's YAML file, or num_fewshot: 0",
        )


def _compare(task: EvalTask, num_fewshot: int | None, on_progress: TellProgress) -> Repetition:
    """Compare documents and examples. Runs in the model process."""
    keys: set[object] = set()  # Prompts, or digests of documents.
    texts: dict[str, Counter[str]] = defaultdict(Counter)  # Digests of long texts by field.
    documents = duplicates = as_examples = 0
    first = example = example_split = ""
    with quiet(), user_errors(task):
        loaded = load_task(task)
        for name, leaf, leaf_documents in documents_by_leaf(loaded, task):
            own = [(document, text_of(leaf, document)) for document in leaf_documents]
            # A prompt that all documents share does not identify them (see ``gate.clusters``).
            is_shared = len({text.prompt for _, text in own}) == 1 < len({text.doc_hash for _, text in own})
            examples = _examples_of(leaf, loaded.fewshot[name], num_fewshot)
            for document, text in own:
                documents += 1
                if examples and words_of(f"{text.prompt}\n{text.target}") in examples:
                    as_examples, example = as_examples + 1, example or text.prompt
                    if leaf.fewshot_cfg.split == (leaf.config.test_split or leaf.config.validation_split):
                        example_split = str(leaf.fewshot_cfg.split)
                key = (name, text.doc_hash) if is_shared else text.prompt
                if key in keys:
                    duplicates, first = duplicates + 1, first or text.prompt
                    continue
                keys.add(key)
                for field, value in document.items() if isinstance(document, Mapping) else ():
                    if isinstance(value, str) and len(value) >= _PASSAGE:
                        texts[field][hashlib.sha256(value.encode(errors="surrogatepass")).hexdigest()] += 1
    passages = tuple(
        RepeatedPassage(field=field, documents=shared, passages=len(counts))
        for field, counts in texts.items()
        if (shared := sum(count for count in counts.values() if count > 1)) >= _MIN_SHARED * documents
        and len(counts) >= _MIN_PASSAGES
    )
    return Repetition(
        documents=documents,
        duplicates=duplicates,
        first=" ".join(first.split())[:60],
        passages=passages,
        as_examples=as_examples,
        example=" ".join(example.split())[:60],
        example_split=example_split,
    )


def _examples_of(leaf: Any, own_count: int | None, num_fewshot: int | None) -> frozenset[tuple[str, ...]]:
    """Return the words of the possible few-shot examples of a leaf; empty if its prompts have none."""
    from lm_eval.api.samplers import FirstNSampler

    count = fewshot_count(own_count, num_fewshot)
    sampler = getattr(leaf, "sampler", None)
    if not count or sampler is None:
        return frozenset()
    drawn_from = list(sampler.df or ())[: count if isinstance(sampler, FirstNSampler) else _MAX_EXAMPLES]
    examples = [text_of(leaf, document) for document in drawn_from]
    return frozenset(words_of(f"{example.prompt}\n{example.target}") for example in examples)


class CalibrationTexts(BaseModel):
    """Calibration texts of a merge and their digest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str
    texts: Annotated[tuple[str, ...], NotInKey]


class ContaminatedDocuments(StageValue):
    """Number of documents that occur in one of the calibration texts."""

    read: int  # documents that occur in the texts
    documents: int  # all documents of the task
    first: str  # prompt of the first document that occurs in the texts

    def summary(self) -> str:
        return f"{self.read:,} of {self.documents:,} documents"


@value_stage("overlap", version=2, subject="task")
def find_contaminated_documents(task: EvalTask, texts: CalibrationTexts, limit: CountLimit) -> ContaminatedDocuments:
    """Count the documents of ``task`` that occur in ``texts``. The data of ``task`` must be pinned."""
    return call_with_task_data(task, _search_texts, (task, texts), "its documents", limit.seconds)


def _search_texts(task: EvalTask, texts: CalibrationTexts, on_progress: TellProgress) -> ContaminatedDocuments:
    """Search the texts for each document. Runs in the model process."""
    documents: list[tuple[str, str]] = []
    with quiet(), user_errors(task):
        for _, leaf, own in documents_by_leaf(load_task(task), task):
            texts_of_leaf = (text_of(leaf, document) for document in own)
            documents += [(text.prompt, text.target) for text in texts_of_leaf]
    found = find_occurring(documents, texts.texts)
    first = documents[found[0]][0][:80] if found else ""
    return ContaminatedDocuments(read=len(found), documents=len(documents), first=first)
