"""How fast a running server answers one request at a time, after it has warmed up."""

from __future__ import annotations

import time
from dataclasses import dataclass

from mergegate.tasks.http import Answer
from mergegate.tasks.serve.checks import ServedSubject
from mergegate.tasks.serve.client import completion_of
from mergegate.tasks.serve.measurements import token_rate
from mergegate.tasks.serve.verdict import Check

_TRIES = 3  # the quickest counts: what else the machine does is not the model's fault
_ENOUGH = 15.0  # seconds of trying after which what there is must do


@dataclass(frozen=True)
class Speed:
    """The quickest of a few tries; None where it could not be measured.

    Args:
        seconds_to_first_token: From sending a request for one token to having it: HTTP, reading the prompt, one step.
        tokens_per_second: Of one stream, ``max_tokens`` after the first prompt, its reading included.
    """

    seconds_to_first_token: float | None = None
    tokens_per_second: float | None = None


def measure_speed(asked: ServedSubject) -> tuple[list[Check], Speed]:
    """The speed of one stream, and the check of it: against the profile's floor, if it has one."""
    floor = asked.settings.min_tokens_per_second
    expected = f"≥ {floor:g} tokens/s" if floor is not None else ""
    first: list[float] = []
    rates: list[float] = []
    began = time.monotonic()
    for _ in range(_TRIES):
        answer, seconds = _timed(asked, 1)
        if completion_of(answer) is not None:
            first.append(seconds)
        answer, seconds = _timed(asked, asked.settings.max_tokens)
        completion = completion_of(answer)
        if completion is None or not completion.tokens:
            seen = answer.complaint if completion is None else "the server counts no tokens"
            return [Check(name="throughput", outcome="not offered", seen=seen, expected=expected)], Speed()
        rates.append(completion.tokens / max(seconds, 1e-6))
        if time.monotonic() - began > _ENOUGH:
            break
    speed = Speed(min(first, default=None), max(rates))
    seen = token_rate(max(rates))
    if floor is not None and max(rates) < floor:
        remedy = "another machine, or a lower serve.min_tokens_per_second"
        return [Check(name="throughput", outcome="fail", seen=seen, expected=expected, remedy=remedy)], speed
    return [Check(name="throughput", outcome="pass", seen=seen, expected=expected)], speed


def _timed(asked: ServedSubject, tokens: int) -> tuple[Answer, float]:
    """A continuation of exactly so many tokens, where the server can be told not to stop; and its seconds."""
    began = time.monotonic()
    answer = asked.complete(asked.settings.prompts[0], tokens, extension={"ignore_eos": True})
    return answer, time.monotonic() - began
