"""Measure how fast a running server answers one request at a time, after warming up."""

from __future__ import annotations

import time
from dataclasses import dataclass

from mergegate.tasks.http import Answer
from mergegate.tasks.serve.checks import ServedSubject
from mergegate.tasks.serve.client import parse_completion
from mergegate.tasks.serve.measurements import token_rate
from mergegate.tasks.serve.verdict import Check

_TRIES = 3  # the fastest counts, because other load on the machine is not the model's fault
_ENOUGH = 15.0  # seconds after which no further try starts


@dataclass(frozen=True)
class Speed:
    """Fastest of up to three tries. A value is None if it could not be measured.

    Args:
        seconds_to_first_token: Time from sending a request for one token to receiving the answer.
        tokens_per_second: Rate of one stream of ``max_tokens``. The time includes reading the prompt.
    """

    seconds_to_first_token: float | None = None
    tokens_per_second: float | None = None


def measure_speed(subject: ServedSubject) -> tuple[list[Check], Speed]:
    """Measure the speed of one stream, and compare it with ``min_tokens_per_second`` if that is set."""
    floor = subject.settings.min_tokens_per_second
    expected = f"≥ {floor:g} tokens/s" if floor is not None else ""
    first: list[float] = []
    rates: list[float] = []
    began = time.monotonic()
    for _ in range(_TRIES):
        answer, seconds = _timed(subject, 1)
        if parse_completion(answer) is not None:
            first.append(seconds)
        answer, seconds = _timed(subject, subject.settings.max_tokens)
        completion = parse_completion(answer)
        if completion is None or not completion.tokens:
            seen = answer.complaint if completion is None else "the server does not report the number of tokens"
            return [Check.not_offered("throughput", seen, expected)], Speed()
        rates.append(completion.tokens / max(seconds, 1e-6))
        if time.monotonic() - began > _ENOUGH:
            break
    speed = Speed(min(first, default=None), max(rates))
    seen = token_rate(max(rates))
    if floor is not None and max(rates) < floor:
        remedy = "use a faster machine, or decrease serve.min_tokens_per_second"
        return [Check.failed_check("throughput", seen, expected, remedy)], speed
    return [Check.passed_check("throughput", seen, expected)], speed


def _timed(subject: ServedSubject, tokens: int) -> tuple[Answer, float]:
    """Request ``tokens`` tokens, and return the answer and the seconds. vLLM generates exactly that many."""
    began = time.monotonic()
    answer = subject.complete(subject.settings.prompts[0], tokens, extension={"ignore_eos": True})
    return answer, time.monotonic() - began
