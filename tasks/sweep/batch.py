"""Score several candidates, reuse known scores, and tell infrastructure failures apart from bad recipes.

A merge that is refused or that computes NaN is a result: the candidate has no score, and would have none tomorrow. If a
worker dies or exceeds its time limit, that says nothing about its candidate. The candidate is scored once more, and it
has no score only if the second try also fails. A full disk or a changed input ends the sweep, which resumes from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mergegate.merge_core.errors import CannotDecide, MergegateError, Refused
from mergegate.tasks.sweep.ledger import Ledger, request_key
from mergegate.tasks.sweep.trials import TrialRequest, TrialScores

ScoreAll = Callable[[Sequence[TrialRequest]], Iterator[tuple[int, TrialScores | Exception]]]


def score_once(
    requests: Sequence[TrialRequest],
    score_all: ScoreAll,
    ledger: Ledger,
    *,
    directory: Path | None = None,
    on_scored: Callable[[TrialScores], None] = lambda scores: None,
) -> tuple[TrialScores, ...]:
    """Return the scores of each candidate in the order of ``requests``, scoring each candidate at most once, ever.

    Args:
        score_all: Yields results in any order, each with the index of its request.
        ledger: Store of scores. Each result is recorded before the next one is awaited.
        directory: Directory of the recipe that is searched.
        on_scored: Callback for each new result.

    Raises:
        MergegateError: The machine cannot continue, or no candidate at all could be scored.
    """
    keys = [request_key(request, directory) for request in requests]
    unscored = {key: request for key, request in zip(keys, requests, strict=True) if ledger.find(key) is None}

    def score_pending(pending: dict[str, TrialRequest]) -> dict[str, Exception]:
        """Score the requests and return the errors that say nothing about their candidate."""
        crashed = {}
        for number, result in score_all(list(pending.values())) if pending else ():
            key = list(pending)[number]
            if isinstance(result, CannotDecide):
                raise result
            if isinstance(result, Exception):
                crashed[key] = result
                continue
            ledger.add(key, result)
            on_scored(result)
        return crashed

    crashed = score_pending({key: unscored[key] for key in score_pending(unscored)})
    # A single crash may be caused by its candidate. If all of them crash, the candidates are not the cause.
    if crashed and len(crashed) == len(set(keys)) and (len(crashed) > 1 or not len(ledger)):
        first = next(iter(crashed.values()))
        if isinstance(first, MergegateError):
            raise first
        raise Refused(
            "sweep",
            found=f"none of {len(crashed)} candidates could be scored: {_error_text(first)}",
            expected="processes that live as long as a trial takes",
            remedy="see what ended them (memory?); the sweep goes on where it is",
        ) from first
    for key, error in crashed.items():
        scores = TrialScores({}, problem=f"no score in two tries: {_error_text(error)}")
        ledger.add(key, scores)
        on_scored(scores)
    return tuple(stored for key in keys if (stored := ledger.find(key)) is not None)


def _error_text(error: Exception) -> str:
    text = str(error).strip()
    return text if isinstance(error, MergegateError) else f"{type(error).__name__}: {text}".rstrip(": ")
