"""Score generated code without Hugging Face's ``code_eval``.

The library ``evaluate`` downloads the script of ``code_eval`` and runs programs in the process that loads it. The
replacement in this module has the same interface and returns the same numbers, but runs programs with
``run_program``. If c of the n answers to a document pass, its score is pass@k = 1 - C(n-c, k) / C(n, k). This is the
probability that at least one of k answers, drawn without replacement from the n, passes (Chen et al. 2021,
arXiv:2107.03374, equation 1).
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
CHECK = "check_correctness"  # function that lm-eval tasks without code_eval use to run programs
_on_program: ContextVar[Callable[[int], None]] = ContextVar("programs run already", default=lambda count: None)


def pass_at(k: int, answers: int, passing: int) -> float:
    """Return the unbiased estimate of pass@k for a document from the number of its answers and of those that pass.

    >>> pass_at(1, 4, 1), pass_at(2, 4, 1)
    (0.25, 0.5)
    """
    return 1 - comb(answers - passing, k) / comb(answers, k)


class CodeEval:
    """Replacement for the object that ``evaluate.load("code_eval")`` returns. ``limits`` apply to each program."""

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
        """Run every answer (``predictions``) together with the tests of its document (``references``).

        The result holds the mean of pass@k over documents, for each ``k`` up to the smallest number of answers to a
        document, and the results of the answers by document. Raises Refused if ``run_program`` does.
        """
        outcomes: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        for document, (tests, answers) in enumerate(zip(references, predictions, strict=True)):
            outcomes[document] = []
            for number, answer in enumerate(answers):
                end = self._run(answer + "\n" + tests)
                passed = end is ProgramEnd.PASSED
                result = {"task_id": document, "passed": passed, "result": str(end), "completion_id": number}
                outcomes[document].append((number, result))
        counts = [(len(results), sum(result["passed"] for _, result in results)) for results in outcomes.values()]
        fewest = min((answers for answers, _ in counts), default=0)
        means = {
            f"pass@{each}": fsum(pass_at(each, *count) for count in counts) / len(counts)
            for each in k
            if counts and each <= fewest
        }
        return means, outcomes

    def check(self, program: str, timeout: float = 0) -> bool:
        """Return whether a program that contains its own tests passes. ``timeout`` has no effect; the limits apply."""
        return self._run(program) is ProgramEnd.PASSED

    def _run(self, program: str) -> ProgramEnd:
        end = run_program(program, self._limits)
        self._programs += 1
        _on_program.get()(self._programs)
        return end


@contextmanager
def report_programs(tell: Callable[[int], None]) -> Iterator[None]:
    """Call ``tell`` after each program inside the context, with the number of programs run so far."""
    token = _on_program.set(tell)
    try:
        yield
    finally:
        _on_program.reset(token)


@contextmanager
def confine_code_eval(limits: ProgramLimits | None) -> Iterator[None]:
    """Make tasks loaded inside the context use ``CodeEval`` as ``code_eval``. No effect if ``limits`` is None."""
    if limits is None:
        yield
        return
    evaluate = importlib.import_module("evaluate")
    load: Callable[..., Any] = vars(evaluate)["load"]

    def load_replacement(path: str, *args: Any, **kwargs: Any) -> Any:
        return CodeEval(limits) if path == _NAME else load(path, *args, **kwargs)

    vars(evaluate)["load"] = load_replacement
    try:
        yield
    finally:
        vars(evaluate)["load"] = load


def functions_in(value: Any) -> Iterator[Any]:
    """Yield every function in nested plain data, such as the configuration of a task."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from functions_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from functions_in(inner)
    elif callable(value):
        yield value
