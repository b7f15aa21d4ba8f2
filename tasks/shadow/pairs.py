"""Sample recorded pairs for the judge: one pair per session, selected by a hash and never by the answers.

Requests of one user resemble each other, so only one request per session counts. A hash of session and request selects
it among the requests that can be shown to a judge. Only then does mergegate read the answers. If one of them failed (a
status other than 200, a truncated stream) or is not text, the pair is left out and counted: failures of a candidate
show in its error rate, not in its win rate. A judged pair is final. Once a session is in the ledger, later looks add
pairs of other sessions and never replace its pair.

The records are read twice, first the requests and then the answers to the selected requests. Memory therefore never
holds more user text than one look can have judged.
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
    """Pair to be judged. ``given.reference`` is the parent's answer, ``given.merge`` the candidate's."""

    session: str
    at: float
    given: RecordedAnswerPair


class Sample(NamedTuple):
    """Pairs of one interim look.

    Attributes:
        pairs: Pairs to be judged now. Half-judged pairs come first, then the oldest.
        waiting: Number of pairs left for the next look.
        left_out: Number of pairs that were left out, by reason.
    """

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
    """Return the pairs for one interim look: half-judged pairs first, then the oldest.

    Args:
        recorded: Function that returns all recorded pairs. It is called twice.
        judged: Judged request of each session in the ledger.
        begun: Requests that an interrupted look left half judged.
        most: Largest number of pairs in one look.
    """
    left_out: Counter[str] = Counter()
    selected = _select_by_hash(recorded(), judged, left_out)
    request_ids = {request_id for _, request_id in selected.values()} | set(begun)
    readable_count = 0

    def readable_pairs() -> Iterator[SampledPair]:
        nonlocal readable_count
        for pair in recorded():
            if pair.request_id in request_ids and (sampled := _read_pair(pair, left_out)) is not None:
                readable_count += 1
                yield sampled

    pairs = heapq.nsmallest(
        most, readable_pairs(), key=lambda pair: (pair.given.id not in begun, pair.at, pair.given.id)
    )
    return Sample(tuple(pairs), readable_count - len(pairs), dict((+left_out).most_common()))


def _select_by_hash(
    recorded: Iterable[RecordedPair], judged: Mapping[str, str], left_out: Counter[str]
) -> dict[str, tuple[bytes, str]]:
    """Return the request with the smallest hash of each session that has no pair yet."""
    selected: dict[str, tuple[bytes, str]] = {}
    for pair in recorded:
        if pair.session in judged:
            left_out[SAME_SESSION] += judged[pair.session] != pair.request_id
            continue
        try:
            question_in(pair.path, pair.request)
        except Unreadable as reason:
            left_out[str(reason)] += 1
            continue
        rank = hashlib.sha256(f"{pair.session}\n{pair.request_id}".encode()).digest()
        previous = selected.get(pair.session)
        left_out[SAME_SESSION] += previous is not None
        if previous is None or rank < previous[0]:
            selected[pair.session] = rank, pair.request_id
    return selected


def _read_pair(pair: RecordedPair, left_out: Counter[str]) -> SampledPair | None:
    if not (_is_answered(pair.parent) and _is_answered(pair.candidate)):
        left_out[FAILED] += 1
        return None
    try:
        question = question_in(pair.path, pair.request)
        answers = answer_in(pair.path, pair.parent.body), answer_in(pair.path, pair.candidate.body)
    except Unreadable as reason:
        left_out[str(reason)] += 1
        return None
    return SampledPair(pair.session, pair.at, RecordedAnswerPair(pair.request_id, question, *answers))


def _is_answered(answer: RecordedAnswer) -> bool:
    return answer.status == _OK and not answer.error
