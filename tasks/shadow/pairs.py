"""Sample recorded pairs for the judge: one pair per session, selected by a hash and never by the answers.

Requests of one user resemble each other, so only one request per session counts. A hash of session and request selects
it among the requests that can be shown to a judge. Only then does mergegate read the answers. If one of them failed (a
status other than 200, a truncated stream) or is not text, the pair is left out and counted: failures of a candidate
show in its error rate, not in its win rate. Once a session is in the ledger, later looks never replace its pair.

mergegate reads the records twice, first the requests and then the answers to the selected requests. So memory holds at
most the user text that one look can judge.
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from mergegate.tasks.judge import RecordedAnswerPair
from mergegate.tasks.shadow.bodies import Unreadable, answer_in, question_in
from mergegate.tasks.shadow.recorded_traffic import RecordedPair

SAME_SESSION = "another request of the same session"
FAILED = "not answered by both servers"


class SampledPair(NamedTuple):
    """A pair to be judged. ``answers.reference`` is the parent's answer, ``answers.merge`` the candidate's."""

    session: str
    at: float
    answers: RecordedAnswerPair

    @property
    def ledger_fields(self) -> tuple[str, str, float]:
        """Request ID, session and time, which the ledger stores for a pair."""
        return self.answers.id, self.session, self.at

    @property
    def cut_off(self) -> tuple[bool, bool]:
        """Whether the token limit cut off the parent's and the candidate's answer."""
        return "reference" in self.answers.cut_off, "merge" in self.answers.cut_off

    @property
    def lengths(self) -> tuple[int, int]:
        """Characters of the parent's and of the candidate's answer."""
        return len(self.answers.reference), len(self.answers.merge)


class Sample(NamedTuple):
    """Pairs for one interim look.

    Attributes:
        pairs: Pairs to be judged now. Half-judged pairs come first, then the oldest.
        waiting: Number of pairs left for the next look.
        left_out: Number of pairs that were left out, by reason.
    """

    pairs: tuple[SampledPair, ...]
    waiting: int
    left_out: Mapping[str, int]


def sample_pairs(
    read_pairs: Callable[[], Iterable[RecordedPair]],
    *,
    judged_requests: Mapping[str, str],
    half_judged: Collection[str] = (),
    limit: int,
) -> Sample:
    """Return the pairs for one interim look: half-judged pairs first, then the oldest.

    Args:
        read_pairs: Function that returns all recorded pairs. It is called twice.
        judged_requests: ID of the judged request of each session in the ledger.
        half_judged: IDs of requests whose pairs an interrupted look judged in only one order.
        limit: Largest number of pairs in one look.
    """
    left_out: Counter[str] = Counter()
    # First pass: in each session without a pair, select the readable request with the smallest hash.
    selected: dict[str, tuple[bytes, str]] = {}
    for pair in read_pairs():
        if pair.session in judged_requests:
            left_out[SAME_SESSION] += judged_requests[pair.session] != pair.request_id
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
    request_ids = {request_id for _, request_id in selected.values()} | set(half_judged)

    # Second pass: hold in memory only the first ``limit`` of the selected pairs whose answers are readable.
    pairs: list[SampledPair] = []
    readable_count = 0
    for pair in read_pairs():
        if pair.request_id not in request_ids:
            continue
        if any(answer.status != 200 or answer.error for answer in (pair.parent, pair.candidate)):
            left_out[FAILED] += 1
            continue
        try:
            question = question_in(pair.path, pair.request)
            parent, candidate = (answer_in(pair.path, each.body) for each in (pair.parent, pair.candidate))
        except Unreadable as reason:
            left_out[str(reason)] += 1
            continue
        readable_count += 1
        cut_off = tuple(name for name, side in (("reference", parent), ("merge", candidate)) if side.cut_off)
        answers = RecordedAnswerPair(pair.request_id, question, parent.text, candidate.text, cut_off)
        sampled = SampledPair(pair.session, pair.at, answers)
        insort(pairs, sampled, key=lambda item: (item.answers.id not in half_judged, item.at, item.answers.id))
        del pairs[limit:]
    return Sample(tuple(pairs), readable_count - len(pairs), dict((+left_out).most_common()))
