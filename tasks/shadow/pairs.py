"""Which recorded pairs are judged: one of each session, chosen by a hash, so that nothing chooses by the answers.

Two requests of one user are alike, so only one of a session counts. Which one is decided by a hash of session and
request, among those whose *request* can be shown to a judge. Only then are the answers looked at: where one of the two
did not come (another status than 200, a stream that was cut off) or is no text, the pair is left out and counted; that
a candidate fails is told by its errors, not by its win rate. What is judged once stays: a session in the ledger has its
pair, so a later look adds pairs and exchanges none.

The records are read twice, first what was asked and then the answers of those that are wanted: no more of users' texts
is held than one look can have judged.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from mergegate.tasks.judge import RecordedAnswerPair
from mergegate.tasks.shadow.bodies import Unreadable, answer_in, question_in
from mergegate.tasks.shadow.recorded_traffic import RecordedAnswer, RecordedPair

SAME_SESSION = "another request of a session that has its pair"
FAILED = "not answered well by both"
_OK = 200


class SampledPair(NamedTuple):
    """A pair that is to be judged. ``given.reference`` is the parent's answer, ``given.merge`` the candidate's."""

    session: str
    at: float
    given: RecordedAnswerPair


class Sample(NamedTuple):
    """What one look has judged, in order of time; how many wait for the next one; what was left out, and why."""

    pairs: tuple[SampledPair, ...]
    waiting: int
    left_out: Mapping[str, int]


def sample_pairs(
    recorded: Callable[[], Iterable[RecordedPair]],
    *,
    judged: Mapping[str, str],
    begun: Collection[str] = (),
    most: int,
) -> Sample:
    """The pairs that a look has judged: those that were begun, then the oldest.

    Args:
        recorded: All pairs; asked twice.
        judged: Of each session that has its pair the request.
        begun: Requests of those that a look which was killed has left half judged.
        most: Pairs of one look.
    """
    left_out: Counter[str] = Counter()
    chosen = _choose(recorded(), judged, left_out)
    wanted = {number for _, number in chosen.values()} | set(begun)
    counted = 0

    def readable() -> Iterator[SampledPair]:
        nonlocal counted
        for pair in recorded():
            if pair.request_id in wanted and (found := _read(pair, left_out)) is not None:
                counted += 1
                yield found

    pairs = heapq.nsmallest(most, readable(), key=lambda one: (one.given.id not in begun, one.at, one.given.id))
    return Sample(tuple(pairs), counted - len(pairs), dict((+left_out).most_common()))


def _choose(
    recorded: Iterable[RecordedPair], judged: Mapping[str, str], left_out: Counter[str]
) -> dict[str, tuple[bytes, str]]:
    """Of each session without a pair the request with the smallest hash."""
    chosen: dict[str, tuple[bytes, str]] = {}
    for pair in recorded:
        if pair.session in judged:
            left_out[SAME_SESSION] += judged[pair.session] != pair.request_id
            continue
        try:
            question_in(pair.path, pair.request)
        except Unreadable as reason:
            left_out[str(reason)] += 1
            continue
        number = hashlib.sha256(f"{pair.session}\n{pair.request_id}".encode()).digest()
        before = chosen.get(pair.session)
        left_out[SAME_SESSION] += before is not None
        if before is None or number < before[0]:
            chosen[pair.session] = number, pair.request_id
    return chosen


def _read(pair: RecordedPair, left_out: Counter[str]) -> SampledPair | None:
    if not (_came(pair.parent) and _came(pair.candidate)):
        left_out[FAILED] += 1
        return None
    try:
        question = question_in(pair.path, pair.request)
        answers = answer_in(pair.path, pair.parent.body), answer_in(pair.path, pair.candidate.body)
    except Unreadable as reason:
        left_out[str(reason)] += 1
        return None
    return SampledPair(pair.session, pair.at, RecordedAnswerPair(pair.request_id, question, *answers))


def _came(answer: RecordedAnswer) -> bool:
    return answer.status == _OK and not answer.error
