"""Several candidates scored: what is known already is not asked again, and what goes wrong is told from a bad recipe.

A merge that is refused, or that computes NaN, comes back as a result: it has no score, and would not have one tomorrow.
A worker that died, or ran out of time, says nothing of its candidate: that is scored once more, and has no score only
when it happens again. A disk that is full, or an input that was changed meanwhile, ends the sweep; it goes on from
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mergegate.merge_core.errors import ChangedInput, DiskRefused, MergegateError, Refused
from mergegate.tasks.sweep.ledger import Ledger, request_key
from mergegate.tasks.sweep.trials import TrialRequest, TrialScores

ScoreAll = Callable[[Sequence[TrialRequest]], Iterator[tuple[int, TrialScores | Exception]]]
_ENDING = (DiskRefused, ChangedInput)


def score_once(
    requests: Sequence[TrialRequest],
    score_all: ScoreAll,
    ledger: Ledger,
    *,
    directory: Path | None = None,
    on_scored: Callable[[TrialScores], None] = lambda scores: None,
) -> tuple[TrialScores, ...]:
    """What each candidate scored, in the order of ``requests``; each is scored once, ever.

    Args:
        score_all: Gives results in any order, each with the number of its request.
        ledger: Each result is in it before the next is waited for.
        directory: Of the recipe that is searched.
        on_scored: Called with each result that is new.

    Raises:
        MergegateError: The machine says no; or nothing at all can be scored, and why.
    """
    keys = [request_key(request, directory) for request in requests]
    waiting = {key: request for key, request in zip(keys, requests, strict=True) if ledger.find(key) is None}

    def ask(asked: dict[str, TrialRequest]) -> dict[str, Exception]:
        """Score them; what kept those from it that say nothing of their candidate."""
        crashed = {}
        for number, result in score_all(list(asked.values())) if asked else ():
            key = list(asked)[number]
            if isinstance(result, _ENDING):
                raise result
            if isinstance(result, Exception):
                crashed[key] = result
                continue
            ledger.add(key, result)
            on_scored(result)
        return crashed

    crashed = ask({key: waiting[key] for key in ask(waiting)})
    # One may be a candidate that no process survives; where all of them are, it is not the candidates.
    if crashed and len(crashed) == len(set(keys)) and (len(crashed) > 1 or not len(ledger)):
        first = next(iter(crashed.values()))
        if isinstance(first, MergegateError):
            raise first
        raise Refused(
            "sweep",
            found=f"none of {len(crashed)} candidates could be scored: {_told(first)}",
            expected="processes that live as long as a trial takes",
            remedy="see what ended them (memory?); the sweep goes on where it is",
        ) from first
    for key, error in crashed.items():
        scores = TrialScores({}, problem=f"no score in two tries: {_told(error)}")
        ledger.add(key, scores)
        on_scored(scores)
    return tuple(found for key in keys if (found := ledger.find(key)) is not None)


def _told(error: Exception) -> str:
    said = str(error).strip()
    return said if isinstance(error, MergegateError) else f"{type(error).__name__}: {said}".rstrip(": ")
