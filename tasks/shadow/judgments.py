"""Store judgments in a ledger, so that each pair is judged only once across all interim looks.

The ledger is a journal (``merge_core.files``) with one judgment per line, and each line is verified together with all
lines before it. After ``kill -9``, the next look continues where the last one stopped. A ledger belongs to one
candidate and one judge. Judgments of different judges cannot be combined as evidence, so a changed judge starts a new
ledger. The ledger contains no user text, only the winner in each order with the IDs of the request and the session. The
texts of lost pairs are stored separately (``losses``), no longer than the records.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, get_args

from mergegate.merge_core.files import JournalPlace, RecordJournal, locked, open_journal, state_directory
from mergegate.tasks.judge import (
    ORDERS,
    JudgeServer,
    Judgment,
    JudgmentSettings,
    Order,
    judge_digest,
    judge_recorded_pairs,
    score_pair,
)
from mergegate.tasks.shadow.pairs import SampledPair
from mergegate.tasks.store import digest

_FORMAT = 1
_NAME = 16  # hexadecimal digits in the file name
_WINNERS = ("reference", "merge", "tie", None)


class JudgedPair(NamedTuple):
    """Pair that was judged in both orders."""

    id: str  # request ID
    session: str
    at: float  # time of the request, as Unix time
    judged: float  # time of the judgment, as Unix time
    score: float  # 1 if the candidate's answer is better, 0 if the parent's is, otherwise 1/2
    consistent: bool | None  # whether both orders agree; None for equal answers, which no judge sees


class JudgedPairs:
    """Ledger of judged pairs, locked by this process. Use :func:`open_judged` to open it."""

    def __init__(self, journal: RecordJournal) -> None:
        self._journal = journal
        self._said: dict[str, dict[Order, Judgment]] = {}
        self._sessions: dict[str, str] = {}
        self._pairs: dict[str, JudgedPair] = {}
        for record in journal.records:
            self._take(record)

    @property
    def pairs(self) -> tuple[JudgedPair, ...]:
        """Judged pairs, in the order in which they were judged."""
        return tuple(self._pairs.values())

    @property
    def scores(self) -> tuple[float, ...]:
        """Scores of the judged pairs, in the same order as ``pairs``."""
        return tuple(pair.score for pair in self._pairs.values())

    @property
    def consistency(self) -> float | None:
        """Share of the pairs seen by the judge in which both orders agree, or None if it has seen no pair."""
        verdicts = [pair.consistent for pair in self._pairs.values() if pair.consistent is not None]
        return sum(verdicts) / len(verdicts) if verdicts else None

    @property
    def by_session(self) -> Mapping[str, str]:
        """Request ID of each session in the ledger, including sessions with a half-judged pair."""
        return {session: request_id for request_id, session in self._sessions.items()}

    @property
    def begun(self) -> tuple[str, ...]:
        """IDs of the requests whose pairs are only half judged.

        An interrupted look stored the judgment for one order of the answers, and the judgment for the other order is
        missing.
        """
        return tuple(request_id for request_id in self._said if request_id not in self._pairs)

    def judge(
        self,
        pairs: Sequence[SampledPair],
        judging: JudgmentSettings,
        server: JudgeServer,
        *,
        now: Callable[[], float],
        on_judged: Callable[[SampledPair, JudgedPair, Sequence[Judgment]], None] = lambda pair, judged, judgments: None,
    ) -> None:
        """Have each pair judged in both orders, and store each judgment immediately.

        Args:
            pairs: Pairs to judge.
            judging: Settings of the judgment.
            server: Server of the judge.
            now: Function that returns the Unix time.
            on_judged: Function that is called with each finished pair and its judgments from this look.

        Raises:
            InvalidInput: If the judge is not available. Judgments stored before remain in the ledger.
        """
        by_id = {pair.given.id: pair for pair in pairs}
        judgments: dict[str, list[Judgment]] = {}
        for pair in pairs:
            if pair.given.reference == pair.given.merge:
                self._keep({"pair": _pair_fields(pair), "tie": True, "judged": now()})
                on_judged(pair, self._pairs[pair.given.id], ())
        finished = {(request_id, order) for request_id, orders in self._said.items() for order in orders}
        for judgment in judge_recorded_pairs([pair.given for pair in pairs], judging, server, finished):
            pair = by_id[judgment.prompt]
            winner = {"order": judgment.order, "winner": judgment.winner, "judge": judgment.judge}
            self._keep({"pair": _pair_fields(pair), "said": winner, "judged": now()})
            judgments.setdefault(judgment.prompt, []).append(judgment)
            if judgment.prompt in self._pairs:
                on_judged(pair, self._pairs[judgment.prompt], judgments[judgment.prompt])

    def _keep(self, record: Mapping[str, Any]) -> None:
        self._journal.append(record)
        self._take(record)

    def _take(self, record: Mapping[str, Any]) -> None:
        id, session, at = record["pair"]
        if id in self._pairs:
            return
        self._sessions[id] = session
        if record.get("tie"):
            self._pairs[id] = JudgedPair(id, session, at, record["judged"], 0.5, None)
            return
        answer = record["said"]
        orders = self._said.setdefault(id, {})
        orders[answer["order"]] = _judgment(id, answer)
        if len(orders) == len(ORDERS):
            both = tuple(orders.values())
            self._pairs[id] = JudgedPair(id, session, at, record["judged"], *score_pair(both))


@contextmanager
def open_judged(
    directory: Path, profile: str, candidate: str, judging: JudgmentSettings, on_wait: Callable[[], None] = lambda: None
) -> Iterator[JudgedPairs]:
    """Open the ledger of a candidate and a judge, and lock it for this process.

    Args:
        directory: Directory of the ledgers.
        profile: Name of the profile.
        candidate: Version of the candidate.
        judging: Settings that identify the judge.
        on_wait: Function that is called once if another look holds the lock.
    """
    location = _journal_location(directory, profile, candidate, judging)
    state_directory(directory, private=True)
    with (
        locked(location.path.with_suffix(".lock"), required=False, on_wait=on_wait),
        open_journal(location, _is_valid_record) as journal,
    ):
        yield JudgedPairs(journal)


def read_judged(directory: Path, profile: str, candidate: str, judging: JudgmentSettings) -> JudgedPairs:
    """Return a copy of the ledger, even while another process has locked it. Additions to the copy are not stored."""
    location = _journal_location(directory, profile, candidate, judging)
    with TemporaryDirectory() as temporary:
        copy = Path(temporary) / "copy"
        if location.path.is_file():
            shutil.copyfile(location.path, copy)
        with open_journal(JournalPlace(copy, location.key), _is_valid_record) as journal:
            return JudgedPairs(journal)


def _journal_location(directory: Path, profile: str, candidate: str, judging: JudgmentSettings) -> JournalPlace:
    key = digest({"format": _FORMAT, "candidate": candidate, "judge": judge_digest(judging)})
    return JournalPlace(directory / f"{profile}.{key[:_NAME]}.judged", key)


def _pair_fields(pair: SampledPair) -> tuple[str, str, float]:
    return pair.given.id, pair.session, pair.at


def _judgment(id: str, record: Mapping[str, Any]) -> Judgment:
    return Judgment(
        prompt=id, turn=0, order=record["order"], winner=record["winner"], dimensions={}, reasoning="", reply="",
        judge=record["judge"],
    )  # fmt: skip


def _is_valid_record(record: Any) -> bool:
    try:
        id, session, at = record["pair"]
        valid = isinstance(id, str) and isinstance(session, str) and isinstance(at, float)
        valid = valid and isinstance(record["judged"], float)
        if record.get("tie"):
            return valid
        vote = record["said"]
        return (
            valid and vote["order"] in get_args(Order) and vote["winner"] in _WINNERS and isinstance(vote["judge"], str)
        )
    except (KeyError, TypeError, ValueError):
        return False
