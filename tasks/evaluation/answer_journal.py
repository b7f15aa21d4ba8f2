"""Answers to lm-eval's requests, kept as they come: a part that was killed asks only for what was not answered.

lm-eval tells whoever wants to know of every answer (``LM.set_cache_hook``). Its own cache of requests listens there
too, and cannot be used here: it keeps answers one by one, and two requests of equal text as one. What is left after a
kill would then be cut into other batches than before, and a batch decides the last places of a number. Here a batch is
kept when all of it is answered, and equal requests count one by one: so what is left is cut exactly as it would have
been, and the numbers are those of a run that nobody disturbed::

    with journalled(lm, journal, backend.computes_in) as lm:
        evaluate(lm, ...)

A sampled answer depends on the ones before it, through the state of torch's generator: that is kept with each batch,
and set again. Where another program samples (a server, vLLM's engine), it is only as random as it would have been.
"""

from __future__ import annotations

import base64
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mergegate.merge_core.files import RecordJournal
from mergegate.tasks.evaluation.backends import AnswerEnd


class JournalledModel:
    """An ``LM`` of lm-eval that answers from a journal what stands in it, and adds to it what does not.

    Args:
        batched: Whether ``batch_begins`` will be called before each batch; otherwise every answer stands for itself.
    """

    def __init__(self, lm: Any, journal: RecordJournal, *, batched: bool) -> None:
        self._lm, self._journal, self._batched = lm, journal, batched
        self.ended_answers: list[tuple[Any, AnswerEnd]] = []  # request and end of every generated answer
        self._known: dict[str, deque[Any]] = defaultdict(deque)  # answers, by name of the request
        self._generator: dict[str, Any] = {}  # state after the last batch, by kind of request
        for record in journal.records:
            for name, answer in record["answers"]:
                self._known[name].append(answer)
            self._generator[record["kind"]] = record.get("generator")
        self._waiting: dict[str, deque[Sequence[Any]]] = {}  # requests without an answer, by name
        self._answered: list[tuple[str, Any]] = []  # of the batch under way
        self._ends: dict[str, deque[AnswerEnd]] = defaultdict(deque)  # of the present call, by name of the request
        self._kind, self._sampled = "", False
        self.restored = 0  # requests of the present call that the journal answered

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """As lm-eval's: log-probability in nats of each continuation, and whether it is what the model would say."""
        return self._answers("loglikelihood", requests)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """As lm-eval's: what the model says to each prompt."""
        return self._answers("generate_until", requests)

    def add_partial(self, kind: str, request: Sequence[Any], answer: Any) -> None:
        """Record ``answer``, which may be of the last batch that was begun. lm-eval calls this hook."""
        ends = getattr(self._lm, "answer_ends", None) if kind == "generate_until" else None
        end = ends.popleft() if ends else AnswerEnd()
        answer = _typed(kind, answer)
        if kind == self._kind and (name := self._whose(kind, request)):
            self._ends[name].append(end)
            self._answered.append((name, answer if kind == "loglikelihood" else [answer, *end]))
            if not self._batched:
                self.batch_begins()

    def batch_begins(self) -> None:
        """All answers until now are those of whole batches: keep them."""
        if not self._answered:
            return
        record: dict[str, Any] = {"kind": self._kind, "answers": self._answered}
        if self._sampled:
            record["generator"] = _generator_state()
        self._journal.append(record)
        self._answered = []

    def _answers(self, kind: str, requests: Sequence[Any]) -> list[Any]:
        names = [_name(kind, request.args) for request in requests]
        recorded = [known.popleft() if (known := self._known.get(name)) else None for name in names]
        ends = [AnswerEnd()] * len(requests)
        if kind == "generate_until":
            ends = [AnswerEnd() if one is None else AnswerEnd(*one[1:]) for one in recorded]
            recorded = [None if one is None else one[0] for one in recorded]
        answers = [None if one is None else _typed(kind, one) for one in recorded]
        left = [index for index in _in_order_of_batches(kind, requests) if answers[index] is None]
        self.restored = len(requests) - len(left)
        self._kind, self._answered = kind, []
        self._sampled = kind == "generate_until" and any(map(_is_sampled, requests))
        self._waiting, self._ends = defaultdict(deque), defaultdict(deque)
        for index in left:
            self._waiting[names[index]].append(requests[index].args)
        if self._sampled and (state := self._generator.get(kind)):
            _set_generator(state)
        if left:
            found = getattr(self._lm, kind)([requests[index] for index in left])
            self.batch_begins()  # what was the last one is whole
            for index, answer in zip(left, found, strict=True):
                answers[index] = answer
                if ended := self._ends.get(names[index]):
                    ends[index] = ended.popleft()
        if kind == "generate_until":
            self.ended_answers += zip(requests, ends, strict=True)
        self._kind = ""
        return answers

    def _whose(self, kind: str, request: Sequence[Any]) -> str:
        """The name of the request that was answered; empty where it cannot be told."""
        name = _name(kind, request)
        if not self._waiting.get(name):
            if kind != "generate_until":
                return ""
            # vLLM says what it made of a prompt's settings, in place of the settings.
            alike = [other for other, waiting in self._waiting.items() if waiting and waiting[0][0] == request[0]]
            if len(alike) != 1:
                return ""
            name = alike[0]
        self._waiting[name].popleft()
        return name


def is_answer_record(record: object) -> bool:
    """Whether ``record`` is one that :class:`JournalledModel` keeps: a kind, its answers by name, torch's state."""
    if not isinstance(record, dict):
        return False
    match record:
        case {"kind": "loglikelihood", "answers": list(answers)}:
            whole = all(_is_pair(answer) and _is_pair(answer[1]) for answer in answers)
        case {"kind": "generate_until", "answers": list(answers)}:
            whole = all(_is_pair(answer) and _is_generated(answer[1]) for answer in answers)
        case _:
            return False
    state = record.get("generator", [])
    return whole and isinstance(state, list) and all(isinstance(part, str) for part in state)


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2


def _is_generated(value: object) -> bool:
    """Return whether ``value`` is a text with the fields of its ``AnswerEnd``."""
    if not (isinstance(value, list) and len(value) == 1 + len(AnswerEnd._fields)):
        return False
    text, reason, tokens = value
    return isinstance(text, str) and isinstance(reason, str) and (tokens is None or type(tokens) is int)


@contextmanager
def journalled(lm: Any, journal: RecordJournal, computes_in: Sequence[str]) -> Iterator[JournalledModel]:
    """``lm`` with a journal, as long as the context is open.

    Args:
        computes_in: Methods of ``lm`` that compute one batch each; none: its answers do not depend on each other.
    """
    from lm_eval.api.model import CacheHook

    model = JournalledModel(lm, journal, batched=bool(computes_in))

    def after_keeping(compute: Callable[..., Any]) -> Callable[..., Any]:
        def computing(*args: Any, **kwargs: Any) -> Any:
            model.batch_begins()
            return compute(*args, **kwargs)

        return computing

    lm.set_cache_hook(model)
    for name in computes_in:
        setattr(lm, name, after_keeping(getattr(lm, name)))
    try:
        yield model
    finally:
        for name in computes_in:
            delattr(lm, name)
        lm.set_cache_hook(CacheHook(None))


def _name(kind: str, request: Sequence[Any]) -> str:
    from lm_eval.api.model import hash_args

    try:
        return str(hash_args(kind, request))
    except TypeError:  # settings that JSON does not know
        return repr((kind, request))


def _typed(kind: str, answer: Any) -> Any:
    """As it goes into the journal, and as it is handed on: JSON knows neither tuples nor numbers of numpy."""
    return (float(answer[0]), bool(answer[1])) if kind == "loglikelihood" else str(answer)


def _is_sampled(request: Any) -> bool:
    settings = request.args[1]
    return bool(settings.get("do_sample") or settings.get("temperature"))


def _in_order_of_batches(kind: str, requests: Sequence[Any]) -> list[int]:
    """Positions of requests; those generated under equal settings together, in the order in which settings are first
    met. So they are batched, and the order must stay when the first of them need no answer any more."""
    if kind != "generate_until":
        return list(range(len(requests)))
    together: dict[str, list[int]] = {}
    for index, request in enumerate(requests):
        together.setdefault(repr(sorted(request.args[1].items())), []).append(index)
    return [index for group in together.values() for index in group]


def _generator_state() -> list[str]:
    """Of torch's generators, the CPU's first."""
    import torch

    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())]
    return [base64.b64encode(state.numpy().tobytes()).decode() for state in states]


def _set_generator(states: Sequence[str]) -> None:
    import torch

    own, *others = (torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8) for state in states)
    torch.set_rng_state(own)
    if others:
        torch.cuda.set_rng_state_all(others)
