"""Judge recorded answers: two answers to one user question, compared in the same way as generated ones.

A question is a whole conversation that both sides share, so each pair is one turn.
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
    """Two recorded answers to one question."""

    id: str
    question: str
    reference: str
    merge: str


def judge_recorded_pairs(
    pairs: Sequence[RecordedAnswerPair],
    judging: JudgmentSettings,
    server: JudgeServer,
    judged: Collection[tuple[str, Order]] = (),
) -> Iterator[Judgment]:
    """Yield the judgment on each pair in each order as it arrives. Equal answers are not sent to the judge.

    Args:
        judged: ``(id, order)`` of earlier judgments, which are not requested again.

    Raises:
        InvalidInput: If the server cannot be reached.
    """
    questions = [
        question
        for pair in pairs
        if pair.reference != pair.merge
        for question in both_orders(Prompt(pair.id, (pair.question,), (None,)), 0, (pair.reference,), (pair.merge,))
        if (pair.id, question.order) not in judged
    ]
    return ask_judge(questions, judging, server, INSTRUCTIONS)


class PairScore(NamedTuple):
    """Score of one pair after both orders, and whether the judge agreed with itself.

    Args:
        score: 1 if the merge's answer is better, 0 if the reference's is better, else 1/2.
        consistent: Whether both orders led to the same choice.
    """

    score: float
    consistent: bool


def score_pair(judgements: Sequence[Judgment]) -> PairScore:
    """Combine the two judgments of one pair into its score."""
    (pair,) = settle(judgements)
    return PairScore(SCORES[pair.winner], bool(pair.consistent))


def judge_digest(judging: JudgmentSettings) -> str:
    """Return 64 hex digits of everything that determines a judgment. A different digest means a different judge."""
    return digest(
        {
            "judging": judging.model_dump(mode="json", include=set(JudgmentSettings.model_fields)),
            "instructions": INSTRUCTIONS,
        }
    )
