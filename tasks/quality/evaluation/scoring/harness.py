"""Run lm-eval as a library, to score one task with one model document by document.

This package turns off lm-eval features that are unsuitable for a gate:

* log-softmax in the model's own dtype, which rounds the likelihoods of a bf16 model by up to half a nat;
* the request cache, whose key lacks the model, and the prompt cache, whose key lacks the data;
* ``limit``, which takes the first documents instead of a random sample;
* lookups in the git repository that contains the working directory;
* lm-eval's own progress bars;
* the data cache, which never expires and whose path does not depend on the content.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest.mock import patch

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import JournalLocation, open_journal
from mergegate.tasks.base.store import digest
from mergegate.tasks.models.checkpoints import CallNeeds, Model, TellProgress, call_model_process, load_model
from mergegate.tasks.quality.evaluation.backends import AnswerEnd, find_backend
from mergegate.tasks.quality.evaluation.backends.pictures import as_picture_prompt, has_pictures, hash_with_pictures
from mergegate.tasks.quality.evaluation.built_in import BuiltInScore
from mergegate.tasks.quality.evaluation.definitions.code import report_programs
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask
from mergegate.tasks.quality.evaluation.document_order import DocumentRange, documents_of_range
from mergegate.tasks.quality.evaluation.scoring.answer_journal import attach_journal
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore, answer_of
from mergegate.tasks.quality.evaluation.scoring.lm_eval_tasks import (
    LoadedTask,
    answer_budget,
    judging_metrics,
    quiet,
    set_up_tasks,
    text_of,
    user_errors,
    with_budget,
)
from mergegate.tasks.quality.evaluation.scoring.loading import cluster_of, documents_in_set, load_task
from mergegate.tasks.quality.evaluation.scoring.metrics import (
    PROBABILITY,
    AnsweredChoice,
    chance_level,
    check_all_scored,
    checked_score,
    choices_of,
    likelihoods_of,
    probabilities,
)
from mergegate.tasks.quality.evaluation.settings import Scoring, resolve_prompt_settings


@dataclass(frozen=True)
class LongerAnswers:
    """Documents whose cut-off answers are generated again, and the token budget of an answer, by leaf."""

    documents: Mapping[str, Sequence[int]]  # ascending positions in the leaf's data
    budgets: Mapping[str, int]


@dataclass(frozen=True)
class ScoringJob:
    """One part of a task to score with one model on ``device`` (``cpu`` or ``cuda``).

    The file at ``journal`` records answers as they arrive, so that an interrupted run can resume. None: no journal.
    ``longer`` selects documents of the part whose answers are generated again. None: all documents, with the budget of
    the task.
    """

    model: Model
    task: EvalTask
    scoring: Scoring
    part: DocumentRange
    device: str
    journal: JournalLocation | None = None
    longer: LongerAnswers | None = None


def score_documents(job: ScoringJob, on_progress: TellProgress) -> tuple[DocumentScore, ...]:
    """Score one part of the documents of a task.

    The result contains only metrics that are means over documents, because a gate needs the contribution of each
    document. Choice tasks have an additional metric, the probability of the right answer (see ``metrics``).
    ``on_progress`` is called with the number of answered requests and the total number.

    Raises:
        InvalidInput: If the model or the task's data cannot be loaded, or the task has no metric that is a mean.
    """
    task, scoring = job.task, job.scoring
    if task.built_in is not None:
        return _score_built_in(job, on_progress)
    backend = find_backend(scoring.backend)
    with (
        quiet(),
        backend.opened(job.model, scoring, job.device) as opened,
        open_journal(job.journal) as records,
        attach_journal(opened, records, backend.computes_in) as lm,
        progress_to(lambda done, of: on_progress(lm.restored + done, lm.restored + of), backend.draws_progress),
        report_programs(lambda count: on_progress(count, count)),
    ):
        loaded = load_task(task)
        if job.longer:
            documents = {leaf: list(positions) for leaf, positions in job.longer.documents.items()}
            longer = _LargerBudgets(lm, job.longer.budgets)
            return score_loaded_documents(loaded, documents, longer, job.model.name, task, scoring)
        documents = _documents_of_part(loaded, job)
        return score_loaded_documents(loaded, documents, lm, job.model.name, task, scoring)


def _documents_of_part(loaded_task: LoadedTask, job: ScoringJob) -> dict[str, list[int]]:
    """Return the ascending positions of the documents of a part by leaf."""
    task, part = job.task, job.part
    documents = documents_of_range(loaded_task.sizes, job.scoring.seed, part, documents_in_set(loaded_task, task))
    if (count := sum(map(len, documents.values()))) != part.last - part.first:
        raise InvalidInput(
            f"task {task.name}: {part}",
            found=f"{count} documents",
            expected=f"{part.last - part.first}, the number when they were counted",
            remedy="its data changed: pin it, or delete 'documents' from the store",
        )
    return documents


def _score_built_in(job: ScoringJob, on_progress: TellProgress) -> tuple[DocumentScore, ...]:
    """Score one part of a built-in task with the library that loads the model, whatever the backend."""
    task, scoring, built_in = job.task, job.scoring, job.task.built_in
    assert built_in is not None
    with quiet(), load_model(job.model, dtype=scoring.dtype, device=job.device) as model:
        if built_in.form not in model.kind.task_forms:
            raise InvalidInput(
                f"task {task.name} on {job.model.name}",
                found=f"a {built_in.kind} task for {model.kind.noun}",
                expected="a task for this kind of model",
            )
        loaded = load_task(task)
        ((name, positions),) = _documents_of_part(loaded, job).items()
        leaf = loaded.leaves[name]
        documents = [leaf.eval_docs[position] for position in positions]
        scores: list[DocumentScore] = []
        location = f"{job.model.name}: task {name}"
        results = _name_model(location, built_in.score(model, documents, scoring.batch_size, on_progress))
        for position, document, result in zip(positions, documents, results, strict=True):
            text = text_of(leaf, document)
            chances = built_in.chance_of(document)
            for metric, higher in built_in.metrics.items():
                row = DocumentScore(
                    task=name,
                    metric=(label := f"{metric},none"),
                    doc_id=position,
                    doc_hash=text.doc_hash,
                    prompt_hash=digest(text.prompt),
                    target_hash=digest(text.target),
                    outcome=checked_score(location, label, position, result.scores[metric]),
                    cluster=cluster_of(name, document, task.cluster_field) if task.cluster_field else "",
                    higher_is_better=higher,
                    answer=result.answer,
                    ended=(result.ended,) if result.ended else (),
                    answer_tokens=(result.tokens,) if result.ended else (),
                    chance=chances.get(metric, 0.0),
                )
                scores.append(row)
    return tuple(scores)


def _name_model(location: str, results: Iterator[BuiltInScore]) -> Iterator[BuiltInScore]:
    """Yield results, and add ``location`` to an error, which names only a document."""
    try:
        yield from results
    except InvalidInput as error:
        where = f"{location}: {error.where}"
        raise InvalidInput(where, found=error.found, expected=error.expected, remedy=error.remedy) from error


class _LargerBudgets:
    """An ``LM`` that generates answers with other token budgets, by leaf.

    A prompt is never cut to make room for a longer answer. If an answer may only be shorter than its budget for this
    reason, and reaches this length, it ended by the context.
    """

    def __init__(self, lm: Any, budgets: Mapping[str, int]) -> None:
        self._lm, self._budgets = lm, budgets

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        context = getattr(self._lm, "shared_context", getattr(self._lm, "max_length", None))
        for request in requests:
            as_picture_prompt(request)
            prompt, settings = request.args
            budget = self._budgets[request.task_name]
            if context is not None:
                # The first answer had at least its own budget, perhaps because its prompt was cut.
                budget = min(budget, max(context - len(self._lm.tok_encode(prompt)), answer_budget(settings)))
            request.arguments = (prompt, with_budget(settings, budget))
        answers: list[str] = self._lm.generate_until(requests)
        return answers

    @property
    def ended_answers(self) -> list[tuple[Any, AnswerEnd]]:
        return [
            (
                request,
                end._replace(reason="context")
                if end.reason == "length" and answer_budget(request.args[1]) < self._budgets[request.task_name]
                else end,
            )
            for request, end in self._lm.ended_answers
        ]


def score_loaded_documents(
    loaded_task: LoadedTask, documents: Mapping[str, list[int]], lm: Any, model: str, task: EvalTask, scoring: Scoring
) -> tuple[DocumentScore, ...]:
    """Score selected documents of a loaded task with ``lm``, an ``LM`` object of lm-eval. See ``score_documents``.

    ``documents`` holds the ascending positions of documents by leaf. ``model`` is the model's name in messages.
    """
    from lm_eval.evaluator import evaluate

    settings = resolve_prompt_settings(task.prompt_settings, scoring)
    if any(map(has_pictures, loaded_task.leaves.values())) and not getattr(lm, "MULTIMODAL", False):
        raise InvalidInput(
            f"task {task.name} on {model}",
            found="a task with pictures",
            expected="a decoder that reads pictures, with evaluate.backend: hf",
            remedy="use a task with text only",
        )
    leaves = set_up_tasks(loaded_task, documents, lm, settings, scoring.seed)
    with user_errors(task):
        results = evaluate(
            lm=lm,
            task_dict={"tasks": dict(leaves)},
            samples=dict(documents),
            bootstrap_iters=0,  # mergegate computes its own standard errors, from paired scores
            log_samples=True,
            system_instruction=settings.system_instruction,
            apply_chat_template=settings.is_chat,
            fewshot_as_multiturn=settings.is_multiturn,
            confirm_run_unsafe_code=task.code is not None,
        )
    ends: dict[tuple[str, int], list[AnswerEnd]] = {}
    budgets: dict[tuple[str, int], int] = {}
    for request, end in getattr(lm, "ended_answers", ()):  # lm-eval numbers the documents of this call from 0
        document = (request.task_name, documents[request.task_name][request.doc_id])
        ends.setdefault(document, []).append(end)
        budgets[document] = answer_budget(request.args[1])
    cuts: dict[tuple[str, int], list[int | None]] = {}
    for request, cut in getattr(lm, "prompt_cuts", ()):
        cuts.setdefault((request.task_name, documents[request.task_name][request.doc_id]), []).append(cut)
    scores: list[DocumentScore] = []
    for name, samples in results["samples"].items():
        leaf, scored_metrics = leaves[name], {metric for sample in samples for metric in sample["metrics"]}
        directions = judging_metrics(name, leaf, scored_metrics)
        choices = [choices_of(leaf, sample["doc"]) for sample in samples]
        right_probabilities = probabilities(
            [sample.get("acc") for sample in samples],
            [
                AnsweredChoice(likelihoods, known[1])
                if known and (likelihoods := likelihoods_of(sample, known[0]))
                else None
                for sample, known in zip(samples, choices, strict=True)
            ],
        )
        probable = right_probabilities or [None] * len(samples)
        for sample, known, probability in zip(samples, choices, probable, strict=True):
            doc_id, doc_hash, prompt_hash = int(sample["doc_id"]), str(sample["doc_hash"]), str(sample["prompt_hash"])
            if has_pictures(leaf):
                doc_hash, prompt_hash = hash_with_pictures(leaf, doc_id, prompt_hash)
            values = {metric: sample[metric] for metric in sample["metrics"] if metric in directions}
            if probability is not None and PROBABILITY not in scored_metrics:
                values[PROBABILITY] = probability
            answer_ends = ends.get((name, doc_id), ())
            prompt_cuts = cuts.get((name, doc_id), [None])
            for metric, value in values.items():
                label = f"{metric},{sample['filter']}"
                row = DocumentScore(
                    task=name,
                    metric=label,
                    doc_id=doc_id,
                    doc_hash=doc_hash,
                    prompt_hash=prompt_hash,
                    target_hash=str(sample["target_hash"]),
                    outcome=checked_score(f"{model}: task {name}", label, doc_id, value),
                    cluster=cluster_of(name, sample["doc"], task.cluster_field) if task.cluster_field else "",
                    higher_is_better=directions.get(metric, True),
                    answer=answer_of(sample),
                    ended=tuple(end.reason for end in answer_ends),
                    answer_tokens=tuple(end.tokens for end in answer_ends),
                    thinking_tokens=tuple(end.thinking for end in answer_ends),
                    prompt_cut=None if None in prompt_cuts else max(cut or 0 for cut in prompt_cuts),
                    chance=chance_level(leaf.OUTPUT_TYPE, sample, (known[0], len(known[1])) if known else None),
                    budgets=(budgets[name, doc_id],) if answer_ends else (),
                )
                scores.append(row)
    expected = [(name, document) for name, positions in documents.items() for document in positions]
    check_all_scored(f"task {task.name}", expected, scores)
    return tuple(scores)


@contextmanager
def progress_to(on_progress: Callable[[int, int], None], drawn_by: Sequence[str]) -> Iterator[None]:
    """Replace lm-eval's progress bars, its only way to report progress, by calls of ``on_progress``.

    ``on_progress`` receives the number of finished requests and the total number. ``drawn_by`` lists the modules of the
    backend that draw bars, in addition to lm-eval's own.
    """
    import lm_eval.api.model
    import lm_eval.api.task  # noqa: F401  # import it now so that its bars are replaced, too

    class ProgressCounter:
        """The part of the tqdm interface that lm-eval uses. A bar with a total and no iterable counts requests."""

        def __init__(self, iterable: Any = None, *, total: int | None = None, **_: Any) -> None:
            self._iterable, self._total, self._done = iterable, total, 0

        def __iter__(self) -> Iterator[Any]:
            return iter(self._iterable)

        def update(self, n: int = 1) -> None:
            self._done += n
            if self._total:
                on_progress(self._done, self._total)

        def close(self) -> None:
            pass

        @staticmethod
        async def gather(*tasks: Awaitable[Any], **_: Any) -> list[Any]:
            """Replace ``tqdm_asyncio.gather``: await batches of requests that run concurrently."""
            counter = ProgressCounter(total=len(tasks))

            async def count(task: Awaitable[Any]) -> Any:
                answer = await task
                counter.update()
                return answer

            return list(await asyncio.gather(*map(count, tasks)))

    names = ("lm_eval.api.model", "lm_eval.api.task", *drawn_by)
    modules = [sys.modules[name] for name in names if name in sys.modules]
    with ExitStack() as bars:
        for module, name in product(modules, ("tqdm", "tqdm_asyncio")):
            if hasattr(module, name):
                bars.enter_context(patch.object(module, name, ProgressCounter))
        yield


def score_in_child(job: ScoringJob, on_progress: TellProgress) -> tuple[DocumentScore, ...]:
    """Run ``score_documents`` in the model process, within ``scoring.time_limit``."""
    backend = find_backend(job.scoring.backend)
    return call_model_process(
        score_documents,
        (job,),
        location=f"task {job.task.name} on {job.model.name}: {job.part}",
        models=[job.model],
        needs=CallNeeds(
            own_process=not backend.frees_memory,
            network=backend.network,
            variables=tuple(backend.environment),
            time_limit=job.scoring.time_limit,
        ),
        on_progress=on_progress,
    )
