"""Store judgments in a ledger, so that each pair is judged only once across all interim looks.

The ledger is a journal (``merge_core.files``) with one judgment per line, and each line is verified together with all
lines before it. After ``kill -9``, the next look continues where the last one stopped. A ledger belongs to one
candidate and one judge: judgments of different judges cannot be combined as evidence. It contains no user text, only
the winner in each order with the IDs of the request and the session, and the lengths of both answers.

A separate file holds the newest pairs that the candidate lost, with the question, both answers and the judge's
reasoning. It is for reviewers; no decision depends on it. It contains user text, so mergegate keeps only a few pairs
and deletes them no later than the records.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, get_args

from pydantic import TypeAdapter

from mergegate.merge_core.errors import to_printable
from mergegate.merge_core.files import (
    Damaged,
    JournalLocation,
    RecordJournal,
    hold_lock,
    open_journal,
    read_state,
    set_aside_damaged,
    state_directory,
    write_state,
)
from mergegate.tasks.base.store import digest
from mergegate.tasks.quality.judge import (
    INSTRUCTIONS,
    ORDERS,
    SCORES,
    Judgment,
    JudgmentKey,
    JudgmentSettings,
    Order,
    control_count,
    controls_found,
    judge_recorded_pairs,
    settle,
)
from mergegate.tasks.shadow.pairs import SampledPair
from mergegate.tasks.shadow.settings import FrozenModel, ShadowJudge
from mergegate.tasks.shadow.verdict import JudgedTotals

_FORMAT = 1
_NAME = 16  # hexadecimal digits in the file name
_WINNERS = ("reference", "merge", "tie", None)
_MAX_LOST_PAIRS = 20
_MAX_CHARACTERS = 2000  # largest length of each text in a lost pair


class JudgedPair(NamedTuple):
    """A pair that was judged in both orders."""

    id: str  # request ID
    session: str
    at: float  # time of the request, as Unix time
    judged: float  # time of the judgment, as Unix time
    score: float  # 1 if the candidate's answer is better, 0 if the parent's is, or else 1/2
    consistent: bool | None  # whether both orders agree; None for equal answers, which no judge sees
    # Characters of the parent's and the candidate's answer, and whether the token limit cut them off. None: not stored.
    lengths: tuple[int, int] | None = None
    cut_off: tuple[bool, bool] = (False, False)


class JudgedPairs:
    """Ledger of judged pairs, locked by this process. Open it with :func:`open_judged`."""

    def __init__(self, journal: RecordJournal) -> None:
        self._journal = journal
        self._judgments: dict[str, dict[Order, Judgment]] = {}
        self.by_session: dict[str, str] = {}  # request ID of each session, even with a half-judged pair
        self._pairs: dict[str, JudgedPair] = {}
        self._controls: dict[JudgmentKey, Judgment] = {}
        for record in journal.records:
            self._add(record)

    @property
    def pairs(self) -> tuple[JudgedPair, ...]:
        """Judged pairs, in the order in which they were judged."""
        return tuple(self._pairs.values())

    @property
    def totals(self) -> JudgedTotals:
        """Scores, controls, lengths and ends of all judged pairs. Older ledgers lack the lengths of some pairs."""
        pairs = self.pairs
        verdicts = [pair.consistent for pair in pairs if pair.consistent is not None]
        lengths = [pair.lengths for pair in pairs if pair.lengths is not None]
        share = 100 / max(1, len(lengths))
        return JudgedTotals(
            [pair.score for pair in pairs],
            sum(verdicts) / len(verdicts) if verdicts else None,
            controls_found(self._controls.values()),
            (sum(parent for parent, _ in lengths), sum(candidate for _, candidate in lengths)),
            (share * sum(pair.cut_off[0] for pair in pairs), share * sum(pair.cut_off[1] for pair in pairs)),
        )

    @property
    def half_judged(self) -> tuple[str, ...]:
        """IDs of the requests whose pairs have a judgment in only one order, because a look was interrupted."""
        return tuple(request_id for request_id in self._judgments if request_id not in self._pairs)

    def judge(
        self,
        pairs: Sequence[SampledPair],
        judge: ShadowJudge,
        *,
        now: Callable[[], float],
        on_judged: Callable[[SampledPair, JudgedPair, Sequence[Judgment]], None] = lambda pair, judged, judgments: None,
    ) -> None:
        """Have each pair judged in both orders, mixed with control pairs, and store each judgment immediately.

        ``now`` returns the Unix time. ``on_judged`` is called with each completely judged pair and its judgments from
        this call.

        Raises:
            InvalidInput: The judge is not available. Judgments stored before remain in the ledger.
        """
        by_id = {pair.answers.id: pair for pair in pairs}
        new_judgments: dict[str, list[Judgment]] = {}
        for pair in pairs:
            if pair.answers.reference == pair.answers.merge:
                self._append({"pair": pair.ledger_fields, "tie": True, "judged": now(), **pair.measured_facts})
                on_judged(pair, self._pairs[pair.answers.id], ())
        finished = {judgment.key for orders in self._judgments.values() for judgment in orders.values()}
        seen = {pair.id for pair in self._pairs.values() if pair.consistent is not None}
        judged_after = len(seen.union(pair.answers.id for pair in pairs if pair.answers.questions()))
        # Controls that an interrupted look judged in one order are completed. New ones have the smallest hashes.
        started = {key.prompt for key in self._controls}
        usable = [
            pair.answers.id
            for pair in pairs
            if pair.answers.id not in started and pair.answers.questions() and pair.answers.controls()
        ]
        usable.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
        missing = max(0, control_count(judged_after, judge.control_share) - len(started))
        controls = started.union(usable[:missing])
        answers = [pair.answers for pair in pairs]
        for judgment in judge_recorded_pairs(answers, judge, judge, finished | self._controls.keys(), controls):
            pair = by_id[judgment.prompt]
            vote = {"order": judgment.order, "winner": judgment.winner, "judge": judgment.judge}
            if judgment.control:
                control = {"pair": pair.ledger_fields, "control": judgment.control, "said": vote, "judged": now()}
                self._append(control)
                continue
            self._append({"pair": pair.ledger_fields, "said": vote, "judged": now(), **pair.measured_facts})
            new_judgments.setdefault(judgment.prompt, []).append(judgment)
            if judgment.prompt in self._pairs:
                on_judged(pair, self._pairs[judgment.prompt], new_judgments[judgment.prompt])

    def _append(self, record: Mapping[str, Any]) -> None:
        self._journal.append(record)
        self._add(record)

    def _add(self, record: Mapping[str, Any]) -> None:
        id, session, at = record["pair"]
        if vote := record.get("said"):
            judgment = Judgment(
                prompt=id, turn=0, order=vote["order"], winner=vote["winner"], dimensions={}, reasoning="", reply="",
                judge=vote["judge"], control=record.get("control", ""),
            )  # fmt: skip
            if judgment.control:
                self._controls[judgment.key] = judgment
                return
        if id in self._pairs:
            return
        if id not in self._judgments:
            self.by_session[session] = id
        lengths = tuple(record["lengths"]) if "lengths" in record else None
        cut_off = tuple(record.get("cut_off", (False, False)))
        if record.get("tie"):
            self._pairs[id] = JudgedPair(id, session, at, record["judged"], 0.5, None, lengths, cut_off)
            return
        orders = self._judgments.setdefault(id, {})
        orders[judgment.order] = judgment
        if len(orders) == len(ORDERS):
            (pair,) = settle(orders.values())
            score, consistent = SCORES[pair.winner], bool(pair.consistent)
            self._pairs[id] = JudgedPair(id, session, at, record["judged"], score, consistent, lengths, cut_off)


@contextmanager
def open_judged(
    directory: Path, profile: str, candidate: str, judging: JudgmentSettings, on_wait: Callable[[], None] = lambda: None
) -> Iterator[JudgedPairs]:
    """Open the ledger for a candidate and a judge, and lock it for this process.

    ``candidate`` is a version, and ``judging`` identifies the judge. ``on_wait`` is called once if another process
    holds the lock.
    """
    location = _journal_location(directory, profile, candidate, judging)
    state_directory(directory, private=True)
    with (
        hold_lock(location.path.with_suffix(".lock"), required=False, on_wait=on_wait),
        open_journal(location, _is_valid_record) as journal,
    ):
        yield JudgedPairs(journal)


def read_judged(directory: Path, profile: str, candidate: str, judging: JudgmentSettings) -> JudgedPairs:
    """Return a copy of the ledger, even while another process holds its lock. Changes to the copy are not stored."""
    location = _journal_location(directory, profile, candidate, judging)
    with TemporaryDirectory() as temporary:
        copy = Path(temporary) / "copy"
        if location.path.is_file():
            shutil.copyfile(location.path, copy)
        with open_journal(JournalLocation(copy, location.key), _is_valid_record) as journal:
            return JudgedPairs(journal)


def _journal_location(directory: Path, profile: str, candidate: str, judging: JudgmentSettings) -> JournalLocation:
    # Everything that determines a judgment: a different digest means a different judge.
    settings = judging.model_dump(mode="json", include=set(JudgmentSettings.model_fields))
    judge = digest({"judging": settings, "instructions": INSTRUCTIONS})
    key = digest({"format": _FORMAT, "candidate": candidate, "judge": judge})
    return JournalLocation(directory / f"{profile}.{key[:_NAME]}.judged", key)


def _is_valid_record(record: Any) -> bool:
    try:
        id, session, at = record["pair"]
        valid = isinstance(id, str) and isinstance(session, str) and isinstance(at, float)
        valid = valid and isinstance(record["judged"], float) and isinstance(record.get("control", ""), str)
        if "lengths" in record:
            lengths, cut_off = record["lengths"], record["cut_off"]
            valid = valid and [type(each) for each in (*lengths, *cut_off)] == [int, int, bool, bool]
        if record.get("tie"):
            return valid
        vote = record["said"]
        return (
            valid and vote["order"] in get_args(Order) and vote["winner"] in _WINNERS and isinstance(vote["judge"], str)
        )
    except (KeyError, TypeError, ValueError):
        return False


class LostPair(FrozenModel):
    """A pair that the candidate lost in both orders."""

    id: str  # request ID
    at: float  # Unix time
    question: str
    parent: str
    candidate: str
    reasoning: str


_STATE = TypeAdapter(tuple[str, tuple[LostPair, ...]])  # candidate version and its lost pairs


def read_lost_pairs(file: Path, candidate: str) -> tuple[LostPair, ...]:
    """Return the stored lost pairs, newest first, or an empty tuple if the file belongs to another candidate."""
    state = read_state(file, _STATE.validate_json)
    if isinstance(state, Damaged):
        set_aside_damaged(file, state.reason)
    return () if state is None or isinstance(state, Damaged) or state[0] != candidate else state[1]


def store_lost_pairs(
    file: Path, candidate: str, new: Sequence[tuple[SampledPair, Sequence[Judgment]]], *, since: float
) -> tuple[LostPair, ...]:
    """Add ``new`` to the stored lost pairs and return the result, newest first.

    A long question loses its beginning, because its end holds the last message. A long answer loses its end. Pairs
    older than ``since``, a Unix time, are dropped.
    """
    by_id = {loss.id: loss for loss in read_lost_pairs(file, candidate) if loss.at >= since}
    for pair, judgments in new:
        if pair.at < since:
            continue
        answers = pair.answers
        reasoning = next((judgment.reasoning for judgment in judgments if judgment.reasoning), "")
        parent, candidate_answer, reasoning = (
            to_printable(text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…")
            for text in (answers.reference, answers.merge, reasoning)
        )
        question = to_printable(answers.question[-_MAX_CHARACTERS:])
        by_id[answers.id] = LostPair(
            id=answers.id,
            at=pair.at,
            question=question if len(answers.question) <= _MAX_CHARACTERS else f"…{question}",
            parent=parent,
            candidate=candidate_answer,
            reasoning=reasoning,
        )
    lost = tuple(sorted(by_id.values(), key=lambda loss: -loss.at)[:_MAX_LOST_PAIRS])
    state_directory(file.parent, private=True)
    write_state(file, _STATE.dump_json((candidate, lost)))
    return lost
