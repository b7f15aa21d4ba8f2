"""Find what repeats in a task: equal prompts, long passages, and few-shot examples among the evaluated documents."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import Finding
from mergegate.tasks.checkpoints import TellProgress
from mergegate.tasks.evaluation.lm_eval_tasks import quiet, text_of, user_errors
from mergegate.tasks.evaluation.process import call_with_task_data
from mergegate.tasks.evaluation.stage import CountLimit
from mergegate.tasks.evaluation.task_definition import EvalTask
from mergegate.tasks.evaluation.task_loading import documents_by_leaf, load_task
from mergegate.tasks.evaluation.text_overlap import words_of
from mergegate.tasks.stage import StageValue, value_stage

_MAX_DUPLICATES = 0.01  # Share of documents with a repeated prompt above which ``check`` warns.
_PASSAGE = 200  # Characters from which the text of a field counts as a passage.
_MIN_SHARED = 0.05  # Share of documents with a repeated passage from which ``check`` suggests ``cluster_by``.
_MIN_PASSAGES = 14  # Number of passages below which ``cluster_by`` is refused, see ``tasks.gate.clusters``.
_MAX_EXAMPLES = 50_000  # Number of possible few-shot examples of a task that are compared.


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
            # A prompt that all documents share does not identify them (see ``tasks.gate.clusters``).
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

    count = num_fewshot if num_fewshot is not None and own_count != 0 else own_count  # as in ``task_setup``
    sampler = getattr(leaf, "sampler", None)
    if not count or sampler is None:
        return frozenset()
    drawn_from = list(sampler.df or ())[: count if isinstance(sampler, FirstNSampler) else _MAX_EXAMPLES]
    examples = [text_of(leaf, document) for document in drawn_from]
    return frozenset(words_of(f"{example.prompt}\n{example.target}") for example in examples)
