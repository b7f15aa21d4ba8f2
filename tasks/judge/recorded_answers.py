"""Answers that were given already, to users: two of them to one question, judged as all others are.

The questions are whole conversations, which both sides had in common, so each pair is one turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from mergegate.tasks.judge.comparison import SCORES, Judgment, Order, settle
from mergegate.tasks.judge.prompts import Prompt
from mergegate.tasks.judge.questions import ask_judge, both_orders
from mergegate.tasks.judge.rubric import INSTRUCTIONS
from mergegate.tasks.judge.settings import JudgeServer, JudgmentSettings
from mergegate.tasks.store import digest


class RecordedAnswerPair(NamedTuple):
    """Two answers to one question."""

    id: str
    question: str
    reference: str
    merge: str


def judge_recorded_pairs(
    pairs: Sequence[RecordedAnswerPair],
    judging: JudgmentSettings,
    server: JudgeServer,
    known: Collection[tuple[str, Order]] = (),
) -> Iterator[Judgment]:
    """What the judge says of each pair in each order, as it says so. Of equal answers nothing is asked.

    Args:
        known: ``(id, order)`` of what it said before, which is not asked again.

    Raises:
        InvalidInput: when the server cannot be asked.
    """
    questions = [
        question
        for pair in pairs
        if pair.reference != pair.merge
        for question in both_orders(Prompt(pair.id, (pair.question,), (None,)), 0, (pair.reference,), (pair.merge,))
        if (pair.id, question.order) not in known
    ]
    return ask_judge(questions, judging, server, INSTRUCTIONS)


class PairScore(NamedTuple):
    """One pair after both orders: 1 where the merge's answer is better, 0 where the reference's is, else 1/2; and
    whether the judge said the same in both."""

    score: float
    consistent: bool


def score_pair(judgements: Sequence[Judgment]) -> PairScore:
    """What the two judgements of one pair come to."""
    (pair,) = settle(judgements)
    return PairScore(SCORES[pair.winner], bool(pair.consistent))


def judge_digest(judging: JudgmentSettings) -> str:
    """64 hex digits of everything that decides a judgement: judgements under another one are of another judge."""
    return digest(
        {
            "judging": judging.model_dump(mode="json", include=set(JudgmentSettings.model_fields)),
            "instructions": INSTRUCTIONS,
        }
    )
