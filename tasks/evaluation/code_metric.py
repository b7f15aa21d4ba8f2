"""Scores of generated code without Hugging Face's ``code_eval``: a script that ``evaluate`` fetches from a network, and
that runs programs in the process which loads it.

What stands in for it has the same face and gives the same numbers; programs are run by ``run_program``. A document
with n answers of which c pass has pass@k = 1 - C(n-c, k) / C(n, k): the chance that at least one of k answers passes
that are drawn from the n without putting any back (Chen et al. 2021, arXiv:2107.03374, equation 1).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import comb, fsum
from typing import Any

from mergegate.tasks.sandbox import ProgramEnd, ProgramLimits, run_program

_NAME = "code_eval"
_CHECK = "check_correctness"  # by which tasks of lm-eval run programs that do not use code_eval
_run_already: ContextVar[Callable[[int], None]] = ContextVar("programs run already", default=lambda count: None)


def pass_at(k: int, answers: int, passed: int) -> float:
    """The unbiased estimate of pass@k.

    Args:
        k: Answers that are drawn, at least 1 and at most ``answers``.
        answers: That there are of a document.
        passed: Those among them that pass.

    >>> pass_at(1, 4, 1), pass_at(2, 4, 1)
    (0.25, 0.5)
    """
    return 1 - comb(answers - passed, k) / comb(answers, k)


class CodeEval:
    """What ``evaluate.load("code_eval")`` returns here.

    Args:
        limits: Of each program.
    """

    def __init__(self, limits: ProgramLimits) -> None:
        self._limits = limits
        self._programs = 0

    def compute(
        self,
        *,
        references: Sequence[str],
        predictions: Sequence[Sequence[str]],
        k: Sequence[int] = (1, 10, 100),
        **_: Any,
    ) -> tuple[dict[str, float], dict[int, list[tuple[int, dict[str, Any]]]]]:
        """Run every answer with the tests of its document.

        Args:
            references: Tests, a program text for each document.
            predictions: Answers, any number for each document.

        Returns:
            The mean of pass@k over documents for each ``k`` of which no document has fewer answers; and what came of
            each answer, by document.

        Raises:
            Refused: as ``run_program``.
        """
        outcomes: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        for document, (tests, answers) in enumerate(zip(references, predictions, strict=True)):
            outcomes[document] = []
            for number, answer in enumerate(answers):
                end = self._run(answer + "\n" + tests)
                passed = end is ProgramEnd.PASSED
                said = {"task_id": document, "passed": passed, "result": str(end), "completion_id": number}
                outcomes[document].append((number, said))
        counts = [(len(found), sum(said["passed"] for _, said in found)) for found in outcomes.values()]
        fewest = min((answers for answers, _ in counts), default=0)
        means = {
            f"pass@{each}": fsum(pass_at(each, *count) for count in counts) / len(counts)
            for each in k
            if counts and each <= fewest
        }
        return means, outcomes

    def check(self, program: str, timeout: float = 0) -> bool:
        """Whether a program that has its tests in it passes. ``timeout`` is not heard: there is one limit for all."""
        return self._run(program) is ProgramEnd.PASSED

    def _run(self, program: str) -> ProgramEnd:
        end = run_program(program, self._limits)
        self._programs += 1
        _run_already.get()(self._programs)
        return end


@contextmanager
def programs_told(tell: Callable[[int], None]) -> Iterator[None]:
    """Inside, ``tell`` hears after each program how many were run: a document may have many, and each takes seconds."""
    token = _run_already.set(tell)
    try:
        yield
    finally:
        _run_already.reset(token)


@contextmanager
def code_bounded(limits: ProgramLimits | None) -> Iterator[None]:
    """Inside, tasks are loaded that get ours where they ask for ``code_eval``. Without limits nothing is changed."""
    if limits is None:
        yield
        return
    evaluate = importlib.import_module("evaluate")
    load: Callable[..., Any] = vars(evaluate)["load"]

    def load_ours(path: str, *more: Any, **named: Any) -> Any:
        return CodeEval(limits) if path == _NAME else load(path, *more, **named)

    vars(evaluate)["load"] = load_ours
    try:
        yield
    finally:
        vars(evaluate)["load"] = load


def bound_checks(leaf: Any, limits: ProgramLimits) -> None:
    """See that a task which runs programs by a function of its own (``check_correctness``) runs them as ours are."""
    for function in _functions(leaf.config.to_dict(keep_callable=True)):
        within = getattr(function, "__globals__", {})
        if callable(within.get(_CHECK)):
            within[_CHECK] = CodeEval(limits).check


def code_labels(leaf: Any) -> dict[str, tuple[str, ...]]:
    """Of metrics that are called otherwise in the end than in the definition: the names that documents get scores by
    (``pass_at_k`` with ``k: [1, 8]``: ``pass@1`` and ``pass@8``)."""
    if not getattr(leaf, "UNSAFE_CODE", False):
        return {}
    kwargs: Mapping[str, Mapping[str, Any]] = getattr(leaf, "_metric_fn_kwargs", {})
    listed = {metric: said["k"] for metric, said in kwargs.items() if "k" in said}
    return {
        metric: tuple(f"pass@{each}" for each in (drawn if isinstance(drawn, list) else [drawn]))
        for metric, drawn in listed.items()
    }


def _functions(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _functions(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _functions(inner)
    elif callable(value):
        yield value
