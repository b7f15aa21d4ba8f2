"""The ledger of judged pairs: what the judge said is asked for once, ever, and outlives the look that asked.

A line is one judgement, vouched for like all before it (``merge_core.files``: a journal): after ``kill -9`` the next
look goes on with what is left. A ledger belongs to one candidate and to one judge; judgements of another judge are no
evidence beside these, so a changed judge begins anew. It holds no text of a user: who won in which order, of which
request, of whose session. What was said in words is kept apart (``losses``), and not for longer than the records.
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
_NAME = 16  # hex digits that name the file
_WINNERS = ("reference", "merge", "tie", None)


class JudgedPair(NamedTuple):
    """A pair after both orders."""

    id: str  # of the request
    session: str
    at: float  # of the request, unix
    judged: float  # when, unix
    score: float  # 1: the candidate's answer is better; 0: the parent's; else 1/2
    consistent: bool | None  # whether the judge said the same in both orders; None of equal answers: nobody was asked


class JudgedPairs:
    """The ledger, for this process alone. Made by :func:`open_judged`."""

    def __init__(self, journal: RecordJournal) -> None:
        self._journal = journal
        self._said: dict[str, dict[Order, Judgment]] = {}
        self._sessions: dict[str, str] = {}
        self._pairs: dict[str, JudgedPair] = {}
        for record in journal.records:
            self._take(record)

    @property
    def pairs(self) -> tuple[JudgedPair, ...]:
        """All that were judged, in the order in which they were."""
        return tuple(self._pairs.values())

    @property
    def scores(self) -> tuple[float, ...]:
        """The same as what they score."""
        return tuple(pair.score for pair in self._pairs.values())

    @property
    def consistency(self) -> float | None:
        """Share of the pairs that the judge was asked about in which it said the same in both orders; None: of none."""
        asked = [pair.consistent for pair in self._pairs.values() if pair.consistent is not None]
        return sum(asked) / len(asked) if asked else None

    @property
    def by_session(self) -> Mapping[str, str]:
        """Of each session that has its pair the request, also where that is judged by half."""
        return {session: one for one, session in self._sessions.items()}

    @property
    def begun(self) -> tuple[str, ...]:
        """Requests whose pair was judged in one order only, when a look was killed."""
        return tuple(one for one in self._said if one not in self._pairs)

    def judge(
        self,
        pairs: Sequence[SampledPair],
        judging: JudgmentSettings,
        server: JudgeServer,
        *,
        now: Callable[[], float],
        on_judged: Callable[[SampledPair, JudgedPair, Sequence[Judgment]], None] = lambda pair, judged, said: None,
    ) -> None:
        """Have the judge look at each in both orders, and keep what it says as it says so.

        Args:
            on_judged: Called with each pair that is done, and with what was said of it in this look.

        Raises:
            InvalidInput: when the judge cannot be asked. What it said before is kept.
        """
        by_id = {pair.given.id: pair for pair in pairs}
        said: dict[str, list[Judgment]] = {}
        for pair in pairs:
            if pair.given.reference == pair.given.merge:
                self._keep({"pair": _line_of(pair), "tie": True, "judged": now()})
                on_judged(pair, self._pairs[pair.given.id], ())
        known = {(one, order) for one, orders in self._said.items() for order in orders}
        for judgement in judge_recorded_pairs([pair.given for pair in pairs], judging, server, known):
            pair = by_id[judgement.prompt]
            winner = {"order": judgement.order, "winner": judgement.winner, "judge": judgement.judge}
            self._keep({"pair": _line_of(pair), "said": winner, "judged": now()})
            said.setdefault(judgement.prompt, []).append(judgement)
            if judgement.prompt in self._pairs:
                on_judged(pair, self._pairs[judgement.prompt], said[judgement.prompt])

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
        said = record["said"]
        orders = self._said.setdefault(id, {})
        orders[said["order"]] = _judgement(id, said)
        if len(orders) == len(ORDERS):
            both = tuple(orders.values())
            self._pairs[id] = JudgedPair(id, session, at, record["judged"], *score_pair(both))


@contextmanager
def open_judged(
    directory: Path, profile: str, candidate: str, judging: JudgmentSettings, on_wait: Callable[[], None] = lambda: None
) -> Iterator[JudgedPairs]:
    """The ledger of a candidate and a judge, for this process alone.

    Args:
        on_wait: Called once if another look has it.
    """
    place = _place(directory, profile, candidate, judging)
    state_directory(directory, private=True)
    with (
        locked(place.path.with_suffix(".lock"), required=False, on_wait=on_wait),
        open_journal(place, _fits) as journal,
    ):
        yield JudgedPairs(journal)


def read_judged(directory: Path, profile: str, candidate: str, judging: JudgmentSettings) -> JudgedPairs:
    """The same as it is now, also while a look has it. What is added to it is kept nowhere."""
    place = _place(directory, profile, candidate, judging)
    with TemporaryDirectory() as apart:
        copy = Path(apart) / "copy"
        if place.path.is_file():
            shutil.copyfile(place.path, copy)
        with open_journal(JournalPlace(copy, place.key), _fits) as journal:
            return JudgedPairs(journal)


def _place(directory: Path, profile: str, candidate: str, judging: JudgmentSettings) -> JournalPlace:
    key = digest({"format": _FORMAT, "candidate": candidate, "judge": judge_digest(judging)})
    return JournalPlace(directory / f"{profile}.{key[:_NAME]}.judged", key)


def _line_of(pair: SampledPair) -> tuple[str, str, float]:
    return pair.given.id, pair.session, pair.at


def _judgement(id: str, said: Mapping[str, Any]) -> Judgment:
    return Judgment(
        prompt=id, turn=0, order=said["order"], winner=said["winner"], dimensions={}, reasoning="", reply="",
        judge=said["judge"],
    )  # fmt: skip


def _fits(record: Any) -> bool:
    try:
        id, session, at = record["pair"]
        known = isinstance(id, str) and isinstance(session, str) and isinstance(at, float)
        known = known and isinstance(record["judged"], float)
        if record.get("tie"):
            return known
        said = record["said"]
        return (
            known and said["order"] in get_args(Order) and said["winner"] in _WINNERS and isinstance(said["judge"], str)
        )
    except (KeyError, TypeError, ValueError):
        return False
