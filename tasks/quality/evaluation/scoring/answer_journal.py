"""Record a model's answers to lm-eval's requests, so that an interrupted run resumes with the unanswered requests.

lm-eval reports every answer to a hook (``LM.set_cache_hook``). Its own request cache uses that hook, but it stores
answers one by one and treats two requests with equal text as one. After an interruption, the remaining requests would
be divided into different batches, which changes the last digits of a score. This journal stores a batch when all of
it is answered, and counts equal requests separately. The remaining requests form the same batches as before, and the
scores equal those of an uninterrupted run::

    with attach_journal(lm, journal, backend.computes_in) as lm:
        evaluate(lm, ...)

A sampled answer depends on the preceding ones through the state of torch's random generator, which the journal stores
with each batch and restores. It cannot restore the generator of a server or of vLLM's engine.
"""

from __future__ import annotations

import base64
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, partialmethod
from itertools import chain
from typing import Any

from mergegate.merge_core.files import RecordJournal
from mergegate.tasks.quality.evaluation.backends import DEFAULT_BUDGET, AnswerEnd
from mergegate.tasks.quality.evaluation.backends.pictures import PicturePrompt, as_picture_prompt


class JournalledModel:
    """An lm-eval ``LM`` that returns the answers in ``journal``, and lets ``lm`` answer and records all other requests.

    ``batched`` tells whether ``finish_batch`` is called before each batch. If not, every answer is its own batch.
    """

    def __init__(self, lm: Any, journal: RecordJournal, *, batched: bool) -> None:
        self._lm, self._journal, self._batched = lm, journal, batched
        self.ended_answers: list[tuple[Any, AnswerEnd]] = []  # request and end of every generated answer
        self.prompt_cuts: list[tuple[Any, int | None]] = []  # request and tokens removed from its prompt; None: unknown
        # The same, by the texts of a scored prompt that does not fit.
        self._scored_cuts: dict[tuple[str, str], int] = {}
        self._recorded: dict[str, deque[Any]] = defaultdict(deque)  # recorded answers, by request name
        self._generator: dict[str, Any] = {}  # generator state after the last batch, by kind of request
        for record in journal.records:
            for name, answer in record["answers"]:
                self._recorded[name].append(answer)
            self._generator[record["kind"]] = record.get("generator")
        self._waiting: dict[str, deque[Sequence[Any]]] = {}  # unanswered requests, by name
        self._answered: list[tuple[str, Any]] = []  # answers in the current batch
        self._ends: dict[str, deque[AnswerEnd]] = defaultdict(deque)  # ends in the current call, by request name
        self._kind, self._sampled = "", False
        # Tokens removed from a prompt that fits; None if the backend does not tell when a prompt fits.
        self._fitting_cut = 0 if hasattr(lm, "max_scored_tokens") else None
        self._is_context_shared = getattr(lm, "shared_context", 0) is not None  # by a prompt and its answer
        self.restored = 0  # number of requests in the current call that the journal answered

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    @property
    def answering_lm(self) -> Any:
        """The ``LM`` that answers requests, for callers that set its attributes."""
        return self._lm

    def count_scored_tokens(self, tokenized_requests: Iterable[tuple[Any, Sequence[int], Sequence[int]]]) -> None:
        """Record how many tokens the backend removes from each tokenized prompt with its continuation to fit."""
        limit = self._lm.max_scored_tokens
        for texts, context, continuation in tokenized_requests:
            tokens = len(context) + (len(continuation) if self._is_context_shared else 0)
            if texts is not None and (cut := tokens - limit) > 0:
                self._scored_cuts[tuple(texts)] = cut

    def add_partial(self, kind: str, request: Sequence[Any], answer: Any) -> None:
        """Record an answer in the current batch. lm-eval calls this hook for every answer of the model."""
        ends = getattr(self._lm, "answer_ends", None) if kind == "generate_until" else None
        end = ends.popleft() if ends else AnswerEnd()
        answer = _typed(kind, answer)
        if kind != self._kind:
            return
        name = _name(kind, request)
        if not self._waiting.get(name):
            # vLLM reports the settings it derived from a prompt's settings, so only the prompt can be compared.
            prompts = {name: waiting[0][0] for name, waiting in self._waiting.items() if waiting}
            matches = [name for name, prompt in prompts.items() if prompt == request[0]]
            if kind != "generate_until" or len(matches) != 1:
                return
            name = matches[0]
        self._waiting[name].popleft()
        self._ends[name].append(end)
        cut = self._scored_cuts.get(tuple(request), self._fitting_cut) if kind == "loglikelihood" else None
        self._answered.append((name, [*answer, cut] if kind == "loglikelihood" else [answer, *end]))
        if not self._batched:
            self.finish_batch()

    def finish_batch(self) -> None:
        """Append the answers of the finished batch to the journal, if there are any."""
        if not self._answered:
            return
        record: dict[str, Any] = {"kind": self._kind, "answers": self._answered}
        if self._sampled:
            import torch

            states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())]
            record["generator"] = [base64.b64encode(state.numpy().tobytes()).decode() for state in states]
        self._journal.append(record)
        self._answered = []

    def _answer_requests(self, kind: str, requests: Sequence[Any]) -> list[Any]:
        for request in requests:
            as_picture_prompt(request)
        names = [_name(kind, request.args) for request in requests]
        recorded = [queue.popleft() if (queue := self._recorded.get(name)) else None for name in names]
        ends = [AnswerEnd()] * len(requests)
        cuts = [self._fitting_cut] * len(requests)
        if kind == "generate_until":
            ends = [AnswerEnd() if entry is None else AnswerEnd(*entry[1:]) for entry in recorded]
            recorded = [None if entry is None else entry[0] for entry in recorded]
            for index, request in enumerate(requests if self._fitting_cut is not None else ()):
                budget = request.args[1].get("max_gen_toks", DEFAULT_BUDGET)
                limit = self._lm.max_length - (budget if self._is_context_shared else 0)
                cuts[index] = max(0, len(self._lm.tok_encode(request.args[0])) - limit)
        else:
            cuts = [self._fitting_cut if entry is None else entry[2] for entry in recorded]
        answers = [None if entry is None else _typed(kind, entry) for entry in recorded]
        order: Iterable[int] = range(len(requests))
        self._sampled = False
        if kind == "generate_until":
            # lm-eval batches requests with equal settings together, in the order in which the settings first occur.
            # This order must not change when some requests are already answered.
            by_settings: dict[str, list[int]] = {}
            for index, request in enumerate(requests):
                settings = request.args[1]
                by_settings.setdefault(repr(sorted(settings.items())), []).append(index)
                self._sampled |= bool(settings.get("do_sample") or settings.get("temperature"))
            order = chain.from_iterable(by_settings.values())
        unanswered = [index for index in order if answers[index] is None]
        self.restored = len(requests) - len(unanswered)
        self._kind, self._answered = kind, []
        self._waiting, self._ends = defaultdict(deque), defaultdict(deque)
        for index in unanswered:
            self._waiting[names[index]].append(requests[index].args)
        if self._sampled and (encoded := self._generator.get(kind)):
            import torch

            states = [torch.frombuffer(bytearray(base64.b64decode(part)), dtype=torch.uint8) for part in encoded]
            torch.set_rng_state(states[0])
            if states[1:]:
                torch.cuda.set_rng_state_all(states[1:])
        if unanswered:
            results = getattr(self._lm, kind)([requests[index] for index in unanswered])
            self.finish_batch()  # the last batch is complete
            for index, answer in zip(unanswered, results, strict=True):
                answers[index] = answer
                if request_ends := self._ends.get(names[index]):
                    ends[index] = request_ends.popleft()
                if kind == "loglikelihood":
                    cuts[index] = self._scored_cuts.get(tuple(requests[index].args), self._fitting_cut)
        if kind == "generate_until":
            self.ended_answers += zip(requests, ends, strict=True)
            answers = ["" if end.is_unfinished_thought else text for text, end in zip(answers, ends, strict=True)]
        self.prompt_cuts += zip(requests, cuts, strict=True)
        self._kind = ""
        return answers

    # As in lm-eval: the log-probability of each continuation in nats and whether it is the argmax; a generated text.
    loglikelihood = partialmethod(_answer_requests, "loglikelihood")
    generate_until = partialmethod(_answer_requests, "generate_until")


@contextmanager
def attach_journal(lm: Any, journal: RecordJournal, computes_in: Sequence[str]) -> Iterator[JournalledModel]:
    """Yield ``lm`` with a journal that is attached until the context closes.

    ``computes_in`` names the methods of ``lm`` that compute one batch each. It is empty if the answers of ``lm`` do not
    depend on each other.
    """
    from lm_eval.api.model import CacheHook

    model = JournalledModel(lm, journal, batched=bool(computes_in))

    def compute_batch(compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model.finish_batch()
        return compute(*args, **kwargs)

    lm.set_cache_hook(model)

    def score_tokens(compute: Callable[..., Any], requests: Any, *args: Any, **kwargs: Any) -> Any:
        model.count_scored_tokens(requests)
        return compute(requests, *args, **kwargs)

    wrappers = dict.fromkeys(computes_in, compute_batch)
    if hasattr(lm, "max_scored_tokens"):
        wrappers["_loglikelihood_tokens"] = score_tokens
    for name, wrapper in wrappers.items():
        setattr(lm, name, partial(wrapper, getattr(lm, name)))
    try:
        yield model
    finally:
        for name in wrappers:
            delattr(lm, name)
        lm.set_cache_hook(CacheHook(None))


def _name(kind: str, request: Sequence[Any]) -> str:
    from lm_eval.api.model import hash_args

    try:
        name = str(hash_args(kind, request))
    except TypeError:  # the settings are not JSON
        name = repr((kind, request))
    return f"{name} {request[0].digest}" if isinstance(request[0], PicturePrompt) else name


def _typed(kind: str, answer: Any) -> Any:
    return (float(answer[0]), bool(answer[1])) if kind == "loglikelihood" else str(answer)
